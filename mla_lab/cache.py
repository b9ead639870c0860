"""KV caches: one latent row (kv_lora_rank latent columns, then qk_rope_head_dim rope columns) per slot.

    bf16           [slots, R], [blocks, block, R] or [slots, 1, 1, R] bf16
    fp8_scalar     the same shapes in fp8, typed or as uint8, with one f32 scale: value = scale * decode(code)
    fp8_dsv32_mla  [blocks, block, 656] uint8, DeepSeek-V3.2's packed row (512 + 64 columns): 512 fp8 codes, then 4 f32
                   scales, one per group of 128 columns, then 64 bf16 rope columns

A NaN is packed as the encoding's NaN. So is an infinity, for which the e4m3 encodings have no code: both still show
up in the output of the query that gathers them. What lies beyond the range saturates and is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from mla_lab import formats
from mla_lab.formats import FORMAT_OF_DTYPE, Fp8Format, get_format
from mla_lab.numerics import hadamard

GROUP, GROUPS, PACKED_ROPE = 128, 4, 64
PACKED_WIDTH = GROUP * GROUPS + 4 * GROUPS + 2 * PACKED_ROPE
"""656 bytes. The packing is FlashMLA's and vLLM's (fp8_ds_mla)."""

SMALLEST_SCALE = 2.0**-100
"""Scales are clamped to it: an all-zero cache must not divide by zero, and 448 / scale must stay finite in f32."""


@dataclass(frozen=True)
class Packed:
    """buffer, scale: what sparse_mla_fwd takes as kv_buffer and kv_scale (None for bf16).

    saturated: finite values that were beyond the range; flushed: nonzero values that became 0; values: all of them.
    """

    buffer: torch.Tensor
    scale: torch.Tensor | None
    saturated: int = 0
    flushed: int = 0
    values: int = 0

    def __str__(self):
        shares = f"{self.saturated / max(self.values, 1):.2%} saturated, {self.flushed / max(self.values, 1):.2%} flushed to zero"
        return f"{list(self.buffer.shape)} {self.buffer.dtype}, {shares}"


def pack_bf16(rows: torch.Tensor) -> Packed:
    """[..., R] float rows to a bf16 cache of the same shape, rounded to nearest even."""
    return Packed(rows.to(torch.bfloat16), None, values=rows.numel())


def pack_fp8_scalar(rows: torch.Tensor, encoding: str | Fp8Format, scale: float | torch.Tensor | None = None) -> Packed:
    """[..., R] f32, bf16 or f16 rows to an fp8_scalar cache of the same shape with a typed fp8 buffer.

    scale: None takes the largest finite magnitude, over the whole row (latent and rope) of every slot, to the
    encoding's largest finite value, and is clamped away from zero. A given one must be one positive finite number
    (ValueError otherwise); what it drives beyond the range saturates, and `saturated` says how many values did.
    """
    fmt = get_format(encoding)
    wide = rows.float()
    finite = torch.isfinite(wide)
    if scale is None:
        largest = torch.where(finite, wide, 0).abs().amax() if wide.numel() else wide.new_zeros(())
        scale = (largest / fmt.max_finite).clamp_min(SMALLEST_SCALE).reshape(1)
    else:
        scale = torch.as_tensor(scale, dtype=torch.float32, device=rows.device).reshape(-1)
        if scale.numel() != 1 or not bool(torch.isfinite(scale).all()) or not bool((scale > 0).all()):
            raise ValueError(f"scale: got {scale.tolist()}; accepted: one positive finite number")
    codes, saturated, flushed = _encode(wide, scale, fmt)
    return Packed(codes.view(fmt.torch_dtype), scale, saturated, flushed, wide.numel())


def _encode(wide, scale, fmt):
    """Codes of wide / scale, the number of finite values that saturated, and of nonzero ones that became 0."""
    scaled = torch.where(torch.isinf(wide), torch.nan, wide / scale)
    codes = formats.encode(scaled, fmt)
    overflow = torch.isfinite(scaled) & torch.isnan(formats.decode(formats.encode(scaled, fmt, overflow="nan"), fmt))
    flushed = (formats.decode(codes, fmt) == 0) & (wide != 0)
    return codes, int(overflow.sum()), int(flushed.sum())


def pack_fp8_dsv32(rows: torch.Tensor, encoding: str | Fp8Format, power_of_two: bool = False) -> Packed:
    """[blocks, block, 576] or [slots, 576] float rows to an fp8_dsv32_mla cache [blocks, block or 1, 656] uint8.

    Each row's group of 128 latent columns has the scale that takes its largest finite magnitude to the encoding's,
    clamped away from zero; with power_of_two it is rounded up to a power of two (both are in use). The rope columns are
    rounded to bf16. Raises ValueError for rows of another width.
    """
    fmt = get_format(encoding)
    latent = GROUP * GROUPS
    if rows.shape[-1] != latent + PACKED_ROPE or rows.dim() not in (2, 3):
        raise ValueError(f"rows: got shape {tuple(rows.shape)}; accepted: [blocks, block, {latent + PACKED_ROPE}] or [slots, {latent + PACKED_ROPE}]")
    rows = rows if rows.dim() == 3 else rows.unsqueeze(1)
    groups = rows[..., :latent].float().unflatten(-1, (GROUPS, GROUP))
    scale = (torch.where(torch.isfinite(groups), groups, 0).abs().amax(-1) / fmt.max_finite).clamp_min(SMALLEST_SCALE)
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    codes, saturated, flushed = _encode(groups, scale[..., None], fmt)
    rope = rows[..., latent:].to(torch.bfloat16).contiguous()
    buffer = torch.cat([codes.flatten(-2), scale.contiguous().view(torch.uint8), rope.view(torch.uint8)], -1)
    return Packed(buffer, None, saturated, flushed, groups.numel())


def rotate(rows: torch.Tensor, kv_lora_rank: int) -> torch.Tensor:
    """[..., R] float rows with their latent columns rotated by an orthonormal Hadamard transform, f32: what a cache holds
    for a recipe with hadamard=True. Scores and outputs stay what they were, if Q and the output are rotated too."""
    rows = rows.float()
    return torch.cat([hadamard(rows[..., :kv_lora_rank]), rows[..., kv_lora_rank:]], -1)


def split_packed(buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., 656] uint8 as views: codes [..., 512] uint8, scales [..., 4] f32, rope [..., 64] bf16."""
    latent = GROUP * GROUPS
    scales = buffer.view(torch.float32)[..., latent // 4 : latent // 4 + GROUPS]
    return buffer[..., :latent], scales, buffer.view(torch.bfloat16)[..., (latent + 4 * GROUPS) // 2 :]


def is_packed(kv_buffer: torch.Tensor) -> bool:
    """Whether a cache that `identify` has accepted is an fp8_dsv32_mla one."""
    return kv_buffer.dtype == torch.uint8 and kv_buffer.shape[-1] == PACKED_WIDTH


def reencode_fn_as_fnuz(packed: Packed) -> Packed:
    """An e4m3fn fp8_scalar cache as an e4m3fnuz one of the same values: nearly the same bytes, the scale doubled.

    Raises ValueError where a code is fn's NaN, which has no counterpart (see formats.convert_fn_to_fnuz).
    """
    codes = formats.convert_fn_to_fnuz(packed.buffer)
    assert packed.scale is not None  # only a bf16 or a packed cache has none
    return Packed(codes.view(torch.float8_e4m3fnuz), packed.scale * 2, packed.saturated, packed.flushed, packed.values)


def flat_rows(kv_buffer: torch.Tensor) -> torch.Tensor:
    """The cache as [blocks, block, R], a view: no byte moves, a padded block pitch stays as it is."""
    if kv_buffer.dim() == 2:
        return kv_buffer.unsqueeze(1)
    if kv_buffer.dim() == 4:
        return kv_buffer.squeeze(2)
    return kv_buffer


def slots(kv_buffer: torch.Tensor) -> int:
    rows = flat_rows(kv_buffer)
    return rows.shape[0] * rows.shape[1]


class Rows(NamedTuple):
    """values [n, R]: rows without their scales, exact in any float type. scales [n, 4] f32: of a packed cache's groups, or None."""

    values: torch.Tensor
    scales: torch.Tensor | None


def gather(kv_buffer: torch.Tensor, slot: torch.Tensor, encoding: str | Fp8Format, dtype: torch.dtype = torch.float32, packed: bool = False) -> Rows:
    """Rows of the given slots [n] (fp8 codes by `encoding`). packed: an fp8_dsv32_mla cache."""
    rows = flat_rows(kv_buffer)
    if rows.dtype in FORMAT_OF_DTYPE:
        rows = rows.view(torch.uint8)
    block = max(rows.shape[1], 1)  # blocks of no rows are a cache that nobody can gather from
    picked = rows[:, 0].index_select(0, slot) if rows.shape[1] == 1 else rows[slot // block, slot % block]
    if packed:
        codes, scales, rope = split_packed(picked)
        return Rows(torch.cat([formats.decode(codes, encoding, dtype), rope.to(dtype)], -1), scales)
    return Rows(formats.decode(picked, encoding, dtype) if picked.dtype == torch.uint8 else picked.to(dtype), None)


def apply_group_scales(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., 576] values and [..., 4] scales: the latent columns times their group's scale, the rope columns as they are."""
    latent = GROUP * GROUPS
    scaled = (values[..., :latent].unflatten(-1, (GROUPS, GROUP)) * scales.to(values.dtype)[..., None]).flatten(-2)
    return torch.cat([scaled, values[..., latent:]], -1)


def unpack(kv_buffer: torch.Tensor, kv_scale: torch.Tensor | None, encoding: str | Fp8Format) -> torch.Tensor:
    """The whole cache as [slots, R] f32, the scales applied. A uint8 cache 656 wide without kv_scale is a packed one."""
    every = torch.arange(slots(kv_buffer), device=kv_buffer.device)
    packed = kv_scale is None and is_packed(kv_buffer)
    rows = gather(kv_buffer, every, encoding, packed=packed)
    if rows.scales is not None:
        return apply_group_scales(rows.values, rows.scales)
    return rows.values if kv_buffer.dtype == torch.bfloat16 or kv_scale is None else rows.values * kv_scale.reshape(1)


def identify(kv_buffer: torch.Tensor, kv_scale: torch.Tensor | None, kv_lora_rank: int, qk_rope_head_dim: int, encoding: Fp8Format) -> str:
    """"bf16", "fp8_scalar" or "fp8_dsv32_mla", by shape, type and kv_scale alone; what these do not pin down is a ValueError."""
    if kv_buffer.dim() == 3 and is_packed(kv_buffer) and (kv_lora_rank, qk_rope_head_dim) == (GROUP * GROUPS, PACKED_ROPE):
        return _identify_packed(kv_buffer, kv_scale)
    width = kv_lora_rank + qk_rope_head_dim
    shape, dtype = tuple(kv_buffer.shape), kv_buffer.dtype
    layouts = f"[slots, {width}], [blocks, block, {width}] or [slots, 1, 1, {width}]"
    if kv_buffer.dim() not in (2, 3, 4) or (kv_buffer.dim() == 4 and shape[1:3] != (1, 1)):
        raise ValueError(f"kv_buffer: got shape {shape}; accepted: {layouts}")
    other = FORMAT_OF_DTYPE.get(dtype)
    if other is not None and other != encoding:
        raise ValueError(
            f"kv_buffer: got {other.name} ({dtype}), where this arch reads {encoding.name}; accepted: {encoding.torch_dtype}, "
            "a uint8 view of it, or torch.bfloat16 (the same bytes in the other encoding are wrong by a factor of two)"
        )
    if dtype not in (torch.bfloat16, torch.uint8) and other is None:
        raise ValueError(f"kv_buffer: got {dtype}; accepted: torch.bfloat16, {encoding.torch_dtype}, or torch.uint8 as a view of it")
    if shape[-1] != width:
        packed = f" (rows of {PACKED_WIDTH} are packed ones: uint8 [blocks, block, {PACKED_WIDTH}] for 512 + 64)" if shape[-1] == PACKED_WIDTH else ""
        raise ValueError(
            f"kv_buffer: got rows of {shape[-1]}{packed}; accepted: kv_lora_rank + qk_rope_head_dim = {kv_lora_rank} + {qk_rope_head_dim} = {width}, as {layouts}"
        )
    if kv_buffer.stride(-1) != 1:
        raise ValueError(f"kv_buffer: got stride {kv_buffer.stride(-1)} in its last dimension; accepted: 1")
    if dtype == torch.bfloat16:
        return "bf16"
    if kv_scale is None:
        raise ValueError(f"kv_scale: got None with an fp8 cache ({dtype}); accepted: a [1] float32 tensor")
    if kv_scale.dtype != torch.float32 or tuple(kv_scale.shape) != (1,):
        raise ValueError(f"kv_scale: got {kv_scale.dtype} of shape {tuple(kv_scale.shape)}; accepted: a [1] float32 tensor")
    if kv_scale.device != kv_buffer.device:
        raise ValueError(f"kv_scale: got a tensor on {kv_scale.device}; accepted: one on kv_buffer's device, {kv_buffer.device}")
    return "fp8_scalar"


def _identify_packed(kv_buffer, kv_scale):
    if kv_scale is not None:
        raise ValueError(f"kv_scale: got one with a packed cache (rows of {PACKED_WIDTH} B carry their own scales); accepted: None")
    if kv_buffer.stride(-1) != 1:
        raise ValueError(f"kv_buffer: got stride {kv_buffer.stride(-1)} in its last dimension; accepted: 1")
    offsets = (*kv_buffer.stride()[:2], kv_buffer.storage_offset())
    if any(offset % 4 for offset in offsets):
        raise ValueError(f"kv_buffer: got strides and offset {offsets} in bytes; accepted for a packed cache: multiples of 4 (its scales are f32)")
    return "fp8_dsv32_mla"
