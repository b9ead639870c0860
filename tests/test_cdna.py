"""The Gluon kernel for CDNA: its LDS to the byte, its instructions, and its numerics, executed on an NVIDIA GPU with mma.sync layouts."""

import pytest
import torch

import cases
from cases import BF16, DEVICE, FP8, Case
from mla_lab import Recipe, cache, inputs, metrics, sparse_mla_fwd, study
from mla_lab.arch import get_profile

on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="Gluon has no interpreter: its numerics run on a GPU")

CASES = [
    Case(arch=arch, rope=rope, cache=kind, recipe=recipe, splits=splits, sink=splits > 1, holes=0.3 if rope else 0.0)
    for arch in ("gfx942", "gfx950", "sm_90")
    for rope in (0, 64)
    for kind, recipe in (("bf16", BF16), ("fp8_scalar", BF16), ("fp8_scalar", FP8))
    for splits in (1, 3)
] + [
    Case(arch="gfx942", heads=heads, lengths=(65, 0, 33), rope=0, recipe=recipe) for heads in (1, 12, 17, 128) for recipe in (BF16, FP8)
] + [Case(arch="gfx942", lengths=(keys,), heads=16, rope=0, recipe=FP8, slots=2500) for keys in (1, 63, 64, 65, 2049)]


@on_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cdna_body_agrees_with_the_emulator(case):
    """e4m3fnuz is decoded exactly there; e4m3fn is multiplied by mma.sync as it is. Both sum in f32: on Hopper the short
    sums are wgmma's, not mma.sync's (short ones would be 5e-3 apart here, and 8% on dominant_key)."""
    t = cases.make(case)
    out, lse = t.call(case, sparse_mla_fwd, backend="cdna")
    want, want_lse = t.call(case, sparse_mla_fwd, backend="emulate")
    assert not out.isnan().any()
    assert metrics.relative_l2(out, want) < 5e-4
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@on_gpu
def test_native_fp8_sums_on_hopper_are_not_short():
    """A key that carries 22 and a tail that adds little at a time: short sums lose the tail."""
    made = inputs.dominant_key(inputs.Shape(tokens=1)).to(DEVICE)
    packed = cache.pack_fp8_scalar(made.rows, "e4m3fn")
    truth = study.truth(made, packed, get_profile("sm_90"))
    out, _ = sparse_mla_fwd(made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, kv_scale=packed.scale, qk_rope_head_dim=0,
                            kv_splits=1, arch="sm_90", backend="cdna", dot_precision="fp8")
    assert metrics.relative_l2(out, truth) < 0.02


REFUSED = [
    (dict(recipe=Recipe("fp8", "bf16")), "recipe: got Recipe.* for the cdna kernel; accepted there: bf16 dots, or fp8 dots with one term"),
    (dict(recipe=Recipe("fp8x2", "fp8x2")), "recipe: got Recipe.* for the cdna kernel"),
    (dict(recipe=Recipe("fp8", "fp8", q_granularity="head")), "recipe: got Recipe.* for the cdna kernel"),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=str)
def test_what_it_does_not_run_is_refused_by_name(changes, message):
    from mla_lab import cdna

    with pytest.raises(ValueError, match=message):
        cdna.check(changes["recipe"], 512, 0, "fp8_scalar", False)
    for arguments, text in (((512, 48, "bf16", False), "qk_rope_head_dim: got 48"), ((32, 0, "bf16", False), "kv_lora_rank: got 32"),
                            ((512, 64, "fp8_dsv32_mla", False), "kv_buffer: got a packed cache"), ((512, 0, "fp8_scalar", True), "q: got fp8")):
        with pytest.raises(ValueError, match=text):
            cdna.check(Recipe(), *arguments)
    if DEVICE == "cpu":
        case = Case(rope=0)
        with pytest.raises(ValueError, match="backend: got 'cdna' on cpu; accepted there: 'emulate'"):
            cases.make(case).call(case, sparse_mla_fwd, backend="cdna")
