"""The forecast: arithmetic over public peaks, and what it says of the published latencies."""

import pytest

from mla_lab import Recipe, floor


def test_a_floor_is_bytes_and_products_over_peaks():
    """GLM-5.3-Flash's prefill of 16K on an MI325X, by hand: 2 x 16384 x 16 x 2048 x 1024 operations, 34.4 GB gathered in bf16."""
    found = floor.floor("MI325X", "prefill", 16384, 16, 2048, 512, 0, "bf16", Recipe())
    assert found["products_us"] == pytest.approx(2 * 16384 * 16 * 2048 * 1024 / 1307.4e12 * 1e6)
    assert found["cache_us"] == pytest.approx(16384 * 2048 * 1024 / 17.2e12 * 1e6) == found["floor_us"] and found["bound_by"] == "cache"
    fp8 = floor.floor("MI325X", "prefill", 16384, 16, 2048, 512, 0, "fp8_scalar", Recipe("fp8", "fp8"))
    assert fp8["products_us"] == pytest.approx(found["products_us"] * 1307.4 / 2614.9) and fp8["cache_us"] == pytest.approx(found["cache_us"] / 2)
    decode = floor.floor("H200", "decode", 2, 16, 2048, 512, 64, "fp8_scalar", Recipe("fp8x2", "bf16"))
    assert decode["memory_us"] == pytest.approx(2 * 2048 * 576 / 4.8e12 * 1e6) == decode["floor_us"] and decode["cache_us"] is None
    assert decode["products_us"] == pytest.approx(2 * 2 * 16 * 2048 * (2 * 576 / 1979e12 + 512 / 989.5e12) * 1e6)


def test_no_published_latency_is_below_its_floor():
    beside = floor.beside_published()
    assert len(beside) == 9 and (beside.times_the_floor > 1).all()
    assert beside.set_index(["phase", "tokens", "dots", "cache"]).published_us["prefill", 16384, "fp8", "fp8_scalar"] == 5780


@pytest.mark.parametrize("given, message", [
    (("MI300", "decode", "bf16"), "device: got 'MI300'; accepted: MI325X, MI355X, H200"),
    (("H200", "training", "bf16"), "phase: got 'training'; accepted: decode, prefill"),
    (("H200", "decode", "int8"), "cache: got 'int8'; accepted: bf16, fp8_scalar"),
])
def test_refusals(given, message):
    device, phase, cache = given
    with pytest.raises(ValueError, match=message):
        floor.floor(device, phase, 1, 16, 2048, 512, 0, cache, Recipe())


def test_every_peak_has_its_source():
    for device in floor.DEVICES.values():
        assert device.fp8 == pytest.approx(2 * device.bf16, rel=1e-3) and "data sheet" in device.source
