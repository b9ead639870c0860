"""What the compiler says of the published configurations, on machines that are not here; and that a regression would show."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import triton

from mla_lab import arch

ROOT = Path(__file__).parents[1]
LDS = pd.read_csv(ROOT / "data" / "published" / "lds_gfx942.csv")

PROGRAM = """
import json, sys
from dataclasses import replace
from mla_lab import Recipe, compile
from mla_lab.arch import Launch
from mla_lab.compile import Point, compile_point

def show(name, point):
    try:
        found = compile_point(point)
        found["occupancy_of_llvm"] = [line.split()[-1] for line in found["files"].get("amdgcn", "").splitlines() if line.startswith("; Occupancy:")]
        del found["files"]
    except ValueError as error:
        found = dict(error=str(error))
    print(json.dumps([name, found]), flush=True)

dots = {"bf16": Recipe(), "fp8": Recipe("fp8", "fp8")}
for d, block_k, rank, rope, pad in json.load(sys.stdin):
    show(f"{d}-{rope}-{pad}", Point("gfx942", dots[d], kernel="cdna", kv_lora_rank=rank, qk_rope_head_dim=rope, launch=Launch(block_k, 4, 1), kv_row_pad=pad))
for d in dots:
    for rope in (0, 64):
        show(f"gfx950-{d}-{rope}", Point("gfx950", dots[d], kernel="cdna", qk_rope_head_dim=rope))
        show(f"parts-{d}-{rope}", Point("gfx942", dots[d], kernel="cdna", qk_rope_head_dim=rope, write_parts=True))
        show(f"sm_90-{d}-{rope}", Point("sm_90", dots[d], kernel="cdna", qk_rope_head_dim=rope))
show("codec", Point("gfx942", dots["fp8"], kernel="cdna", native_cast=False))
show("gfx1250", Point("gfx1250", dots["bf16"], cache="bf16", launch=Launch(64, 4, 1)))
# Regressions, planted.
show("planted block_k", Point("gfx942", dots["fp8"], kernel="cdna", launch=Launch(128, 4, 1)))
show("planted spill", Point("gfx942", dots["fp8"], kernel="cdna", qk_rope_head_dim=64, launch=Launch(64, 1, 1)))  # one wave for all
compile.NUMERICS["gfx942"] = "gfx950"
show("planted encoding", Point("gfx942", dots["fp8"], kernel="cdna"))
"""


@pytest.fixture(scope="module")
def compiled():
    """In a process of its own: this one has Triton's interpreter, which compiles nothing."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    wanted = LDS[["dots", "block_k", "kv_lora_rank", "qk_rope_head_dim", "kv_row_pad_elements"]].values.tolist()
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=json.dumps(wanted), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))


MFMA = {("gfx942", "bf16"): "v_mfma_f32_16x16x16_bf16", ("gfx942", "fp8"): "v_mfma_f32_16x16x32_fp8_fp8",
        ("gfx950", "bf16"): "v_mfma_f32_16x16x32_bf16", ("gfx950", "fp8"): "v_mfma_f32_16x16x32_fp8_fp8"}
# Triton 3.6 rounds to e4m3fn in software on gfx950.
P_CONVERSION = {"gfx942": "v_cvt_pk_fp8_f32", "gfx950": None if triton.__version__ < "3.7" else "v_cvt_scalef32_pk_fp8_f32"}


def violations(found, name, dots, block_k=64):
    """What is not as it must be in a published configuration on CDNA."""
    if "error" in found:
        return [found["error"]]
    wrong = []
    if set(found["matrix_instructions"]) != {MFMA[name, dots]}:
        wrong.append(f"matrix instructions {found['matrix_instructions']}")
    if found["vgpr_spills"] or found["sgpr_spills"] or found["scratch_bytes"]:
        wrong.append(f"{found['vgpr_spills']} and {found['sgpr_spills']} spills, {found['scratch_bytes']} B of scratch")
    # Four values of P a lane under 64 keys, two to an instruction; nothing else is converted in the loop.
    if dots == "fp8" and found["loop_conversions"] != ({P_CONVERSION[name]: block_k * 16 // 256 // 2} if P_CONVERSION[name] else {}):
        wrong.append(f"conversions in the loop {found['loop_conversions']}")
    if found["shared_memory"] > arch.PROFILES[name].shared_memory:
        wrong.append(f"{found['shared_memory']} B of LDS")
    return wrong


@pytest.mark.parametrize("row", list(LDS.itertuples()), ids=lambda r: f"{r.dots}-{r.qk_rope_head_dim}-{r.kv_row_pad_elements}")
def test_lds_is_the_published_one_to_the_byte(row, compiled):
    found = compiled[f"{row.dots}-{row.qk_rope_head_dim}-{row.kv_row_pad_elements}"]
    assert found["shared_memory"] == row.lds_bytes == arch.tile_bytes(row.dots, row.block_k, row.kv_lora_rank, row.qk_rope_head_dim, row.kv_row_pad_elements)
    assert not violations(found, "gfx942", row.dots)


@pytest.mark.parametrize("dots", ["bf16", "fp8"])
@pytest.mark.parametrize("rope", [0, 64])
def test_gfx950_from_the_same_source(dots, rope, compiled):
    found = compiled[f"gfx950-{dots}-{rope}"]
    assert not violations(found, "gfx950", dots)
    assert found["shared_memory"] == arch.tile_bytes(dots, 64, 512, rope)
    assert found["name"] == f"sparse_mla_fwd_cdna_e4m3fn_cache_{dots}_qk_{dots}_pv"


@pytest.mark.parametrize("dots", ["bf16", "fp8"])
@pytest.mark.parametrize("rope", [0, 64])
def test_the_split_form_and_hoppers_layouts_take_as_much(dots, rope, compiled):
    block_k = 32 if dots == "bf16" else 64
    assert compiled[f"parts-{dots}-{rope}"]["shared_memory"] == arch.tile_bytes(dots, block_k, 512, rope)
    assert not violations(compiled[f"parts-{dots}-{rope}"], "gfx942", dots)
    hopper = compiled[f"sm_90-{dots}-{rope}"]
    wanted = {"bf16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "fp8": "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"}[dots]
    assert set(hopper["matrix_instructions"]) == {wanted}
    assert hopper["shared_memory"] == arch.tile_bytes(dots, 64, 512, rope)


def test_a_regression_would_show(compiled):
    assert "needs 69,632 B of gfx942's 65,536 B" in violations(compiled["planted block_k"], "gfx942", "fp8")[0]
    assert any("spills" in wrong for wrong in violations(compiled["planted spill"], "gfx942", "fp8"))
    # e4m3fn's bytes on gfx942: its matrix cores have no such instruction, and the layouts are stated, so nothing is widened in silence.
    assert "does not compile for gfx942" in violations(compiled["planted encoding"], "gfx942", "fp8")[0]
    assert any("conversions" in wrong for wrong in violations(compiled["codec"], "gfx942", "fp8"))  # P by the long software path


def test_waves_by_registers_are_llvms(compiled):
    """LLVM prints the waves that registers allow; LDS, which is ours to count, it does not know at that point."""
    for name, found in compiled.items():
        if found.get("occupancy_of_llvm") and found["arch"] != "gfx1250":
            by_registers = min(512 // (-(-found["vgpr"] // 8) * 8), 800 // (-(-found["sgpr"] // 16) * 16), 8)
            assert by_registers == int(found["occupancy_of_llvm"][0]), name
    two = compiled["fp8-64-16"]
    assert two["waves"] == 1 and "lds" in two["limited_by"]  # 39,936 B twice do not fit into 64 KB


def test_gfx1250_is_said_of(compiled):
    found = compiled["gfx1250"]
    assert "error" in found or Counter(found["matrix_instructions"])


def test_the_command_prints_a_table_and_says_why_a_row_is_missing(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = lambda *more: subprocess.run([sys.executable, "-c", "from mla_lab.cli import app; app()", "compile", *more], capture_output=True, text=True, env=environment)
    done = run("--arch", "gfx942", "--block-k", "64", "--rope", "0", "--out", str(tmp_path / "t"), "--files", str(tmp_path / "files"))
    assert done.returncode == 0, done.stderr[-2000:]
    frame = pd.read_parquet(tmp_path / "t.parquet")
    assert len(frame) == 3 and (frame.error == "").sum() == 1  # bf16 dots do not fit at 64 keys
    assert "34816" in done.stdout and "needs 68,608 B of gfx942's 65,536 B" in done.stdout
    assert len(list((tmp_path / "files").glob("*.amdgcn"))) == 1
    done = run("--arch", "gfx90a")
    assert done.returncode == 2 and "--arch: got gfx90a; accepted: gfx942, gfx950, gfx1250, sm_90" in done.stderr
