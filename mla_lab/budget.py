"""The error of a recipe, taken apart: what each rounding costs alone, what leaving it out would save, what theory says.

Everything is measured against f32 attention over rows that nothing has rounded, so that the cache's own rounding is
part of the account. Theory takes each value's rounding error as independent of every other's and uniform over its
step, which has the variance step^2 / 12 (Bennett 1948), and carries it to the output to first order:

    Q   an error of column i moves every score by softmax_scale k_i, and the output by softmax_scale Cov_p(k_i, v)
    K   an error of key k's column i moves that key's score by softmax_scale q_i, and the output by p (v - out) times that
    V   an error of key k's value moves the output by p times it
    P   an error of key k's p moves the output by v times it (the softmax's sum is taken before the rounding)

where Cov_p is the covariance under the softmax's weights. A step of e4m3 is an eighth of its octave's lower end, so that
a value's relative error is at most 2^-4, its rms at most 2^-4 / sqrt(3) = 3.6%, and 2.4% over values that are spread
evenly over an octave. Q's errors average over the columns, K's over columns and keys, V's and P's over keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from tqdm import tqdm

from mla_lab import cache, emulate, metrics, reference
from mla_lab.arch import HEAD_BLOCK, Profile
from mla_lab.formats import Fp8Format, decode, encode
from mla_lab.inputs import Inputs
from mla_lab.numerics import full_precision_matmul
from mla_lab.recipe import Recipe

OPERANDS = ("Q", "K", "V", "K and V", "P", "sums", "output")
ADDED = ("Q", "K and V", "P", "output")
"""Those that make up the whole. K and V are the same codes, so that their errors are not independent of each other."""


def error_budget(every: Sequence[Inputs], profile: Profile, recipes: Mapping[str, Recipe], kv_splits: int = 1) -> pd.DataFrame:
    """Relative L2 errors of the emulated kernel over an fp8_scalar cache, with parts of its roundings.

    Columns: input, recipe, operand, alone (this rounding only), left_out (all others), predicted (by theory, alone).
    Operands: OPERANDS, "whole" (alone: all roundings; predicted: the root of the sum of squares of ADDED's predictions)
    and "root of squares" (alone: that of ADDED's alone). "sums" are the shorter sums of recipes that have them: alone is
    the distance between the output with and without them. A Hadamard recipe's theory is left out (NaN).
    """
    rows = []
    for made in tqdm(every, desc="error budget", leave=False):
        truth = reference.sparse_mla(made.q, made.rows.float(), made.kv_indptr, made.kv_indices, made.softmax_scale, kv_lora_rank=made.kv_lora_rank, arch=profile)[0]
        for name, recipe in recipes.items():
            unrounded = cache.rotate(made.rows, made.kv_lora_rank) if recipe.hadamard else made.rows
            packed = cache.pack_fp8_scalar(unrounded, profile.encoding)
            predicted = {} if recipe.hadamard else predict(made, packed, profile, recipe, truth)

            def error(exact=(), rounded_output=True, recipe=recipe):
                parts = emulate.sparse_mla_parts(
                    made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, profile=profile, recipe=recipe,
                    block_k=profile.launch(recipe.dots).block_k, kv_splits=kv_splits, kv_scale=packed.scale, kv_lora_rank=made.kv_lora_rank,
                    exact=exact, exact_rows=unrounded.float())
                out = emulate.merge(parts)[0]
                return out.bfloat16() if rounded_output else out

            def off(out):
                return metrics.relative_l2(out, truth)

            whole = error()
            alone, left_out = {}, {}
            for operand, parts in {"Q": "q", "K": "k", "V": "v", "K and V": "kv", "P": "p"}.items():
                alone[operand] = off(error(set("qkvp") - set(parts), rounded_output=False))
                left_out[operand] = off(error(set(parts)))
            alone["output"], left_out["output"] = off(truth.bfloat16()), off(error(rounded_output=False))
            if recipe.accumulate != "f32":
                plain = error(recipe=dataclasses.replace(recipe, accumulate="f32"))
                alone["sums"], left_out["sums"] = metrics.relative_l2(whole, plain), off(plain)
            for operand in alone:
                rows.append(dict(input=made.name, recipe=name, operand=operand, alone=alone[operand], left_out=left_out[operand], predicted=predicted.get(operand, math.nan)))
            squares = lambda parts: math.sqrt(sum(parts.get(o, math.nan) ** 2 for o in ADDED))
            rows.append(dict(input=made.name, recipe=name, operand="root of squares", alone=squares(alone), left_out=math.nan, predicted=math.nan))
            rows.append(dict(input=made.name, recipe=name, operand="whole", alone=off(whole), left_out=math.nan, predicted=squares(predicted)))
    return pd.DataFrame(rows)


def predict(made: Inputs, packed: cache.Packed, profile: Profile, recipe: Recipe, truth: torch.Tensor) -> dict[str, float]:
    """What theory says of each rounding's relative L2 error (see above), over a bf16 or fp8_scalar cache of made.rows.

    P's scale per tile is taken as if every tile held the list's largest p. Negative indices (holes) must not be there.
    """
    rows, rank, scale = made.rows.float(), made.kv_lora_rank, made.softmax_scale
    fmt = profile.encoding
    row_scale = 1.0 if packed.scale is None else packed.scale
    rows_variance = variance(rows / row_scale, "bf16" if packed.scale is None else "fp8", fmt) * row_scale**2
    q = made.q.float()
    q_variance = _q_variance(q, recipe, fmt)
    p_scale = profile.p_scale_of(recipe)
    one = torch.tensor([p_scale])
    of_one = 0.0 if recipe.p == "bf16" else float((decode(encode(one, fmt), fmt) / p_scale - 1).square())
    squares = dict.fromkeys(("Q", "K", "V", "P"), 0.0)
    with full_precision_matmul():
        for token, (lo, hi) in enumerate(zip(made.kv_indptr[:-1].tolist(), made.kv_indptr[1:].tolist())):
            slots = made.kv_indices[lo:hi].long()
            k, v, k_variance = rows[slots], rows[slots, :rank], rows_variance[slots]
            scores = (q[token] @ k.T) * scale
            p = torch.exp(scores - scores.amax(-1, keepdim=True))
            total = p.sum(-1, keepdim=True)
            weight, out = p / total, truth[token].float()  # [H, n], [H, rank]
            covariance = (weight[:, None, :] * k.T) @ v - (weight @ k)[..., None] * out[:, None, :]  # [H, R, rank]
            squares["Q"] += float((q_variance[token] * scale**2 * covariance.square().sum(-1)).sum())
            score_variance = (q[token].square() @ k_variance.T) * scale**2
            distance = v.square().sum(-1) - 2 * out @ v.T + out.square().sum(-1, keepdim=True)  # |v - out|^2 [H, n]
            squares["K"] += float((weight.square() * score_variance * distance).sum())
            squares["V"] += float((weight.square() @ k_variance[:, :rank].sum(-1)).sum())
            p_variance = variance(p * p_scale, recipe.p, fmt) / p_scale**2
            # The largest p is 1, known beforehand, and a power of two keeps it exact.
            p_variance = torch.where(p == 1, of_one, p_variance)
            squares["P"] += float((p_variance / total.square() * v.square().sum(-1)).sum())
    norm = float(truth.double().square().sum())
    found = {name: math.sqrt(square / norm) for name, square in squares.items()}
    found["K and V"] = math.hypot(found["K"], found["V"])
    found["output"] = math.sqrt(float(variance(truth, "bf16", fmt).double().sum()) / norm)
    return found


def _q_variance(q, recipe, fmt):
    """[C, H, R]: the variance of Q's rounding, by the scale that its head block, head or tensor shares."""
    if recipe.q == "bf16":
        return torch.zeros_like(q)
    largest = q.abs().amax(-1, keepdim=True)
    if recipe.q_granularity == "tensor":
        largest = largest.amax().expand_as(largest)
    elif recipe.q_granularity == "head_block":
        largest = torch.cat([block.amax(1, keepdim=True).expand_as(block) for block in largest.split(HEAD_BLOCK, 1)], 1)
    step = largest.clamp_min(emulate.SMALLEST_AMAX) / fmt.max_finite
    return variance(q / step, recipe.q, fmt) * step.square()


def variance(x: torch.Tensor, kind: str, fmt: Fp8Format) -> torch.Tensor:
    """The expected square of the rounding error of x: step^2 / 12, and x^2 where x becomes 0. kind: "bf16", "fp8", "fp8x2".

    A second term rounds a remainder r that is uniform over the first one's step: r lies in [step/4, step/2) half of the
    time, in the octave below a quarter, and so on, each with steps of an eighth of its lower end; together (step/32)^2
    4/7, over 12, but not less than what the smallest subnormal leaves.
    """
    x = x.float()
    exponent = torch.frexp(x).exponent - 1
    if kind == "bf16":
        return torch.where(x == 0, 0.0, torch.exp2(2.0 * (exponent - 7)) / 12)
    step = torch.exp2(exponent.clamp_min(1 - fmt.bias).float() - fmt.mantissa_bits)
    first = torch.where(x.abs() <= fmt.flush_threshold, x.square(), step.square() / 12)
    if kind == "fp8":
        return first
    second = ((step / 32).square() * 4 / 7).clamp_min(fmt.smallest_subnormal**2) / 12
    return torch.minimum(first, second)
