"""Profiles: the numerics, limits and launch configurations of one GPU architecture each.

A profile can be studied on any device: arch="gfx942" on a CPU or an H200 gives gfx942's numerics.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from mla_lab import kernels
from mla_lab.formats import E4M3FN, E4M3FNUZ, Fp8Format
from mla_lab.recipe import Recipe

HEAD_BLOCK = 16
"""Query heads that one workgroup serves, and that share one scale when Q is quantized in the kernel."""


@dataclass(frozen=True)
class Launch:
    """block_k: keys in one tile. num_warps, num_stages: Triton's launch options."""

    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Profile:
    """shared_memory: bytes that one workgroup may use (LDS on AMD). p_scale: the default multiplier of an fp8 P.

    compute_units: CUs or SMs, for the split-K policy (MI325X, MI355X, H200).
    """

    name: str
    encoding: Fp8Format
    matrix_core: str
    shared_memory: int
    p_scale: float
    compute_units: int

    def launch(self, dots: str) -> Launch:
        """The launch configuration for "bf16" or "fp8" dots, from kernels/configs/<name>.json."""
        return _launches(self.name)[dots]

    def p_scale_of(self, recipe: Recipe) -> float:
        """The number that a recipe's P is multiplied by here: 1 in bf16; under "tile", before the tile's own power of two."""
        if recipe.p == "bf16":
            return 1.0
        if recipe.p_scale in ("largest", "tile"):
            return self.encoding.largest_p_scale
        return float(self.p_scale if recipe.p_scale is None else recipe.p_scale)


@functools.cache
def _launches(name: str) -> dict[str, Launch]:
    entries = json.loads((Path(kernels.__path__[0]) / "configs" / f"{name}.json").read_text())
    return {dots: Launch(**entries[dots]) for dots in ("bf16", "fp8")}


PROFILES = {
    p.name: p
    for p in (
        Profile("gfx942", E4M3FNUZ, "MFMA 3", 65_536, 128.0, 304),
        Profile("gfx950", E4M3FN, "MFMA 4", 163_840, 1.0, 256),
        Profile("sm_90", E4M3FN, "wgmma, mma.sync", 232_448, 256.0, 132),
    )
}


def get_profile(arch: str | Profile | None, device: torch.device | str = "cpu") -> Profile:
    """The profile of a name; of the running device where `arch` is None ("gfx942" on a CPU).

    Raises ValueError for an unknown name, or where the device has no profile of its own.
    """
    if isinstance(arch, Profile):
        return arch
    if arch is None:
        arch = device_arch(torch.device(device))
    if not isinstance(arch, str) or arch not in PROFILES:
        raise ValueError(f"arch: got {arch!r}; accepted: {', '.join(PROFILES)}")
    return PROFILES[arch]


def device_arch(device: torch.device) -> str:
    """The architecture that `device` is: "gfx942", "sm_90", "sm_120", ...; "gfx942" for a CPU, which can be any."""
    if device.type != "cuda":
        return "gfx942"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def tile_bytes(dots: str, block_k: int, kv_lora_rank: int, qk_rope_head_dim: int, kv_row_pad: int | None = None) -> int:
    """Bytes of shared memory that the published kernel's tiles take.

    kv_row_pad: padding of a latent row in elements; None is the decode kernel's (8 under bf16 dots, 16 under fp8).
    Source of the formula: data/published/README.md; data/published/lds_gfx942.csv holds six compiled values.
    """
    element, pad = (2, 8) if dots == "bf16" else (1, 16)
    latent = block_k * (kv_lora_rank + (pad if kv_row_pad is None else kv_row_pad))
    rope = block_k * (qk_rope_head_dim + pad) if qk_rope_head_dim > 0 else 0
    return element * (latent + rope + HEAD_BLOCK * block_k)


def check_fits(profile: Profile, dots: str, kv_lora_rank: int, qk_rope_head_dim: int, block_k: int | None = None, kv_row_pad: int | None = None) -> None:
    """ValueError where a tile of keys (None: the profile's) does not fit into shared memory: bytes, budget, what would fit."""

    def needed(block_k):
        return tile_bytes(dots, block_k, kv_lora_rank, qk_rope_head_dim, kv_row_pad)

    block_k = profile.launch(dots).block_k if block_k is None else block_k
    if needed(block_k) <= profile.shared_memory:
        return
    smaller = [b for b in (128, 64, 32, 16) if b < block_k and needed(b) <= profile.shared_memory]
    fits = f"a tile of {smaller[0]} keys would fit ({needed(smaller[0]):,} B)" if smaller else "no tile of 16 keys or more would fit"
    raise ValueError(
        f"kv_lora_rank: got {kv_lora_rank} (rope {qk_rope_head_dim}), whose tile of {block_k} keys under {dots} dots needs "
        f"{needed(block_k):,} B of {profile.name}'s {profile.shared_memory:,} B of shared memory; {fits}"
    )


def choose_kv_splits(profile: Profile, tokens: int, heads: int, keys: int, block_k: int, heads_block: int = HEAD_BLOCK, programs_per_unit: int = 1) -> int:
    """How many splits of the keys fill the device: 1 where the queries alone do.

    keys: per query, on average. heads_block: heads that one program serves. programs_per_unit: how many programs a compute
    unit is given. A split keeps at least two tiles, so that its merge does not cost more than its work.
    """
    programs = tokens * -(-heads // heads_block)
    tiles = -(-keys // block_k)
    if programs == 0:
        return 1
    return max(1, min(profile.compute_units * programs_per_unit // programs, tiles // 2))
