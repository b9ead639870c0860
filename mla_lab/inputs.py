"""Inputs by name, each from a seed, and captured activations from a safetensors file.

An input is what attention gets before any rounding to fp8: queries, latent rows, and which rows each query gathers.
The random numbers are numpy's (PCG64), so that the same seed gives the same input on every machine.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open


@dataclass(frozen=True)
class Inputs:
    """q [C, H, R] bf16, rows [slots, R] f32 (bf16 values for a capture), kv_indptr [C + 1], kv_indices int32.

    R = kv_lora_rank + qk_rope_head_dim. about: what there is to say of this input, by name (plain numbers and strings).
    """

    name: str
    q: torch.Tensor
    rows: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    softmax_scale: float
    kv_lora_rank: int
    qk_rope_head_dim: int
    about: dict = field(default_factory=dict)

    def to(self, device) -> Inputs:
        moved = {n: getattr(self, n).to(device) for n in ("q", "rows", "kv_indptr", "kv_indices")}
        return Inputs(**{**self.__dict__, **moved})


@dataclass(frozen=True)
class Shape:
    """GLM-5.3-Flash at tensor parallelism 4 by default: 16 heads, width 512 without rope, top-k 2048."""

    tokens: int = 4
    heads: int = 16
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 0
    topk: int = 2048
    slots: int = 8192

    def __post_init__(self):
        for name in ("tokens", "heads", "kv_lora_rank", "topk", "slots"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: got {value!r}; accepted: an integer of 1 or more")
        if not isinstance(self.qk_rope_head_dim, int) or self.qk_rope_head_dim < 0:
            raise ValueError(f"qk_rope_head_dim: got {self.qk_rope_head_dim!r}; accepted: 0 or a positive integer")
        if self.topk > self.slots:
            raise ValueError(f"topk: got {self.topk} with {self.slots} slots; accepted: at most the number of slots")

    @property
    def width(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim


def normal(shape: Shape = Shape(), seed: int = 0) -> Inputs:
    """Everything N(0, 1), softmax_scale 1 / sqrt(R): scores are N(0, 1) too, and no key stands out."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((shape.tokens, shape.heads, shape.width), np.float32)
    rows = rng.standard_normal((shape.slots, shape.width), np.float32)
    return _build("normal", shape, q, rows, _lists(rng, shape))


def peaky(shape: Shape = Shape(), seed: int = 0, peaks: int = 8, margin: float = 6.0) -> Inputs:
    """`normal`, but `peaks` keys of each list score about `margin` nats above the rest.

    All queries share a component along one direction; the peak rows have the margin along it. With 8 peaks at 6 nats
    among 2048 they carry about six tenths of the softmax mass.
    """
    _check(margin=margin)
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((shape.tokens, shape.heads, shape.width), np.float32)
    rows = rng.standard_normal((shape.slots, shape.width), np.float32)
    direction = _unit(rng, shape.width)
    length = math.sqrt(shape.width)
    q += (length - q @ direction)[..., None] * direction
    rows -= (rows @ direction)[:, None] * direction
    lists = _lists(rng, shape)
    chosen = np.arange(min(peaks, shape.topk))  # the same slots for every query, as a sink or a system prompt would be
    for row in lists:
        rest = row[~np.isin(row, chosen)][: shape.topk - chosen.size]
        row[:] = rng.permutation(np.concatenate([chosen, rest]))
    rows[chosen] += margin * direction  # q . row * softmax_scale = length * margin / length
    return _build("peaky", shape, q, rows, lists, peaks=int(chosen.size), margin=margin)


def dominant_key(shape: Shape = Shape(), seed: int = 0, margin: float = 9.0, position: str = "first",
                 output_part: float | None = None) -> Inputs:
    """One key scores `margin` nats above topk - 1 others, which score alike and share one direction.

    The others' share of the softmax mass is w = (topk - 1) e^-margin / (1 + (topk - 1) e^-margin): a fifth for margin 9
    and 2047 others. Since their rows point the same way they add up, and carry that share of the output too; a kernel
    that loses them is wrong by w |their row| / |output|, `about["output_part"]`. All rows have the same length (an rms
    value of 1, or more where the margin is longer than such a row) unless output_part (0 to 1) asks for another length of
    theirs; theirs have a tenth of noise.
    position: where the key stands in each list: "first", "last" or "random"; behind the others it is not yet the running
    maximum when they are rounded, and nothing of them is lost.
    """
    _check(margin=margin)
    if output_part is not None and not 0 < output_part < 1:
        raise ValueError(f"output_part: got {output_part!r}; accepted: None, or a number between 0 and 1")
    if shape.topk < 2 or shape.width < 3:
        name, value, least = ("topk", shape.topk, 2) if shape.topk < 2 else ("kv_lora_rank", shape.kv_lora_rank, "4 (three directions are needed)")
        raise ValueError(f"{name}: got {value} for dominant_key; accepted: {least} or more")
    if position not in ("first", "last", "random"):
        raise ValueError(f"position: got {position!r}; accepted: 'first', 'last', 'random'")
    rng = np.random.default_rng(seed)
    length = math.sqrt(shape.width)
    frame = np.linalg.qr(rng.standard_normal((shape.width, 3)))[0].T.astype(np.float32)
    score, own, shared = frame  # the direction that scores, and those that the dominant row and the others point to
    q = rng.standard_normal((shape.tokens, shape.heads, shape.width), np.float32)
    rows = 0.1 * rng.standard_normal((shape.slots, shape.width), np.float32)
    for direction in frame:  # scores come from the score direction alone, up to the noise
        q -= (q @ direction)[..., None] * direction
        rows -= (rows @ direction)[:, None] * direction
    q += length * score
    share = (shape.topk - 1) * math.exp(-margin) / (1 + (shape.topk - 1) * math.exp(-margin))
    ratio = 1.0  # of the others' length to the dominant row's
    if output_part is not None:
        ratio = output_part / math.sqrt(1 - output_part**2) * (1 - share) / share
    longest = max(length, margin)
    rows[1:] += ratio * longest * shared
    rows[0] = math.sqrt(longest**2 - margin**2) * own + margin * score
    lists = _lists(rng, shape)
    for row in lists:
        others = row[row != 0][: shape.topk - 1]
        at = {"first": 0, "last": others.size, "random": int(rng.integers(others.size + 1))}[position]
        row[:] = np.insert(others, at, 0)
    part = share * ratio / math.hypot(share * ratio, 1 - share)
    return _build("dominant_key", shape, q, rows, lists, margin=margin, position=position, tail_share=share, output_part=part)


def ones(shape: Shape = Shape(), seed: int = 0, margin: float = 7.0) -> Inputs:
    """V all ones, one key at score 0 and the others at -margin: every output is 1, whatever the softmax weights are.

    Needs a rope part (the latent columns, which are V too, are all 1 and score alike): ValueError without one. All
    values are small powers of two times integers, so that a scale of 1 packs them exactly for margins up to 16 in eighths.
    """
    _check(margin=margin)
    if shape.qk_rope_head_dim < 1:
        raise ValueError(f"qk_rope_head_dim: got {shape.qk_rope_head_dim}; accepted: 1 or more (the scores come from the rope columns)")
    q = np.zeros((shape.tokens, shape.heads, shape.width), np.float32)
    rows = np.zeros((shape.slots, shape.width), np.float32)
    rows[:, : shape.kv_lora_rank] = 1.0
    q[..., shape.kv_lora_rank] = 1.0
    rows[1:, shape.kv_lora_rank] = -margin
    lists = np.tile(np.arange(shape.topk), (shape.tokens, 1))
    return _build("ones", shape, q, rows, lists, softmax_scale=1.0, margin=margin)


def heavy_tailed(shape: Shape = Shape(), seed: int = 0, outliers: float = 0.01, gain: float = 12.0) -> Inputs:
    """Latents with outlier channels: a share `outliers` of them (one at least) is `gain` times as large, and all values
    have Student's t distribution with 4 degrees of freedom (rms 1 before the gain).

    The MiniLM layers in data/inputs/ have largest values of 12 to 17 rms, and channels of 4 to 7 times the median one.
    softmax_scale keeps the scores' rms at 1.
    """
    _check(outliers=outliers, gain=gain)
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((shape.tokens, shape.heads, shape.width), np.float32)
    gains = np.ones(shape.width)
    gains[rng.permutation(shape.width)[: max(1, round(outliers * shape.width))]] = gain
    rows = (rng.standard_t(4, (shape.slots, shape.width)) / math.sqrt(2) * gains).astype(np.float32)
    return _build("heavy_tailed", shape, q, rows, _lists(rng, shape), softmax_scale=float(np.sum(gains**2) ** -0.5), outliers=outliers, gain=gain)


def sink(shape: Shape = Shape(), seed: int = 0, margin: float = 9.0, length: float = 2.0) -> Inputs:
    """`normal`, but slot 0, in every list's first place, scores `margin` nats above the mean and is a short row.

    So it takes most of the softmax mass (seven tenths for margin 9 and 2047 others) and adds little to the output, as
    the first token does in trained models. Its row is `length` long, the others sqrt(R); so every query has a component
    along it that is margin / length times its own length, which its rounding must carry beside the rest.
    """
    _check(margin=margin, length=length)
    if length == 0:
        raise ValueError("length: got 0; accepted: a finite number above 0")
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((shape.tokens, shape.heads, shape.width), np.float32)
    rows = rng.standard_normal((shape.slots, shape.width), np.float32)
    direction = _unit(rng, shape.width)
    q += (math.sqrt(shape.width) * margin / length - q @ direction)[..., None] * direction
    rows -= (rows @ direction)[:, None] * direction
    rows[0] = length * direction
    lists = _lists(rng, shape)
    for row in lists:
        row[:] = np.concatenate([[0], row[row != 0][: shape.topk - 1]])
    return _build("sink", shape, q, rows, lists, margin=margin, length=length)


def uniform(shape: Shape = Shape(), seed: int = 0, spread: float = 0.02) -> Inputs:
    """`normal` with scores of N(0, spread^2): every key weighs almost the same, and the output is nearly the rows' mean."""
    _check(spread=spread)
    made = normal(shape, seed)
    return Inputs("uniform", (made.q.float() * spread).bfloat16(), made.rows, made.kv_indptr, made.kv_indices, made.softmax_scale,
                  made.kv_lora_rank, made.qk_rope_head_dim, dict(spread=spread))


def _scaled(name, shape, seed, factor):
    made = normal(shape, seed)
    return Inputs(name, made.q, made.rows * factor, made.kv_indptr, made.kv_indices, made.softmax_scale / factor,
                  made.kv_lora_rank, made.qk_rope_head_dim, dict(factor=factor))


def large_scale(shape: Shape = Shape(), seed: int = 0, factor: float = 3e4) -> Inputs:
    """`normal` with latents `factor` times as large, far beyond fp8's range; softmax_scale keeps the scores N(0, 1)."""
    _check(factor=factor)
    return _scaled("large_scale", shape, seed, factor)


def small_scale(shape: Shape = Shape(), seed: int = 0, factor: float = 3e-5) -> Inputs:
    """`normal` with latents `factor` times as large, far below fp8's smallest subnormal; the scores are N(0, 1) still."""
    _check(factor=factor)
    return _scaled("small_scale", shape, seed, factor)


def indexed(shape: Shape = Shape(), seed: int = 0, memory: float = 0.95) -> Inputs:
    """Correlated keys, chosen as an indexer chooses them.

    Latents and queries drift along the text (neighbours' correlation: `memory`), a token's heads share half of their
    query, and each token gets the topk slots of the largest sum over heads of relu(score), in the text's order: the
    indexer's form in DeepSeek-V3.2, with the attention's own scores in place of its small keys. Neighbouring tokens
    share most of their keys: about["shared"] is the mean share.
    """
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not 0 <= memory < 1:
        raise ValueError(f"memory: got {memory!r}; accepted: a number from 0 to below 1")
    rng = np.random.default_rng(seed)

    def drift(steps, *rest):
        noise = rng.standard_normal((steps, *rest), np.float32)
        out, fresh = np.empty_like(noise), math.sqrt(1 - memory**2)
        out[0] = noise[0]
        for i in range(1, steps):
            out[i] = memory * out[i - 1] + fresh * noise[i]
        return out

    rows = drift(shape.slots, shape.width)
    q = math.sqrt(0.5) * (drift(shape.tokens, 1, shape.width) + drift(shape.tokens, shape.heads, shape.width))
    index = np.maximum(np.einsum("chr,sr->chs", q, rows, optimize=True), 0).sum(1)
    lists = np.sort(np.argsort(-index, axis=1, kind="stable")[:, : shape.topk], axis=1)
    shared = [np.intersect1d(a, b).size / shape.topk for a, b in zip(lists, lists[1:])]
    return _build("indexed", shape, q, rows, lists, memory=memory, shared=float(np.mean(shared)) if shared else 1.0)


SYNTHETIC = {f.__name__: f for f in (normal, peaky, dominant_key, ones, heavy_tailed, sink, uniform, large_scale, small_scale, indexed)}


def make(name: str, shape: Shape = Shape(), seed: int = 0, **options) -> Inputs:
    """A synthetic input by its name. ValueError for another name."""
    if name not in SYNTHETIC:
        raise ValueError(f"input: got {name!r}; accepted: {', '.join(SYNTHETIC)}, or a safetensors file for load_capture")
    return SYNTHETIC[name](shape, seed, **options)


def capture_layers(path: str | Path) -> list[int]:
    """Numbers of the layers in a capture."""
    with _open(path) as file:
        return sorted(map(int, json.loads(file.metadata()["layers"])))


def load_capture(path: str | Path, layer: int) -> Inputs:
    """One layer of captured activations, the latent columns zero-padded to the next power of two.

    The file (mla_lab.capture.save writes it) holds, for each layer n, `n.q` [C, H, width] and `n.kv` [slots, width], the
    lists as `n.indptr` and `n.indices` (or `indptr` and `indices`, one for all layers), and what it is in its metadata.
    Raises ValueError for a missing file, one that is no capture, or another layer.
    """
    layers = capture_layers(path)
    if layer not in layers:
        raise ValueError(f"layer: got {layer!r}; accepted for {Path(path).name}: {', '.join(map(str, layers))}")
    with _open(path) as file:
        metadata, there = file.metadata(), set(file.keys())
        q, kv = file.get_tensor(f"{layer}.q"), file.get_tensor(f"{layer}.kv")
        indptr, indices = (file.get_tensor(f"{layer}.{name}" if f"{layer}.{name}" in there else name) for name in ("indptr", "indices"))
    entry = json.loads(metadata["layers"])[str(layer)]
    rope = entry["qk_rope_head_dim"]
    width = kv.shape[1] - rope
    rank = 1 << (width - 1).bit_length()
    q, kv = (torch.cat([torch.nn.functional.pad(x[..., :width], (0, rank - width)), x[..., width:]], -1).contiguous() for x in (q, kv))
    about = {"layer": layer, "kind": entry["kind"], "model": metadata["model"], "text": metadata["text"], "width": width}
    return Inputs(f"{Path(path).stem} layer {layer}", q, kv.float(), indptr, indices, entry["softmax_scale"], rank, rope, about)


def _open(path):
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"capture: got {str(path)!r}, which is no file; accepted: a safetensors file as mla-lab capture writes it")
    try:
        file = safe_open(path, "pt")
        metadata = file.metadata() or {}
    except Exception as error:
        raise ValueError(f"capture: got {str(path)!r}, which is no safetensors file ({error})") from None
    if "layers" not in metadata:
        raise ValueError(f"capture: got {str(path)!r}, whose metadata names no layers; accepted: a file as mla-lab capture writes it")
    return file


def _lists(rng, shape):
    return np.stack([rng.permutation(shape.slots)[: shape.topk] for _ in range(shape.tokens)])


def _unit(rng, width):
    vector = rng.standard_normal(width).astype(np.float32)
    return vector / np.linalg.norm(vector)


def _check(**numbers):
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{name}: got {value!r}; accepted: a finite number of 0 or more")


def _build(name, shape, q, rows, lists, softmax_scale=None, **about):
    return Inputs(
        name, torch.from_numpy(q).bfloat16(), torch.from_numpy(rows),
        torch.arange(shape.tokens + 1, dtype=torch.int32) * shape.topk, torch.from_numpy(lists.astype(np.int32).reshape(-1)),
        shape.width**-0.5 if softmax_scale is None else softmax_scale, shape.kv_lora_rank, shape.qk_rope_head_dim, about,
    )
