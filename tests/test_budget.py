"""The error taken apart: against Monte Carlo rounding, and against what each switch must and must not change."""

import math

import pytest
import torch

from mla_lab import budget, cache, emulate, formats, inputs, metrics, reference, study
from mla_lab.arch import get_profile
from mla_lab.inputs import Shape
from mla_lab.recipe import NAMED

SHAPE = Shape(tokens=2, heads=16, topk=512, slots=2048)


@pytest.fixture(scope="module")
def table():
    every = [inputs.make(name, SHAPE) for name in ("normal", "peaky", "indexed", "uniform", "sink")]
    return budget.error_budget(every, get_profile("gfx942"), {"fp8": NAMED["fp8"]})


def of(table, name):
    return table[table.input == name].set_index("operand")


def test_theory_predicts_each_rounding_where_errors_are_independent(table):
    """Within 20% on inputs without structure between a rounding and what it multiplies; a missing factor is 1.4 or more."""
    for name in ("normal", "indexed", "sink"):
        part = of(table, name)
        for operand in ("Q", "K", "V", "P", "output", "whole"):
            assert part.alone[operand] / part.predicted[operand] == pytest.approx(1, abs=0.2), (name, operand)


def test_errors_add_in_the_square(table):
    for name in ("normal", "indexed", "sink", "uniform"):
        part = of(table, name)
        assert part.alone["root of squares"] == pytest.approx(part.alone["whole"], rel=0.06)
        for operand in ("Q", "K and V", "P"):  # whole^2 = alone^2 + left_out^2
            assert math.hypot(part.alone[operand], part.left_out[operand]) == pytest.approx(part.alone["whole"], rel=0.08)


def test_what_is_left_out_leaves_no_trace():
    """With all four exact the emulator is the f32 reference over unrounded rows; with one rounding, it is that one's kernel."""
    made = inputs.normal(SHAPE)
    profile = get_profile("gfx942")
    packed = cache.pack_fp8_scalar(made.rows, profile.encoding)

    def run(recipe, exact):
        parts = emulate.sparse_mla_parts(made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, profile=profile, recipe=recipe,
                                         block_k=64, kv_splits=1, kv_scale=packed.scale, exact=exact, exact_rows=made.rows)
        return emulate.merge(parts)[0]

    truth, _ = reference.sparse_mla(made.q, made.rows, made.kv_indptr, made.kv_indices, made.softmax_scale)
    assert metrics.relative_l2(run(NAMED["fp8"], "qkvp"), truth) < 1e-6
    over_cache, _ = reference.sparse_mla(made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, kv_scale=packed.scale, arch=profile)
    assert metrics.relative_l2(run(NAMED["fp8"], "qp"), over_cache) < 1e-6
    # K from the cache and V not: values of the unrounded rows under the cache's weights.
    rows = made.rows[made.kv_indices.long()].view(2, 512, 512)
    codes = cache.unpack(packed.buffer, packed.scale, profile.encoding)[made.kv_indices.long()].view(2, 512, 512)
    weights = torch.softmax(torch.einsum("chr,ckr->chk", made.q.float(), codes) * made.softmax_scale, -1)
    assert metrics.relative_l2(run(NAMED["fp8"], "qvp"), weights @ rows) < 1e-5
    weights = torch.softmax(torch.einsum("chr,ckr->chk", made.q.float(), rows) * made.softmax_scale, -1)
    assert metrics.relative_l2(run(NAMED["fp8"], "qkp"), weights @ codes) < 1e-5


@pytest.mark.parametrize("pack", [cache.pack_fp8_scalar, cache.pack_fp8_dsv32])
def test_an_exact_operand_over_a_packed_cache_too(pack):
    made = inputs.normal(Shape(tokens=1, heads=3, qk_rope_head_dim=64, topk=200, slots=300))
    packed = pack(made.rows, "e4m3fn")
    parts = emulate.sparse_mla_parts(made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, profile=get_profile("sm_90"), recipe=NAMED["fp8"],
                                     block_k=64, kv_splits=2, kv_scale=packed.scale, exact="kvp", exact_rows=made.rows)
    truth, _ = reference.sparse_mla(made.q, made.rows, made.kv_indptr, made.kv_indices, made.softmax_scale)
    assert 0.015 < metrics.relative_l2(emulate.merge(parts)[0], truth) < 0.035  # Q's rounding alone: 2.6%


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8x2"])
@pytest.mark.parametrize("encoding", ["e4m3fn", "e4m3fnuz"])
def test_variance_is_that_of_rounding(kind, encoding):
    """Against the rounding of 2^18 values, octave by octave, from below the flush to the top."""
    fmt = formats.get_format(encoding)
    generator = torch.Generator().manual_seed(0)
    for exponent in range(-14, 7):
        x = torch.exp2(exponent + torch.rand(1 << 18, generator=generator))
        if kind == "bf16":
            rounded = x.bfloat16().float()
        else:
            rounded = formats.decode(formats.encode(x, fmt), fmt)
            if kind == "fp8x2":
                rounded = rounded + formats.decode(formats.encode(x - rounded, fmt), fmt)
        measured, predicted = (rounded - x).square().mean(), budget.variance(x, kind, fmt).mean()
        # Two terms: the remainder's own smallest steps are taken as one step, good within a factor.
        assert measured / predicted == pytest.approx(1, abs=0.05) if kind == "bf16" or (kind == "fp8" and exponent > -9) else 0.2 < measured / predicted < 1.7, exponent


def test_sums_are_accounted_for():
    made = inputs.dominant_key(Shape(tokens=1, heads=4))
    table = budget.error_budget([made], get_profile("sm_90"), {"short": NAMED["fp8, short sums"], "Hadamard": NAMED["fp8, Hadamard"]})
    short = table[table.recipe == "short"].set_index("operand")
    assert short.alone["sums"] > 0.05 and short.left_out["sums"] < 0.5 * short.alone["whole"]
    rotated = table[table.recipe == "Hadamard"].set_index("operand")
    assert rotated.predicted.isna().all() and "sums" not in rotated.index and rotated.alone["whole"] < 0.05


def test_a_pareto_front_is_what_nothing_beats():
    import pandas as pd

    points = pd.DataFrame(dict(error=[1, 2, 2, 3, 1], cost=[3, 2, 2, 2, 4]))
    assert study.pareto_front(points) == [True, True, True, False, False]


def test_recipe_tables_hold_their_costs_and_a_front():
    every = [inputs.make(name, SHAPE) for name in ("normal", "heavy_tailed")]
    names = ["bf16", "fp8", "two-term Q", "fp8, Hadamard"]
    errors = study.recipe_errors(every, get_profile("sm_90"), {n: NAMED[n] for n in names})
    assert len(errors) == 2 * 5 and set(errors.cache) == {"fp8_scalar", "bf16"}
    assert (errors.kernel_error <= errors.total_error * 1.1).all()
    summary = study.recipe_summary(errors).set_index(["recipe", "cache"])
    assert summary.matrix_time["fp8", "fp8_scalar"] == 1 and summary.matrix_time["two-term Q", "fp8_scalar"] == 1.5
    assert summary.bytes_per_token["bf16", "bf16"] == 1024 and summary.bytes_per_token["bf16", "fp8_scalar"] == 512
    assert summary.on_front_total["bf16", "bf16"] and not summary.on_front["fp8", "fp8_scalar"]  # the rotation beats it
    mean = math.exp(sum(math.log(e) for e in errors[(errors.recipe == "fp8")].kernel_error) / 2)
    assert summary.kernel_error["fp8", "fp8_scalar"] == pytest.approx(mean)


def test_capacity_ratio_is_arithmetic():
    table, implied = study.capacity_ratio()
    assert 1.88 < implied["ratio_low"] < implied["ratio_high"] < 1.91 and 53 < implied["bytes_low"] < 64 < implied["bytes_high"] < 70
    assert table[table.within_published].bytes.tolist() == [64]
    assert table.set_index("bytes").ratio[0] == 2


def test_outliers_hurt_one_scale_before_many():
    gains = study.outlier_gains([1.0, 1e3, 1e5], 0, encodings=["e4m3fn"], slots=64).set_index(["cache", "gain"]).error
    assert gains["fp8_scalar", 1e3] < 1.05 * gains["fp8_scalar", 1.0] and gains["fp8_scalar", 1e5] > 0.3
    assert gains["fp8_dsv32_mla", 1e5] < 0.1
