"""The experiments that the notebooks show: each returns a pandas frame of long rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from mla_lab import cache, emulate, formats, inputs, metrics, numerics, reference
from mla_lab.arch import Profile, get_profile
from mla_lab.formats import get_format
from mla_lab.inputs import Inputs, Shape
from mla_lab.recipe import BF16_DOTS, FP8_DOTS, Recipe

E4M3 = ("e4m3fnuz", "e4m3fn")
CAPTURES = Path(__file__).resolve().parents[1] / "data" / "inputs"


def with_encoding(arch: str | Profile, encoding: str | None) -> Profile:
    """The profile of `arch`, reading another encoding where one is named: gfx942's tiles with e4m3fn, say."""
    profile = get_profile(arch)
    return profile if encoding is None else dataclasses.replace(profile, encoding=get_format(encoding))


def make_inputs(names: Sequence[str], shape: Shape, seed: int) -> list[Inputs]:
    """Inputs for names such as "normal", "minilm_alice" (every layer), "minilm_alice:4" or a path to a capture.

    Raises ValueError for a name that is neither a synthetic input nor a capture.
    """
    made = []
    for name in names:
        if name in inputs.SYNTHETIC:
            made.append(inputs.make(name, shape, seed))
            continue
        path, colon, layer = name.partition(":")
        if colon and not layer.isdigit():
            raise ValueError(f"inputs: got {name!r}; accepted: NAME, or NAME:N for layer N of a capture")
        if not path.endswith(".safetensors"):
            path = str(CAPTURES / f"{path}.safetensors")
            if not Path(path).is_file():
                shipped = sorted(p.stem for p in CAPTURES.glob("*.safetensors"))
                raise ValueError(f"inputs: got {name!r}; accepted: {', '.join([*inputs.SYNTHETIC, *shipped])} (:N for one layer), or a path to a safetensors file")
        for number in [int(layer)] if layer.isdigit() else inputs.capture_layers(path):
            made.append(inputs.load_capture(path, number))
    return made


def run(made: Inputs, packed: cache.Packed, profile: Profile, recipe: Recipe, kv_splits: int = 1):
    """out [C, H, rank] bf16 and LSE [C, H] f32 of the emulated kernel with the profile's tiles."""
    return _run(made, packed, profile, recipe, profile.launch(recipe.dots).block_k, kv_splits)


def _run(made, packed, profile, recipe, block_k, kv_splits):
    parts = emulate.sparse_mla_parts(
        made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, profile=profile, recipe=recipe, block_k=block_k,
        kv_splits=kv_splits, kv_scale=packed.scale, kv_lora_rank=made.kv_lora_rank,
    )
    out, lse = emulate.merge(parts)
    return out.bfloat16(), lse


def truth(made: Inputs, packed: cache.Packed, profile: Profile, hadamard: bool = False) -> torch.Tensor:
    """The f32 reference over the same cache. hadamard: it holds rotated rows (cache.rotate)."""
    q = cache.rotate(made.q, made.kv_lora_rank) if hadamard else made.q
    out = reference.sparse_mla(q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, kv_scale=packed.scale,
                               kv_lora_rank=made.kv_lora_rank, arch=profile)[0]
    return numerics.hadamard(out) if hadamard else out


def recipe_errors(every: Sequence[Inputs], profile: Profile, recipes: Mapping[str, Recipe]) -> pd.DataFrame:
    """Relative L2 errors of every recipe on every input, with what it costs; split-K off.

    The cache is fp8_scalar; the recipe of bf16 dots is there a second time, over a bf16 cache. Columns: input, recipe,
    cache, kernel_error (against f32 attention over the same cache), total_error (over rows that nothing has rounded),
    bf16_products, fp8_products (multiply-adds per query row and key), matrix_time (Recipe.matrix_time), bytes_per_token.
    """
    rows = []
    for made in tqdm(every, desc="recipes", leave=False):
        unrounded = reference.sparse_mla(made.q, made.rows.float(), made.kv_indptr, made.kv_indices, made.softmax_scale, kv_lora_rank=made.kv_lora_rank, arch=profile)[0]
        width = made.q.shape[-1]
        points = [("fp8_scalar", name, recipe) for name, recipe in recipes.items()]
        points += [("bf16", name, recipe) for name, recipe in recipes.items() if not recipe.needs_fp8_cache]
        packs, truths = {}, {}
        for kind, name, recipe in points:
            key = kind, recipe.hadamard
            if key not in packs:
                latents = cache.rotate(made.rows, made.kv_lora_rank) if recipe.hadamard else made.rows
                packs[key] = cache.pack_bf16(latents) if kind == "bf16" else cache.pack_fp8_scalar(latents, profile.encoding)
                truths[key] = truth(made, packs[key], profile, recipe.hadamard)
            out, _ = run(made, packs[key], profile, recipe)
            count = recipe.products(width, made.kv_lora_rank)
            rows.append(dict(input=made.name, recipe=name, cache=kind, kernel_error=metrics.relative_l2(out, truths[key]), total_error=metrics.relative_l2(out, unrounded),
                             bf16_products=count["bf16"], fp8_products=count["fp8"], matrix_time=recipe.matrix_time(width, made.kv_lora_rank),
                             bytes_per_token=width * packs[key].buffer.itemsize))
    return pd.DataFrame(rows)


def recipe_summary(errors: pd.DataFrame) -> pd.DataFrame:
    """recipe_errors over the inputs: geometric mean and worst of both errors, and whether no other point is better.

    on_front, on_front_total: no other recipe and cache has an error (geometric mean of kernel_error, total_error), a
    matrix_time and bytes_per_token that are all as small and one of them smaller; errors count to two digits. Costs are
    those of the widest input.
    """
    mean = lambda x: float(np.exp(np.log(x.clip(lower=1e-12)).mean()))
    coarse = lambda x: x.map(lambda v: float(f"{v:.1e}"))  # what differs in the third digit differs by the seed
    table = errors.groupby(["recipe", "cache"], sort=False).agg(
        kernel_error=("kernel_error", mean), worst_kernel_error=("kernel_error", "max"), total_error=("total_error", mean), worst_total_error=("total_error", "max"),
        matrix_time=("matrix_time", "max"), bytes_per_token=("bytes_per_token", "max")).reset_index()
    for name, error in (("on_front", "kernel_error"), ("on_front_total", "total_error")):
        table[name] = pareto_front(table[[error, "matrix_time", "bytes_per_token"]].assign(**{error: coarse(table[error])}))
    return table


def pareto_front(points: pd.DataFrame) -> list[bool]:
    """For each row: no other row is at most as large in every column and smaller in one."""
    x = points.to_numpy(float)
    return [not bool(((x <= row).all(1) & (x < row).any(1)).any()) for row in x]


def error_parts(every: Sequence[Inputs], profile: Profile, p_scales: Sequence[float]) -> pd.DataFrame:
    """Relative L2 error of each input under the profile, with split-K off: bf16 dots, Q alone in fp8, P alone, both.

    Columns: input, encoding, rounded, p_scale, relative_l2, max_relative. `rounded` is "the output alone" (the f32
    reference rounded to bf16, which no kernel can do without), "bf16 dots", "Q", "P" or "Q and P".
    """
    rows = []
    for made in tqdm(every, desc="error by operand", leave=False):
        packed = cache.pack_fp8_scalar(made.rows, profile.encoding)
        right = truth(made, packed, profile)
        rows.append(dict(input=made.name, encoding=profile.encoding.name, rounded="the output alone", p_scale=None,
                         relative_l2=metrics.relative_l2(right.bfloat16(), right), max_relative=metrics.max_relative(right.bfloat16(), right)))
        recipes = [("bf16 dots", BF16_DOTS), ("Q", Recipe("fp8", "bf16"))]
        recipes += [(f"{what}", Recipe(q, "fp8", s)) for s in p_scales for what, q in (("P", "bf16"), ("Q and P", "fp8"))]
        for what, recipe in recipes:
            # One tile size for all, that of fp8 dots: what differs is the rounding alone.
            out, _ = _run(made, packed, profile, recipe, profile.launch("bf16" if recipe == BF16_DOTS else "fp8").block_k, 1)
            rows.append(dict(input=made.name, encoding=profile.encoding.name, rounded=what, p_scale=recipe.p_scale,
                             relative_l2=metrics.relative_l2(out, right), max_relative=metrics.max_relative(out, right)))
    return pd.DataFrame(rows)


def p_scale_sweep(every: Sequence[Inputs], arch: str | Profile, p_scales: Sequence[float], kv_splits: Iterable[int] = (1,),
                  encodings: Sequence[str] = E4M3, q: str = "fp8", same_bytes: bool = False) -> pd.DataFrame:
    """Relative L2 error against P scale, for each input, encoding and number of splits, with the tiles of fp8 dots.

    same_bytes: the e4m3fnuz cache is the e4m3fn one re-encoded (the scale doubled), so that both hold the same values;
    otherwise each encoding packs for itself. q: "fp8" or "bf16" (P is then the only operand rounded).
    """
    profile = get_profile(arch)
    block_k = profile.launch("fp8").block_k
    rows = []
    for made in tqdm(every, desc="P scales", leave=False):
        for encoding in encodings:
            read = with_encoding(profile, encoding)
            if same_bytes:
                packed = cache.pack_fp8_scalar(made.rows, "e4m3fn")
                packed = cache.reencode_fn_as_fnuz(packed) if encoding == "e4m3fnuz" else packed
            else:
                packed = cache.pack_fp8_scalar(made.rows, encoding)
            right = truth(made, packed, read)
            for splits in kv_splits:
                for s in p_scales:
                    out, _ = _run(made, packed, read, Recipe(q, "fp8", float(s)), block_k, splits)
                    rows.append(dict(input=made.name, encoding=encoding, kv_splits=splits, p_scale=float(s), relative_l2=metrics.relative_l2(out, right)))
    return pd.DataFrame(rows)


def with_rope_columns(made: Inputs, rope: int = cache.PACKED_ROPE) -> Inputs:
    """An input without rope columns gets `rope` columns of zeros, which change no score; another passes through."""
    if made.qk_rope_head_dim:
        return made
    pad = lambda x: torch.nn.functional.pad(x, (0, rope))
    return dataclasses.replace(made, q=pad(made.q), rows=pad(made.rows), qk_rope_head_dim=rope)


def cache_errors(every: Sequence[Inputs], profile: Profile, p_scale: float) -> pd.DataFrame:
    """Relative L2 errors of the emulated kernel over each kind of cache, 512 + 64 columns, split-K off.

    Columns: input, cache, bytes (per token), dots, kernel_error (against the f32 reference over the same cache: what the
    products' roundings cost), total_error (against the f32 reference over the unrounded rows: with the cache's own).
    """
    rows = []
    for made in tqdm([with_rope_columns(made) for made in every], desc="caches", leave=False):
        unrounded = reference.sparse_mla(made.q, made.rows.float(), made.kv_indptr, made.kv_indices, made.softmax_scale, kv_lora_rank=made.kv_lora_rank, arch=profile)[0]
        kinds = {"bf16": cache.pack_bf16(made.rows), "fp8_scalar": cache.pack_fp8_scalar(made.rows, profile.encoding),
                 "fp8_dsv32_mla": cache.pack_fp8_dsv32(made.rows, profile.encoding), "fp8_dsv32_mla, scales 2^n": cache.pack_fp8_dsv32(made.rows, profile.encoding, power_of_two=True)}
        for kind, packed in kinds.items():
            right = truth(made, packed, profile)
            for recipe in (BF16_DOTS,) if kind == "bf16" else (BF16_DOTS, Recipe("fp8", "fp8", p_scale)):
                out, _ = _run(made, packed, profile, recipe, profile.launch(recipe.dots).block_k, 1)
                rows.append(dict(input=made.name, cache=kind, bytes=packed.buffer.shape[-1] * packed.buffer.itemsize, dots=recipe.dots,
                                 kernel_error=metrics.relative_l2(out, right), total_error=metrics.relative_l2(out, unrounded)))
    return pd.DataFrame(rows)


def encoding_errors(every: Sequence[Inputs], profile: Profile) -> pd.DataFrame:
    """Total error of the fp8_scalar cache in each encoding, packed for itself, under bf16 dots: input, encoding, total_error."""
    rows = []
    for made in every:
        unrounded = reference.sparse_mla(made.q, made.rows.float(), made.kv_indptr, made.kv_indices, made.softmax_scale, kv_lora_rank=made.kv_lora_rank, arch=profile)[0]
        for e in E4M3:
            out, _ = run(made, cache.pack_fp8_scalar(made.rows, e), with_encoding(profile, e), BF16_DOTS)
            rows.append(dict(input=made.name, encoding=e, total_error=metrics.relative_l2(out, unrounded)))
    return pd.DataFrame(rows)


def outlier_gains(gains: Sequence[float], seed: int, encodings: Sequence[str] = E4M3, slots: int = 512) -> pd.DataFrame:
    """Rows of N(0, 1) with one latent channel `gain` times as large: what that outlier costs the other 511.

    Columns: gain, cache, encoding, error (relative L2 of the other latent columns after packing and unpacking, over the
    outlier's own group of 128 and the rest alike), flushed (their share that became 0).
    """
    rng = np.random.default_rng(seed)
    plain = torch.from_numpy(rng.standard_normal((slots, 576), np.float32))
    others = torch.arange(512) != 7
    rows = []
    for gain in tqdm(gains, desc="outliers", leave=False):
        latents = plain.clone()
        latents[:, 7] *= gain
        right = latents[:, :512][:, others]
        for e in encodings:
            packs = {"fp8_scalar": cache.pack_fp8_scalar(latents, e), "fp8_dsv32_mla": cache.pack_fp8_dsv32(latents, e),
                     "fp8_dsv32_mla, scales 2^n": cache.pack_fp8_dsv32(latents, e, power_of_two=True)}
            for kind, packed in packs.items():
                got = cache.unpack(packed.buffer, packed.scale, e).reshape(slots, -1)[:, :512][:, others]
                rows.append(dict(gain=float(gain), cache=kind, encoding=e, error=metrics.relative_l2(got, right), flushed=float((got == 0).float().mean())))
    return pd.DataFrame(rows)


def token_bytes(kv_lora_rank: int = 512, qk_rope_head_dim: int = 0) -> pd.DataFrame:
    """Bytes of one token in one layer's cache, and how many tokens fit into a GiB: columns cache, bytes, tokens_per_gib."""
    width = kv_lora_rank + qk_rope_head_dim
    kinds = {"bf16": 2 * width, "fp8_scalar": width}
    if (kv_lora_rank, qk_rope_head_dim) == (512, cache.PACKED_ROPE):
        kinds["fp8_dsv32_mla"] = cache.PACKED_WIDTH
    return pd.DataFrame([dict(cache=kind, bytes=size, tokens_per_gib=2**30 // size) for kind, size in kinds.items()])


def capacity_ratio(kv_lora_rank: int = 512) -> tuple[pd.DataFrame, dict[str, float]]:
    """How far bytes explain the published KV capacities (bf16 and fp8, one serving set-up): a table, and what they imply.

    The published figures are rounded to three digits, so that their ratio lies between two bounds. Besides the latent row
    something that fp8 does not shrink must be kept per token and layer; `implied` holds the bounds of the ratio and of
    those bytes x, from (2 w + x) / (w + x) = ratio with w bytes in fp8. The table: candidates for x, the ratio that each
    gives, and whether it lies within the published bounds.
    """
    there = published("end_to_end_mi325x").set_index("metric").loc["KV cache capacity"]
    bf16, fp8 = float(there.bf16_kv_bf16_dots), float(there.fp8_kv_fp8_dots)
    half = 0.05e6  # of the last digit given
    low, high = (fp8 - half) / (bf16 + half), (fp8 + half) / (bf16 - half)
    implied = lambda ratio: kv_lora_rank * (2 - ratio) / (ratio - 1)
    candidates = {"nothing else": 0, "an index key of 128 in bf16 for every token": 256, "an index key of 128 in fp8 for every token": 128,
                  "an index key of 128 in bf16 for every 4 tokens": 64, "an index key of 128 in bf16 for every 16 tokens": 16}
    rows = [dict(besides_the_latent=what, bytes=x, ratio=(2 * kv_lora_rank + x) / (kv_lora_rank + x)) for what, x in candidates.items()]
    table = pd.DataFrame(rows)
    table["within_published"] = table.ratio.between(low, high)
    return table, dict(ratio_low=low, ratio_high=high, bytes_low=implied(high), bytes_high=implied(low))


def best_power_of_two(sweep: pd.DataFrame) -> pd.DataFrame:
    """For each encoding and number of splits: the power of two with the smallest worst error over the inputs.

    "Worst" is relative: the largest ratio of an input's error to the least that any power gave it. Powers within 5% of
    the smallest worst ratio are as good as each other (above the flush a power of two only moves the same grid); the
    largest of them is named, since it keeps the longest tail. Sweep P alone for it (q="bf16"): beside Q's error a tail
    that P rounds badly can cancel by chance.
    """
    powers = sweep[np.log2(sweep.p_scale) % 1 == 0]
    least = powers.groupby(["input", "encoding", "kv_splits"]).relative_l2.transform("min")
    worst = (powers.relative_l2 / least).groupby([powers.encoding, powers.kv_splits, powers.p_scale]).max().rename("worst_ratio").reset_index()
    rows = []
    for (encoding, splits), group in worst.groupby(["encoding", "kv_splits"]):
        good = group[group.worst_ratio <= 1.05 * group.worst_ratio.min()]
        pick = good.loc[good.p_scale.idxmax()]
        rows.append(dict(encoding=encoding, kv_splits=splits, best_p_scale=pick.p_scale, worst_ratio=pick.worst_ratio,
                         as_good=", ".join(f"{s:g}" for s in sorted(good.p_scale)),
                         worst_ratio_at_1=float(group[group.p_scale == 1].worst_ratio.iloc[0])))
    return pd.DataFrame(rows)


def rounding_near_zero(encodings: Sequence[str] = E4M3, upto: float = 2**-7, points: int = 2049) -> pd.DataFrame:
    """What each encoding makes of values from 0 to `upto`: columns encoding, value, rounded."""
    x = torch.linspace(0, upto, points)
    return pd.concat([pd.DataFrame(dict(encoding=e, value=x.numpy(), rounded=formats.decode(formats.encode(x, e), e).numpy())) for e in encodings], ignore_index=True)


def encoding_table(encodings: Sequence[str] = E4M3) -> pd.DataFrame:
    """The descriptors, and the flush threshold found by encoding rather than by formula."""
    rows = []
    for fmt in map(formats.get_format, encodings):
        grid = torch.exp2(torch.linspace(-14, -8, 6 * 4096 + 1))
        flushed = formats.decode(formats.encode(grid, fmt), fmt) == 0
        rows.append(dict(encoding=fmt.name, bias=fmt.bias, largest=fmt.max_finite, smallest_normal=f"2^{math.log2(fmt.smallest_normal):g}",
                         smallest_subnormal=f"2^{math.log2(fmt.smallest_subnormal):g}", flushes_at_or_below=f"2^{math.log2(float(grid[flushed].max())):g}"))
    return pd.DataFrame(rows)


def flush_margins(p_scales: Sequence[float], encodings: Sequence[str] = E4M3) -> pd.DataFrame:
    """From which score margin (nats below the maximum) on p = exp(-margin) flushes to zero, found by encoding.

    The formula beside it: ln(S / flush_threshold), 6.93 + ln S in e4m3fn and 7.62 + ln S in e4m3fnuz.
    """
    margin = torch.linspace(0, 16, 16001, dtype=torch.float64)
    rows = []
    for e in encodings:
        for s in p_scales:
            rounded = formats.decode(formats.encode((torch.exp(-margin) * s).float(), e), e)
            rows.append(dict(encoding=e, p_scale=float(s), flushes_from=float(margin[rounded == 0].min()),
                             formula=math.log(s / get_format(e).flush_threshold)))
    return pd.DataFrame(rows)


def kept_share(encodings: Sequence[str] = E4M3, keys: int = 2048, margins: np.ndarray | None = None) -> pd.DataFrame:
    """One key at 0 and keys - 1 at -margin, V all ones: what the numerator keeps of the softmax mass (1 is right).

    At P scale 1 and at the encoding's largest legal power of two.
    """
    margins = np.linspace(0, 16, 321) if margins is None else margins
    rows = []
    for e in encodings:
        for s in (1.0, get_format(e).largest_p_scale):
            tail = torch.exp(-torch.from_numpy(margins)).float()
            p = torch.cat([torch.ones(len(margins), 1), tail[:, None].expand(-1, keys - 1)], 1)
            for margin, kept in zip(margins, metrics.kept_mass(p, e, s)):
                rows.append(dict(encoding=e, p_scale=float(s), margin=float(margin), kept=float(kept)))
    return pd.DataFrame(rows)


def lost_tail(p_scales: Sequence[float], keys: int = 2048, encodings: Sequence[str] = E4M3, arch: str | Profile = "gfx942") -> pd.DataFrame:
    """What share of the softmax mass a tail loses at the margin from which it flushes, the worst there is.

    Columns: encoding, p_scale, margin (nats), formula (metrics.lost_tail), kernel_lost (1 minus the emulated kernel's
    output on V all ones, at a margin a ten-thousandth beyond).
    """
    made = inputs.ones(Shape(tokens=1, heads=1, qk_rope_head_dim=64, topk=keys, slots=keys), margin=1.0)
    rows = []
    for e in encodings:
        packed = cache.pack_fp8_scalar(made.rows, e, scale=1.0)
        for s in p_scales:
            margin = math.log(s / get_format(e).flush_threshold)
            at = dataclasses.replace(made, softmax_scale=1.0001 * margin)  # the key below has a score of -1 before it
            out, _ = run(at, packed, with_encoding(arch, e), Recipe("bf16", "fp8", float(s)))
            rows.append(dict(encoding=e, p_scale=float(s), margin=margin, formula=metrics.lost_tail(e, s, keys), kernel_lost=1 - float(out.float().mean())))
    return pd.DataFrame(rows)


def error_by_spread(shape: Shape, seed: int, profile: Profile, spreads: Sequence[float]) -> pd.DataFrame:
    """`normal` with scores of N(0, spread^2): relative L2 errors of fp8 dots, of Q's and of P's rounding alone."""
    made = inputs.normal(shape, seed)
    packed = cache.pack_fp8_scalar(made.rows, profile.encoding)
    recipes = {"Q and P": FP8_DOTS, "Q": Recipe("fp8", "bf16"), "P": Recipe("bf16", "fp8")}
    rows = []
    for spread in spreads:
        at = dataclasses.replace(made, softmax_scale=made.softmax_scale * spread)
        right = truth(at, packed, profile)
        for what, recipe in recipes.items():
            rows.append(dict(spread=float(spread), rounded=what, relative_l2=metrics.relative_l2(run(at, packed, profile, recipe)[0], right)))
    return pd.DataFrame(rows)


def errors_beside_published(shape: Shape, seed: int, profile: Profile, p_scale: float) -> pd.DataFrame:
    """What the published work reports of fp8's accuracy (MI325X, gfx942) beside the same quantity here: what, here, published.

    All against f32 attention over the same cache. Q's share is that of the squared error: 1 - (error without Q's
    rounding / error)^2. Published ranges and remarks are given as text.
    """
    fp8 = Recipe("fp8", "fp8", p_scale)
    here = {}
    for name in ("normal", "peaky", "dominant_key"):
        made = inputs.make(name, shape, seed)
        packed = cache.pack_fp8_scalar(made.rows, profile.encoding)
        right = truth(made, packed, profile)
        for what, recipe in {"bf16 dots": BF16_DOTS, "fp8 dots": fp8, "P alone": Recipe("bf16", "fp8", p_scale)}.items():
            here[name, what] = metrics.relative_l2(run(made, packed, profile, recipe)[0], right)
    table = published("accuracy_mi325x").query("metric == 'relative L2' and (p_scale == 128 or dots == 'bf16')")
    there = {("bf16 dots" if row.dots == "bf16" else "fp8 dots", row.input.split(",")[0].split("(")[0].split(" ")[0]): row.value for row in table.itertuples()}
    share = lambda name: 1 - (here[name, "P alone"] / here[name, "fp8 dots"]) ** 2
    as_percent = lambda value: " to ".join(f"{100 * float(v):.1f}" for v in str(value).split("..")) + "%"
    rows = [
        ("bf16 dots, normal", f"{here['normal', 'bf16 dots']:.2%}", as_percent(there["bf16 dots", "normal"])),
        ("fp8 dots, normal", f"{here['normal', 'fp8 dots']:.2%}", as_percent(there["fp8 dots", "normal"])),
        ("fp8 dots, normal: Q's share of the squared error", f"{share('normal'):.0%}", table[(table.dots == "fp8") & table.input.str.startswith("normal")].note.iloc[0]),
        ("fp8 dots, peaky", f"{here['peaky', 'fp8 dots']:.2%}", as_percent(there["fp8 dots", "peaky"])),
        ("fp8 dots, dominant_key", f"{here['dominant_key', 'fp8 dots']:.2%}", as_percent(there["fp8 dots", "one"])),
    ]
    return pd.DataFrame(rows, columns=["what", "here", "published"])


def lost_mass_in_the_kernel(arch: str | Profile, seed: int, margin: float = 7.0, p_scales: Sequence[float] = (), encodings: Sequence[str] = E4M3) -> pd.DataFrame:
    """The mean output of the emulated kernel on V all ones, where 1 is right whatever the softmax's weights are.

    At P scale 1, at the encoding's largest legal power of two, and at `p_scales`; lse_error is the largest absolute one.
    """
    made = inputs.ones(Shape(tokens=1, heads=4, qk_rope_head_dim=64, topk=2048, slots=2048), seed, margin)
    rows = []
    for e in encodings:
        profile = with_encoding(arch, e)
        packed = cache.pack_fp8_scalar(made.rows, e, scale=1.0)
        for s in sorted({1.0, profile.encoding.largest_p_scale, *map(float, p_scales)}):
            out, lse = run(made, packed, profile, Recipe("fp8", "fp8", s))
            rows.append(dict(encoding=e, p_scale=float(s), margin=margin, output=float(out.float().mean()),
                             lse_error=float((lse - math.log(1 + 2047 * math.exp(-margin))).abs().max())))
    return pd.DataFrame(rows)


def misread(made: Inputs, written: str, read: str, arch: str, headroom: float = 1.25) -> tuple[pd.DataFrame, torch.Tensor, torch.Tensor]:
    """A cache written in one encoding and read in the other: a table of what changes, the right output, the misread one.

    headroom: factor on the scale, so that no value takes the largest code, which is NaN in the other encoding and would
    give the mistake away. (Written as e4m3fn, negative zeros still do: 0x80 is e4m3fnuz's NaN.) The outputs are those
    rows that stay finite, which may be none.
    """
    scale = cache.pack_fp8_scalar(made.rows, written).scale
    assert scale is not None
    packed = cache.pack_fp8_scalar(made.rows, written, scale=headroom * scale)
    right, right_lse = run(made, packed, with_encoding(arch, written), FP8_DOTS)
    wrong_cache = cache.Packed(packed.buffer.view(torch.uint8), packed.scale)
    wrong, wrong_lse = run(made, wrong_cache, with_encoding(arch, read), FP8_DOTS)
    values, misread_values = (cache.unpack(packed.buffer.view(torch.uint8), packed.scale, e) for e in (written, read))
    usable = torch.isfinite(misread_values) & (values != 0)
    ratio = (misread_values / values)[usable]
    finite = torch.isfinite(wrong.float()).all(-1).flatten()
    a, b = right.float().flatten(0, 1)[finite], wrong.float().flatten(0, 1)[finite]
    rows = [
        ("cache values: misread / right, median", float(ratio.median())),
        ("cache values: share off by exactly that factor", float((ratio == ratio.median()).float().mean())),
        ("cache values: NaN by misreading", int(torch.isnan(misread_values).sum())),
        ("output rows: NaN", int((~finite).sum())),
        ("output: length of misread / right", float(b.norm() / a.norm())),
        ("output: cosine between the two", float((a * b).sum() / a.norm() / b.norm())),
        ("output: relative L2 error", metrics.relative_l2(b, a) if len(a) else math.nan),
        ("LSE: misread minus right, mean (nats)", float((wrong_lse - right_lse).flatten()[finite].mean())),
    ]
    return pd.DataFrame(rows, columns=["what", "value"]), a, b


def tail_loss(every: Sequence[Inputs], arch: str | Profile, encodings: Sequence[str] = E4M3) -> pd.DataFrame:
    """Relative L2 error of P's rounding alone, split-K off, at P scale 1 and at the largest legal power of two."""
    sweeps = [p_scale_sweep(every, arch, (1.0, get_format(e).largest_p_scale), encodings=(e,), q=q).assign(q=q) for e in encodings for q in ("bf16", "fp8")]
    return pd.concat(sweeps, ignore_index=True).drop(columns="kv_splits")


def beside_published(loss: pd.DataFrame, shape: Shape, seed: int, profile: Profile) -> pd.DataFrame:
    """dominant_key under fp8 dots, from tail_loss, beside the published errors: columns what, here, published.

    Where the tail is gone entirely the error is the part of the output's length that the tail carried, which follows
    from the rows' lengths. The last row shortens the tail's rows until they carry the published error's part.
    """
    there = published_errors().query("input == 'dominant_key'").set_index("p_scale").relative_l2
    here = loss[(loss.input == "dominant_key") & (loss.encoding == profile.encoding.name) & (loss.q == "fp8")].set_index("p_scale").relative_l2
    about = inputs.dominant_key(shape, seed).about
    rows = [("the tail's share of the softmax mass", about["tail_share"], math.nan), ("the part of the output's length that it carries", about["output_part"], math.nan)]
    rows += [(f"error at P scale {s:g}", here[s], there.get(s, math.nan)) for s in here.index]
    made = inputs.dominant_key(shape, seed, output_part=there[1.0])
    short = p_scale_sweep([made], profile, [1.0], encodings=[profile.encoding.name])
    rows.append((f"error at P scale 1, the tail carrying {there[1.0]:.1%} of the output", float(short.relative_l2.iloc[0]), there[1.0]))
    return pd.DataFrame(rows, columns=["what", "here", "published"])


def shifted_by_one_octave(sweep: pd.DataFrame) -> pd.DataFrame:
    """e4m3fnuz at S beside e4m3fn at 2S, for every S at which neither saturates; `equal` is to the bit."""
    by = sweep.set_index(["encoding", "p_scale"]).relative_l2
    rows = []
    for s in sorted(sweep.p_scale.unique()):
        if s <= formats.E4M3FNUZ.largest_p_scale and ("e4m3fn", 2 * s) in by.index:
            one, other = by["e4m3fnuz", s], by["e4m3fn", 2 * s]
            rows.append(dict(S=s, e4m3fnuz_at_S=one, e4m3fn_at_2S=other, equal=bool(one == other)))
    return pd.DataFrame(rows)


def published_errors() -> pd.DataFrame:
    """Published relative L2 errors of fp8 dots (MI325X, gfx942) by the names of our inputs: input, p_scale, relative_l2."""
    names = {"normal(0;1)": "normal", "peaky": "peaky", "one key scoring 9 above 2047 that carry a fifth of the output": "dominant_key"}
    table = published("accuracy_mi325x")
    table = table[(table.metric == "relative L2") & (table.dots == "fp8")]
    return pd.DataFrame(dict(input=table.input.map(names), p_scale=table.p_scale, relative_l2=table.value.astype(float))).reset_index(drop=True)


def published(name: str) -> pd.DataFrame:
    """A table of published figures from data/published/, as measured by their author (see the README there)."""
    return pd.read_csv(CAPTURES.parent / "published" / f"{name}.csv")
