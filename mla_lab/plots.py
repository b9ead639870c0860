"""The figures, one function each: a frame in, a matplotlib figure out.

Colours are Okabe and Ito's, which colour-blind readers can tell apart. What was published by others is drawn in black,
hollow, and named as such; what was computed here is drawn filled and in colour.
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

BLUE, ORANGE, GREEN, PURPLE, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#666666"
ENCODING_COLOR = {"e4m3fnuz": BLUE, "e4m3fn": ORANGE}
PUBLISHED: dict[str, Any] = dict(marker="D", s=52, facecolors="none", edgecolors="black", linewidths=1.4, zorder=5)

plt.rcParams.update({"figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False,
                     "axes.spines.right": False, "font.size": 9.5, "axes.titlesize": 10.5, "figure.titlesize": 12, "figure.dpi": 80})


def _dashes(p_scales):
    styles = ["-", "--", ":", "-."]
    return {s: styles[i % 4] for i, s in enumerate(sorted(set(p_scales)))}


def _percent_axis(axes):
    """A logarithmic axis of percentages with plain numbers."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if low <= t <= high]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()


def near_zero(rounding: pd.DataFrame) -> plt.Figure:
    """study.rounding_near_zero: the staircase of each encoding beside zero."""
    figure, axes = plt.subplots(figsize=(7.5, 3.8))
    axes.plot([0, rounding.value.max()], [0, rounding.value.max()], color=GREY, linewidth=0.8, label="no rounding")
    for encoding, group in rounding.groupby("encoding", sort=False):
        axes.step(group.value, group.rounded, color=ENCODING_COLOR[encoding], label=encoding, where="mid")
        flushed = group[(group.rounded == 0)].value.max()
        axes.axvspan(0, flushed, color=ENCODING_COLOR[encoding], alpha=0.12, linewidth=0)
    axes.set(xlabel="value before rounding", ylabel="value after rounding", title="What can the two encodings hold near zero? (shaded: becomes 0)",
             xlim=(0, rounding.value.max()), ylim=(0, rounding.value.max()))
    ticks = [0, 2**-10, 2**-9, 2**-8, 2**-7]
    names = ["0"] + [rf"$2^{{{int(np.log2(t))}}}$" for t in ticks[1:]]
    axes.set_xticks(ticks, names)
    axes.set_yticks(ticks, names)
    axes.legend(frameon=False)
    return figure


def kept_share(kept: pd.DataFrame, kernel: pd.DataFrame) -> plt.Figure:
    """study.kept_share as curves, study.lost_mass_in_the_kernel as points."""
    figure, axes = plt.subplots(figsize=(8.5, 4))
    dashes = _dashes(kept.p_scale)
    for (encoding, s), group in kept.groupby(["encoding", "p_scale"], sort=False):
        axes.plot(group.margin, group.kept, color=ENCODING_COLOR[encoding], linestyle=dashes[s], label=f"{encoding}, P scale {s:g}")
    for encoding, group in kernel.groupby("encoding", sort=False):
        axes.scatter(group.margin, group.output, color=ENCODING_COLOR[encoding], s=36, zorder=4, label=f"{encoding}, emulated kernel")
    axes.set(xlabel="margin of one key above 2047 others (nats)", ylabel="output where 1 is right", ylim=(0, None), xlim=(0, kept.margin.max()),
             title="How much of the softmax mass is left in the numerator? (V all ones)")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower right")
    return figure


def flush_margins(margins: pd.DataFrame) -> plt.Figure:
    """study.flush_margins: found by encoding (points) on the formula (lines)."""
    figure, axes = plt.subplots(figsize=(7.5, 3.6))
    for encoding, group in margins.groupby("encoding", sort=False):
        axes.plot(group.p_scale, group.formula, color=ENCODING_COLOR[encoding], linewidth=1, label=f"{encoding}: ln(S / flush threshold)")
        legal = group.p_scale <= {"e4m3fnuz": 240, "e4m3fn": 448}[encoding]
        axes.scatter(group.p_scale[legal], group.flushes_from[legal], color=ENCODING_COLOR[encoding], s=28, label=f"{encoding}: found by encoding")
        axes.scatter(group.p_scale[~legal], group.flushes_from[~legal], color=ENCODING_COLOR[encoding], s=36, marker="x",
                     label=f"{encoding}: found, but p = 1 saturates")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="P scale S", ylabel="score margin (nats)", title="From which margin below the maximum on does a probability become 0?")
    axes.legend(frameon=False, fontsize=8)
    return figure


def misread(right, wrong, written: str, read: str) -> plt.Figure:
    """Output values of the right reading against those of the misread cache, and their distributions."""
    right, wrong = (x.flatten().numpy() for x in (right, wrong))
    if not right.size:
        figure, axes = plt.subplots(figsize=(7.5, 1.2))
        axes.axis("off")
        axes.text(0.5, 0.5, f"Every output row is NaN: an {written} cache's negative zeros (0x80) are NaN in {read}.", ha="center", va="center")
        return figure
    shown = np.random.default_rng(0).choice(right.size, min(4000, right.size), replace=False)
    limit = float(np.quantile(np.abs(wrong), 0.999))
    figure, (left, axes) = plt.subplots(1, 2, figsize=(9.5, 3.8))
    left.scatter(right[shown], wrong[shown], s=3, color=BLUE, alpha=0.4, linewidths=0)
    for slope, style in ((1, "-"), (2, "--")):
        left.plot([-limit, limit], [-slope * limit, slope * limit], color=GREY, linewidth=0.9, linestyle=style, label=f"factor {slope}")
    left.set(xlabel="output, read right", ylabel="output, misread", xlim=(-limit, limit), ylim=(-limit, limit), title="value by value")
    left.legend(frameon=False)
    bins = np.linspace(-limit, limit, 81)
    axes.hist(right, bins, histtype="stepfilled", color=BLUE, alpha=0.45, label=f"read as {written} (right)")
    axes.hist(wrong, bins, histtype="step", color=ORANGE, linewidth=1.5, label=f"read as {read}")
    axes.set(xlabel="output value", ylabel="number of values", title="as a distribution")
    axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"What does an {written} cache look like when it is read as {read}?")
    return figure


def error_by_operand(errors: pd.DataFrame) -> plt.Figure:
    """study.error_parts at one P scale: bars per input."""
    kinds = {"bf16 dots": GREY, "P": SKY, "Q": ORANGE, "Q and P": BLUE}
    names = list(dict.fromkeys(errors.input))
    figure, axes = plt.subplots(figsize=(9.5, 3.9))
    for i, (kind, color) in enumerate(kinds.items()):
        values = errors[errors.rounded == kind].set_index("input").relative_l2.reindex(names)
        axes.bar(np.arange(len(names)) + 0.2 * (i - 1.5), 100 * values, 0.19, color=color, label=kind)
    s, encoding = errors.p_scale.dropna().iloc[0], errors.encoding.iloc[0]
    axes.set_xticks(range(len(names)), [n.replace("minilm_alice ", "MiniLM\n") for n in names])
    axes.set(ylabel="relative L2 error (%)", title=f"Which operand's rounding makes the error? ({encoding}, P scale {s:g})")
    figure.legend(loc="outside lower center", frameon=False, title="rounded to fp8 (bf16 dots: neither)", ncols=4)
    return figure


def p_scale_sweep(sweep: pd.DataFrame, published: pd.DataFrame) -> plt.Figure:
    """study.p_scale_sweep, one panel per input. published: columns input, p_scale, relative_l2 (gfx942)."""
    names = list(dict.fromkeys(sweep.input))
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(3.7 * columns, 2.5 * rows + 0.9), sharex=True, sharey=True, squeeze=False)
    styles = dict(zip(sorted(sweep.kv_splits.unique()), ["-", ":", "--"]))
    for axes, name in zip(panels.flat, names):
        for (encoding, splits), group in sweep[sweep.input == name].groupby(["encoding", "kv_splits"], sort=False):
            group = group.sort_values("p_scale")
            axes.plot(group.p_scale, 100 * group.relative_l2, color=ENCODING_COLOR[encoding], linestyle=styles[splits], marker=".", markersize=4,
                      label=f"{encoding}, " + ("split-K off" if splits == 1 else f"{splits} splits"))
        points = published[published.input == name]
        if len(points):
            axes.scatter(points.p_scale, 100 * points.relative_l2, label="published, MI325X (gfx942)", **PUBLISHED)
        axes.set_title(name)
        axes.set_xscale("log", base=2)
    for axes in panels.flat[: len(names)]:
        _percent_axis(axes)
    for axes in panels.flat[len(names):]:
        axes.axis("off")
    for axes in panels[:, 0]:
        axes.set_ylabel("relative L2 error (%)")
    for axes in panels[-1]:
        axes.set_xlabel("P scale")
    handles = {label: handle for axes in panels.flat for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("What should P be multiplied by before it is rounded to fp8?")
    return figure


def octave_shift(sweep: pd.DataFrame) -> plt.Figure:
    """A sweep over the same bytes in both encodings: as it is, and with e4m3fn shifted down by one octave."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), sharey=True)
    for axes, shift in ((left, 1.0), (right, 0.5)):
        for encoding, group in sweep.groupby("encoding", sort=False):
            x = group.p_scale * (shift if encoding == "e4m3fn" else 1.0)
            wide = encoding == "e4m3fnuz"  # the first lies wide under the second, so that coinciding lines both show
            axes.plot(x, 100 * group.relative_l2, color=ENCODING_COLOR[encoding], linewidth=4.5 if wide else 1.4, alpha=0.5 if wide else 1,
                      marker="o" if wide else ".", markersize=7 if wide else 5, label=encoding)
        axes.set_xscale("log", base=2)
    for axes in (left, right):
        _percent_axis(axes)
    left.set(xlabel="P scale S", ylabel="relative L2 error (%)", title="at the same P scale")
    right.set(xlabel="S in e4m3fnuz, S / 2 in e4m3fn", title="e4m3fn moved by one octave")
    left.legend(frameon=False)
    figure.suptitle("Is e4m3fn at 2S the same as e4m3fnuz at S? (same bytes in the cache, P alone rounded)")
    return figure


def saw(sweep: pd.DataFrame) -> plt.Figure:
    """A fine sweep: the error between powers of two, and the cliff."""
    figure, axes = plt.subplots(figsize=(8.5, 3.8))
    names = list(dict.fromkeys(sweep.input))
    styles = dict(zip(names, ["-", "--", ":", "-."]))
    for (name, encoding), group in sweep.groupby(["input", "encoding"], sort=False):
        axes.plot(group.p_scale, 100 * group.relative_l2, color=ENCODING_COLOR[encoding], linestyle=styles[name], label=f"{name}, {encoding}")
    for encoding, largest in (("e4m3fnuz", 240), ("e4m3fn", 448)):
        axes.axvline(largest, color=ENCODING_COLOR[encoding], linewidth=0.8)
    axes.set_xscale("log", base=2)
    _percent_axis(axes)
    axes.set(xlabel="P scale (vertical lines: the encodings' largest values)", ylabel="relative L2 error (%)",
             title="Does the error change between powers of two, and where is the cliff? (P alone rounded)")
    axes.legend(frameon=False, fontsize=8)
    return figure


def cache_errors(errors: pd.DataFrame) -> plt.Figure:
    """study.cache_errors: what the products cost on each cache, and the whole error with the cache's own rounding."""
    names = list(dict.fromkeys(errors.input))
    kinds = list(dict.fromkeys(zip(errors.cache, errors.dots)))
    colors = {"bf16": GREY, "fp8_scalar": BLUE, "fp8_dsv32_mla": ORANGE, "fp8_dsv32_mla, scales 2^n": GREEN}
    figure, panels = plt.subplots(2, 1, figsize=(9.5, 6), sharex=True)
    for axes, column, title in zip(panels, ("kernel_error", "total_error"), ("against f32 attention over the same cache", "against f32 attention over the unrounded rows")):
        for i, (kind, dots) in enumerate(kinds):
            values = errors[(errors.cache == kind) & (errors.dots == dots)].set_index("input")[column].reindex(names)
            axes.bar(np.arange(len(names)) + 0.12 * (i - (len(kinds) - 1) / 2), 100 * values, 0.11, color=colors[kind], hatch="////" if dots == "fp8" else None,
                     edgecolor="white", linewidth=0, label=f"{kind}, {dots} dots")
        axes.set(ylabel="relative L2 error (%)", title=title)
    panels[1].set_xticks(range(len(names)), [n.replace("minilm_alice ", "MiniLM\n") for n in names])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("Which cache is the more accurate, under which products?")
    return figure


def _short(names):
    return [n.replace("minilm_alice ", "MiniLM\n").replace("_", "_\n", 1) if len(n) > 8 else n for n in names]


def error_budget(budget: pd.DataFrame) -> plt.Figure:
    """budget.error_budget of one recipe: bars of what each rounding costs alone, a black tick where theory puts it."""
    kinds = {"Q": ORANGE, "K and V": GREEN, "P": SKY, "output": GREY, "whole": BLUE}
    names = list(dict.fromkeys(budget.input))
    figure, axes = plt.subplots(figsize=(10.5, 4.2))
    for i, (kind, color) in enumerate(kinds.items()):
        part = budget[budget.operand == kind].set_index("input").reindex(names)
        at = np.arange(len(names)) + 0.17 * (i - 2)
        axes.bar(at, 100 * part.alone, 0.16, color=color, label={"K and V": "K and V (the cache)", "whole": "all together"}.get(kind, kind))
        axes.scatter(at, 100 * part.predicted, marker="_", s=70, color="black", linewidths=1.6, zorder=4, label="by theory" if i == 0 else None)
    axes.set_xticks(range(len(names)), _short(names), fontsize=8)
    axes.set(ylabel="relative L2 error (%)", title=f"Which rounding costs what? (recipe: {budget.recipe.iloc[0]}; against f32 attention over unrounded rows)")
    figure.legend(loc="outside lower center", frameon=False, ncols=6)
    return figure


def error_theory(budget: pd.DataFrame) -> plt.Figure:
    """budget.error_budget: every rounding's measured cost against what theory says."""
    kinds = {"Q": (ORANGE, "o"), "K": (GREEN, "s"), "V": (PURPLE, "^"), "P": (SKY, "D"), "output": (GREY, "v"), "whole": (BLUE, "P")}
    figure, axes = plt.subplots(figsize=(5.6, 5))
    for kind, (color, marker) in kinds.items():
        part = budget[(budget.operand == kind) & (budget.predicted > 0) & (budget.alone > 0)]
        axes.scatter(100 * part.predicted, 100 * part.alone, color=color, marker=marker, s=30, label=kind)
    low, high = axes.get_xlim()[0], max(axes.get_xlim()[1], axes.get_ylim()[1])
    line = np.geomspace(max(low, 0.01), high, 2)
    axes.plot(line, line, color=GREY, linewidth=1, label="equal")
    axes.fill_between(line, line / 1.25, line * 1.25, color=GREY, alpha=0.15, linewidth=0, label="within 25%")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for limits, setter in ((axes.get_xlim(), axes.set_xticks), (axes.get_ylim(), axes.set_yticks)):
        ticks = [t for t in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if limits[0] <= t <= limits[1]]
        setter(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set(xlabel="predicted relative L2 error (%)", ylabel="emulated relative L2 error (%)", title="Does theory say what each rounding costs?")
    axes.legend(frameon=False, fontsize=8)
    return figure


def error_by_spread(errors: pd.DataFrame, published: pd.DataFrame) -> plt.Figure:
    """study.error_by_spread, with the published errors (MI325X, columns input, relative_l2) as horizontal lines."""
    figure, axes = plt.subplots(figsize=(7.5, 3.8))
    for kind, color in {"Q and P": BLUE, "Q": ORANGE, "P": SKY}.items():
        part = errors[errors.rounded == kind]
        axes.plot(part.spread, 100 * part.relative_l2, color=color, marker=".", label=f"{kind} in fp8")
    for row, style in zip(published.itertuples(), ("--", ":")):
        axes.axhline(100 * row.relative_l2, color="black", linewidth=1, linestyle=style, label=f"published, MI325X: {row.input}")
    axes.set(xlabel="standard deviation of the scores (nats)", ylabel="relative L2 error (%)", ylim=(0, None), title="How does the error depend on the spread of the scores?")
    axes.legend(frameon=False, fontsize=8)
    return figure


def recipe_errors(errors: pd.DataFrame, summary: pd.DataFrame) -> plt.Figure:
    """study.recipe_errors as points per input, study.recipe_summary's mean as a bar; bold: on the Pareto front."""
    order = summary.sort_values(["matrix_time", "total_error"], ascending=[False, False])
    names = [f"{row.recipe}{' (bf16 cache)' if row.cache == 'bf16' else ''}, {row.matrix_time:g}x" for row in order.itertuples()]
    figure, panels = plt.subplots(1, 2, figsize=(11, 0.32 * len(names) + 1.5), sharey=True)
    for axes, column, front, title in zip(panels, ("kernel_error", "total_error"), ("on_front", "on_front_total"), ("what the products add (same cache)", "with the cache's own rounding")):
        for y, row in enumerate(order.itertuples()):
            points = errors[(errors.recipe == row.recipe) & (errors.cache == row.cache)][column]
            color = BLUE if getattr(row, front) else GREY
            axes.scatter(100 * points, [y] * len(points), s=14, color=color, alpha=0.5, linewidths=0)
            axes.scatter(100 * getattr(row, column), y, marker="|", s=190, linewidths=2.6, color=color)
        axes.set_xscale("log")
        ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20]
        axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axes.minorticks_off()
        axes.set(xlabel="relative L2 error (%)", title=title)
    panels[0].set_yticks(range(len(names)), names)
    figure.suptitle("How accurate is each recipe, and what do its products cost? (bar: geometric mean; blue: on the Pareto front; 2x: time of the products)")
    return figure


def pareto(summary: pd.DataFrame) -> plt.Figure:
    """study.recipe_summary: both errors against the time of the matrix products; filled: on the front."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True)
    for axes, column, on_front, title in zip(panels, ("kernel_error", "total_error"), ("on_front", "on_front_total"), ("what the products add (same cache)", "with the cache's own rounding")):
        for kind, marker, color in (("fp8_scalar", "o", BLUE), ("bf16", "s", ORANGE)):
            for front in (True, False):
                some = summary[(summary.cache == kind) & (summary[on_front] == front)]
                axes.scatter(some.matrix_time, 100 * some[column], marker=marker, s=48, color=color if front else "none", edgecolors=color,
                             label=f"{kind} cache, {'on the front' if front else 'not on it'}")
        front = summary[summary[on_front]].sort_values(column)
        for time, group in front.groupby("matrix_time"):
            below = 100.0  # labels of points that coincide stand on one another
            for row in group.sort_values(column, ascending=False).itertuples():
                at = min(getattr(row, column), below / 1.18)
                axes.annotate(row.recipe, (time, 100 * getattr(row, column)), xytext=(time + 0.05, 100 * at), fontsize=8, va="center")
                below = at
        axes.set(xlabel="time of the matrix products (both in fp8: 1)", xlim=(0.9, 2.75), title=title)
    _percent_axis(panels[0])
    panels[0].set_ylabel("relative L2 error (%), geometric mean")
    panels[1].legend(frameon=False, fontsize=8, loc="lower left")
    figure.suptitle("Which recipes are worth their cost? (named: no other is better in error, time and bytes)")
    return figure


def lost_tail(lost: pd.DataFrame, keys: int) -> plt.Figure:
    """study.lost_tail: the formula as a line, the emulated kernel as points; a cross where p = 1 saturates."""
    figure, axes = plt.subplots(figsize=(7.5, 3.8))
    for encoding, group in lost.groupby("encoding", sort=False):
        color = ENCODING_COLOR[encoding]
        axes.plot(group.p_scale, 100 * group.formula, color=color, linewidth=1, label=f"{encoding}: formula")
        legal = group.p_scale <= {"e4m3fnuz": 240, "e4m3fn": 448}[encoding]
        axes.scatter(group.p_scale[legal], 100 * group.kernel_lost[legal], color=color, s=30, label=f"{encoding}: emulated kernel")
        axes.scatter(group.p_scale[~legal], 100 * group.kernel_lost[~legal], color=color, s=40, marker="x", label=f"{encoding}: the same, but p = 1 saturates")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="P scale S", ylabel="lost share of the softmax mass (%)", title=f"How much of the mass can still be lost? (one key above {keys - 1} that just flush)")
    axes.legend(frameon=False, fontsize=8)
    return figure


def outlier_gains(errors: pd.DataFrame) -> plt.Figure:
    """study.outlier_gains: error of the ordinary channels against the outlier's size."""
    dashes = {"fp8_scalar": "-", "fp8_dsv32_mla": "--", "fp8_dsv32_mla, scales 2^n": ":"}
    figure, axes = plt.subplots(figsize=(7.5, 3.8))
    for (encoding, kind), group in errors.groupby(["encoding", "cache"], sort=False):
        axes.plot(group.gain, 100 * group.error, color=ENCODING_COLOR[encoding], linestyle=dashes[kind], label=f"{encoding}, {kind}")
    axes.set_xscale("log")
    _percent_axis(axes)
    axes.set(xlabel="size of one channel, the others' being 1", ylabel="relative L2 error of the other channels (%)",
             title="When does an outlier channel hurt the others?")
    axes.legend(frameon=False, fontsize=8)
    return figure


def compiled(table: pd.DataFrame, budget: int) -> plt.Figure:
    """compile.table of one arch: shared memory and registers against the tile, one line per cache, dots and warps."""
    figure, panels = plt.subplots(1, 2, figsize=(10.5, 4))
    good = table[table.error == ""]
    colors = {("bf16", "bf16"): GREY, ("fp8_scalar", "bf16"): ORANGE, ("fp8_scalar", "fp8"): BLUE}
    styles = dict(zip(sorted(table.num_warps.unique()), ["-", "--", ":"]))
    for (kind, dots, warps), group in good.groupby(["cache", "qk", "num_warps"], sort=False):
        group = group.sort_values("block_k")
        for axes, column, factor in ((panels[0], "shared_memory", 1 / 1024), (panels[1], "vgpr", 1)):
            axes.plot(group.block_k, group[column] * factor, color=colors[kind, dots], linestyle=styles[warps], marker="o", markersize=4,
                      label=f"{kind} cache, {dots} dots, {warps} warps")
    panels[0].axhline(budget / 1024, color="black", linewidth=1, linestyle="-.", label="what a workgroup may take")
    panels[0].set(ylabel="shared memory of a workgroup (KiB)", ylim=(0, None))
    panels[1].set(ylabel="vector registers of a lane", ylim=(0, None))
    for axes in panels:
        axes.set(xlabel="keys in a tile", xticks=sorted(table.block_k.unique()))
    handles = {label: handle for handle, label in zip(*panels[0].get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(f"What does a tile of keys take on {table.arch.iloc[0]}? (compiled; missing points do not fit)")
    return figure


def forecast(table: pd.DataFrame) -> plt.Figure:
    """floor.beside_published: the published latencies as hollow diamonds, the floors as dashes (a forecast, not measured)."""
    names = [f"{r.phase}\n{r.tokens} tokens\n{r.cache}\n{r.dots} dots" for r in table.itertuples()]
    figure, axes = plt.subplots(figsize=(10.5, 4.4))
    at = np.arange(len(table))
    for column, color, label in (("products_us", ORANGE, "forecast: products at peak"), ("memory_us", SKY, "forecast: gathered bytes from memory"), ("cache_us", GREEN, "forecast: gathered bytes from the last cache")):
        axes.scatter(at, table[column], marker="_", s=420, linewidths=2.2, color=color, label=label)
    axes.scatter(at, table.published_us, label="published, MI325X", **PUBLISHED)
    for x, row in zip(at, table.itertuples()):
        axes.annotate(f"{row.times_the_floor:.0f}x" if row.times_the_floor >= 10 else f"{row.times_the_floor:.1f}x", (x, row.published_us), xytext=(8, -3), textcoords="offset points", fontsize=8)
    axes.set_yscale("log")
    axes.set_xticks(at, names, fontsize=8)
    axes.set(ylabel="time of a call (us)", xlim=(-0.5, len(table) - 0.3), title="How far are the published latencies from their floor? (number: times the floor)")
    axes.legend(frameon=False, fontsize=8)
    return figure


RECIPE_COLOR = {"bf16": GREY, "fp8": BLUE, "fp8 QK, bf16 PV": SKY, "bf16 QK, fp8 PV": PURPLE}
CACHE_MARKER = {"bf16": "s", "fp8_scalar": "o", "fp8_dsv32_mla": "^"}


def latency_against_accuracy(table: pd.DataFrame, published: pd.DataFrame, where: str) -> plt.Figure:
    """bench rows of one decode and one prefill shape, with `front`: total error against time, and below it the kernel's own.

    published: phase, dots, latency_us, low and high (their kernel error). where: what measured it.
    """
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.8), sharey=True)
    for axes, phase in zip(panels, ("decode", "prefill")):
        rows = table[table.phase == phase]
        unit, divide = ("us", 1) if phase == "decode" else ("ms", 1000)
        for row in rows.itertuples():
            color, marker = RECIPE_COLOR[row.recipe], CACHE_MARKER[row.cache]
            axes.plot([row.median_us / divide] * 2, [100 * row.kernel_error, 100 * row.total_error], color=color, linewidth=0.8, alpha=0.6)
            axes.scatter(row.median_us / divide, 100 * row.kernel_error, color=color, s=12)
            axes.scatter(row.median_us / divide, 100 * row.total_error, color=color, marker=marker, s=64, zorder=4, label=f"{row.cache} cache, {row.recipe}")
        best = rows[rows.front].sort_values("median_us")
        axes.plot(best.median_us / divide, 100 * best.total_error, color="black", linewidth=1, linestyle="--", zorder=2, label="Pareto front of total error and time")
        tokens = rows.tokens.iloc[0] if len(rows) else 0
        for row in published[(published.phase == phase) & (published.tokens == tokens)].itertuples():
            axes.scatter(row.latency_us / divide, 50 * (row.low + row.high), **PUBLISHED, label="published, MI325X: kernel error")
            axes.annotate(f"{row.dots} dots", (row.latency_us / divide, 50 * (row.low + row.high)), xytext=(7, -3), textcoords="offset points", fontsize=8)
        axes.set(xlabel=f"time of a call ({unit})", title=f"{phase}, {tokens:,} tokens", xlim=(0, None))
    panels[0].set_ylim(0.1, 100 * max(table.total_error.max(), 0.04) * 1.3)
    _percent_axis(panels[0])
    panels[0].set_ylabel("relative L2 error (%)")
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle(f"What does fp8 cost, and what does it bring? ({where}; large: total error, small: the kernel's alone)")
    return figure


def time_against_tokens(table: pd.DataFrame, where: str) -> plt.Figure:
    """bench rows of one model: time against query tokens for each cache and recipe, and each cache's floor as a dashed line."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.4))
    for axes, phase in zip(panels, ("decode", "prefill")):
        rows = table[table.phase == phase]
        for (kind, recipe), group in rows.groupby(["cache", "recipe"], sort=False):
            group = group.sort_values("tokens")
            axes.plot(group.tokens, group.median_us, color=RECIPE_COLOR[recipe], marker=CACHE_MARKER[kind], markersize=5, label=f"{kind} cache, {recipe}")
        for kind, group in rows.groupby("cache", sort=False):
            gathered = group.groupby("tokens").gather_us.median()
            axes.plot(gathered.index, gathered, color="black", linewidth=1, linestyle="--", marker=CACHE_MARKER[kind], markersize=4, fillstyle="none", label=f"{kind} cache, rows only gathered")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        ticks = [t * 10**n for n in range(5) for t in (1, 2, 5) if low <= t * 10**n <= high]
        axes.set_yticks(ticks, [f"{t:,}" for t in ticks])
        axes.minorticks_off()
        axes.set_xticks(sorted(rows.tokens.unique()), [f"{t:,}" for t in sorted(rows.tokens.unique())])
        axes.set(xlabel="query tokens", ylabel="time of a call (us)", title=phase)
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle(f"How does time grow with the queries, and how far is the floor? ({where})")
    return figure
