"""What a call costs: long rows with median and spread, next to the least that the memory traffic could take.

The emulator is timed by wall clock; the Triton kernel by CUDA-graph replays (triton.testing.do_bench_cudagraph), after
its result has been checked against the emulator. gather_us, beside a kernel's time, is a kernel that gathers the same
rows and only adds them up, the fastest of a few tile sizes: what the memory traffic alone takes, or nearly so.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import pandas as pd
import torch
import triton
from tqdm import tqdm

from mla_lab import cache, metrics, sparse_mla_fwd
from mla_lab.arch import get_profile
from mla_lab.inputs import Shape, normal
from mla_lab.notebook import device_name, versions

SEED = 0


def cases(gpu: bool):
    """(phase, Shape): GLM-5.3-Flash at tensor parallelism 4; prefill's pool has as many rows as tokens, at least 16K."""
    yield from (("decode", Shape(tokens=t, slots=16384)) for t in ((2, 16, 64) if gpu else (1, 16)))
    yield from (("prefill", Shape(tokens=t, slots=16384)) for t in ((1024, 4096, 16384) if gpu else (512,)))


def gathered_bytes(shape: Shape, element: int) -> int:
    """Bytes that must be read and written at least: gathered rows, queries (bf16), indices (int32), output (bf16)."""
    per_token = shape.topk * (shape.width * element + 4) + shape.heads * 2 * (shape.width + shape.kv_lora_rank)
    return shape.tokens * per_token


def run(repeats: int, command: str) -> pd.DataFrame:
    """One row per phase, cache and dots on this device. Raises RuntimeError where a kernel's result is wrong."""
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    profile = get_profile(None, device)
    kinds = [("bf16", "bf16"), ("fp8_scalar", "bf16"), ("fp8_scalar", "fp8")]
    rows = []
    every = [(phase, shape, kind, dots) for phase, shape in cases(gpu) for kind, dots in kinds]
    made, made_for = None, None
    for phase, shape, kind, dots in tqdm(every, desc="benchmark"):
        if made_for != shape:
            made, made_for = _inputs(shape, device), shape
        packed = cache.pack_bf16(made.rows) if kind == "bf16" else cache.pack_fp8_scalar(made.rows, profile.encoding)

        def call():
            return sparse_mla_fwd(made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, kv_scale=packed.scale,
                                  kv_lora_rank=shape.kv_lora_rank, qk_rope_head_dim=0, dot_precision=dots, arch=profile.name)[0]

        row = dict(kernel="triton" if gpu else "emulate", arch=profile.name, phase=phase, tokens=shape.tokens, heads=shape.heads,
                   kv_lora_rank=shape.kv_lora_rank, qk_rope_head_dim=0, topk=shape.topk, cache=kind, dots=dots)
        try:
            row |= _time_gpu(call, made, packed, kind, dots, profile) if gpu else _time_cpu(call, repeats)
        except ValueError as refusal:  # a geometry that does not fit: its row says why, the others are measured
            rows.append(row | dict(error=str(refusal)))
            continue
        element = 2 if kind == "bf16" else 1
        row["bytes"] = gathered_bytes(shape, element)
        row["tflops"] = 2 * shape.tokens * shape.heads * shape.topk * (shape.width + shape.kv_lora_rank) / row["median_us"] / 1e6
        rows.append(row)
    return pd.DataFrame(rows).assign(device=device_name(), versions=versions(), seed=SEED, command=command)


def _inputs(shape, device):
    if shape.tokens <= 1024:
        return normal(shape, SEED).to(device)
    # numpy's permutations for 16K lists of 2,048 take minutes; sorted draws without a permutation gather just as much.
    few = normal(Shape(tokens=64, slots=shape.slots, topk=shape.topk), SEED)
    rng = np.random.default_rng(SEED)
    q = torch.from_numpy(rng.standard_normal((shape.tokens, shape.heads, shape.width), np.float32)).bfloat16()
    lists = rng.integers(0, shape.slots, shape.tokens * shape.topk, dtype=np.int32)
    indptr = torch.arange(shape.tokens + 1, dtype=torch.int32) * shape.topk
    return type(few)(**{**few.__dict__, "q": q, "kv_indices": torch.from_numpy(lists), "kv_indptr": indptr}).to(device)


def _time_cpu(call, repeats):
    call()  # thread pools and allocator
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    quantile = lambda values, q: float(np.quantile(values, q))
    return dict(median_us=statistics.median(times), p20_us=quantile(times, 0.2), p80_us=quantile(times, 0.8), gather_us=None, repeats=repeats)


def _time_gpu(call, made, packed, kind, dots, profile):
    some = min(16, made.q.shape[0])
    few = slice(0, int(made.kv_indptr[some]))
    want, _ = sparse_mla_fwd(made.q[:some], packed.buffer, made.kv_indptr[: some + 1], made.kv_indices[few], made.softmax_scale,
                             kv_scale=packed.scale, kv_lora_rank=made.kv_lora_rank, qk_rope_head_dim=0, dot_precision=dots, arch=profile.name, backend="emulate")
    error = metrics.relative_l2(call()[:some], want)
    # Splits differ (the policy counts tokens), and with them the maxima that P is rounded against: P's rounding, not more.
    if not error < (0.03 if dots == "fp8" else 4e-3):
        raise RuntimeError(f"the kernel is wrong, so it is not timed: relative L2 {error} against the emulator ({kind}, {dots})")
    low, median, high = triton.testing.do_bench_cudagraph(call, rep=100, quantiles=[0.2, 0.5, 0.8])
    gather = min(triton.testing.do_bench_cudagraph(_gather_only(made, packed, *tile), rep=20, return_mode="median") for tile in GATHER_TILES)
    return dict(median_us=median * 1e3, p20_us=low * 1e3, p80_us=high * 1e3, gather_us=gather * 1e3, repeats=None)


GATHER_TILES = [(32, 4), (64, 4), (128, 4), (64, 8), (128, 8)]
"""Keys per tile and warps."""


def _gather_only(made, packed, block_k, num_warps):
    from mla_lab.kernels.gather import gather_only

    rows = packed.buffer.view(torch.int32)  # whole words: what is read is what counts, not what it means
    tokens, topk = made.q.shape[0], made.kv_indices.numel() // made.q.shape[0]
    splits = max(1, 264 // tokens)
    out = torch.empty(tokens * splits, rows.shape[1], dtype=torch.int32, device=rows.device)

    def call():
        gather_only[(tokens, splits)](rows, made.kv_indices, out, topk, triton.cdiv(topk, splits), WIDTH=rows.shape[1], BLOCK_K=block_k, num_warps=num_warps)

    return call
