"""Random calls against the reference: shapes, raggedness, holes, caches, strides, products, splits, sinks.

2,000 examples on the emulator; on a GPU 60 on the kernel, each of which may be a compilation. MLA_LAB_FUZZ_EXAMPLES and
MLA_LAB_FUZZ_BACKEND (emulate, triton) ask for others.
"""

import os

import numpy as np
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from cases import DEVICE
from mla_lab import Recipe, cache, metrics, reference, sparse_mla_fwd
from mla_lab.arch import PROFILES

EXAMPLES = int(os.environ.get("MLA_LAB_FUZZ_EXAMPLES", 60 if DEVICE == "cuda" else 2000))
BACKEND = os.environ.get("MLA_LAB_FUZZ_BACKEND", "triton" if DEVICE == "cuda" else "emulate")

shapes = st.fixed_dictionaries(dict(
    lengths=st.lists(st.integers(0, 150), max_size=4), heads=st.integers(1, 40), rank=st.sampled_from([16, 32, 64, 128]), rope=st.sampled_from([0, 8, 24, 64]),
    slots=st.integers(1, 200), arch=st.sampled_from(sorted(PROFILES)), kind=st.sampled_from(["bf16", "fp8_scalar", "fp8_scalar", "fp8_dsv32_mla"]),
    q=st.sampled_from(["bf16", "fp8"]), p=st.sampled_from(["bf16", "fp8"]), splits=st.one_of(st.none(), st.integers(1, 7)), holes=st.sampled_from([0.0, 0.2, 0.9]),
    sink=st.sampled_from([None, -3.0, 0.0, 4.0]), layout=st.sampled_from(["rows", "blocks", "padded", "slice", "4d"]), wide=st.booleans(),
    scale=st.sampled_from([0.3, 1.0, 3.0]), magnitude=st.sampled_from([1e-3, 1.0, 50.0]), seed=st.integers(0, 2**31 - 1), strided=st.booleans(),
))


def lay_out(buffer, layout):
    """The same rows [slots, R], one after another, in another layout."""
    slots, width = buffer.shape
    if layout == "slice":
        whole = buffer.new_zeros(slots, width + 16)
        whole[:, 4 : 4 + width] = buffer
        return whole[:, 4 : 4 + width]
    if layout == "4d":
        return buffer.view(slots, 1, 1, width)
    block = next(b for b in (8, 5, 4, 3, 2, 1) if slots % b == 0)
    if layout == "padded":
        whole = buffer.new_zeros(slots // block, block * width + 32)
        whole[:, : block * width] = buffer.view(slots // block, -1)
        return whole[:, : block * width].unflatten(1, (block, width))
    return buffer.view(slots // block, block, width) if layout == "blocks" else buffer


@seed(20250601)
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(shapes)
def test_random_calls(s):
    rng = np.random.default_rng(s["seed"])
    packed_kind = s["kind"] == "fp8_dsv32_mla"
    rank, rope = (512, 64) if packed_kind else (s["rank"], s["rope"])
    lengths, width = s["lengths"], rank + rope
    normal = lambda *shape: torch.from_numpy(rng.standard_normal(shape, np.float32))
    q = normal(len(lengths), s["heads"], width).bfloat16()
    rows = normal(s["slots"], width) * s["magnitude"]
    encoding = PROFILES[s["arch"]].encoding
    recipe = Recipe() if s["kind"] == "bf16" else Recipe(s["q"], s["p"])
    if packed_kind:
        packed = cache.pack_fp8_dsv32(rows, encoding, power_of_two=s["wide"])
        layout = s["layout"] if s["layout"] in ("blocks", "padded") else "rows"
        buffer = lay_out(packed.buffer[:, 0], layout)
        buffer, kv_scale = buffer if buffer.dim() == 3 else buffer[:, None], None
    else:
        packed = cache.pack_bf16(rows) if s["kind"] == "bf16" else cache.pack_fp8_scalar(rows, encoding)
        buffer = packed.buffer if s["kind"] == "bf16" else packed.buffer.view(torch.uint8)
        buffer, kv_scale = lay_out(buffer, s["layout"]), packed.scale
    indices = rng.integers(0, s["slots"], sum(lengths))
    indices[rng.random(indices.size) < s["holes"]] = -1
    kind = np.int64 if s["wide"] else np.int32
    indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(kind)).to(DEVICE)
    indices = torch.from_numpy(indices.astype(kind)).to(DEVICE)
    if s["strided"] and q.numel():
        q = torch.nn.functional.pad(q, (0, 32))[..., :width]
    sink = None if s["sink"] is None else torch.full((s["heads"],), s["sink"])
    softmax_scale = s["scale"] * width**-0.5 / s["magnitude"]
    move = lambda x: None if x is None else (x.to(DEVICE) if x.is_contiguous() else torch.as_strided(x._base.to(DEVICE), x.shape, x.stride(), x.storage_offset()) if DEVICE == "cuda" else x)
    q, buffer, kv_scale, sink = move(q), move(buffer), move(kv_scale), move(sink)

    out, lse = sparse_mla_fwd(q, buffer, indptr, indices, softmax_scale, kv_scale=kv_scale, kv_lora_rank=rank, qk_rope_head_dim=rope, kv_splits=s["splits"],
                              has_invalid=s["holes"] > 0, recipe=recipe, attn_sink=sink, arch=s["arch"], return_lse=True, backend=BACKEND)
    want, want_lse = reference.sparse_mla(q, buffer, indptr, indices, softmax_scale, kv_scale=kv_scale, kv_lora_rank=rank, attn_sink=sink, arch=s["arch"])

    assert not out.isnan().any() and not lse.isnan().any()
    empty = want_lse == (-torch.inf if sink is None else sink[None, :])
    if sink is None:
        assert torch.equal(lse == -torch.inf, empty)
    assert (out[(indices.numel() == 0) | empty & (want == 0).all(-1)] == 0).all()
    if not lengths or not bool((want != 0).any()):
        return
    # A rounded Q moves a score by at most 2^-4 of the sum of |q k| (relative half step), about 4% of a score's spread
    # times 4 sigma here; P by half a step of 4 significant bits, at most 2^-4; below the smallest normal value a P in
    # e4m3fn without a P scale (gfx950) is off by up to 2^-10 of the maximum, 150 keys long.
    score = 0.16 * s["scale"] if recipe.q == "fp8" else 1e-4
    flush = 0.0
    if recipe.p == "fp8" and s["arch"] == "gfx950":
        flush = 150 * 2**-10
    bound = (2 * score if recipe.q == "fp8" else 0) + (2**-4 if recipe.p == "fp8" else 0) + 5e-3 + flush
    finite = torch.isfinite(want_lse) & torch.isfinite(lse)
    assert ((lse - want_lse)[finite].abs() <= 4 * score + 1e-5 * want_lse[finite].abs()).all()
    # Of a row's error, relative to the length that its values have before they cancel: the root of the sum of (p v)^2.
    error = (out.float() - want).norm(dim=-1)
    values = cache.unpack(buffer, kv_scale, encoding)[:, :rank]
    largest = values.norm(dim=-1).max()
    assert (error <= bound * largest).all(), f"{float((error / largest).max())} of a row's length, bound {bound}"
    if recipe == Recipe():
        assert metrics.relative_l2(out, want) < 6e-3


ODD = st.sampled_from([
    None, True, -1, 0, 3, 2.5, float("nan"), "fp8", "", [1, 2], np.zeros(3), torch.zeros(()), torch.zeros(1), torch.zeros(1).double(), torch.zeros(3),
    torch.zeros(0), torch.zeros(2, 3), torch.zeros(3, dtype=torch.int32), torch.zeros(3, 1, dtype=torch.int64), torch.zeros(2, 4, 48).bfloat16(),
    torch.zeros(2, 4, 48), torch.zeros(2, 4, 48).half(), torch.zeros(10, 48).bfloat16(), torch.zeros(10, 48, dtype=torch.uint8), torch.zeros(10, 48, dtype=torch.int8),
    torch.zeros(10, 48, dtype=torch.bool), torch.zeros(2, 5, 656, dtype=torch.uint8), torch.zeros(10, 1, 1, 48).bfloat16(), torch.zeros(4), torch.zeros(4, device="meta"),
    torch.zeros(10, 48, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.zeros(10, 48, dtype=torch.uint8).view(torch.float8_e5m2), Recipe("bf16", "fp8"), Recipe(),
])
NAMES = ["q", "kv_buffer", "kv_indptr", "kv_indices", "softmax_scale", "kv_scale", "kv_lora_rank", "qk_rope_head_dim", "kv_splits", "has_invalid", "dot_precision",
         "q_scale", "out", "return_lse", "attn_sink", "arch", "recipe", "backend", "check_indices", "skip_reduce"]


@seed(20250602)
@settings(max_examples=min(EXAMPLES, 2000), deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(NAMES), ODD, min_size=1, max_size=2))
def test_odd_arguments_are_refused_by_name_or_work(odd):
    """Nothing but a ValueError that begins with an argument's name and says what is accepted; or a result."""
    usual = dict(q=torch.ones(2, 4, 48).bfloat16(), kv_buffer=torch.ones(10, 48, dtype=torch.uint8), kv_indptr=torch.tensor([0, 2, 3]), kv_indices=torch.tensor([1, 2, 9]),
                 softmax_scale=0.1, kv_scale=torch.ones(1), kv_lora_rank=32, qk_rope_head_dim=16, arch="gfx942", backend="emulate")
    try:
        result = sparse_mla_fwd(**{**usual, **odd})
    except ValueError as error:
        name = str(error).split(":")[0].split(".")[0]
        assert name in NAMES and "; accepted" in str(error), str(error)
    else:
        assert len(result) == 2
