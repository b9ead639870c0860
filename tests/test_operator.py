"""torch.ops.mla_lab.sparse_mla_fwd: opcheck, torch.compile, and on a GPU a captured graph."""

import pytest
import torch

import cases
from cases import DEVICE, FP8, Case
from mla_lab import sparse_mla_fwd

CASES = [
    Case(cache="bf16", recipe=cases.BF16, rope=0, heads=4, sink=True),
    Case(recipe=FP8, rope=0, heads=4, splits=2, holes=0.2),
    Case(cache="fp8_dsv32_mla", recipe=FP8, heads=4, arch="sm_90"),
]


def arguments(case, tensors):
    return (tensors.q, tensors.packed.buffer, tensors.indptr, tensors.indices, tensors.scale), dict(
        kv_scale=tensors.packed.scale, kv_lora_rank=case.rank, qk_rope_head_dim=case.rope, kv_splits=case.splits, has_invalid=case.holes > 0,
        q_dots=case.recipe.q, p_dots=case.recipe.p, attn_sink=tensors.sink, arch=case.arch)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck(case):
    args, options = arguments(case, cases.make(case))
    if args[1].dtype.itemsize == 1:  # opcheck multiplies its arguments, which torch cannot do with fp8: the uint8 view
        args = (args[0], args[1].view(torch.uint8), *args[2:])
    torch.library.opcheck(torch.ops.mla_lab.sparse_mla_fwd.default, args, options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_operator_is_the_function(case):
    tensors = cases.make(case)
    args, options = arguments(case, tensors)
    out, lse = torch.ops.mla_lab.sparse_mla_fwd(*args, **options)
    want, want_lse = tensors.call(case, sparse_mla_fwd, backend="auto")
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_under_torch_compile_without_a_graph_break(case):
    tensors = cases.make(case)
    args, options = arguments(case, tensors)

    def model(q, scale):
        out, lse = torch.ops.mla_lab.sparse_mla_fwd(q * 1, *args[1:4], scale, **options)
        return out * 2, lse

    # aot_eager: what is tested is the tracing; inductor would add a C++ compiler to what a user needs.
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    out, lse = torch.compile(model, fullgraph=True, backend=backend)(args[0], args[4])
    want, want_lse = torch.ops.mla_lab.sparse_mla_fwd(*args, **options)
    assert torch.equal(out, want * 2) and torch.equal(lse, want_lse)


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_a_cuda_graph(case):
    """Captured once, replayed over other queries and another scale: nothing of the call was read at capture."""
    tensors = cases.make(case)
    args, options = arguments(case, tensors)
    options["kv_scale"] = None if tensors.packed.scale is None else tensors.packed.scale.clone()
    torch.ops.mla_lab.sparse_mla_fwd(*args, **options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = torch.ops.mla_lab.sparse_mla_fwd(*args, **options)
    args[0].copy_(torch.randn_like(args[0]))
    graph.replay()
    want, want_lse = torch.ops.mla_lab.sparse_mla_fwd(*args, **options)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    if options["kv_scale"] is not None:  # the scale is read at replay
        before = out.clone()
        options["kv_scale"].mul_(2)
        graph.replay()
        assert torch.equal(out, torch.ops.mla_lab.sparse_mla_fwd(*args, **options)[0]) and not torch.equal(out, before)
