"""The figures, one function each: a frame in, a matplotlib figure out.

Colours are Okabe and Ito's, which colour-blind readers can tell apart. What was published by others is drawn in black,
hollow, and named as such; what was computed here is drawn filled and in colour.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

BLUE, ORANGE, GREEN, PURPLE, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#666666"
ENCODING_COLOR = {"e4m3fnuz": BLUE, "e4m3fn": ORANGE}
PUBLISHED = dict(marker="D", s=52, facecolors="none", edgecolors="black", linewidths=1.4, zorder=5)

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
