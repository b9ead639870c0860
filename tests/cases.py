"""One list of cases for emulator, interpreter and GPU: a dataclass describes a case, `make` builds its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mla_lab import Recipe, cache
from mla_lab.arch import PROFILES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

BF16, FP8 = Recipe(), Recipe("fp8", "fp8")
FP8_QK, FP8_PV = Recipe("fp8", "bf16"), Recipe("bf16", "fp8")
TWO_TERM_Q, TWO_TERM_Q_BF16_PV = Recipe("fp8x2", "fp8", "largest"), Recipe("fp8x2", "bf16")
TWO_TERM_P, TWO_TERMS = Recipe("fp8", "fp8x2", "largest"), Recipe("fp8x2", "fp8x2", "largest")
FP8_PER_HEAD = Recipe("fp8", "fp8", q_granularity="head")


@dataclass(frozen=True)
class Case:
    """lengths: keys per query token. holes: share of the indices that is -1. cache "fp8_dsv32_mla_p2": scales that are
    powers of two."""

    lengths: tuple[int, ...] = (70, 0, 131)
    heads: int = 20
    rank: int = 512
    rope: int = 64
    cache: str = "fp8_scalar"
    recipe: Recipe = FP8
    arch: str = "gfx942"
    splits: int = 1
    sink: bool = False
    holes: float = 0.0
    slots: int = 300
    seed: int = 0

    def __str__(self):
        head = "_head" if self.recipe.q_granularity == "head" else ""
        return f"{self.arch}-{self.cache}-q_{self.recipe.q}{head}-p_{self.recipe.p}-rope{self.rope}-H{self.heads}-K{'.'.join(map(str, self.lengths))}-S{self.splits}" + (
            "-sink" if self.sink else "") + ("-holes" if self.holes else "")


@dataclass
class Tensors:
    q: torch.Tensor
    packed: cache.Packed
    indptr: torch.Tensor
    indices: torch.Tensor
    scale: float
    sink: torch.Tensor | None

    def call(self, case: Case, function, backend=None, **options):
        """`function` (sparse_mla_fwd or its like) on these tensors."""
        usual = dict(kv_scale=self.packed.scale, kv_lora_rank=case.rank, arch=case.arch, attn_sink=self.sink)
        if backend is not None:
            usual |= dict(qk_rope_head_dim=case.rope, kv_splits=case.splits, recipe=case.recipe, has_invalid=case.holes > 0,
                          return_lse=True, backend=backend)
        return function(self.q, self.packed.buffer, self.indptr, self.indices, self.scale, **usual | options)


def make(case: Case, device=DEVICE) -> Tensors:
    rng = np.random.default_rng(case.seed)
    width = case.rank + case.rope
    q = torch.from_numpy(rng.standard_normal((len(case.lengths), case.heads, width), np.float32)).bfloat16()
    rows = torch.from_numpy(rng.standard_normal((case.slots, width), np.float32))
    if case.cache == "bf16":
        packed = cache.pack_bf16(rows)
    elif case.cache.startswith("fp8_dsv32"):
        packed = cache.pack_fp8_dsv32(rows.view(-1, 10, width), PROFILES[case.arch].encoding, power_of_two=case.cache.endswith("p2"))
    else:
        packed = cache.pack_fp8_scalar(rows, PROFILES[case.arch].encoding)
    indices = rng.integers(0, case.slots, sum(case.lengths), dtype=np.int32)
    indices[rng.random(indices.size) < case.holes] = -1
    indptr = np.concatenate([[0], np.cumsum(case.lengths)]).astype(np.int32)
    sink = torch.from_numpy(rng.standard_normal(case.heads, np.float32)) if case.sink else None
    packed = cache.Packed(packed.buffer.to(device), None if packed.scale is None else packed.scale.to(device))
    return Tensors(q.to(device), packed, torch.from_numpy(indptr).to(device), torch.from_numpy(indices).to(device), width**-0.5,
                   None if sink is None else sink.to(device))


CACHES_AND_RECIPES = [("bf16", BF16)] + [("fp8_scalar", r) for r in (BF16, FP8, FP8_QK, FP8_PV)]

MATRIX = [
    Case(arch=arch, rope=rope, cache=kind, recipe=recipe, splits=splits, sink=splits > 1, holes=0.3 if rope else 0.0)
    for arch in PROFILES
    for rope in (0, 64)
    for kind, recipe in CACHES_AND_RECIPES
    for splits in (1, 3)
]
HEADS = [Case(heads=heads, lengths=(65, 33), rope=0, splits=splits) for heads in (1, 4, 8, 12, 16, 17, 128) for splits in (1, 2)]
WIDTHS = [
    Case(lengths=(keys,), heads=16, rope=0, splits=splits, recipe=recipe, slots=2500)
    for keys in (1, 15, 16, 17, 63, 65, 192, 2047, 2049)
    for splits, recipe in ((1, FP8), (4, BF16))
]
RANKS = [Case(rank=rank, rope=rope, heads=3, lengths=(40, 5)) for rank in (16, 64, 256) for rope in (0, 16, 40)]
SINKS = [Case(sink=True, splits=splits, lengths=(0, 50), heads=5, rope=0) for splits in (1, 2)]
PACKED = [
    Case(arch=arch, cache=kind, recipe=recipe, splits=splits, sink=splits > 1, holes=0.3 if splits > 1 else 0.0)
    for arch in PROFILES
    for kind in ("fp8_dsv32_mla", "fp8_dsv32_mla_p2")
    for recipe in (BF16, FP8, FP8_QK, FP8_PV)
    for splits in (1, 3)
    if arch != "gfx950" or kind == "fp8_dsv32_mla"
]
NEWER = (TWO_TERM_Q, TWO_TERM_Q_BF16_PV, TWO_TERM_P, TWO_TERMS, FP8_PER_HEAD)
RECIPES = [
    Case(arch=arch, rope=64, cache=kind, recipe=recipe, splits=splits, holes=0.3)
    for i, (kind, recipe) in enumerate((k, r) for k in ("fp8_scalar", "fp8_dsv32_mla") for r in NEWER)
    for arch in PROFILES
    for splits in ((1,) if i % 2 else (3,))
]
EVERY = PACKED + RECIPES + MATRIX + HEADS + WIDTHS + RANKS + SINKS
