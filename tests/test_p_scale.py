"""The P scale that is chosen: the largest power of two in range, proved over the values that p can take."""

import math

import pytest
import torch

from cases import DEVICE
from mla_lab import Recipe, cache, formats, inputs, metrics, study
from mla_lab.arch import PROFILES, get_profile
from mla_lab.formats import FORMATS

CHUNK = 1 << 20 if DEVICE == "cpu" else 1 << 24


def worst_step(bits, fmt, scale):
    """Over the f32 of these bit patterns, p in [0, 1]: the largest |rounded - p| in steps of the encoding at p; whether any saturates."""
    x = bits.view(torch.float32) * scale  # exact: a power of two
    codes = formats.encode(x, fmt, overflow="nan")
    value = formats.decode(codes, fmt)
    exponent = (torch.frexp(x).exponent - 1).clamp_min(1 - fmt.bias)
    steps = (value - x).abs() / torch.exp2(exponent.float() - fmt.mantissa_bits)
    return float(steps.max()), bool(value.isnan().any())


@pytest.mark.parametrize("name", FORMATS)
def test_no_p_saturates_or_loses_more_than_half_a_step(name):
    """By exhaustion. A p below 2^-20 (2^-36 in e5m2) is beneath a quarter of the smallest subnormal and becomes 0: half a
    step or less is lost, since the first step of an encoding begins at 0. So on a CPU the octaves above are gone through,
    every f32 of them for the e4m3 pair (168 million) and every bf16 for the other two; on a GPU every f32 in [0, 1]."""
    fmt = FORMATS[name]
    scale = fmt.largest_p_scale
    assert scale <= fmt.max_finite < 2 * scale
    one = 0x3F800000
    if DEVICE == "cuda":
        starts, step = range(0, one + 1, CHUNK), 1
    elif fmt.mantissa_bits == 3:
        starts, step = range(one - (20 << 23), one + 1, CHUNK), 1
    else:
        starts, step = range(0, one + 1, CHUNK << 16), 1 << 16
    seen = 0
    for start in starts:
        bits = torch.arange(start, min(start + CHUNK * step, one + 1), step, dtype=torch.int32, device=DEVICE)
        lost, saturated = worst_step(bits, fmt, scale)
        seen += bits.numel()
        assert not saturated and lost <= 0.5
    assert seen > (1e9 if DEVICE == "cuda" else 1.6e8 if fmt.mantissa_bits == 3 else 1.6e4)
    below = torch.tensor([fmt.flush_threshold / scale], device=DEVICE)
    assert float(formats.decode(formats.encode(below * scale, fmt), fmt)) == 0


@pytest.mark.parametrize("name", FORMATS)
def test_one_power_more_saturates(name):
    fmt = FORMATS[name]
    scale = 2 * fmt.largest_p_scale
    lost, saturated = worst_step(torch.tensor([0x3F800000], dtype=torch.int32), fmt, scale)
    if fmt.infinity_code is None:
        assert saturated
    assert float(formats.decode(formats.encode(torch.tensor([scale]), fmt), fmt)) < scale


@pytest.mark.parametrize("arch", PROFILES)
def test_largest_is_what_a_recipe_takes(arch):
    profile = get_profile(arch)
    assert profile.p_scale_of(Recipe("fp8", "fp8", "largest")) == {"e4m3fnuz": 128, "e4m3fn": 256}[profile.encoding.name]
    assert profile.p_scale_of(Recipe("fp8", "fp8")) == profile.p_scale
    assert profile.p_scale_of(Recipe("fp8", "fp8", 64)) == 64 and profile.p_scale_of(Recipe()) == 1


@pytest.mark.parametrize("encoding", ["e4m3fnuz", "e4m3fn"])
def test_the_lost_tail_is_what_the_formula_says(encoding):
    """At the margin where it flushes the whole tail is gone, and just above it is still there (rounded up: twice as much)."""
    lost = study.lost_tail([1.0, 16.0, formats.get_format(encoding).largest_p_scale], encodings=[encoding])
    assert (lost.kernel_lost - lost.formula).abs().max() < 2e-3  # the output's own bf16, 2^-9
    assert lost.formula.iloc[-1] == pytest.approx(2047 * 2**-18 / (1 + 2047 * 2**-18), rel=1e-9)  # 0.78% with 2048 keys in both
    for s in (1.0, formats.get_format(encoding).largest_p_scale):
        margin = math.log(s / formats.get_format(encoding).flush_threshold)
        tail = torch.full((1, 2047), math.exp(-margin * 1.0001))
        assert metrics.kept_mass(torch.cat([torch.ones(1, 1), tail], 1), encoding, s) == pytest.approx(1 - metrics.lost_tail(encoding, s, 2048), abs=1e-3)


def test_a_scale_per_tile_keeps_a_tail_that_no_fixed_scale_can():
    """The key with the maximum has no value, 2047 others 14 nats below have 1: at any legal fixed scale they flush; with
    a scale per tile, only those in the tile of that key do (63 of 2047)."""
    made = inputs.ones(inputs.Shape(tokens=1, heads=2, qk_rope_head_dim=64, topk=2048, slots=2048), margin=14.0)
    made.rows[0, : made.kv_lora_rank] = 0
    packed = cache.pack_fp8_scalar(made.rows, "e4m3fnuz", scale=1.0)
    weight = 2047 * math.exp(-14)

    def out(recipe):
        return study.run(made, packed, get_profile("gfx942"), recipe)[0].float()

    right = torch.full((1, 2, 512), weight / (1 + weight))
    torch.testing.assert_close(out(Recipe()), right, rtol=5e-3, atol=0)
    assert out(Recipe("fp8", "fp8", "largest")).abs().max() == 0
    torch.testing.assert_close(out(Recipe("fp8", "fp8", "tile")), right * (2047 - 63) / 2047, rtol=0.03, atol=0)
