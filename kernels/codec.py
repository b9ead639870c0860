"""fp8 encode and decode in Triton by integer arithmetic: the same bits on every backend and in the interpreter.

The hardware's own conversions are faster, and are used only where a test on that hardware has found them equal;
Triton's interpreter gets them wrong (subnormals, ties, carries, NaN codes). All four encodings share this code; the
constants are those of mla_lab.formats.Fp8Format.
"""

import triton
import triton.language as tl


@triton.jit
def decode_f32(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_CODE: tl.constexpr, FNUZ: tl.constexpr):
    """uint8 codes to f32, exactly."""
    c = code.to(tl.int32)
    magnitude = c & 0x7F
    # In f32's own fields a code reads as its value times 2^(BIAS - 127), subnormals included: one multiplication by a
    # power of two, exact as long as the backend keeps f32 subnormals, which the codec's test on it shows.
    REBIAS: tl.constexpr = 2.0 ** (127 - BIAS)
    # All exponent bits set where the code is not finite, by arithmetic: a select needs a mask register per value. An
    # infinity (e5m2) keeps its empty mantissa, a NaN its full one.
    if FNUZ:
        special = (((c ^ 0x80) - 1) >> 31) & 0x7FC00000
    else:
        special = -((magnitude + (127 - MAX_CODE)) >> 7) & 0x7F800000
    return (((magnitude << (23 - MANTISSA)) | ((c & 0x80) << 24)) | special).to(tl.float32, bitcast=True) * REBIAS


@triton.jit
def encode_f32(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_CODE: tl.constexpr, NAN_CODE: tl.constexpr,
               FNUZ: tl.constexpr):
    """f32 to uint8 codes: nearest even, saturating (infinity too); NaN stays NaN."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 24) & 0x80
    HALF: tl.constexpr = (1 << (SHIFT - 1)) - 1
    code = ((magnitude + HALF + ((magnitude >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # Beside this power of two the last place of an f32 is the smallest subnormal: the addition does the rounding.
    ANCHOR: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    ANCHOR_BITS: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    absolute = magnitude.to(tl.float32, bitcast=True)
    subnormal = (absolute + ANCHOR).to(tl.int32, bitcast=True) - ANCHOR_BITS
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    code = tl.where(absolute < SMALLEST_NORMAL, subnormal, code)
    code = tl.where(code > MAX_CODE, MAX_CODE, code)
    code = tl.where(magnitude > 0x7F800000, NAN_CODE, code)
    if FNUZ:
        code = tl.where((code == 0) | (code == NAN_CODE), code, code | sign)
    else:
        code = code | sign
    return code.to(tl.uint8)


@triton.jit
def round_to_bf16(x):
    """f32 to the f32 of the nearest bf16 (ties to even), for the interpreter, whose own cast truncates."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, x, rounded)


@triton.jit
def decode_kernel(codes, out, n, BLOCK: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
                  MAX_CODE: tl.constexpr, FNUZ: tl.constexpr):
    """One-dimensional `decode_f32`, so that the codec can be held against its truth on each backend."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(codes + at, mask=at < n, other=0)
    tl.store(out + at, decode_f32(code, MANTISSA, BIAS, MAX_CODE, FNUZ), mask=at < n)


@triton.jit
def encode_kernel(x, out, n, BLOCK: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
                  MAX_CODE: tl.constexpr, NAN_CODE: tl.constexpr, FNUZ: tl.constexpr, NATIVE: tl.constexpr):
    """One-dimensional `encode_f32`; with NATIVE, the hardware's conversion after a clamp (e4m3 pair only)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    if NATIVE:
        code = encode_native(value, MAX_CODE, FNUZ)
    else:
        code = encode_f32(value, MANTISSA, BIAS, MAX_CODE, NAN_CODE, FNUZ)
    tl.store(out + at, code, mask=at < n)


@triton.jit
def encode_native(x, MAX_CODE: tl.constexpr, FNUZ: tl.constexpr):
    """f32 to e4m3 codes by the hardware's conversion. Clamped first: an unsaturated cast makes NaN of overflow."""
    if FNUZ:
        clamped = tl.clamp(x, -240.0, 240.0, propagate_nan=tl.PropagateNan.ALL)
        return clamped.to(tl.float8e4b8).to(tl.uint8, bitcast=True)
    else:
        clamped = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        return clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def decode_native(code, FNUZ: tl.constexpr):
    """uint8 codes of the e4m3 pair to bf16, by the hardware's conversion."""
    if FNUZ:
        return code.to(tl.float8e4b8, bitcast=True).to(tl.bfloat16)
    else:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)


@triton.jit
def decode_native_kernel(codes, out, n, BLOCK: tl.constexpr, FNUZ: tl.constexpr):
    """One-dimensional `decode_native`, for its test."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(codes + at, mask=at < n, other=0)
    tl.store(out + at, decode_native(code, FNUZ).to(tl.float32), mask=at < n)
