"""Recipes: what they refuse, what they cost, and that each setting does what it says."""

import pytest
import torch

import cases
from cases import DEVICE, Case
from mla_lab import Recipe, cache, emulate, inputs, metrics, numerics, reference, sparse_mla_fwd, study
from mla_lab.arch import get_profile
from mla_lab.inputs import Shape
from mla_lab.recipe import DOTS, NAMED

SMALL = Shape(tokens=2, heads=20, topk=300, slots=600)


@pytest.mark.parametrize("given, message", [
    (dict(q="fp4"), "recipe.q: got 'fp4'; accepted: bf16, fp8, fp8x2"),
    (dict(p=None), "recipe.p: got None; accepted: bf16, fp8, fp8x2"),
    (dict(q_granularity="column"), "recipe.q_granularity: got 'column'; accepted: head_block, head, tensor"),
    (dict(accumulate="f16"), "recipe.accumulate: got 'f16'; accepted: f32, fp22, fp22_promoted"),
    (dict(hadamard=1), "recipe.hadamard: got 1; accepted: False, True"),
    (dict(p="fp8", p_scale="row"), "recipe.p_scale: got 'row'; accepted: None, 'largest', 'tile', or a number"),
    (dict(p="fp8", p_scale=1e300), r"recipe.p_scale: got 1e\+300; accepted"),
    (dict(p="fp8", p_scale=1e-46), "recipe.p_scale: got 1e-46; accepted"),
    (dict(p="fp8", p_scale=10**400), "recipe.p_scale: got 10+; accepted"),
    (dict(p="fp8", p_scale=True), "recipe.p_scale: got True; accepted"),
    (dict(p="fp8", p_scale=float("nan")), "recipe.p_scale: got nan; accepted"),
    (dict(p_scale=2.0), "recipe.p_scale: got 2.0 with a bf16 P"),
    (dict(q_granularity="head"), "recipe.q_granularity: got 'head' with a bf16 Q"),
    (dict(accumulate="fp22"), "recipe.accumulate: got 'fp22' with bf16 products"),
])
def test_refusals(given, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**given)


@pytest.mark.parametrize("recipe, message", [
    (Recipe("fp8", "fp8", "tile"), "recipe.p_scale: got 'tile' for the Triton kernel"),
    (Recipe("fp8", q_granularity="tensor"), "recipe.q_granularity: got 'tensor' for the Triton kernel"),
    (Recipe(hadamard=True), "recipe.hadamard: got True for the Triton kernel; accepted there: False; backend='emulate' runs it"),
    (Recipe("fp8", accumulate="fp22"), "recipe.accumulate: got 'fp22' for the Triton kernel"),
])
def test_what_only_the_emulator_runs_is_refused_by_the_kernel_by_name(recipe, message):
    t = cases.make(Case(rope=0))
    with pytest.raises(ValueError, match=message):
        t.call(Case(rope=0), sparse_mla_fwd, backend="triton", recipe=recipe)
    out, _ = t.call(Case(rope=0), sparse_mla_fwd, backend="emulate", recipe=recipe)
    assert torch.isfinite(out).all()


def test_an_fp8_q_has_one_term_and_no_rotation():
    made = inputs.normal(SMALL).to(DEVICE)
    packed = cache.pack_fp8_scalar(made.rows, "e4m3fn")
    q = cache.pack_fp8_scalar(made.q, "e4m3fn")
    for recipe in (Recipe("fp8x2"), Recipe("fp8", hadamard=True)):
        with pytest.raises(ValueError, match="recipe: got Recipe.* with an fp8 q, whose rounding is done"):
            sparse_mla_fwd(q.buffer, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, kv_scale=packed.scale, q_scale=q.scale,
                           qk_rope_head_dim=0, arch="sm_90", recipe=recipe)


def test_a_name_is_taken_for_its_recipe():
    t = cases.make(Case(rope=0))
    one, _ = t.call(Case(rope=0), sparse_mla_fwd, backend="emulate", recipe="two-term Q and P")
    other, _ = t.call(Case(rope=0), sparse_mla_fwd, backend="emulate", recipe=NAMED["two-term Q and P"])
    assert torch.equal(one, other)
    assert DOTS == {"bf16": NAMED["bf16"], "fp8": NAMED["fp8"]}


def test_products_are_counted():
    assert Recipe().products(576, 512) == {"bf16": 1088, "fp8": 0} and Recipe().matrix_time(576, 512) == 2
    assert Recipe("fp8", "fp8").products(576, 512) == {"bf16": 0, "fp8": 1088} and Recipe("fp8", "fp8").matrix_time(576, 512) == 1
    assert Recipe("fp8x2", "bf16").products(512, 512) == {"bf16": 512, "fp8": 1024} and Recipe("fp8x2", "bf16").matrix_time(512, 512) == 2
    assert Recipe("bf16", "fp8x2").products(576, 512) == {"bf16": 576, "fp8": 1024}


def error(made, recipe, arch="sm_90", kind="fp8_scalar"):
    profile = get_profile(arch)
    rows = cache.rotate(made.rows, made.kv_lora_rank) if recipe.hadamard else made.rows
    packed = cache.pack_fp8_scalar(rows, profile.encoding) if kind == "fp8_scalar" else cache.pack_fp8_dsv32(rows, profile.encoding) if kind == "fp8_dsv32_mla" else cache.pack_bf16(rows)
    return metrics.relative_l2(study.run(made, packed, profile, recipe)[0], study.truth(made, packed, profile, recipe.hadamard))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("kind", ["fp8_scalar", "fp8_dsv32_mla"])
def test_every_named_recipe_stays_within_its_roundings(name, kind):
    """On N(0, 1): bf16 parts 0.2%, P 1.6%, Q 2.6%; two terms as bf16. With and without a packed cache's group scales."""
    recipe = NAMED[name]
    made = inputs.normal(Shape(tokens=1, heads=20, qk_rope_head_dim=64, topk=512, slots=600))
    limit = {"bf16": 0.002, "fp8": 0.032, "fp8x2": 0.002}
    limit_p = {"bf16": 0.002, "fp8": 0.024, "fp8x2": 0.002}
    assert error(made, recipe, kind=kind) < (limit[recipe.q] ** 2 + limit_p[recipe.p] ** 2) ** 0.5 * 1.1


def test_a_recipe_a_tenth_of_the_published_ones_error():
    """Two terms on normal, peaky and dominant_key: 0.4% or less, and a tenth of fp8's, as far as the output's own bf16 lets."""
    for name in ("normal", "peaky", "dominant_key"):
        made = inputs.make(name)
        best, published = error(made, NAMED["two-term Q and P"], "gfx942"), error(made, NAMED["fp8"], "gfx942")
        assert best < 0.004
        assert best < 0.1 * published or best < 1.1 * 0.00167  # what rounding the exact output to bf16 costs alone


def test_a_rotation_changes_nothing_but_the_roundings():
    """In bf16 over a bf16 cache both are as near to f64 as bf16 is: the rotation is its own inverse on both sides."""
    made = inputs.normal(SMALL)
    assert error(made, Recipe(hadamard=True), kind="bf16") < 4e-3
    plain, _ = reference.sparse_mla(made.q, made.rows, made.kv_indptr, made.kv_indices, made.softmax_scale)
    rotated, _ = reference.sparse_mla(cache.rotate(made.q, 512), cache.rotate(made.rows, 512), made.kv_indptr, made.kv_indices, made.softmax_scale)
    torch.testing.assert_close(numerics.hadamard(rotated), plain, rtol=1e-4, atol=1e-5)
    with_rope = inputs.normal(Shape(tokens=1, heads=3, qk_rope_head_dim=64, topk=64, slots=100))
    assert torch.equal(cache.rotate(with_rope.rows, 512)[:, 512:], with_rope.rows[:, 512:])  # rope columns stay


def test_a_rotation_helps_where_channels_stand_out():
    made = inputs.heavy_tailed(Shape(tokens=2))
    assert error(made, NAMED["fp8, Hadamard"]) < 0.5 * error(made, Recipe("fp8", "fp8", "largest"))


def test_q_granularities_share_what_they_say():
    """A head 2^-20 as large as its block's others: flushed by a scale for the block or the tensor, not by one of its own."""
    made = inputs.normal(Shape(tokens=2, heads=32, topk=1, slots=1))
    made.q[:, 3] *= 2**-20  # in block 0
    made.q[1, 16:] *= 2**-20  # a whole block
    packed = cache.pack_fp8_scalar(made.rows, "e4m3fn")

    def lse(granularity):
        return study.run(made, packed, get_profile("sm_90"), Recipe("fp8", "fp8", q_granularity=granularity))[1]

    assert (lse("head") != 0).all()
    block = lse("head_block")
    assert (block[:, 3] == 0).all() and (block[1, 16:] != 0).all()
    tensor = lse("tensor")
    assert (tensor[:, 3] == 0).all() and (tensor[1, 16:] == 0).all() and (tensor[0, 16:] != 0).all()


def test_short_sums_cost_most_where_a_small_tail_adds_to_a_large_sum():
    """dominant_key: beside the key's 22 the tail's products fall under 2^-13 of it. A sum per tile, added in f32, does not."""
    made = inputs.dominant_key(Shape(tokens=1, heads=4))
    plain, short, promoted = (error(made, Recipe("fp8", "fp8", "largest", accumulate=a)) for a in ("f32", "fp22", "fp22_promoted"))
    assert short > 3 * plain and promoted < 1.1 * plain


def test_short_sums_do_not_touch_bf16_products():
    made = inputs.normal(SMALL)
    packed = cache.pack_fp8_scalar(made.rows, "e4m3fn")
    for q, p in (("bf16", "fp8"), ("fp8", "bf16")):
        parts = {a: emulate.sparse_mla_parts(made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, profile=get_profile("sm_90"),
                                             recipe=Recipe(q, p, accumulate=a), block_k=64, kv_splits=1, kv_scale=packed.scale) for a in ("f32", "fp22")}
        same_scores = torch.equal(parts["f32"].max, parts["fp22"].max)
        assert same_scores == (q == "bf16")  # the scores' sums are short only where Q is fp8
        assert not torch.equal(parts["f32"].acc, parts["fp22"].acc)
