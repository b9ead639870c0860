"""Runs the kernels over a few of the tests' cases, to be watched by compute-sanitizer on an NVIDIA GPU.

    compute-sanitizer --tool memcheck python tools/sanitize.py
    compute-sanitizer --tool racecheck python tools/sanitize.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

import cases  # noqa: E402
from mla_lab import metrics, sparse_mla_fwd  # noqa: E402

# Ragged, an empty query, heads beyond one block, holes, a sink, splits: where a mask could be wrong.
CASES = [
    cases.Case(arch=arch, cache=kind, recipe=recipe, rope=64, splits=3, sink=True, holes=0.3)
    for arch, kind, recipe in (
        ("sm_90", "bf16", cases.BF16), ("sm_90", "fp8_scalar", cases.FP8), ("gfx942", "fp8_scalar", cases.FP8),
        ("sm_90", "fp8_dsv32_mla", cases.FP8), ("sm_90", "fp8_dsv32_mla", cases.BF16),
    )
] + [cases.Case(arch="sm_90", heads=1, lengths=(1, 17, 65), rope=0)]

for case in CASES:
    tensors = cases.make(case)
    out, _ = tensors.call(case, sparse_mla_fwd, backend="triton")
    torch.cuda.synchronize()
    want, _ = tensors.call(case, sparse_mla_fwd, backend="emulate")
    print(case, f"relative L2 against the emulator: {metrics.relative_l2(out, want):.1e}", flush=True)
