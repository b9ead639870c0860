"""The Gluon kernel for Hopper: on an H200 its numerics; anywhere its launches, its code, what it refuses, and the search."""

import itertools
import json
import os
import subprocess
import sys

import pandas as pd
import pytest
import torch

import cases
from cases import DEVICE, Case
from mla_lab import Recipe, arch, hopper, metrics, sparse_mla_fwd, tune
from mla_lab.arch import get_profile
from mla_lab.hopper import HopperLaunch, ShapeClass

on_hopper = pytest.mark.skipif(DEVICE == "cpu" or arch.device_arch(torch.device(DEVICE)) != "sm_90", reason="wgmma is Hopper's: its numerics run there")

RECIPES = [Recipe(q, p) for q in ("bf16", "fp8") for p in ("bf16", "fp8")]
LENGTHS = (2048, 1, 0, 63, 64, 65, 777)
CASES = [
    Case(arch="sm_90", cache=kind, recipe=recipe, rope=rope, heads=heads, splits=splits, lengths=LENGTHS, slots=4096, sink=splits > 1, holes=0.2 if rope else 0.0)
    for kind, rope, heads, splits in itertools.chain(
        itertools.product(("bf16", "fp8_scalar"), (0, 64), (5, 16, 72), (1, 3)), itertools.product(("fp8_dsv32_mla",), (64,), (5, 16, 72), (1, 3)))
    for recipe in (RECIPES[:1] if kind == "bf16" else RECIPES)
]


@on_hopper
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_agrees_with_the_emulator(case):
    """bf16 QK sums in f32 on both sides. Hopper's fp8 sums keep some 14 bits, here in sums of 128 columns: seen up to 2.2e-3."""
    t = cases.make(case)
    out, lse = t.call(case, sparse_mla_fwd, backend="hopper")
    want, want_lse = t.call(case, sparse_mla_fwd, backend="emulate")
    assert not out.isnan().any()
    assert metrics.relative_l2(out, want) < (5e-4 if case.recipe.q == "bf16" else 3e-3)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-5 if case.recipe.q == "bf16" else 2e-3)


@pytest.mark.parametrize("arguments, message", [
    ((Recipe("fp8x2", "fp8"), 512, 0), "recipe: got Recipe.* for the hopper kernel; accepted there: one term for q and p"),
    ((Recipe(), 256, 0), "kv_lora_rank: got 256 for the hopper kernel; accepted there: 512"),
    ((Recipe(), 512, 32), "qk_rope_head_dim: got 32 for the hopper kernel; accepted there: 0, 64"),
], ids=lambda v: str(v[1:]) if isinstance(v, tuple) else "")
def test_what_it_does_not_run_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        hopper.check_geometry(*arguments)


def test_elsewhere_it_says_what_is_accepted():
    if DEVICE != "cpu":
        pytest.skip("a CPU's message")
    case = Case(arch="sm_90", rope=0)
    with pytest.raises(ValueError, match="backend: got 'hopper' on cpu; accepted there: 'auto'"):
        cases.make(case).call(case, sparse_mla_fwd, backend="hopper")


def every_class():
    for heads, rope, few in itertools.product(("16", "more"), (0, 64), (False, True)):
        for cache in ("bf16", "fp8_scalar") + (("fp8_dsv32_mla",) if rope else ()):
            yield from (ShapeClass(heads, rope, cache, q_fp8, few) for q_fp8 in ((False,) if cache == "bf16" else (False, True)))


def test_every_class_of_calls_has_a_launch_that_the_search_knows():
    table = hopper.launches()
    assert set(table) == set(every_class())
    for of, launch in table.items():
        assert launch in hopper.candidates(of), f"{of}: {launch}"
    profile = get_profile("sm_90")
    classed = lambda tokens, heads: hopper.shape_class(profile, tokens, heads, 0, "bf16", False)
    assert classed(131, 16).few and not classed(132, 16).few and classed(65, 128).few and not classed(66, 128).few
    assert classed(1, 16).heads == "16" and classed(1, 17).heads == "more"


def test_splits_follow_the_heads_of_a_program():
    """128 heads: two programs of 64 a token, so that 16 tokens leave four splits each; by 16 heads it would be one."""
    profile = get_profile("sm_90")
    assert arch.choose_kv_splits(profile, 16, 128, 2048, 64, 64, 1) == 4
    assert arch.choose_kv_splits(profile, 16, 128, 2048, 64, 64, 2) == 8
    assert arch.choose_kv_splits(profile, 16, 128, 2048, 64) == 1
    assert arch.choose_kv_splits(profile, 2, 16, 2048, 64, 16, 2) == 16  # never less than two tiles


PROGRAM = """
import json
from mla_lab import Recipe, compile
from mla_lab.hopper import HopperLaunch

for name, cache, recipe, rope, launch in (
    ("bf16", "bf16", Recipe(), 0, HopperLaunch(16, 4, 3, True)),
    ("fp8", "fp8_scalar", Recipe("fp8", "fp8"), 0, HopperLaunch(16, 4, 2, False)),
    ("fp8, three programs", "fp8_scalar", Recipe("fp8", "fp8"), 0, HopperLaunch(16, 4, 2, False, 168)),
    ("bf16 over fp8, many heads", "fp8_scalar", Recipe(), 64, HopperLaunch(64, 8, 2, False)),
    ("packed", "fp8_dsv32_mla", Recipe("fp8", "bf16"), 64, HopperLaunch(16, 4, 2, False)),
    ("planted: more registers than there are", "fp8_scalar", Recipe("fp8", "fp8"), 64, HopperLaunch(64, 4, 2, False)),
    ("planted: more shared memory than there is", "bf16", Recipe(), 0, HopperLaunch(64, 8, 3, False)),
):
    try:
        found = compile.compile_point(compile.Point("sm_90", recipe, kernel="hopper", cache=cache, qk_rope_head_dim=rope, heads=launch.heads_block, hopper=launch))
        found["copies"] = found.pop("files")["ptx"].count("cp.async.cg.shared.global")
    except ValueError as error:
        found = dict(error=str(error))
    print(json.dumps([name, found]), flush=True)
try:
    compile.compile_point(compile.Point("gfx942", kernel="hopper"))
except ValueError as error:
    print(json.dumps(["gfx942", dict(error=str(error))]))
"""


@pytest.fixture(scope="module")
def compiled():
    """In a process of its own: this one has Triton's interpreter, which compiles nothing."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))


def test_it_compiles_to_the_products_that_the_recipe_says(compiled):
    """fp8 QK multiplies the codes as they are; all else over an fp8 cache is f16, or bf16 for packed rope columns."""
    bf16, f16, fp8 = "k16.f32.bf16.bf16", "k16.f32.f16.f16", "k32.f32.e4m3.e4m3"
    expected = {"bf16": {"m64n16" + bf16}, "fp8": {"m64n16" + fp8, "m64n16" + f16}, "fp8, three programs": {"m64n16" + fp8, "m64n16" + f16},
                "bf16 over fp8, many heads": {"m64n32" + f16, "m64n64" + f16}, "packed": {"m64n16" + fp8, "m64n16" + f16, "m64n16" + bf16}}
    for name, instructions in expected.items():
        found = compiled[name]
        assert {i.split("aligned.")[1] for i in found["matrix_instructions"]} == instructions, name
        assert found["copies"] > 0, name  # 16 bytes at a time, past the L1


def test_it_neither_spills_nor_crowds_out_its_neighbours(compiled):
    for name, programs in (("bf16", 1), ("fp8", 2), ("bf16 over fp8, many heads", 1), ("packed", 2)):
        assert compiled[name]["scratch_bytes"] == 0 and compiled[name]["waves"] == programs, name
    assert compiled["fp8, three programs"]["waves"] == 3 and compiled["fp8, three programs"]["scratch_bytes"] <= 64  # the price of the third
    assert compiled["planted: more registers than there are"]["scratch_bytes"] > 64
    assert "takes 271" in compiled["planted: more shared memory than there is"]["error"]


def test_another_arch_is_refused(compiled):
    assert compiled["gfx942"]["error"] == "arch: got 'gfx942' for the hopper kernel; accepted there: sm_90"


def searched(times):
    """A search's rows of one class: {launch: times of two shapes}."""
    of = ShapeClass("16", 0, "fp8_scalar", True, True)
    return of, pd.DataFrame([vars(of) | vars(launch) | dict(tokens=tokens, total_heads=16, apart=1e-4, median_us=time, error="")
                             for launch, pair in times.items() for tokens, time in zip((2, 16), pair)])


def test_the_search_keeps_the_fastest_that_ran_everything(tmp_path, monkeypatch):
    slow, fast, failed = HopperLaunch(16, 4, 3, True), HopperLaunch(16, 4, 2, False, 168, 2), HopperLaunch(16, 4, 2, False)
    of, frame = searched({slow: (10.0, 20.0), fast: (12.0, 15.0), failed: (1.0, None)})
    assert tune.best(frame) == {of: fast}  # 13.4 against 14.1, geometric means
    tune.write(tune.best(frame), tmp_path / "found.json", "mla-lab tune")
    entries = json.loads((tmp_path / "found.json").read_text())
    read = {ShapeClass(**e["class"]): HopperLaunch(**e["launch"]) for e in entries["launches"]}
    assert read == hopper.launches() | {of: fast} and entries["source"].startswith("mla-lab tune on ")
    of, frame = searched({failed: (1.0, None)})
    assert tune.best(frame) == {}
