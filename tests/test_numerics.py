"""The model of Hopper's short sums against an H200's own, and the Hadamard transform."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mla_lab import formats, numerics

MEASURED = Path(__file__).resolve().parents[1] / "data" / "measured" / "h200" / "fp8_accumulation.safetensors"
KINDS = ["normal", "normal_512", "normal_and_sum", "one_product", "positive_128", "sum_alone", "two_products", "wide", "wide_and_sum"]


@pytest.mark.parametrize("kind", KINDS)
def test_short_sums_are_the_h200s_to_the_bit(kind):
    stored = load_file(MEASURED)
    a, b = (formats.decode(stored[f"{kind}.{name}"], "e4m3fn") for name in "ab")
    assert torch.equal(numerics.short_sum(stored[f"{kind}.c"], a, b, -6), stored[f"{kind}.d"])
    # And the file can tell: rounding instead of cutting, a bit more or less, or a plain f32 sum give something else.
    exact = (stored[f"{kind}.c"].double() + a.double() @ b.double().mT).float()
    assert not torch.equal(exact, stored[f"{kind}.d"])


@pytest.mark.parametrize("bits", [12, 14])
def test_another_number_of_bits_is_not_what_was_measured(bits, monkeypatch):
    monkeypatch.setattr(numerics, "_SHORT_BITS", bits)
    stored = load_file(MEASURED)
    a, b = (formats.decode(stored[f"wide_and_sum.{name}"], "e4m3fn") for name in "ab")
    same = numerics.short_sum(stored["wide_and_sum.c"], a, b, -6) == stored["wide_and_sum.d"]
    assert same.float().mean() < 0.6


def test_the_measured_file_is_whole():
    with safe_open(MEASURED, "pt") as file:
        assert sorted({key.split(".")[0] for key in file.keys()}) == KINDS
        assert "H200" in file.metadata()["device"] and "probe_accumulation.py" in file.metadata()["command"]


def test_short_sums_of_nothing_and_of_odd_widths():
    zero = torch.zeros(2, 3)
    assert torch.equal(numerics.short_sum(zero, torch.zeros(2, 32), torch.ones(3, 32), -6), zero)
    assert torch.equal(numerics.short_sum(zero, torch.ones(2, 40), torch.ones(3, 40), -6), zero + 40)
    tiny = torch.full((2, 3), 2.0**-110)
    assert torch.isfinite(numerics.short_sum(tiny, torch.zeros(2, 32), torch.ones(3, 32), -6)).all()
    with_nan = torch.ones(2, 32)
    with_nan[0, 5] = torch.nan
    assert numerics.short_sum(zero, with_nan, torch.ones(3, 32), -6).isnan().tolist() == [[True] * 3, [False] * 3]


@pytest.mark.parametrize("width", [1, 2, 512])
def test_hadamard_is_orthonormal_and_its_own_inverse(width):
    x = torch.randn(7, width, generator=torch.Generator().manual_seed(0))
    y = numerics.hadamard(x)
    torch.testing.assert_close(numerics.hadamard(y), x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    one = torch.zeros(width)
    one[-1] = 1
    torch.testing.assert_close(numerics.hadamard(one).abs(), torch.full((width,), width**-0.5))  # one channel over all
