"""The FlashMLA face, the converter, and parts that merge."""

import math

import pytest
import torch

import cases
from cases import DEVICE, Case
from mla_lab import flash_mla_sparse_fwd, merge_parts, metrics, sparse_mla_fwd
from mla_lab.flashmla import to_lists

BACKENDS = ["emulate", "triton"]


def make(tokens=3, heads=4, width=576, slots=120, topk=50, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, width, generator=g).bfloat16()
    kv = torch.randn(slots, 1, width, generator=g).bfloat16()
    return q.to(DEVICE), kv.to(DEVICE), torch.randint(0, slots, (tokens, topk), generator=g).int().to(DEVICE)


def truth(q, kv, indices, scale, d_v, length=None, sink=None):
    """Written out in f64, row by row."""
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, d_v, dtype=torch.float64)
    top, lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64), torch.full((tokens, heads), math.inf, dtype=torch.float64)
    for t in range(tokens):
        row = indices.reshape(tokens, -1)[t].tolist()[: None if length is None else int(length[t])]
        row = [i for i in row if 0 <= i < kv.shape[0]]
        if row:
            keys = kv[row, 0].double().cpu()
            scores = q[t].double().cpu() @ keys.T * scale
            top[t], lse[t] = scores.amax(-1), scores.logsumexp(-1)
            out[t] = scores.softmax(-1) @ keys[:, :d_v]
            if sink is not None:
                out[t] *= torch.sigmoid(lse[t] - sink.double().cpu())[:, None]
    return out, top, lse


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [576, 512])
@pytest.mark.parametrize("three", [False, True])
def test_flash_mla_sparse_fwd(backend, width, three):
    q, kv, indices = make(tokens=5, width=width)
    indices[0, 3:9] = -1
    indices[1, ::2] = torch.tensor([120, 2**31 - 1, -7, 121, 500], dtype=torch.int32, device=DEVICE).repeat(5)
    indices[2] = -1
    length = torch.tensor([50, 31, 50, 0, 7], dtype=torch.int32, device=DEVICE)
    sink = torch.tensor([0.3, -math.inf, math.inf, -2.0], device=DEVICE)
    kv[100:] = torch.nan  # behind the cut a NaN row does not matter
    indices[indices >= 100] = torch.where(indices[indices >= 100] >= 120, indices[indices >= 100], 5)
    indices[4, 7:] = 110
    given = indices[:, None] if three else indices
    for one_sink in (None, sink):
        out, top, lse = flash_mla_sparse_fwd(q, kv, given, 0.05, 512, one_sink, length, backend=backend, arch="sm_90")
        want, want_top, want_lse = truth(q, kv, indices, 0.05, 512, length, one_sink)
        assert out.shape == (5, 4, 512) and out.dtype == torch.bfloat16 and top.dtype == lse.dtype == torch.float32
        assert metrics.relative_l2(out.cpu(), want) < 4e-3
        torch.testing.assert_close(top.cpu().double(), want_top, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-5, atol=1e-5)
        assert (out[[2, 3]] == 0).all() and (lse[[2, 3]] == math.inf).all() and (top[[2, 3]] == -math.inf).all()


def test_converter():
    indices = torch.tensor([[3, -1, 9, 10], [0, 2**31 - 1, 4, -9]], dtype=torch.int32)
    indptr, flat = to_lists(indices, 10)
    assert indptr.tolist() == [0, 4, 8] and flat.tolist() == [3, -1, 9, -1, 0, -1, 4, -1] and flat.dtype == indptr.dtype == torch.int32
    assert to_lists(indices.long()[:, None], 10, torch.tensor([1, 3]))[1].tolist() == [3, -1, -1, -1, 0, -1, 4, -1]
    with pytest.raises(ValueError, match=r"indices: got shape \(2, 2, 2\); accepted: \[tokens, topk\] or \[tokens, 1, topk\]"):
        to_lists(torch.zeros(2, 2, 2, dtype=torch.int32), 10)
    with pytest.raises(ValueError, match="indices: got torch.float32"):
        to_lists(torch.zeros(2, 2), 10)
    with pytest.raises(ValueError, match=r"topk_length: got torch.int64 of shape \(3,\) on cpu; accepted: integers of shape \(2,\)"):
        to_lists(indices, 10, torch.zeros(3, dtype=torch.int64))


def test_refusals():
    q, kv, indices = make()
    with pytest.raises(ValueError, match=r"kv: got shape \(120, 576\) with q of shape"):
        flash_mla_sparse_fwd(q, kv[:, 0], indices, 0.1)
    with pytest.raises(ValueError, match="indices: got 2 rows for 3 query tokens"):
        flash_mla_sparse_fwd(q, kv, indices[:2], 0.1)
    with pytest.raises(ValueError, match=r"attn_sink: got torch.float32 of shape \(3,\); accepted: float32 of shape \(4,\)"):
        flash_mla_sparse_fwd(q, kv, indices, 0.1, attn_sink=torch.zeros(3, device=DEVICE))
    with pytest.raises(ValueError, match="softmax_scale: got 0"):
        flash_mla_sparse_fwd(q, kv, indices, 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["bf16", "fp8_scalar", "fp8_dsv32_mla"])
@pytest.mark.parametrize("splits", [(1, 1), (2, 3)])
def test_the_parts_of_two_halves_give_the_whole(backend, kind, splits):
    """Context parallelism: two ranks hold half of the keys each; some token has all of its keys on one rank."""
    case = Case(lengths=(90, 0, 131), cache=kind, recipe=cases.BF16, sink=True)
    t = cases.make(case)
    out, lse = t.call(case, sparse_mla_fwd, backend=backend)
    halves = []
    for rank, kv_splits in enumerate(splits):
        lists = [t.indices[t.indptr[i] : t.indptr[i + 1]] for i in range(3)]
        mine = [row[: len(row) // 2] if rank == 0 else row[len(row) // 2 :] for row in lists]
        if rank == 0:
            mine[0] = lists[0]
        else:
            mine[0] = lists[0][:0]
        half = cases.Tensors(t.q, t.packed, torch.tensor([0, *torch.tensor([len(m) for m in mine]).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE), torch.cat(mine), t.scale, None)
        parts, none = half.call(case, sparse_mla_fwd, backend=backend, kv_splits=kv_splits, skip_reduce=True)
        assert none is None and parts.acc.shape == (3, kv_splits, case.heads, 512)
        halves.append(parts)
    merged, merged_lse = merge_parts(halves, t.sink)
    assert metrics.relative_l2(merged, out) < 3e-3  # P's rounding to bf16 against another maximum, and the output's
    torch.testing.assert_close(merged_lse, lse, rtol=1e-5, atol=1e-5)


def test_merge_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="parts: got an empty list"):
        merge_parts([])
    case = Case(lengths=(9,), recipe=cases.BF16)
    one, _ = cases.make(case).call(case, sparse_mla_fwd, backend="emulate", skip_reduce=True)
    two, _ = cases.make(Case(lengths=(9, 9), recipe=cases.BF16)).call(case, sparse_mla_fwd, backend="emulate", skip_reduce=True)
    with pytest.raises(ValueError, match="parts: got .tokens, heads, rank. .*accepted: the same for all"):
        merge_parts([one, two])
