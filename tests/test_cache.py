"""Packing, unpacking, what saturates and what flushes."""

import pytest
import torch

from mla_lab import cache, formats

E4M3 = ["e4m3fn", "e4m3fnuz"]


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", E4M3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_comes_back_within_half_a_step(name, dtype):
    x = rows(50, 80).to(dtype)
    packed = cache.pack_fp8_scalar(x, name)
    back = cache.unpack(packed.buffer, packed.scale, name)
    assert packed.buffer.dtype == formats.get_format(name).torch_dtype and packed.scale.shape == (1,)
    error = (back - x.float()).abs()
    step = torch.maximum(x.float().abs() * 2**-4, packed.scale * formats.get_format(name).smallest_subnormal / 2)
    assert (error <= step * 1.0001).all()  # half a unit in the last of 4 significant bits; 1.0001: the division by the scale
    assert (packed.saturated, packed.values) == (0, 4000)


@pytest.mark.parametrize("name", E4M3)
def test_the_scale_is_taken_over_the_whole_row(name):
    """A latent below 0.1 beside a rope part within 1: a scale from the latent alone would saturate the rope part."""
    x = rows(50, 80).clamp(-1, 1)
    x[:, :64] *= 0.1
    fmt = formats.get_format(name)
    packed = cache.pack_fp8_scalar(x, name)
    assert packed.saturated == 0
    torch.testing.assert_close(packed.scale, x.abs().max().reshape(1) / fmt.max_finite)
    from_latent = cache.pack_fp8_scalar(x, name, scale=x[:, :64].abs().max() / fmt.max_finite)
    beyond = x[:, 64:].abs() > x[:, :64].abs().max()
    assert 0 < from_latent.saturated <= beyond.sum() and from_latent.saturated > 0.8 * beyond.sum()
    assert cache.unpack(from_latent.buffer, from_latent.scale, name).abs().max() == from_latent.scale * fmt.max_finite


@pytest.mark.parametrize("name", E4M3)
def test_an_uncalibrated_scale_says_what_it_did(name):
    fmt = formats.get_format(name)
    x = torch.linspace(0, 5e4, 1001)[:, None]
    packed = cache.pack_fp8_scalar(x, name, scale=1.0)
    half_step = fmt.max_finite * (1 + 1 / 30 if name == "e4m3fnuz" else 1 + 1 / 28)  # 248 and 464 round down or up
    assert packed.saturated == int((x > half_step).sum())
    small = cache.pack_fp8_scalar(x / 5e7, name, scale=1.0)  # at most 1e-3
    assert small.flushed == int(((x / 5e7 <= fmt.flush_threshold) & (x > 0)).sum()) > 400
    assert "saturated" in str(packed) and f"{small.flushed / 1001:.2%} flushed" in str(small)


def test_zero_rows_and_odd_values():
    packed = cache.pack_fp8_scalar(torch.zeros(3, 8), "e4m3fnuz")
    assert packed.scale.item() == cache.SMALLEST_SCALE and (packed.buffer.view(torch.uint8) == 0).all()
    x = torch.tensor([[1.0, torch.nan, torch.inf, -torch.inf, -2.0]])
    packed = cache.pack_fp8_scalar(x, "e4m3fnuz")
    back = cache.unpack(packed.buffer, packed.scale, "e4m3fnuz")
    assert back.isnan().tolist() == [[False, True, True, True, False]] and packed.saturated == 0
    torch.testing.assert_close(back[0, [0, 4]], torch.tensor([1.0, -2.0]))
    assert cache.pack_fp8_scalar(torch.zeros(0, 8), "e4m3fn").values == 0


def test_given_scales_are_checked():
    for wrong in (0.0, -1.0, float("nan"), float("inf"), torch.ones(2)):
        with pytest.raises(ValueError, match="scale: got .*; accepted: one positive finite number"):
            cache.pack_fp8_scalar(torch.ones(2, 2), "e4m3fn", scale=wrong)


def test_reencoding_fn_as_fnuz_keeps_the_values():
    packed = cache.pack_fp8_scalar(rows(20, 16), "e4m3fn")
    twin = cache.reencode_fn_as_fnuz(packed)
    assert twin.buffer.dtype == torch.float8_e4m3fnuz and twin.scale == 2 * packed.scale
    assert torch.equal(cache.unpack(twin.buffer, twin.scale, "e4m3fnuz"), cache.unpack(packed.buffer, packed.scale, "e4m3fn"))


def test_bf16():
    x = rows(4, 3, 16)
    packed = cache.pack_bf16(x)
    assert packed.scale is None and torch.equal(cache.unpack(packed.buffer, None, "e4m3fn"), x.bfloat16().float().view(12, 16))


@pytest.mark.parametrize("name", E4M3)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_packed_rows_come_back(name, power_of_two):
    fmt = formats.get_format(name)
    x = rows(3, 7, 576)
    x[..., 128:256] *= 1e-3
    packed = cache.pack_fp8_dsv32(x, name, power_of_two)
    assert packed.buffer.shape == (3, 7, 656) and packed.buffer.dtype == torch.uint8 and packed.scale is None
    codes, scales, rope = cache.split_packed(packed.buffer)
    assert torch.equal(rope, x[..., 512:].bfloat16())
    largest = x[..., :512].unflatten(-1, (4, 128)).abs().amax(-1)
    if power_of_two:
        assert (torch.log2(scales) % 1 == 0).all() and (scales >= largest / fmt.max_finite).all() and (scales < 2 * largest / fmt.max_finite).all()
    else:
        assert torch.equal(scales, largest / fmt.max_finite)
    back = cache.unpack(packed.buffer, None, name)
    step = torch.maximum(x.abs() * 2**-4, torch.cat([scales.repeat_interleave(128, -1) * fmt.smallest_subnormal / 2, torch.ones(3, 7, 64)], -1))
    assert ((back.view(3, 7, 576) - x).abs()[..., :512] <= 1.0001 * step[..., :512]).all()
    assert packed.saturated == 0


@pytest.mark.parametrize("scale", [1.0, 1.37, 1.99, 2.0])
def test_packed_scales_are_read_as_exact_f32(scale):
    """Two public readers cut them to powers of two."""
    codes = torch.full((1, 1, 512), 0x38, dtype=torch.uint8)  # 1.0 in e4m3fn
    scales = torch.full((1, 1, 4), scale / 448)
    buffer = torch.cat([codes, scales.view(torch.uint8), torch.zeros(1, 1, 128, dtype=torch.uint8)], -1)
    assert (cache.unpack(buffer, None, "e4m3fn")[0, :512] == scales[0, 0, 0]).all()


def test_packed_layout_is_656_bytes_in_the_order_of_the_field():
    x = torch.zeros(1, 1, 576)
    x[..., 0], x[..., 300], x[..., 575] = 448.0, 2.0, -3.0
    buffer = cache.pack_fp8_dsv32(x, "e4m3fn").buffer[0, 0]
    assert buffer[0] == 0x7E and buffer[300] == 0x7E and (buffer[1:300] == 0).all()
    assert buffer[512:528].view(torch.float32).tolist()[0] == 1.0 and buffer[528:].view(torch.bfloat16)[63] == -3.0
    with pytest.raises(ValueError, match=r"rows: got shape \(4, 512\); accepted: \[blocks, block, 576\] or \[slots, 576\]"):
        cache.pack_fp8_dsv32(torch.zeros(4, 512), "e4m3fn")
