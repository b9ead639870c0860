"""The Gluon kernel for CDNA: its LDS to the byte, its instructions, and its numerics, executed on an NVIDIA GPU with mma.sync layouts."""

import dataclasses

import pytest
import torch

import cases
from cases import BF16, DEVICE, FP8, Case
from mla_lab import Recipe, metrics, sparse_mla_fwd

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
    """e4m3fnuz is decoded exactly there and e4m3fn multiplied natively, whose sums are then Hopper's short ones."""
    t = cases.make(case)
    out, lse = t.call(case, sparse_mla_fwd, backend="cdna")
    native_fp8 = case.recipe == FP8 and case.arch != "gfx942"
    recipe = dataclasses.replace(case.recipe, accumulate="fp22") if native_fp8 else case.recipe
    want, want_lse = t.call(case, sparse_mla_fwd, backend="emulate", recipe=recipe)
    assert metrics.relative_l2(out, want) < (2e-3 if native_fp8 else 5e-4)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=2e-4 if native_fp8 else 1e-5)
