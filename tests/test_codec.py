"""The Triton codec against the torch codec, code for code: in the interpreter on a CPU, compiled on a GPU."""

import numpy as np
import pytest
import torch
import triton

from mla_lab import formats
from mla_lab.kernels import codec
from samples import sample_f32

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = list(formats.FORMATS)


def constants(fmt, *names):
    every = dict(MANTISSA=fmt.mantissa_bits, BIAS=fmt.bias, MAX_CODE=fmt.max_code, NAN_CODE=fmt.nan_code, FNUZ=fmt.fnuz)
    return {n: every[n] for n in names}


def triton_encode(x, fmt, native=False):
    out = torch.empty(x.shape, dtype=torch.uint8, device=DEVICE)
    block = 1024 if DEVICE == "cuda" else 2**16
    grid = (triton.cdiv(x.numel(), block),)
    codec.encode_kernel[grid](x, out, x.numel(), BLOCK=block, NATIVE=native,
                              **constants(fmt, "MANTISSA", "BIAS", "MAX_CODE", "NAN_CODE", "FNUZ"))
    return out


@pytest.mark.parametrize("name", NAMES)
def test_decode_all_256_codes(name):
    fmt = formats.get_format(name)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out = torch.empty(256, device=DEVICE)
    codec.decode_kernel[(1,)](codes, out, 256, BLOCK=256, **constants(fmt, "MANTISSA", "BIAS", "MAX_CODE", "FNUZ"))
    np.testing.assert_array_equal(out.cpu().numpy(), formats.code_table(name).numpy())


@pytest.mark.parametrize("name", NAMES)
def test_encode(name):
    """2^24 f32 values on both devices: the interpreter runs numpy, so they are affordable there too."""
    fmt = formats.get_format(name)
    x = torch.from_numpy(sample_f32())
    got = triton_encode(x.to(DEVICE), fmt).cpu()
    assert torch.equal(got, formats.encode(x, name))


@pytest.mark.skipif(DEVICE == "cpu", reason="a hardware conversion needs the hardware")
def test_the_hardware_conversion_is_equal_where_it_is_used():
    x = torch.from_numpy(sample_f32())
    x = x[~x.isnan()]  # the kernel never rounds a NaN: its sum carries it
    got = triton_encode(x.to(DEVICE), formats.E4M3FN, native=True).cpu()
    assert torch.equal(got, formats.encode(x, "e4m3fn"))
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out = torch.empty(256, device=DEVICE)
    codec.decode_native_kernel[(1,)](codes, out, 256, BLOCK=256, FNUZ=False)
    np.testing.assert_array_equal(out.cpu().numpy(), formats.code_table("e4m3fn").numpy())


def test_round_to_bf16_matches_torch():
    """The interpreter's own cast truncates; a truncating twin would differ in half of all values."""
    import triton.language as tl

    @triton.jit
    def kernel(x, out, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, codec.round_to_bf16(tl.load(x + at)))

    x = torch.from_numpy(sample_f32()[-(2**16):]).to(DEVICE)
    out = torch.empty_like(x)
    kernel[(2**16 // 1024,)](x, out, BLOCK=1024)
    assert torch.equal(out, x.bfloat16().float())
