"""The least time that a call could take, from public peak figures: a forecast, not a measurement.

    products   the multiply-adds of both matrix products at the peak rate of what they run in
    cache      every gathered byte once from the last cache that is shared by the whole GPU, where its peak is public
    memory     every gathered byte once from memory: what a call takes at least whose queries share no rows

A prefill's queries share most of their rows, so that its floor is the larger of products and cache; a decode's queries
belong to different sequences and share none, so that its floor is the larger of products and memory. No kernel reaches
it: launch, latency, softmax and address arithmetic are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from mla_lab import study
from mla_lab.recipe import Recipe


@dataclass(frozen=True)
class Device:
    """Peaks, dense: memory and cache in bytes/s (cache None: not public), products in multiply-adds/s."""

    arch: str
    memory: float
    cache: float | None
    bf16: float
    fp8: float
    source: str


DEVICES = {
    "MI325X": Device("gfx942", 6.0e12, 17.2e12, 1307.4e12 / 2, 2614.9e12 / 2, "AMD Instinct MI325X data sheet (2024): 6 TB/s, Infinity Cache 17.2 TB/s, 1,307.4 and 2,614.9 TFLOP/s"),
    "MI355X": Device("gfx950", 8.0e12, None, 2516.6e12 / 2, 5033.2e12 / 2, "AMD Instinct MI355X data sheet (2025): 8 TB/s, 2.5 and 5.0 PFLOP/s"),
    "H200": Device("sm_90", 4.8e12, None, 989.5e12 / 2, 1979e12 / 2, "NVIDIA H200 data sheet (2024): 4.8 TB/s, 989 and 1,979 TFLOP/s"),
}


def floor(device: str, phase: str, tokens: int, heads: int, topk: int, kv_lora_rank: int, qk_rope_head_dim: int, cache: str, recipe: Recipe) -> dict:
    """products_us, cache_us (None where the peak is not public), memory_us, floor_us and bound_by of one call on a device.

    phase: "decode" or "prefill". cache: "bf16" or "fp8_scalar". Raises ValueError for another device, phase or cache.
    """
    for name, value, accepted in (("device", device, DEVICES), ("phase", phase, ("decode", "prefill")), ("cache", cache, ("bf16", "fp8_scalar"))):
        if value not in accepted:
            raise ValueError(f"{name}: got {value!r}; accepted: {', '.join(accepted)}")
    peak = DEVICES[device]
    width = kv_lora_rank + qk_rope_head_dim
    count = recipe.products(width, kv_lora_rank)
    pairs = tokens * heads * topk
    gathered = tokens * topk * width * (2 if cache == "bf16" else 1)
    times = dict(products=pairs * (count["bf16"] / peak.bf16 + count["fp8"] / peak.fp8), memory=gathered / peak.memory)
    if peak.cache is not None:
        times["cache"] = gathered / peak.cache
    counted = [name for name in ("products", "memory" if phase == "decode" else "cache") if name in times]
    bound = max(counted, key=lambda name: times[name])
    return dict(products_us=1e6 * times["products"], cache_us=1e6 * times["cache"] if "cache" in times else None, memory_us=1e6 * times["memory"],
                floor_us=1e6 * times[bound], bound_by=bound)


def beside_published(device: str = "MI325X") -> pd.DataFrame:
    """The published latencies (MI325X) that state their shape, each beside the floor of `device`: times_the_floor is their quotient."""
    table = study.published("latency_mi325x")
    table = table[table.tokens.notna() & (table["where"] == "PR description")]
    rows = []
    for row in table.itertuples():
        recipe = Recipe() if row.dots == "bf16" else Recipe("fp8", "fp8")
        least = floor(device, row.phase, int(row.tokens), int(row.heads), int(row.topk), int(row.kv_lora_rank), int(row.qk_rope_head_dim), row.cache, recipe)
        rows.append(dict(phase=row.phase, tokens=int(row.tokens), cache=row.cache, dots=row.dots, published_us=float(row.latency_us), **least, times_the_floor=row.latency_us / least["floor_us"]))
    return pd.DataFrame(rows)
