"""What must hold between encodings, P scales and orders, on emulator and kernel."""

import math

import pytest
import torch

from cases import DEVICE
from mla_lab import Recipe, cache, inputs, metrics, reference, sparse_mla_fwd
from mla_lab.arch import Launch, Profile
from mla_lab.inputs import Shape

BACKENDS = ["emulate", "triton"]
SMALL = Shape(tokens=1, heads=4, topk=300, slots=400)


def run(made, packed, arch, recipe, backend, **options):
    options = dict(kv_splits=1, return_lse=True) | options
    return sparse_mla_fwd(made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, kv_scale=packed.scale,
                          kv_lora_rank=made.kv_lora_rank, qk_rope_head_dim=made.qk_rope_head_dim, arch=arch, recipe=recipe, backend=backend, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p_scale", [1.0, 16.0, 100.0, 128.0, 224.0])
@pytest.mark.parametrize("splits", [1, 2])
def test_fnuz_at_s_is_fn_at_2s_bit_for_bit(backend, p_scale, splits, monkeypatch):
    """fnuz(S p) / S = fn(2 S p) / (2 S). With the same bytes in both caches (the scale doubled) and the same Q, P is the
    only operand that the encodings could treat differently; so not one bit may differ."""
    # The same tiles: P is rounded against a maximum that depends on them.
    monkeypatch.setattr(Profile, "launch", lambda self, dots: Launch(block_k=32, num_warps=4, num_stages=1))
    made = inputs.dominant_key(SMALL, margin=5.0).to(DEVICE)
    fn = cache.pack_fp8_scalar(made.rows, "e4m3fn")
    fnuz = cache.reencode_fn_as_fnuz(fn)
    q_fn = cache.pack_fp8_scalar(made.q, "e4m3fn")
    q_fnuz = cache.reencode_fn_as_fnuz(q_fn)
    for q_pair in ((made.q, None), (made.q, None)), ((q_fnuz.buffer, q_fnuz.scale), (q_fn.buffer, q_fn.scale)):
        given = q_pair[0][1] is not None
        results = []
        for arch, packed, (q, q_scale), scale in (("gfx942", fnuz, q_pair[0], p_scale), ("gfx950", fn, q_pair[1], 2 * p_scale)):
            moved = inputs.Inputs(**{**made.__dict__, "q": q})
            results.append(run(moved, packed, arch, Recipe("fp8" if given else "bf16", "fp8", scale), backend, q_scale=q_scale, kv_splits=splits))
        (out_fnuz, lse_fnuz), (out_fn, lse_fn) = results
        assert torch.equal(out_fnuz, out_fn) and torch.equal(lse_fnuz, lse_fn)
    assert out_fn.float().norm() > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch, s_lost, lost, s_kept", [("gfx942", 1.0, 0.0, 128.0), ("gfx950", 1.0, 0.0, 256.0)])
def test_one_key_without_value_above_a_tail_of_ones(backend, arch, s_lost, lost, s_kept):
    """The dominant key's V is 0, 2047 others at -8 nats have V = 1: right is 2047 e^-8 / (1 + 2047 e^-8) = 0.40712."""
    made = inputs.ones(Shape(tokens=1, heads=1, qk_rope_head_dim=32, topk=2048, slots=2048), margin=8.0).to(DEVICE)
    made.rows[0, : made.kv_lora_rank] = 0
    packed = cache.pack_fp8_scalar(made.rows, inputs_encoding(arch), scale=1.0)
    share = 2047 * math.exp(-8) / (1 + 2047 * math.exp(-8))
    truth, _ = reference.sparse_mla(made.q, packed.buffer, made.kv_indptr, made.kv_indices, 1.0, kv_scale=packed.scale, arch=arch, dtype=torch.float64)
    torch.testing.assert_close(truth, torch.full_like(truth, share), rtol=1e-9, atol=0)
    out, _ = run(made, packed, arch, Recipe("bf16", "fp8", s_lost), backend)
    assert (out == lost).all()
    for s, want in ((s_kept, 0.40740), (240.0 if arch == "gfx942" else 448.0, 0.39506 if arch == "gfx942" else 0.42328)):
        out, _ = run(made, packed, arch, Recipe("bf16", "fp8", s), backend)
        torch.testing.assert_close(out.float(), torch.full_like(out.float(), want), rtol=2**-8, atol=0)  # the output is bf16


def inputs_encoding(arch):
    return {"gfx942": "e4m3fnuz"}.get(arch, "e4m3fn")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch, s, share", [("gfx950", 1.0, 0.35), ("sm_90", 256.0, 1.0), ("gfx942", 128.0, 1.0)])
def test_the_softmax_mass_that_is_lost(backend, arch, s, share):
    """V all ones, one key at 0 and 2047 at -7: 1.0 is right whatever the weights; e4m3fn without a P scale gives 0.35."""
    made = inputs.ones(Shape(tokens=1, heads=2, qk_rope_head_dim=32, topk=2048, slots=2048), margin=7.0).to(DEVICE)
    packed = cache.pack_fp8_scalar(made.rows, inputs_encoding(arch), scale=1.0)
    out, lse = run(made, packed, arch, Recipe("fp8", "fp8", s), backend)
    assert ((out.float() - share).abs() < 0.01).all()
    # The softmax's own sum is taken before P is rounded, so the LSE knows nothing of the P scale.
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(1 + 2047 * math.exp(-7))), rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_p_scales_that_differ_in_the_tail_differ_and_others_agree(backend):
    """A kernel that neither applies nor removes the P scale would give one result for all."""
    made = inputs.dominant_key(Shape(tokens=1, heads=2, topk=2048, slots=2048)).to(DEVICE)
    packed = cache.pack_fp8_scalar(made.rows, "e4m3fnuz")
    out = {s: run(made, packed, "gfx942", Recipe("bf16", "fp8", s), backend)[0] for s in (1.0, 64.0, 128.0)}
    assert metrics.relative_l2(out[1.0], out[128.0]) > 0.1
    assert metrics.relative_l2(out[64.0], out[128.0]) < 0.02


@pytest.mark.parametrize("backend", BACKENDS)
def test_gather_order_matters_only_within_fp8s_noise(backend):
    """A large difference would mean a stale maximum, or a P scale that is not applied."""
    made = {p: inputs.dominant_key(SMALL, position=p).to(DEVICE) for p in ("first", "last")}
    out = {}
    for position, one in made.items():
        packed = cache.pack_fp8_scalar(one.rows, "e4m3fnuz")
        out[position] = run(one, packed, "gfx942", Recipe("fp8", "fp8", 128.0), backend)[0]
        truth, _ = reference.sparse_mla(one.q, packed.buffer, one.kv_indptr, one.kv_indices, one.softmax_scale, kv_scale=packed.scale, arch="gfx942")
        assert metrics.relative_l2(out[position], truth) < 0.02
    assert metrics.relative_l2(out["first"], out["last"]) < 0.02


@pytest.mark.parametrize("p_scale, worst", [(128.0, 0.02), (240.0, 0.02), (256.0, 0.2), (448.0, 0.2)])
def test_beyond_the_range_the_error_jumps(p_scale, worst):
    """p = 1 saturates above 240 in fnuz: a cliff of several percent, not NaN."""
    made = inputs.normal(Shape(tokens=1)).to(DEVICE)
    packed = cache.pack_fp8_scalar(made.rows, "e4m3fnuz")
    out, _ = run(made, packed, "gfx942", Recipe("bf16", "fp8", p_scale), "emulate")
    truth, _ = reference.sparse_mla(made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, kv_scale=packed.scale, arch="gfx942")
    error = metrics.relative_l2(out, truth)
    assert error < worst and (p_scale <= 240 or error > 0.02)
