"""Search for the Hopper kernel's launches: every candidate of every class of shapes, checked, then timed, the fastest kept.

The result is kernels/configs/sm_90_hopper.json and the table that it was read from.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from mla_lab import bench, hopper, metrics, sparse_mla_fwd
from mla_lab.arch import get_profile
from mla_lab.inputs import Shape
from mla_lab.notebook import device_name, versions
from mla_lab.recipe import Recipe

SEED = 0

LENGTHS = (2048, 1, 0, 63, 64, 65, 2047, 777)
"""Keys of the queries that a candidate is checked with: empty, one short of a tile, a tile, one more, ..."""

FURTHEST_APART = 3e-3
"""Relative L2 between kernel and emulator. Hopper's fp8 sums keep some 14 bits, in sums of 128 columns: seen up to 2.2e-3.
A wrong layout, a race or a missed rounding: 1e-2 and more."""


def shapes_of(of: hopper.ShapeClass) -> list[Shape]:
    """What a class is timed with."""
    heads = 16 if of.heads == "16" else 128
    tokens, slots = ((2, 16), bench.DECODE_SLOTS) if of.few else ((4096 if heads == 16 else 1024,), bench.PREFILL_SLOTS)
    return [Shape(tokens=t, heads=heads, qk_rope_head_dim=of.rope, slots=slots) for t in tokens + ((64,) if of.few and heads == 128 else ())]


def recipes_of(of: hopper.ShapeClass) -> list[Recipe]:
    """The recipe that a class is timed with first, then the others that it serves."""
    q = "fp8" if of.q_fp8 else "bf16"
    return [Recipe(q=q, p=q)] + ([] if of.cache == "bf16" else [Recipe(q=q, p="bf16" if of.q_fp8 else "fp8")])


def check(of: hopper.ShapeClass, launch: hopper.HopperLaunch) -> float:
    """The largest relative L2 between kernel and emulator over LENGTHS: 5 splits where the queries are few, else one pass and
    each of the class's recipes."""
    profile = get_profile("sm_90")
    rng = torch.Generator("cuda").manual_seed(SEED)
    heads = 16 if of.heads == "16" else 72  # a whole block of heads and a part of one
    slots = 4096
    width = 512 + of.rope
    q = torch.randn(len(LENGTHS), heads, width, generator=rng, device="cuda").bfloat16()
    packed = bench.pack(torch.randn(slots, width, generator=rng, device="cuda"), of.cache, profile.encoding)
    indptr = torch.tensor(np.concatenate([[0], np.cumsum(LENGTHS)]), dtype=torch.int32, device="cuda")
    indices = torch.randint(0, slots, (sum(LENGTHS),), generator=rng, device="cuda", dtype=torch.int32)
    worst = 0.0
    before = hopper.launches().copy()
    try:
        for one in before:  # whichever class this small call falls into
            hopper.launches()[one] = launch
        for recipe in recipes_of(of)[: 1 if of.few else 2]:
            for splits in (5,) if of.few else (1,):
                given = dict(kv_scale=packed.scale, qk_rope_head_dim=of.rope, recipe=recipe, kv_splits=splits, return_lse=True, arch="sm_90")
                out, lse = sparse_mla_fwd(q, packed.buffer, indptr, indices, width**-0.5, backend="hopper", **given)
                want, want_lse = sparse_mla_fwd(q, packed.buffer, indptr, indices, width**-0.5, backend="emulate", **given)
                apart = metrics.relative_l2(out, want)
                if not apart < FURTHEST_APART or not (lse - want_lse).nan_to_num(0).abs().max() < 2e-3:
                    raise RuntimeError(f"{recipe}, {splits} splits: {apart:.2e} apart from the emulator")
                worst = max(worst, apart)
    finally:
        hopper.launches().update(before)
    return worst


def _checked(of, launch):
    try:
        return check(of, launch), ""
    except Exception as error:  # a candidate that does not compile, launch or agree is a row that says so
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"


def search(classes: Sequence[hopper.ShapeClass], repeats: int, processes: int, limit_s: float) -> pd.DataFrame:
    """One row per class, candidate and shape: apart (from the emulator), median_us, error.

    Candidates are compiled and checked in `processes` processes of their own, so that one that faults takes none with it, and
    for `limit_s` seconds together, so that one that waits for ever does not hold up the rest; then timed one after another,
    in turns over one set of inputs, cold for decode (see bench).
    """
    profile = get_profile("sm_90")
    todo = [(of, launch) for of in classes for launch in hopper.candidates(of)]
    distinct = list(dict.fromkeys((of, _compiled(launch)) for of, launch in todo))
    found = {}
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=3) as pool:  # leaving it ends its processes
        end = time.monotonic() + limit_s
        running = {pair: pool.apply_async(_checked, pair) for pair in distinct}
        for pair, run in tqdm(running.items(), desc="compile and check"):
            try:
                found[pair] = run.get(max(0.0, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                found[pair] = None, f"TimeoutError: not compiled and checked within {limit_s:g} s"
    rows = []
    for of in tqdm(classes, desc="time"):
        for shape in shapes_of(of):
            case = bench.Case("", "decode" if of.few else "prefill", shape)
            made = bench.make(case, SEED, "cuda")
            packed = bench.pack(made.rows, of.cache, profile.encoding)
            sets = bench.input_sets(case, made, packed)
            for launch in hopper.candidates(of):
                apart, error = found[of, _compiled(launch)]
                row = asdict(of) | asdict(launch) | dict(tokens=shape.tokens, total_heads=shape.heads, apart=apart, median_us=None, error=error)
                before = hopper.launches()[of]
                if not error:
                    try:
                        hopper.launches()[of] = launch
                        calls = [bench.call_of(one, packed, recipes_of(of)[0], profile, "hopper") for one in sets.get("cold", sets["warm"])]
                        row["median_us"] = statistics.median(bench.replay(calls, repeats))
                    except Exception as failed:
                        row["error"] = f"{type(failed).__name__}: {str(failed).strip().splitlines()[0][:200]}"
                    finally:
                        hopper.launches()[of] = before
                rows.append(row)
    return pd.DataFrame(rows)


def _compiled(launch):
    """The launch as far as the compiler sees it."""
    return hopper.HopperLaunch(**asdict(launch) | dict(programs_per_unit=1))


def best(frame: pd.DataFrame) -> dict[hopper.ShapeClass, hopper.HopperLaunch]:
    """Of each class the candidate with the smallest geometric mean of times over its shapes, of those that ran all of them."""
    names = list(hopper.ShapeClass.__dataclass_fields__), list(hopper.HopperLaunch.__dataclass_fields__)
    kept = {}
    frame = frame.astype({"registers": object}).where(frame.notna() | (frame.columns != "registers"), None)
    for key, rows in frame.groupby(names[0], sort=False):
        timed = rows.assign(registers=rows.registers.fillna(0)).groupby(names[1], sort=False).median_us
        mean = timed.apply(lambda times: np.exp(np.log(times.astype(float)).mean()) if times.notna().all() else np.inf)
        if np.isfinite(mean.min()):
            values = dict(zip(names[1], mean.idxmin()))
            kept[hopper.ShapeClass(**dict(zip(names[0], map(_plain, key))))] = hopper.HopperLaunch(**{name: _plain(value) for name, value in values.items()} | dict(registers=int(values["registers"]) or None))
    return kept


def _plain(value):
    return value.item() if isinstance(value, np.generic) else value


def write(kept: dict[hopper.ShapeClass, hopper.HopperLaunch], path: Path, command: str) -> None:
    """The launches as JSON, those of other classes as they were."""
    every = hopper.launches() | kept
    lines = ",\n".join("    " + json.dumps({"class": asdict(of), "launch": asdict(launch)}) for of, launch in every.items())
    path.write_text(f'{{\n  "source": {json.dumps(f"{command} on {device_name()}; {versions()}")},\n  "launches": [\n{lines}\n  ]\n}}\n')
