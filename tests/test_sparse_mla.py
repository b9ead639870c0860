"""Emulator against the reference, and the Triton kernel (interpreted or on a GPU) against the emulator, on one list of cases."""

import dataclasses
import math

import pytest
import torch

import cases
from cases import DEVICE, FP8, Case
from mla_lab import Recipe, cache, formats, metrics, reference, sparse_mla_fwd
from mla_lab.arch import PROFILES

# The kernel and the emulator round at the same places, so that what is left is the order of f32 sums: now and then an
# output or a P on the other side of a rounding. Seen: 1.2e-4 in the interpreter and on an H200. A wrong
# P scale, a lost tile or a missed rounding moves the output by 1e-2 and more.
KERNEL_L2 = 5e-4
LSE_TOLERANCE = dict(rtol=1e-5, atol=1e-5)

# Against the reference: bf16 dots leave P's rounding and the output's (2^-9 / sqrt(3) = 0.11% each); fp8 adds P's 4
# significant bits (1.6% measured over many keys, up to 2^-4 / sqrt(3) = 3.6% on one) and Q's (2.6% over normal inputs).
# A second term takes 4 bits more off either; Q's then is what bf16 leaves.
ERROR_OF_P = {"bf16": 2e-3, "fp8": 0.03, "fp8x2": 2.5e-3}
ERROR_OF_Q = {"bf16": 2e-3, "fp8": 0.045, "fp8x2": 2.5e-3}


def reference_l2(recipe):
    return math.hypot(ERROR_OF_P[recipe.p], ERROR_OF_Q[recipe.q])


@pytest.mark.parametrize("case", cases.EVERY, ids=str)
def test_kernel_agrees_with_emulator(case):
    tensors = cases.make(case)
    out, lse = tensors.call(case, sparse_mla_fwd, backend="triton")
    want, want_lse = tensors.call(case, sparse_mla_fwd, backend="emulate")
    assert not out.isnan().any()
    assert metrics.relative_l2(out, want) < KERNEL_L2
    torch.testing.assert_close(lse, want_lse, **LSE_TOLERANCE)


@pytest.mark.parametrize("case", cases.EVERY, ids=str)
def test_emulator_is_as_near_to_the_reference_as_its_roundings_allow(case):
    tensors = cases.make(case)
    out, lse = tensors.call(case, sparse_mla_fwd, backend="emulate")
    want, want_lse = tensors.call(case, reference.sparse_mla)
    assert metrics.relative_l2(out, want) < reference_l2(case.recipe)
    # Only a rounded Q moves a score: by 2.6% of one nat for normal inputs, and the LSE of one key is its score.
    torch.testing.assert_close(lse, want_lse, rtol=0, atol={"bf16": 2e-5, "fp8": 0.15, "fp8x2": 0.01}[case.recipe.q])


def test_reference_f32_and_f64_agree_and_do_not_depend_on_chunks(monkeypatch):
    case = Case(sink=True, holes=0.2, lengths=(70, 0, 131, 64))
    tensors = cases.make(case)
    wide, wide_lse = tensors.call(case, reference.sparse_mla, dtype=torch.float64)
    out, lse = tensors.call(case, reference.sparse_mla)
    assert metrics.relative_l2(out, wide) < 1e-6
    torch.testing.assert_close(lse.double(), wide_lse, rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(reference, "_BUDGET", 1)
    again, _ = tensors.call(case, reference.sparse_mla, dtype=torch.float64)
    assert metrics.relative_l2(again, wide) < 1e-14


def test_reference_is_attention_as_written_down():
    """Against a softmax over explicit loops, so that reference and emulator cannot share a mistake."""
    case = Case(lengths=(5, 0, 9), heads=2, rank=32, rope=16, cache="bf16", recipe=cases.BF16, sink=True)
    t = cases.make(case)
    out, lse = t.call(case, reference.sparse_mla, dtype=torch.float64)
    for token in range(3):
        listed = t.indices[t.indptr[token] : t.indptr[token + 1]].long()
        rows = t.packed.buffer[listed].double()
        for head in range(2):
            weights = torch.cat([t.scale * (rows @ t.q[token, head].double()), t.sink[head : head + 1].double()]).exp()
            want = (weights[:-1, None] * rows[:, :32]).sum(0) / weights.sum()
            torch.testing.assert_close(out[token, head], want, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(lse[token, head], weights.sum().log(), rtol=1e-10, atol=1e-12)


BACKENDS = ["triton", "emulate"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("splits", [1, 3])
def test_a_query_without_a_key(backend, splits):
    case = Case(lengths=(40, 0, 40, 40), rope=0, heads=5, splits=splits, holes=1e-9)
    t = cases.make(case)
    t.indices[40:80] = -1  # and one whose keys are all holes
    out, lse = t.call(case, sparse_mla_fwd, backend=backend)
    assert (out[[1, 2]] == 0).all() and (lse[[1, 2]] == -torch.inf).all()
    assert metrics.relative_l2(out[[0, 3]], t.call(case, reference.sparse_mla)[0][[0, 3]]) < 0.055

    t.sink = torch.full((5,), 0.25, device=DEVICE)
    out, lse = t.call(case, sparse_mla_fwd, backend=backend)
    assert (out[[1, 2]] == 0).all() and (lse[[1, 2]] == 0.25).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("sink", [-torch.inf, torch.inf, 0.0, 300.0, -300.0])
def test_extreme_sinks(backend, splits, sink):
    case = Case(lengths=(90,), rope=0, heads=3, splits=splits, cache="bf16", recipe=cases.BF16)
    t = cases.make(case)
    plain, plain_lse = t.call(case, sparse_mla_fwd, backend=backend)
    t.sink = torch.full((3,), sink, device=DEVICE)
    out, lse = t.call(case, sparse_mla_fwd, backend=backend)
    want, want_lse = t.call(case, reference.sparse_mla)
    torch.testing.assert_close(lse, want_lse, **LSE_TOLERANCE)
    assert metrics.relative_l2(out, want) < reference_l2(cases.BF16)
    if sink in (-torch.inf, -300.0):
        assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
    if sink == torch.inf:
        assert (out == 0).all() and (lse == torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("recipe", [cases.BF16, FP8])
@pytest.mark.parametrize("where", ["first", "last", "both", "scattered", "between", "first 16 of 64", "one key at the end"])
def test_holes_are_as_if_they_were_not_there(backend, splits, recipe, where):
    """NaN codes in every slot that nobody asked for: masking a score is not enough, since 0 times NaN is NaN."""
    case = Case(lengths=(192,), rope=0, heads=4, splits=splits, recipe=recipe, holes=1e-9)
    t = cases.make(case)
    t.indices = torch.randperm(case.slots - 2, generator=torch.Generator().manual_seed(1))[:192].int().to(DEVICE) + 1  # neither the first slot nor the last
    hole = torch.zeros(192, dtype=torch.bool)
    if where in ("first", "both"):
        hole[:144] = True
    if where in ("last", "both"):
        hole[150:] = True
    if where == "scattered":
        hole[::3] = True
    if where == "between":
        hole[64:128] = True  # a whole tile, between valid ones
    if where == "first 16 of 64":
        hole[:16] = hole[64:] = True
    if where == "one key at the end":
        hole[:-1] = True
    t.indices[hole.to(DEVICE)] = -1
    compact = dataclasses.replace(t, indices=t.indices[t.indices >= 0], indptr=torch.tensor([0, int((~hole).sum())], dtype=torch.int32, device=DEVICE))

    codes = t.packed.buffer.view(torch.uint8).clone()
    unasked = torch.ones(case.slots, dtype=torch.bool, device=DEVICE)
    unasked[t.indices[t.indices >= 0].long()] = False
    clean, dirty = codes.clone(), codes.clone()
    clean[unasked], dirty[unasked] = 0, formats.E4M3FNUZ.nan_code
    results = {}
    for name, buffer in (("clean", clean), ("dirty", dirty)):
        t.packed = cache.Packed(buffer, t.packed.scale)
        results[name] = t.call(case, sparse_mla_fwd, backend=backend)
    assert torch.equal(results["clean"][0], results["dirty"][0]) and torch.equal(results["clean"][1], results["dirty"][1])

    # Holes move keys between tiles, and with them the running maximum that P is rounded against: equal within P's noise.
    want, want_lse = compact.call(dataclasses.replace(case, splits=1), sparse_mla_fwd, backend="emulate")
    assert metrics.relative_l2(results["dirty"][0], want) < (0.03 if recipe is FP8 else 3e-3)
    torch.testing.assert_close(results["dirty"][1], want_lse, **LSE_TOLERANCE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", [cases.BF16, FP8])
@pytest.mark.parametrize("rubbish", ["NaN", "huge"])
def test_rubbish_in_packed_rows_that_nobody_asked_for(backend, recipe, rubbish):
    """NaN codes, scales and rope, or huge ones, in every other slot, 0 and the last among them: not one bit changes."""
    case = Case(lengths=(100,), heads=4, cache="fp8_dsv32_mla", recipe=recipe, holes=1e-9, splits=2)
    t = cases.make(case)
    t.indices = torch.randperm(298, generator=torch.Generator().manual_seed(1))[:100].int().to(DEVICE) + 1
    t.indices[::3] = -1
    buffer = t.packed.buffer.view(300, 656)
    unasked = torch.ones(300, dtype=torch.bool, device=DEVICE)
    unasked[t.indices[t.indices >= 0].long()] = False
    results = []
    for dirty in (False, True):
        buffer[unasked] = 0
        if dirty:
            codes, scales, rope = cache.split_packed(buffer)
            codes[unasked] = 0x80 if rubbish == "NaN" else 0x7F
            scales[unasked] = torch.nan if rubbish == "NaN" else 1e30
            rope[unasked] = torch.nan if rubbish == "NaN" else 1e30
        results.append(t.call(case, sparse_mla_fwd, backend=backend))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1]) and results[0][0].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["code", "scale", "rope"])
def test_a_nan_in_a_packed_row_shows_in_the_queries_that_gather_it(backend, where):
    case = Case(lengths=(50, 50), heads=4, cache="fp8_dsv32_mla", recipe=FP8)
    t = cases.make(case)
    t.indices = torch.arange(100, dtype=torch.int32, device=DEVICE)
    codes, scales, rope = cache.split_packed(t.packed.buffer.view(300, 656))
    if where == "code":
        codes[77, 300] = 0x80
    elif where == "scale":
        scales[77, 2] = torch.nan
    else:
        rope[77, 5] = torch.nan
    out, lse = t.call(case, sparse_mla_fwd, backend=backend)
    assert out[1].isnan().all() and lse[1].isnan().all() and out[0].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_scores_in_order(backend, order):
    """Ascending scores move the running maximum with every tile, descending ones never: equal within P's rounding."""
    case = Case(lengths=(256,), heads=1, rope=0, recipe=cases.FP8_PV)
    t = cases.make(case)
    shuffled, lse = t.call(case, sparse_mla_fwd, backend=backend)
    scores = cache.unpack(t.packed.buffer, t.packed.scale, "e4m3fnuz")[t.indices.long()] @ t.q[0, 0].float()
    t.indices = t.indices[scores.argsort(descending=order == "descending")]
    out, lse_sorted = t.call(case, sparse_mla_fwd, backend=backend)
    assert metrics.relative_l2(out, shuffled) < 0.03
    torch.testing.assert_close(lse_sorted, lse, **LSE_TOLERANCE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
@pytest.mark.parametrize("recipe", [cases.BF16, FP8])
@pytest.mark.parametrize("where", [0, 511, 512])
def test_a_nan_code_shows_in_the_queries_that_gather_it_and_in_no_other(backend, arch, recipe, where):
    case = Case(lengths=(50, 50), heads=4, arch=arch, recipe=recipe)
    t = cases.make(case)
    t.indices = torch.arange(100, dtype=torch.int32, device=DEVICE)
    t.packed.buffer.view(torch.uint8)[77, where] = PROFILES[arch].encoding.nan_code
    out, lse = t.call(case, sparse_mla_fwd, backend=backend)
    assert out[1].isnan().all() and lse[1].isnan().all()
    assert not out[0].isnan().any() and not lse[0].isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_in_a_bf16_row(backend, value):
    case = Case(lengths=(50, 50), heads=4, cache="bf16", recipe=cases.BF16)
    t = cases.make(case)
    t.indices = torch.arange(100, dtype=torch.int32, device=DEVICE)
    t.packed.buffer[77, 3] = value
    out, _ = t.call(case, sparse_mla_fwd, backend=backend)
    assert not out[1].isfinite().all()
    assert out[0].isfinite().all()


@pytest.mark.parametrize("splits", [1, 2])
def test_an_index_out_of_range_is_never_read(splits):
    """The device kernel looks at no data beforehand: such a query becomes NaN, its neighbour stays right."""
    case = Case(lengths=(50, 50), heads=4, rope=0, splits=splits)
    t = cases.make(case)
    right, _ = t.call(case, sparse_mla_fwd, backend="triton")
    for wrong in (case.slots, 2**31 - 1, -1, -7):
        t.indices[60] = wrong
        out, _ = t.call(case, sparse_mla_fwd, backend="triton")
        assert out[1].isnan().all() and torch.equal(out[0], right[0])
        with pytest.raises(ValueError, match=rf"kv_indices: got {wrong} at position 60; accepted: 0 to 299"):
            t.call(case, sparse_mla_fwd, backend="triton", check_indices=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("splits", [1, 3])
def test_the_output_is_the_same_to_the_bit_without_the_lse(backend, splits):
    case = Case(splits=splits, sink=True)
    t = cases.make(case)
    with_lse, lse = t.call(case, sparse_mla_fwd, backend=backend)
    without, none = t.call(case, sparse_mla_fwd, backend=backend, return_lse=False)
    assert torch.equal(with_lse, without) and none is None and lse.shape == (3, case.heads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_stay_zeros(backend):
    case = Case(rope=0)
    t = cases.make(case)
    packed = cache.pack_fp8_scalar(torch.zeros(case.slots, 512, device=DEVICE), "e4m3fnuz")
    assert (packed.scale > 0).all()
    t.packed = packed
    out, lse = t.call(case, sparse_mla_fwd, backend=backend)
    assert (out == 0).all()
    torch.testing.assert_close(lse[0].exp(), torch.full_like(lse[0], 70.0))
    t = cases.make(case)
    t.q.zero_()
    out, lse = t.call(case, sparse_mla_fwd, backend=backend)
    torch.testing.assert_close(lse[2].exp(), torch.full_like(lse[2], 131.0))
    assert out.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_duplicates_count_twice(backend):
    case = Case(lengths=(2, 3), heads=2, cache="bf16", recipe=cases.BF16, rope=0)
    t = cases.make(case)
    t.indices[:] = torch.tensor([4, 9, 4, 9, 9], dtype=torch.int32)
    t.q[1] = t.q[0]
    out, lse = t.call(case, sparse_mla_fwd, backend=backend)
    want, want_lse = t.call(case, reference.sparse_mla)
    torch.testing.assert_close(lse, want_lse, **LSE_TOLERANCE)
    assert metrics.relative_l2(out, want) < 3e-3 and (lse[1] > lse[0]).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", [cases.BF16, FP8])
def test_views_are_read_where_they_lie(backend, recipe):
    """A slice of a larger pool, a padded block pitch, strided q and out, int64 lists, each cache shape: the same bits."""
    case = Case(recipe=recipe, lengths=(70, 131), heads=4)
    t = cases.make(case)
    want, want_lse = t.call(case, sparse_mla_fwd, backend=backend)
    codes = t.packed.buffer.view(torch.uint8)
    layouts = {}
    wide = torch.full((300, 600), 0x80, dtype=torch.uint8, device=DEVICE)
    wide[:, :576] = codes
    layouts["slice of wider rows"] = wide[:, :576]
    layouts["[slots, 1, 1, R]"] = codes.view(300, 1, 1, 576)
    layouts["blocks"] = codes.view(10, 30, 576)
    padded = torch.full((10, 30 * 576 + 64), 0x80, dtype=torch.uint8, device=DEVICE)
    padded[:, : 30 * 576] = codes.view(10, -1)
    layouts["padded pitch"] = padded[:, : 30 * 576].unflatten(1, (30, 576))
    for name, buffer in layouts.items():
        t.packed = cache.Packed(buffer, t.packed.scale)
        out, lse = t.call(case, sparse_mla_fwd, backend=backend)
        assert torch.equal(out, want) and torch.equal(lse, want_lse), name

    big_q = torch.zeros(2, 6, 640, dtype=torch.bfloat16, device=DEVICE)
    big_q[:, 1:5, :576] = t.q
    t.q = big_q[:, 1:5, :576]
    t.indptr, t.indices = t.indptr.long(), t.indices.long()
    target = torch.full((2, 4, 544), 7.0, dtype=torch.bfloat16, device=DEVICE)
    out, lse = t.call(case, sparse_mla_fwd, backend=backend, out=target)
    assert torch.equal(out, want) and torch.equal(target[..., :512], want) and torch.equal(lse, want_lse)
    assert (target[..., 512:] == 7.0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", [cases.BF16, FP8])
def test_q_given_in_fp8(backend, recipe):
    case = Case(recipe=recipe)
    t = cases.make(case)
    given = cache.pack_fp8_scalar(t.q, "e4m3fnuz")
    t.q = given.buffer
    out, lse = t.call(case, sparse_mla_fwd, backend=backend, q_scale=given.scale)
    want, want_lse = t.call(case, reference.sparse_mla, q_scale=given.scale)
    assert metrics.relative_l2(out, want) < reference_l2(Recipe("bf16", recipe.p))  # the reference reads the same rounded q
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_merge_to_the_whole(backend):
    from mla_lab import emulate

    case = Case(splits=3)
    t = cases.make(case)
    out, lse = t.call(case, sparse_mla_fwd, backend=backend)
    parts, none = t.call(case, sparse_mla_fwd, backend=backend, skip_reduce=True)
    merged, merged_lse = emulate.merge(parts)
    assert none is None and parts.acc.shape == (3, 3, case.heads, 512)
    assert metrics.relative_l2(merged.bfloat16(), out) < 1e-4
    torch.testing.assert_close(merged_lse, lse, **LSE_TOLERANCE)


def test_no_tokens():
    case = Case(lengths=())
    t = cases.make(case)
    for backend in BACKENDS:
        out, lse = t.call(case, sparse_mla_fwd, backend=backend)
        assert out.shape == (0, case.heads, 512) and lse.shape == (0, case.heads)


def test_kernels_that_differ_in_dots_cache_or_encoding_differ_in_name():
    from types import SimpleNamespace

    from mla_lab.kernels.sparse_mla import kernel_name

    names = set()
    for cache_fp8, q, p, fnuz in [(False, "bf16", "bf16", False), (True, "bf16", "bf16", True), (True, "fp8", "fp8", True), (True, "fp8", "fp8", False),
                                  (True, "bf16", "fp8", True), (True, "fp8x2", "fp8x2", True)]:
        flags = dict(Q_FP8=q != "bf16", Q_LOW=q == "fp8x2", P_FP8=p != "bf16", P_LOW=p == "fp8x2")
        names.add(kernel_name(SimpleNamespace(constants=dict(CACHE_FP8=cache_fp8, FNUZ=fnuz, **flags))))
    assert names == {
        "sparse_mla_fwd_bf16_cache_bf16_qk_bf16_pv", "sparse_mla_fwd_e4m3fnuz_cache_bf16_qk_bf16_pv",
        "sparse_mla_fwd_e4m3fnuz_cache_fp8_qk_fp8_pv", "sparse_mla_fwd_e4m3fn_cache_fp8_qk_fp8_pv",
        "sparse_mla_fwd_e4m3fnuz_cache_bf16_qk_fp8_pv", "sparse_mla_fwd_e4m3fnuz_cache_fp8x2_qk_fp8x2_pv",
    }
