"""What a call costs: long rows with median and spread, the error beside it, next to what the same work takes at least.

On a CPU the emulator, by wall clock. On a GPU the kernel that backend="auto" chooses (or another), by replays of a CUDA
graph, after its result has been held against the emulator: a wrong kernel is an exception, not a row. In the same run:

    gather_us     a kernel that gathers the same rows and only adds them up (kernels/gather.py), the fastest of a few tiles
    products_us   the call's multiply-adds at the rate of one large product (PRODUCT_SIZE), in bf16 and fp8 as the recipe has them
    floor_us      the larger of the two, and ratio = median_us / floor_us

l2 "warm": one set of inputs again and again. "cold": a decode step rotates among sets that gather more than SWEPT bytes
between two uses of one row. A prefill reads each row of its pool many times, cold or not, and is warm only.
"""

from __future__ import annotations

import dataclasses
import datetime
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import triton
from tqdm import tqdm

from mla_lab import attention, cache, metrics, reference, sparse_mla_fwd, study
from mla_lab.arch import get_profile
from mla_lab.inputs import Inputs, Shape, normal
from mla_lab.notebook import device_name, versions
from mla_lab.recipe import NAMED

SEED = 0

SWEPT = 256 << 20
"""Bytes gathered between two uses of one set of inputs when the L2 is to be cold: several times the H200's 50 MB."""

PRODUCT_SIZE = 8192

RECIPES = {"bf16": ("bf16",), "fp8_scalar": ("bf16", "fp8", "fp8 QK, bf16 PV", "bf16 QK, fp8 PV"), "fp8_dsv32_mla": ("bf16", "fp8", "fp8 QK, bf16 PV")}
"""Cache format: names in recipe.NAMED."""


@dataclass(frozen=True)
class Case:
    """model, phase and the shape; indices "random", or "indexer": a list that keeps most of its left neighbour's."""

    model: str
    phase: str
    shape: Shape
    indices: str = "random"


GLM = dict(heads=16, qk_rope_head_dim=0)
GLM_WHOLE = dict(heads=64, qk_rope_head_dim=0)
DEEPSEEK = dict(heads=128, qk_rope_head_dim=64)
DECODE_SLOTS, PREFILL_SLOTS = 131072, 16384


def cases(gpu: bool) -> list[Case]:
    """GLM-5.3-Flash at tensor parallelism 4 and 1, DeepSeek-V3.2 (whose prefill pool is 8K rows, as FlashMLA's benchmark has it)."""
    if not gpu:
        return [Case("GLM-5.3-Flash TP4", "decode", Shape(tokens=t, slots=16384, **GLM)) for t in (1, 16)] + [Case("GLM-5.3-Flash TP4", "prefill", Shape(tokens=512, slots=16384, **GLM))]
    every = []
    for model, heads, prefill in (("GLM-5.3-Flash TP4", GLM, (1024, 4096, 16384)), ("GLM-5.3-Flash", GLM_WHOLE, (1024, 4096)), ("DeepSeek-V3.2", DEEPSEEK, (1024, 4096, 16384))):
        every += [Case(model, "decode", Shape(tokens=t, slots=DECODE_SLOTS, **heads)) for t in (2, 16, 64)]
        every += [Case(model, "prefill", Shape(tokens=t, slots=8192 if model == "DeepSeek-V3.2" else PREFILL_SLOTS, **heads)) for t in prefill]
    every += [Case("GLM-5.3-Flash TP4", phase, Shape(tokens=t, slots=slots, topk=topk, **GLM))
              for topk in (256, 512) for phase, t, slots in (("decode", 16, DECODE_SLOTS), ("prefill", 4096, PREFILL_SLOTS))]
    every += [Case(model, phase, Shape(tokens=t, slots=slots, **heads), "indexer")
              for model, heads in (("GLM-5.3-Flash TP4", GLM), ("DeepSeek-V3.2", DEEPSEEK)) for phase, t, slots in (("decode", 16, DECODE_SLOTS), ("prefill", 4096, PREFILL_SLOTS))]
    return every


def gathered_bytes(shape: Shape, row_bytes: int, q_bytes: int = 2) -> int:
    """Bytes that must be read and written at least: gathered rows, queries, indices (int32), output (bf16)."""
    per_token = shape.topk * (row_bytes + 4) + shape.heads * (q_bytes * shape.width + 2 * shape.kv_lora_rank)
    return shape.tokens * per_token


def operations(shape: Shape) -> int:
    """Two per multiply-add of both products."""
    return 2 * shape.tokens * shape.heads * shape.topk * (shape.width + shape.kv_lora_rank)


def draw(case: Case, seed: int):
    """Queries [tokens, heads, width] bf16 and index lists [tokens * topk] int32 on the GPU.

    Random lists are drawn with repetition. The indexer's have none: from one token to the next a sixteenth of the list
    changes, as the lists of neighbouring positions do; its order is shuffled, the same way for all.
    """
    shape = case.shape
    rng = torch.Generator("cuda").manual_seed(seed)
    q = torch.randn(shape.tokens, shape.heads, shape.width, generator=rng, device="cuda").bfloat16()
    if case.indices == "random":
        lists = torch.randint(0, shape.slots, (shape.tokens, shape.topk), generator=rng, device="cuda", dtype=torch.int32)
    else:
        order = torch.randperm(shape.slots, generator=rng, device="cuda")
        step = max(1, shape.topk // 16)
        window = (torch.arange(shape.tokens, device="cuda")[:, None] * step + torch.arange(shape.topk, device="cuda")[None, :]) % shape.slots
        lists = order[window][:, torch.randperm(shape.topk, generator=rng, device="cuda")].int()
    return q, lists.reshape(-1)


def make(case: Case, seed: int, device: str) -> Inputs:
    """N(0, 1) rows and queries, with `draw`'s index lists on a GPU."""
    shape = case.shape
    if device == "cpu":
        return normal(shape, seed)
    q, lists = draw(case, seed)
    rows = torch.randn(shape.slots, shape.width, generator=torch.Generator("cuda").manual_seed(seed + 1_000_000), device="cuda")
    indptr = torch.arange(shape.tokens + 1, dtype=torch.int32, device="cuda") * shape.topk
    return Inputs(case.indices, q, rows, indptr, lists, shape.width**-0.5, shape.kv_lora_rank, shape.qk_rope_head_dim)


def pack(rows, kind, encoding):
    return {"bf16": lambda: cache.pack_bf16(rows), "fp8_scalar": lambda: cache.pack_fp8_scalar(rows, encoding), "fp8_dsv32_mla": lambda: cache.pack_fp8_dsv32(rows, encoding)}[kind]()


def run(repeats: int, command: str, backend: str = "auto", only: str = "", chosen: list[Case] | None = None) -> pd.DataFrame:
    """One row per case, cache, recipe and state of the L2 on this device. only: cases whose description contains it.

    repeats: timed calls on a CPU; on a GPU replays, at least. Raises RuntimeError where a kernel's result is wrong, ValueError where no case is left.
    """
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    profile = get_profile(None, device)
    rates = product_rates() if gpu else {}
    every = cases(gpu) if chosen is None else chosen
    some = [case for case in every if only in describe(case)]
    if not some:
        raise ValueError(f"only: got {only!r}, which is in none of the descriptions; accepted: part of one, as {describe(every[0])!r}")
    rows = []
    bar = tqdm(some, desc="benchmark")
    for case in bar:
        bar.set_postfix_str(describe(case))
        made = make(case, SEED, device)
        for kind, names in RECIPES.items():
            if kind == "fp8_dsv32_mla" and case.shape.qk_rope_head_dim != 64:
                continue
            try:
                packed = pack(made.rows, kind, profile.encoding)
                gather = _gather_times(case, made, packed) if gpu else {}
            except ValueError as refusal:
                rows.append(_row(case, kind, names[0], profile, backend) | dict(error=str(refusal)))
                continue
            for name in names:
                row = _row(case, kind, name, profile, backend)
                try:
                    if gpu:
                        rows += [row | timed for timed in _time_gpu(case, made, packed, kind, NAMED[name], profile, backend, gather, rates, repeats)]
                    else:
                        rows.append(row | _time_cpu(call_of(made, packed, NAMED[name], profile, backend), repeats))
                except ValueError as refusal:  # a geometry that does not fit: its row says why, the others are measured
                    rows.append(row | dict(error=str(refusal)))
    frame = pd.DataFrame(rows)
    if "error" not in frame:
        frame["error"] = None
    return frame.assign(device=device_name(), clocks=clocks(), versions=versions(), commit=commit(), date=datetime.datetime.now(datetime.UTC).date().isoformat(), seed=SEED, command=command)


def describe(case: Case) -> str:
    return f"{case.model} {case.phase} {case.shape.tokens} tokens, top-k {case.shape.topk}, {case.indices}"


def _row(case, kind, name, profile, backend):
    shape = case.shape
    row_bytes = {"bf16": 2 * shape.width, "fp8_scalar": shape.width, "fp8_dsv32_mla": 656}[kind]
    return dict(model=case.model, phase=case.phase, tokens=shape.tokens, heads=shape.heads, kv_lora_rank=shape.kv_lora_rank, qk_rope_head_dim=shape.qk_rope_head_dim,
                topk=shape.topk, slots=shape.slots, indices=case.indices, cache=kind, recipe=name, arch=profile.name,
                bytes=gathered_bytes(shape, row_bytes), operations=operations(shape))


def call_of(made, packed, recipe, profile, backend, out=None):
    """A function without arguments that is one call."""
    def call():
        return sparse_mla_fwd(made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, kv_scale=packed.scale, kv_lora_rank=made.kv_lora_rank,
                              qk_rope_head_dim=made.qk_rope_head_dim, recipe=recipe, arch=profile.name, backend=backend, out=out)[0]

    return call


def _time_cpu(call, repeats):
    call()  # thread pools and allocator
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return dict(kernel="emulate", l2="warm", **_summary(times))


def _summary(times):
    return dict(median_us=statistics.median(times), p20_us=float(np.quantile(times, 0.2)), p80_us=float(np.quantile(times, 0.8)), replays=len(times))


FEWEST_TOKENS_CHECKED = 8


def _time_gpu(case, made, packed, kind, recipe, profile, backend, gather, rates, repeats):
    kernel = attention.chosen_backend(made.q, packed.buffer, made.kv_lora_rank, recipe, profile, backend)
    errors = check(made, packed, recipe, profile, backend)
    width = case.shape.width
    count = recipe.products(width, made.kv_lora_rank)
    pairs = case.shape.tokens * case.shape.heads * case.shape.topk
    products = sum(2 * pairs * count[dots] / rates[dots] for dots in ("bf16", "fp8")) * 1e6
    for l2, sets in input_sets(case, made, packed).items():
        outs = [torch.empty(*made.q.shape[:2], made.kv_lora_rank, dtype=torch.bfloat16, device="cuda") for _ in sets]
        calls = [call_of(one, packed, recipe, profile, backend, out) for one, out in zip(sets, outs)]
        timed = _summary(replay(calls, repeats))
        floor = max(gather[l2], products)
        yield dict(kernel=kernel, l2=l2, **errors, **timed, gather_us=gather[l2], products_us=products, floor_us=floor, ratio=timed["median_us"] / floor,
                   tb_per_s=gathered_bytes(case.shape, packed.buffer.element_size() * packed.buffer.shape[-1]) / timed["median_us"] / 1e6,
                   tflops=operations(case.shape) / timed["median_us"] / 1e6)


def check(made, packed, recipe, profile, backend) -> dict:
    """Of some tokens' results the relative L2 to f32 attention over the same cache (kernel_error) and over the rows before
    they were rounded to it (total_error). RuntimeError where the results are not the emulator's."""
    some = min(FEWEST_TOKENS_CHECKED, made.q.shape[0])
    keys = slice(0, int(made.kv_indptr[some]))
    lists = (made.kv_indptr[: some + 1], made.kv_indices[keys], made.softmax_scale)
    got = call_of(made, packed, recipe, profile, backend)()[:some]
    want, _ = sparse_mla_fwd(made.q[:some], packed.buffer, *lists, kv_scale=packed.scale, kv_lora_rank=made.kv_lora_rank, qk_rope_head_dim=made.qk_rope_head_dim,
                             recipe=recipe, arch=profile.name, backend="emulate")
    apart = metrics.relative_l2(got, want)
    # Splits differ (the policy counts tokens), and with them the maxima that P is rounded against: P's rounding, not more.
    if not apart < (0.03 if recipe.p != "bf16" else 4e-3):
        raise RuntimeError(f"the kernel is wrong, so it is not timed: relative L2 {apart} against the emulator ({recipe})")
    options = dict(kv_lora_rank=made.kv_lora_rank, qk_rope_head_dim=made.qk_rope_head_dim, arch=profile.name)
    same, _ = reference.sparse_mla(made.q[:some], packed.buffer, *lists, kv_scale=packed.scale, **options)
    exact, _ = reference.sparse_mla(made.q[:some], made.rows, *lists, **options)
    return dict(kernel_error=metrics.relative_l2(got, same), total_error=metrics.relative_l2(got, exact))


def input_sets(case, made, packed):
    """"warm": one set; "cold", for decode: as many as gather SWEPT bytes, each with lists and queries of its own over the same pool."""
    sets = dict(warm=[made])
    if case.phase == "decode":
        bytes_of_one = case.shape.tokens * case.shape.topk * packed.buffer.element_size() * packed.buffer.shape[-1]
        count = max(2, min(64, -(-SWEPT // bytes_of_one)))
        sets["cold"] = [dataclasses.replace(made, q=q, kv_indices=lists) for q, lists in (draw(case, SEED + 1 + i) for i in range(count))]
    return sets


def replay(calls, repeats: int) -> list[float]:
    """Microseconds per call, of graphs that hold all the calls once, or one of them several times where it is short."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()  # compiles
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        calls[0]()
        end.record()
        torch.cuda.synchronize()
        inner = max(1, min(20, int(0.5 / start.elapsed_time(end)))) if len(calls) == 1 else 1
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(inner):
                for call in calls:
                    call()
        one = _timed(graph)
        count = int(max(repeats, min(200, 60 / one)))
        return [_timed(graph) * 1e3 / (inner * len(calls)) for _ in range(count)]


def _timed(graph):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def product_rates() -> dict[str, float]:
    """Operations per second of one PRODUCT_SIZE^3 product of random numbers, in bf16 and in fp8."""
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device="cuda").bfloat16() for _ in range(2))
    one = torch.ones((), device="cuda")
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    times = dict(bf16=min(replay([lambda: a @ b], 5)), fp8=min(replay([lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16)], 5)))
    return {name: 2 * PRODUCT_SIZE**3 / us * 1e6 for name, us in times.items()}


GATHER_TILES = [(32, 4), (64, 4), (128, 4), (64, 8), (128, 8)]
"""Keys per tile and warps."""


def _gather_times(case, made, packed):
    return {l2: min(statistics.median(replay([_gather_only(one, packed, *tile) for one in sets], 5)) for tile in GATHER_TILES)
            for l2, sets in input_sets(case, made, packed).items()}


def _gather_only(made, packed, block_k, num_warps):
    from mla_lab.kernels.gather import gather_only

    rows = packed.buffer.reshape(-1, packed.buffer.shape[-1]).view(torch.int32)  # whole words: what is read is what counts, not what it means
    tokens, topk = made.q.shape[0], made.kv_indices.numel() // made.q.shape[0]
    splits = max(1, 264 // tokens)
    out = torch.empty(tokens * splits, rows.shape[1], dtype=torch.int32, device=rows.device)

    def call():
        gather_only[(tokens, splits)](rows, made.kv_indices, out, topk, triton.cdiv(topk, splits), WIDTH=rows.shape[1], WIDTH_PAD=triton.next_power_of_2(rows.shape[1]),
                                      BLOCK_K=block_k, num_warps=num_warps)

    return call


def front(table: pd.DataFrame, time: str = "median_us", error: str = "total_error") -> pd.Series:
    """Which rows no other row of the same phase beats: none is at least as fast and as exact, and better in one of the two."""
    def beaten(row, rows):
        return ((rows[time] <= row[time]) & (rows[error] <= row[error]) & ((rows[time] < row[time]) | (rows[error] < row[error]))).any()

    return pd.Series({i: not beaten(row, rows) for _, rows in table.groupby("phase") for i, row in rows.iterrows()}, dtype=bool).reindex(table.index)


def speedups(table: pd.DataFrame, l2: str) -> pd.DataFrame:
    """Of each shape, the time under bf16 over the bf16 cache by that of each other row: times_as_fast. Prefills are warm."""
    keys = ["model", "phase", "tokens", "topk", "indices"]
    rows = table[table.l2 == table.phase.map({"decode": l2, "prefill": "warm"})]
    plain = rows[(rows.cache == "bf16") & (rows.recipe == "bf16")].set_index(keys).median_us
    rows = rows[(rows.cache != "bf16")]
    return rows[keys + ["cache", "recipe", "median_us"]].assign(times_as_fast=plain.reindex(pd.MultiIndex.from_frame(rows[keys])).to_numpy() / rows.median_us.to_numpy()).reset_index(drop=True)


def published_points(shape: tuple[int, int, int]) -> pd.DataFrame:
    """The published MI325X latencies of a shape (heads, qk_rope_head_dim, topk) whose accuracy was published too.

    Columns phase, tokens, cache, dots, latency_us, and low and high: the published error against f32 attention over the same cache.
    """
    times = study.published("latency_mi325x")
    times = times[(times["where"] == "PR description") & (times.cache == "fp8_scalar")]
    times = times[(times[["heads", "qk_rope_head_dim", "topk"]] == list(shape)).all(axis=1)]
    errors = study.published("accuracy_mi325x")
    errors = errors[(errors.input == "normal(0;1)") & (errors.metric == "relative L2")].drop_duplicates("dots").set_index("dots").value.astype(str)
    bounds = errors.str.split("..", regex=False, expand=True).astype(float).ffill(axis=1)
    return times[["phase", "tokens", "cache", "dots", "latency_us"]].assign(low=times.dots.map(bounds[0]), high=times.dots.map(bounds.iloc[:, -1])).dropna().astype({"tokens": int}).reset_index(drop=True)


def clocks() -> str | None:
    """The GPU's clocks as nvidia-smi reads them at this moment; None without one."""
    if not torch.cuda.is_available():
        return None
    asked = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem,power.draw", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def commit() -> str | None:
    """The commit that the package is at, "+" where files differ from it; None outside a checkout."""
    try:
        asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None
