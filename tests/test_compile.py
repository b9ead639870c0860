"""The portable kernel compiles for gfx942, gfx950 and sm_90 on a machine that has none of them."""

import json
import os
import subprocess
import sys

import pytest

# (arch, q, p, cache, rope). Under bf16 dots gfx950's code for the exact decoding is long and slow to compile.
WANTED = [
    *[(arch, "bf16", "bf16", "bf16", rope) for arch in ("gfx942", "gfx950", "sm_90") for rope in (0, 64)],
    *[(arch, "fp8", "fp8", "fp8_scalar", rope) for arch in ("gfx942", "gfx950", "sm_90") for rope in (0, 64)],
    *[("gfx942", q, p, "fp8_scalar", 64) for q, p in (("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "bf16"))],
    *[("gfx950", q, p, "fp8_scalar", 0) for q, p in (("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "bf16"))],
    *[(arch, "fp8", "fp8", "fp8_dsv32_mla", 64) for arch in ("gfx942", "gfx950", "sm_90")],
    ("gfx942", "bf16", "bf16", "fp8_dsv32_mla", 64),
]

PROGRAM = """
import json, sys
from mla_lab import Recipe
from mla_lab.compile import compile_attend
for arch, q, p, cache, rope in json.load(sys.stdin):
    made = compile_attend(arch, Recipe(q, p), cache=cache, qk_rope_head_dim=rope, native_cast=arch == "sm_90")
    del made["files"]
    print(json.dumps(made), flush=True)
"""


@pytest.fixture(scope="module")
def compiled():
    """In a process of its own: this one has Triton's interpreter, which compiles nothing."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=json.dumps(WANTED), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(WANTED, map(json.loads, done.stdout.splitlines()), strict=True))


MATRIX_INSTRUCTIONS = {  # what each product must use: by arch, then bf16 and fp8
    "gfx942": ({"v_mfma_f32_16x16x16_bf16"}, {"v_mfma_f32_16x16x32_fp8_fp8"}),
    "gfx950": ({"v_mfma_f32_16x16x32_bf16"}, {"v_mfma_f32_16x16x128_f8f6f4", "v_mfma_f32_16x16x32_fp8_fp8"}),
    # With 16 heads on the M side Triton 3.7 has no fp8 mma.sync: it widens to f16, which is exact for e4m3.
    "sm_90": ({"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"},
              {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"}),
}


@pytest.mark.parametrize("what", WANTED, ids=lambda w: "-".join(map(str, w)))
def test_it_compiles_with_the_matrix_instructions_of_its_dots(what, compiled):
    arch, q, p, cache, _ = what
    made = compiled[what]
    bf16, fp8 = MATRIX_INSTRUCTIONS[arch]
    used = set(made["matrix_instructions"])
    packed = cache == "fp8_dsv32_mla"  # its rope columns are bf16 under every product
    assert bool(used & bf16) == ("bf16" in (q, p) or packed) and bool(used & fp8) == ("fp8" in (q, p)) and used <= bf16 | fp8
    limit = {"gfx942": 65_536, "gfx950": 163_840, "sm_90": 232_448}[arch]
    assert 0 < made["shared_memory"] <= limit
    encoding = {"gfx942": "e4m3fnuz"}.get(arch, "e4m3fn") if cache != "bf16" else "bf16"
    assert made["name"] == f"sparse_mla_fwd_{encoding}{'_dsv32' if packed else ''}_cache_{q}_qk_{p}_pv"


def test_the_published_configurations_do_not_spill(compiled):
    """bf16 and fp8 dots over the published caches on gfx942: nothing goes to memory. (A Triton may park two values of the
    exact decoding in AGPRs; gfx950 under bf16 dots with rope does spill: the exact decoding.)"""
    published = [w for w in WANTED if w[0] == "gfx942" and w[1] == w[2] and w[3] != "fp8_dsv32_mla"]
    assert len(published) == 5 and all(compiled[w]["scratch_bytes"] == 0 and compiled[w]["vgpr_spills"] <= 2 for w in published)


def test_the_interpreter_compiles_nothing():
    from mla_lab import Recipe, portable
    from mla_lab.compile import compile_attend

    if portable.INTERPRETED:
        with pytest.raises(ValueError, match="TRITON_INTERPRET: got 1; accepted: unset"):
            compile_attend("gfx942", Recipe())
    with pytest.raises(ValueError, match="arch: got 'gfx90a'"):
        compile_attend("gfx90a", Recipe())
