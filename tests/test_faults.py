"""Planted faults: each guard passes on the code as it is, and fails once its fault is planted in it.

The faults are planted in a copy of the source, which then takes the module's place.
"""

import dataclasses
import importlib.util
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from cases import DEVICE
from mla_lab import Recipe, arch, attention, cache, emulate, inputs, metrics, portable, reference, sparse_mla_fwd
from mla_lab.inputs import Shape
from mla_lab.kernels import sparse_mla as kernels
from mla_lab.kernels import sparse_mla_packed as packed_kernels

BACKENDS = ["emulate", "triton"]
SHAPE = Shape(tokens=1, heads=2, topk=2048, slots=2048)


def call(made, packed, backend, recipe=None, name="gfx942", **options):
    options = dict(kv_splits=1, return_lse=True) | options
    return sparse_mla_fwd(made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, kv_scale=packed.scale,
                          kv_lora_rank=made.kv_lora_rank, qk_rope_head_dim=made.qk_rope_head_dim, arch=name, backend=backend,
                          **(dict(dot_precision="fp8") if recipe is None else dict(recipe=recipe)), **options)


def guard_tail(backend):
    """The published focused case: a tail that carries a fifth survives fp8 dots in gfx942's own profile."""
    made = inputs.dominant_key(SHAPE).to(DEVICE)
    packed = cache.pack_fp8_scalar(made.rows, "e4m3fnuz")
    truth, _ = reference.sparse_mla(made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, kv_scale=packed.scale, arch="gfx942")
    assert metrics.relative_l2(call(made, packed, backend)[0], truth) < 0.02


def guard_lse(backend):
    """The LSE is exact to f32 whatever P is rounded to."""
    made = inputs.ones(Shape(tokens=1, heads=2, qk_rope_head_dim=32, topk=2048, slots=2048), margin=7.0).to(DEVICE)
    packed = cache.pack_fp8_scalar(made.rows, "e4m3fnuz", scale=1.0)
    for s in (1.0, 128.0):
        _, lse = call(made, packed, backend, Recipe("fp8", "fp8", s))
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(1 + 2047 * math.exp(-7))), rtol=1e-6, atol=0)


def guard_bytes(backend):
    """Bytes that ml_dtypes wrote as e4m3fnuz, over numpy in f64: nothing of mla_lab's codec is on the right side."""
    made = inputs.normal(Shape(tokens=1, heads=2, topk=128, slots=128))
    scale = 0.02
    codes = (made.rows.numpy() / scale).astype(ml_dtypes.float8_e4m3fnuz)
    rows = codes.astype(np.float64)[made.kv_indices] * scale
    weights = np.exp(made.q[0].double().numpy() @ rows.T * made.softmax_scale)
    want = weights @ rows / weights.sum(-1, keepdims=True)
    made = made.to(DEVICE)
    packed = cache.Packed(torch.from_numpy(codes.view(np.uint8)).to(DEVICE), torch.tensor([scale], device=DEVICE))
    for recipe, worst in ((Recipe(), 3e-3), (Recipe("bf16", "fp8"), 0.03), (None, 0.055)):
        out, _ = call(made, packed, backend, recipe)
        assert metrics.relative_l2(out[0].cpu(), torch.from_numpy(want)) < worst


def guard_splits(backend):
    """Split-K and its merge give what one pass gives, up to P's rounding."""
    made = inputs.dominant_key(SHAPE, position="random").to(DEVICE)
    packed = cache.pack_fp8_scalar(made.rows, "e4m3fnuz")
    one, lse = call(made, packed, backend, Recipe())
    three, lse_three = call(made, packed, backend, Recipe(), kv_splits=3)
    assert metrics.relative_l2(three, one) < 4e-3
    torch.testing.assert_close(lse_three, lse, rtol=1e-5, atol=1e-5)


def guard_head_blocks(backend):
    """Q has one scale per block of 16 heads: a block of tiny queries must not be flushed by a neighbour's scale."""
    made = inputs.normal(Shape(tokens=1, heads=32, topk=1, slots=1)).to(DEVICE)
    made.q[:, 16:] *= 2**-20
    packed = cache.pack_fp8_scalar(made.rows, "e4m3fnuz")
    _, lse = call(made, packed, backend)  # of one key: its score
    _, truth = reference.sparse_mla(made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, kv_scale=packed.scale, arch="gfx942")
    assert metrics.relative_l2(lse[:, 16:], truth[:, 16:]) < 0.06  # 2.6% is Q's own rounding, over a mean score of 0


def guard_packed(backend):
    """Groups and keys whose scales lie decades apart: each scale must reach its own key and its own group, once."""
    made = inputs.normal(Shape(tokens=1, heads=2, qk_rope_head_dim=64, topk=256, slots=256)).to(DEVICE)
    rows = made.rows.clone()
    rows[:, :128] *= 20.0
    rows[:, 384:512] *= 0.02
    rows[::3, :512] *= 0.1
    packed = cache.pack_fp8_dsv32(rows, "e4m3fnuz")
    for recipe, worst in ((Recipe(), 5e-3), (Recipe("bf16", "fp8"), 0.06)):
        out, _ = call(made, packed, backend, recipe, kv_splits=2)
        truth, _ = reference.sparse_mla(made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, arch="gfx942")
        for g in range(4):  # by group: the largest would hide the others
            columns = slice(128 * g, 128 * (g + 1))
            assert metrics.relative_l2(out[..., columns], truth[..., columns]) < worst


def guard_two_terms(backend, rope=0, pack=cache.pack_fp8_scalar):
    """Two fp8 terms are as good as bf16: 0.2% where one is 1.6% (P) and 2.7% (Q)."""
    made = inputs.normal(Shape(tokens=1, heads=2, qk_rope_head_dim=rope, topk=512, slots=512)).to(DEVICE)
    packed = pack(made.rows, "e4m3fnuz")
    truth, _ = reference.sparse_mla(made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, kv_scale=packed.scale, arch="gfx942")
    out, _ = call(made, packed, backend, Recipe("fp8x2", "fp8x2"))
    assert metrics.relative_l2(out, truth) < 4e-3


def guard_packed_two_terms(backend):
    guard_two_terms(backend, 64, cache.pack_fp8_dsv32)


def guard_heads(backend):
    """With a scale per head, a head of tiny queries must not be flushed by the others of its block."""
    made = inputs.normal(Shape(tokens=1, heads=16, topk=1, slots=1)).to(DEVICE)
    made.q[:, 8:] *= 2**-20
    packed = cache.pack_fp8_scalar(made.rows, "e4m3fnuz")
    _, lse = call(made, packed, backend, Recipe("fp8", "fp8", q_granularity="head"))
    _, truth = reference.sparse_mla(made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, kv_scale=packed.scale, arch="gfx942")
    assert metrics.relative_l2(lse[:, 8:], truth[:, 8:]) < 0.06


GUARDS = [guard_two_terms, guard_packed_two_terms, guard_heads, guard_packed, guard_tail, guard_lse, guard_bytes, guard_splits, guard_head_blocks]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("guard", GUARDS, ids=lambda g: g.__name__)
def test_guard_passes_on_the_code_as_it_is(guard, backend):
    guard(backend)


def planted(module, old, new, folder):
    """`module` with `old` replaced in its source; `old` must be there."""
    source = Path(module.__file__).read_text()
    assert old in source, f"the fault's place is gone from {module.__name__}: {old!r}"
    path = folder / f"planted_{Path(module.__file__).name}"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


FAULTS = {
    "emulator forgets to divide the P scale out": (guard_tail, emulate, "value_scale = value_scale / value_scale.new_tensor(arithmetic.p_scale)", "pass"),
    "emulator forgets to apply the P scale": (guard_tail, emulate, "x = p * self.p_scale", "x = p * 1.0"),
    "emulator's sum is taken over the rounded P": (guard_lse, emulate, "p.sum(-1, keepdim=True)  # before", "(arithmetic.p_terms(p)[0][0] / arithmetic.p_scale).sum(-1, keepdim=True)  # before"),
    "emulator reads fnuz as fn": (guard_bytes, emulate, "lists.gather_pool(kv_buffer, slot, profile.encoding,", "lists.gather_pool(kv_buffer, slot, 'e4m3fn',"),
    "emulator merges splits without their maxima": (guard_splits, emulate, "weight = torch.exp2(parts.max - safe)", "weight = torch.ones_like(parts.max)"),
    "emulator drops the last tile of a split": (guard_splits, emulate, "for lo in range(0, slot.shape[1], block_k):", "for lo in range(0, slot.shape[1] - block_k, block_k):"),
    "emulator has one Q scale for all heads": (guard_head_blocks, emulate, "padded.amax(-1, keepdim=True)", "padded.amax((-1, -2), keepdim=True)"),
    "emulator forgets the packed scales on the PV side": (guard_packed, emulate, "rows[..., columns], largest))", "rows[..., columns], 1.0))"),
    "emulator takes one group's scales for all": (guard_packed, emulate, "scales[:, g, None, :]\n    rope", "scales[:, 0, None, :]\n    rope"),
    "emulator drops Q's second term": (guard_two_terms, emulate, "for q in q_terms)", "for q in q_terms[:1])"),
    "emulator drops P's second term": (guard_two_terms, emulate, "for term in terms:\n                    acc", "for term in terms[:1]:\n                    acc"),
    "emulator shares a head's scale within its block": (guard_heads, emulate, 'recipe.q_granularity == "head_block"', 'recipe.q_granularity != "tensor"'),
    "kernel drops Q's second term": (guard_two_terms, kernels, "tl.dot(q_latent_low, tl.trans(k), scores,", "tl.dot(q_latent_low * 0.0, tl.trans(k), scores,"),
    "kernel drops P's second term": (guard_two_terms, kernels, "if P_LOW:", "if False:"),
    "kernel's second term is the first again": (guard_two_terms, kernels, "left = x - _widen(", "left = x - 0.0 * _widen("),
    "kernel shares a head's scale within its block": (guard_heads, kernels, "if not Q_PER_HEAD:", "if True:"),
    "packed kernel drops Q's second term": (guard_packed_two_terms, packed_kernels, "scores = tl.dot(q_low, tl.trans(k), scores,", "scores = tl.dot(q_low * 0.0, tl.trans(k), scores,"),
    "packed kernel drops P's second term": (guard_packed_two_terms, packed_kernels, "if P_LOW:", "if False:"),
    "packed kernel forgets the scales on the PV side": (guard_packed, packed_kernels, "alpha[:, None] + values * largest", "alpha[:, None] + values"),
    "packed kernel reads the rope columns two bytes off": (guard_packed, packed_kernels, "(LATENT + 16) // 2", "(LATENT + 14) // 2"),
    "packed kernel takes one group's scales for all": (guard_packed, packed_kernels, "_group_scores(q3, low3, c3, s3,", "_group_scores(q3, low3, c3, s0,"),
    "kernel forgets to divide the P scale out": (guard_tail, kernels, "value_scale = tl.div_rn(value_scale, p_scale)", "value_scale = value_scale * 1.0"),
    "kernel forgets to apply the P scale": (guard_tail, kernels, "_encode(p * p_scale,", "_encode(p,"),
    "kernel's sum is taken over the rounded P": (guard_lse, kernels, "            p_operand = _fp8_operand(_encode(p * p_scale,", "            row_sum += tl.sum(_widen(_encode(p * p_scale, FNUZ, NATIVE_CAST), FNUZ, NATIVE_CAST, INTERPRET).to(tl.float32) / p_scale - p, 1)\n            p_operand = _fp8_operand(_encode(p * p_scale,"),
    "kernel reads fnuz as fn": (guard_bytes, kernels, "decode_f32(code, 3, 8 if FNUZ else 7, 0x7F if FNUZ else 0x7E, FNUZ)", "decode_f32(code, 3, 7, 0x7E, False)"),
    "kernel merges splits without their maxima": (guard_splits, kernels, "mask=some < splits, other=float(\"-inf\")) - safe_max)", "mask=some < splits, other=float(\"-inf\")) * 0.0)"),
    "kernel drops the last tile of a split": (guard_splits, kernels, "for lo in range(first, last, BLOCK_K):", "for lo in range(first, last - BLOCK_K, BLOCK_K):"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_guard_fails_on_its_fault(what, monkeypatch, tmp_path):
    guard, module, old, new = FAULTS[what]
    copy = planted(module, old, new, tmp_path)
    if module is emulate:
        monkeypatch.setattr(attention, "emulate", copy)
        backend = "emulate"
    else:
        monkeypatch.setattr(portable, "kernels" if module is kernels else "packed_kernels", copy)
        backend = "triton"
    with pytest.raises(AssertionError):
        guard(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_guard_fails_if_gfx942s_p_scale_becomes_1(backend, monkeypatch):
    monkeypatch.setitem(arch.PROFILES, "gfx942", dataclasses.replace(arch.PROFILES["gfx942"], p_scale=1.0))
    with pytest.raises(AssertionError):
        guard_tail(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_guard_fails_if_the_profile_reads_fn(backend, monkeypatch):
    """Reference and emulator would misread alike and agree: only bytes from elsewhere show it."""
    monkeypatch.setitem(arch.PROFILES, "gfx942", dataclasses.replace(arch.PROFILES["gfx942"], encoding=arch.PROFILES["gfx950"].encoding))
    with pytest.raises(AssertionError):
        guard_bytes(backend)
