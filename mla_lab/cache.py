"""KV caches: one latent row (kv_lora_rank latent columns, then qk_rope_head_dim rope columns) per slot.

    bf16         [slots, R], [blocks, block, R] or [slots, 1, 1, R] bf16
    fp8_scalar   the same shapes in fp8, typed or as uint8, with one f32 scale: value = scale * decode(code)

A NaN is packed as the encoding's NaN. So is an infinity, for which the e4m3 encodings have no code: both still show
up in the output of the query that gathers them. What lies beyond the range saturates and is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_lab import formats
from mla_lab.formats import FORMAT_OF_DTYPE, Fp8Format, get_format

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
    scaled = torch.where(torch.isinf(wide), torch.nan, wide / scale)
    codes = formats.encode(scaled, fmt)
    overflow = torch.isfinite(scaled) & torch.isnan(formats.decode(formats.encode(scaled, fmt, overflow="nan"), fmt))
    flushed = (formats.decode(codes, fmt) == 0) & (wide != 0)
    return Packed(codes.view(fmt.torch_dtype), scale, int(overflow.sum()), int(flushed.sum()), wide.numel())


def reencode_fn_as_fnuz(packed: Packed) -> Packed:
    """An e4m3fn fp8_scalar cache as an e4m3fnuz one of the same values: nearly the same bytes, the scale doubled.

    Raises ValueError where a code is fn's NaN, which has no counterpart (see formats.convert_fn_to_fnuz).
    """
    codes = formats.convert_fn_to_fnuz(packed.buffer)
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


def gather(kv_buffer: torch.Tensor, slot: torch.Tensor, encoding: str | Fp8Format, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows [n, R] of the given slots [n] as `dtype`, exactly and without the scale (fp8 codes by `encoding`)."""
    rows = flat_rows(kv_buffer)
    if rows.dtype in FORMAT_OF_DTYPE:
        rows = rows.view(torch.uint8)
    block = rows.shape[1]
    picked = rows[slot // block, slot % block] if block > 1 else rows[:, 0].index_select(0, slot)
    return formats.decode(picked, encoding, dtype) if picked.dtype == torch.uint8 else picked.to(dtype)


def unpack(kv_buffer: torch.Tensor, kv_scale: torch.Tensor | None, encoding: str | Fp8Format) -> torch.Tensor:
    """The whole cache as [slots, R] f32, the scale applied."""
    every = torch.arange(slots(kv_buffer), device=kv_buffer.device)
    rows = gather(kv_buffer, every, encoding)
    return rows if kv_scale is None or kv_buffer.dtype == torch.bfloat16 else rows * kv_scale.reshape(1)


def identify(kv_buffer: torch.Tensor, kv_scale: torch.Tensor | None, kv_lora_rank: int, qk_rope_head_dim: int, encoding: Fp8Format) -> str:
    """"bf16" or "fp8_scalar", by shape, type and kv_scale alone; whatever these do not pin down is a ValueError."""
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
        raise ValueError(
            f"kv_buffer: got rows of {shape[-1]}; accepted: kv_lora_rank + qk_rope_head_dim = {kv_lora_rank} + {qk_rope_head_dim} = {width}, as {layouts}"
        )
    if kv_buffer.stride(-1) != 1:
        raise ValueError(f"kv_buffer: got stride {kv_buffer.stride(-1)} in its last dimension; accepted: 1")
    if dtype == torch.bfloat16:
        return "bf16"
    if kv_scale is None:
        raise ValueError(f"kv_scale: got None with an fp8 cache ({dtype}); accepted: a [1] float32 tensor")
    if not isinstance(kv_scale, torch.Tensor) or kv_scale.dtype != torch.float32 or tuple(kv_scale.shape) != (1,):
        got = f"{kv_scale.dtype} of shape {tuple(kv_scale.shape)}" if isinstance(kv_scale, torch.Tensor) else repr(kv_scale)
        raise ValueError(f"kv_scale: got {got}; accepted: a [1] float32 tensor")
    if kv_scale.device != kv_buffer.device:
        raise ValueError(f"kv_scale: got a tensor on {kv_scale.device}; accepted: one on kv_buffer's device, {kv_buffer.device}")
    return "fp8_scalar"
