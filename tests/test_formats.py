"""The torch codec against the definition of each encoding, ml_dtypes and gfloat: tolerance 0."""

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch

from mla_lab import formats
from samples import sample_f32

NAMES = list(formats.FORMATS)
GFLOAT = {
    "e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
}


@pytest.fixture(scope="module")
def f32_values():
    return sample_f32()


def ml_codes(x, name):
    return x.astype(getattr(ml_dtypes, f"float8_{name}")).view(np.uint8)


def expected(x, name, overflow):
    """ml_dtypes' cast turns overflow into NaN (infinity in e5m2); the saturating codes are made from it by clipping."""
    fmt = formats.get_format(name)
    if overflow == "saturate":
        x = np.where(np.isnan(x), x, np.clip(x, -fmt.max_finite, fmt.max_finite)).astype(np.float32)
    return ml_codes(x, name)


def assert_codes_equal(got, want, x):
    bad = np.flatnonzero(got != want)
    assert bad.size == 0, f"{bad.size} differ, first: x = {x[bad[0]]!r} gave {got[bad[0]]:#x}, right is {want[bad[0]]:#x}"


@pytest.mark.parametrize("name", NAMES)
def test_decode_all_256_codes(name):
    codes = np.arange(256, dtype=np.uint8)
    got = formats.decode(torch.from_numpy(codes), name).numpy()
    want = codes.view(getattr(ml_dtypes, f"float8_{name}")).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(want[~np.isnan(want)]))
    if name in GFLOAT:
        decoded = [gfloat.decode_float(GFLOAT[name], int(c)).fval for c in codes]
        np.testing.assert_array_equal(got, np.array(decoded, np.float32))


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("e4m3")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_e4m3_is_exact_in_16_bits(name, dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(formats.decode(codes, name, dtype).float().nan_to_num(7e4), formats.decode(codes, name).nan_to_num(7e4))


@pytest.mark.parametrize("overflow", ["saturate", "nan"])
@pytest.mark.parametrize("name", NAMES)
def test_encode_f32(name, overflow, f32_values):
    got = formats.encode(torch.from_numpy(f32_values), name, overflow).numpy()
    assert_codes_equal(got, expected(f32_values, name, overflow), f32_values)


@pytest.mark.parametrize("overflow", ["saturate", "nan"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_encode_every_16_bit_pattern(name, dtype, overflow):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = x.float().numpy()
    assert_codes_equal(formats.encode(x, name, overflow).numpy(), expected(wide, name, overflow), wide)


@pytest.mark.parametrize("name", list(GFLOAT))
def test_encode_agrees_with_gfloat(name, f32_values):
    x = f32_values[: 2**14]
    x = x[np.isfinite(x)]
    info = GFLOAT[name]
    want = [gfloat.encode_float(info, gfloat.round_float(info, float(v), sat=True)) for v in x]
    assert_codes_equal(formats.encode(torch.from_numpy(x), name).numpy(), np.array(want, np.uint8), x)


@pytest.mark.parametrize("name", NAMES)
def test_finite_codes_survive_a_round_trip(name):
    fmt = formats.get_format(name)
    codes = torch.arange(256, dtype=torch.uint8)
    values = formats.decode(codes, name)
    finite = torch.isfinite(values)
    assert torch.equal(formats.encode(values[finite], name), codes[finite])
    assert finite.sum() == 2 * (fmt.max_code + 1) - fmt.fnuz  # fnuz: one zero, not two


@pytest.mark.parametrize(
    "name, largest, normal, subnormal",
    [("e4m3fn", 448, 2**-6, 2**-9), ("e4m3fnuz", 240, 2**-7, 2**-10), ("e5m2", 57344, 2**-14, 2**-16), ("e5m2fnuz", 57344, 2**-15, 2**-17)],
)
def test_the_descriptors_say_what_the_specifications_say(name, largest, normal, subnormal):
    fmt = formats.get_format(name)
    assert (fmt.max_finite, fmt.smallest_normal, fmt.smallest_subnormal) == (largest, normal, subnormal)
    edge = torch.tensor([fmt.flush_threshold, np.nextafter(np.float32(fmt.flush_threshold), np.float32(1))])
    assert formats.decode(formats.encode(edge, name), name).tolist() == [0.0, subnormal]


def test_the_same_code_means_half_as_much_in_fnuz():
    codes = torch.tensor([c for c in range(256) if c not in (0x80, 0x7F, 0xFF)], dtype=torch.uint8)
    assert torch.equal(formats.decode(codes, "e4m3fnuz") * 2, formats.decode(codes, "e4m3fn"))


def test_fn_to_fnuz_keeps_every_value_under_a_doubled_scale():
    codes = torch.tensor([c for c in range(256) if c not in (0x7F, 0xFF)], dtype=torch.uint8)
    assert torch.equal(formats.decode(formats.convert_fn_to_fnuz(codes), "e4m3fnuz") * 2, formats.decode(codes, "e4m3fn"))
    for code in (0x7F, 0xFF):
        with pytest.raises(ValueError, match="codes: got the NaN codes"):
            formats.convert_fn_to_fnuz(torch.tensor([0, code], dtype=torch.uint8))


def test_refusals():
    with pytest.raises(ValueError, match="encoding: got 'e4m3'; accepted: e4m3fn, e4m3fnuz"):
        formats.encode(torch.zeros(1), "e4m3")
    with pytest.raises(ValueError, match="x: got torch.float64"):
        formats.encode(torch.zeros(1, dtype=torch.float64), "e4m3fn")
    with pytest.raises(ValueError, match="overflow: got 'wrap'"):
        formats.encode(torch.zeros(1), "e4m3fn", "wrap")
    with pytest.raises(ValueError, match="codes: got torch.int8"):
        formats.decode(torch.zeros(1, dtype=torch.int8), "e4m3fn")
