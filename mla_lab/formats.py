"""The four fp8 encodings as data, and an exact codec for them in torch.

NaN: encode maps every NaN to the encoding's own NaN (sign kept where the encoding has signed NaNs); decode maps
every NaN code to NaN. Infinity and overflow: with overflow="saturate" both become the largest finite value; with
overflow="nan" both become what the encoding has beyond its range, which is NaN, except in e5m2, the one encoding
of the four that has an infinity. Zero: the two "fnuz" encodings have one zero only; -0.0 encodes to it.

Rounding is to nearest, ties to even, from the f32 value (bf16 and f16 widen to it exactly). f64 is refused: a
detour over f32 would round twice.

Sources: OCP 8-bit Floating Point Specification 1.0 (e4m3fn, e5m2); AMD CDNA3 ISA, and Noune et al. 2022,
"8-bit numerical formats for deep neural networks" (the fnuz pair).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Fp8Format:
    """One 8-bit float: a sign bit, `exponent_bits`, `mantissa_bits`.

    max_code: the code (sign bit clear) of the largest finite value. infinity_code: that of +infinity, or None.
    nan_code: what a NaN is encoded to (sign bit clear where NaNs are signed). fnuz: finite, one NaN at 0x80, no
    negative zero.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    nan_code: int
    infinity_code: int | None = None
    fnuz: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, f"float8_{self.name}")

    @property
    def max_finite(self) -> float:
        return self.value(self.max_code)

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def flush_threshold(self) -> float:
        """The largest magnitude that rounds to zero: half the smallest subnormal (the tie goes to even, 0)."""
        return self.smallest_subnormal / 2

    @property
    def largest_p_scale(self) -> float:
        """The largest power of two that is in range: P, at most 1, times it does not saturate. 128 or 256 in e4m3."""
        return 2.0 ** math.floor(math.log2(self.max_finite))

    def value(self, code: int) -> float:
        """The value of one code (0 to 255), by the definition of the encoding: the slow truth beside `decode`."""
        sign, magnitude = code >> 7, code & 0x7F
        if self.fnuz and code == 0x80:
            return math.nan
        if magnitude == self.infinity_code:
            return -math.inf if sign else math.inf
        if magnitude > self.max_code:
            return math.nan
        exponent, fraction = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        if exponent == 0:
            absolute = fraction * self.smallest_subnormal
        else:
            absolute = math.ldexp(1 + fraction / (1 << self.mantissa_bits), exponent - self.bias)
        return math.copysign(absolute, -1.0 if sign else 1.0)


E4M3FN = Fp8Format("e4m3fn", 4, 3, bias=7, max_code=0x7E, nan_code=0x7F)
E4M3FNUZ = Fp8Format("e4m3fnuz", 4, 3, bias=8, max_code=0x7F, nan_code=0x80, fnuz=True)
E5M2 = Fp8Format("e5m2", 5, 2, bias=15, max_code=0x7B, nan_code=0x7E, infinity_code=0x7C)
E5M2FNUZ = Fp8Format("e5m2fnuz", 5, 2, bias=16, max_code=0x7F, nan_code=0x80, fnuz=True)

FORMATS = {f.name: f for f in (E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ)}
FORMAT_OF_DTYPE = {f.torch_dtype: f for f in FORMATS.values()}


def get_format(fmt: str | Fp8Format) -> Fp8Format:
    """The descriptor for a name such as "e4m3fnuz"; a descriptor passes through. ValueError for other names."""
    if isinstance(fmt, Fp8Format):
        return fmt
    if fmt not in FORMATS:
        raise ValueError(f"encoding: got {fmt!r}; accepted: {', '.join(FORMATS)}")
    return FORMATS[fmt]


@functools.cache
def code_table(fmt: str | Fp8Format) -> torch.Tensor:
    """[256] f32 on the CPU: the value of each code."""
    fmt = get_format(fmt)
    return torch.tensor([fmt.value(code) for code in range(256)], dtype=torch.float32)


def decode(codes: torch.Tensor, fmt: str | Fp8Format, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 codes (or an fp8 tensor, whose bytes are taken as they are) of any shape to `dtype`, exactly.

    Every value of the two e4m3 encodings is exact in bf16, f16 and f32. Raises ValueError for codes of another type.
    """
    if codes.dtype in FORMAT_OF_DTYPE:
        codes = codes.view(torch.uint8)
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes: got {codes.dtype}; accepted: torch.uint8 or a one-byte float")
    table = code_table(get_format(fmt)).to(device=codes.device, dtype=dtype)
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    # index_select wants 32-bit indices, four times the codes' bytes: in chunks, so that a large pool fits.
    flat, flat_out = codes.reshape(-1), out.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        torch.index_select(table, 0, part.int(), out=flat_out[start : start + _CHUNK])
    return out


def encode(x: torch.Tensor, fmt: str | Fp8Format, overflow: str = "saturate") -> torch.Tensor:
    """f32, bf16 or f16 of any shape to uint8 codes: nearest, ties to even.

    overflow: "saturate" (what lies beyond the range, infinity too, becomes the largest finite value) or "nan" (it
    becomes NaN; in e5m2, infinity). NaN stays NaN under both. Raises ValueError for another type or `overflow`.
    """
    fmt = get_format(fmt)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"x: got {x.dtype}; accepted: float32, bfloat16, float16 (f64 would be rounded twice)")
    if overflow not in ("saturate", "nan"):
        raise ValueError(f"overflow: got {overflow!r}; accepted: 'saturate', 'nan'")
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    flat, flat_out = x.reshape(-1), out.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        flat_out[start : start + _CHUNK] = _encode_bits(flat[start : start + _CHUNK], fmt, overflow == "saturate")
    return out


def _encode_bits(x: torch.Tensor, fmt: Fp8Format, saturate: bool) -> torch.Tensor:
    m = fmt.mantissa_bits
    shift = 23 - m
    bits = x.to(torch.float32).view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 24) & 0x80
    nan = magnitude > 0x7F800000

    # Normal results: add half of the last kept place (a tie up only from an odd place), drop the rest, and move the
    # exponent to the new bias. A carry out of the mantissa runs into the exponent, which is what it should do.
    code = ((magnitude + (1 << (shift - 1)) - 1 + ((magnitude >> shift) & 1)) >> shift) - ((127 - fmt.bias) << m)
    # Subnormal results: beside 2^k with k = 1 - bias - m + 23 one unit in f32's last place is the smallest subnormal,
    # so the f32 addition itself rounds to nearest even.
    anchor = torch.tensor(2.0 ** (24 - fmt.bias - m), dtype=torch.float32, device=x.device)
    absolute = magnitude.view(torch.float32)
    subnormal = (absolute + anchor).view(torch.int32) - anchor.view(torch.int32)
    code = torch.where(absolute < fmt.smallest_normal, subnormal, code)

    if saturate:
        code = code.clamp(max=fmt.max_code)
    else:
        beyond = fmt.nan_code if fmt.infinity_code is None else fmt.infinity_code
        code = torch.where(code > fmt.max_code, beyond, code)
    code = torch.where(nan, fmt.nan_code, code)
    signed = code | sign
    if fmt.fnuz:  # 0x80 is NaN there, so neither a negative zero nor a signed NaN may be made
        signed = torch.where((code == 0) | (code == fmt.nan_code), code, signed)
    return signed.to(torch.uint8)


def convert_fn_to_fnuz(codes: torch.Tensor) -> torch.Tensor:
    """e4m3fn codes to the e4m3fnuz codes of half the value: multiply the scale by two and every value is the same.

    0x80 (fn's negative zero) becomes 0x00. uint8 of any shape. Raises ValueError where a code is 0x7F or 0xFF: NaN
    in fn, but +-240 in fnuz, so there is no code to give them that keeps both the value and the doubled scale.
    """
    if codes.dtype in FORMAT_OF_DTYPE:
        codes = codes.view(torch.uint8)
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise ValueError("codes: got the NaN codes 0x7F or 0xFF; accepted: finite e4m3fn codes (0x7F means 240 in e4m3fnuz)")
    return torch.where(codes == 0x80, torch.zeros_like(codes), codes)
