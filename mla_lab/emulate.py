"""The kernel's numerics in vectorised torch, on any device and for any profile: the fast twin of kernels/sparse_mla.py.

What is the same to the bit: every rounding to fp8 and bf16, the order of the tiles, the running maximum that each
tile's P is taken against, the splits and their merge. What is not: the order of the f32 sums within one matrix
product, which no kernel promises either. Products of fp8 or bf16 values are exact in f32, so that a product in f32
here equals one in a matrix core that accumulates in f32, up to that order.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import NamedTuple

import torch

from mla_lab import cache, formats, lists
from mla_lab.arch import HEAD_BLOCK, Profile
from mla_lab.numerics import LN_2, LOG2_E, full_precision_matmul, hadamard, short_sum
from mla_lab.recipe import Recipe
from mla_lab.reference import widen_q

SMALLEST_AMAX = 2.0**-100
"""An all-zero Q block must not divide by zero; kernels/sparse_mla.py has the same constant."""

_BUDGET = 256 << 20

OPERANDS = ("q", "k", "v", "p")


class Parts(NamedTuple):
    """Unmerged splits. acc [C, S, H, kv_lora_rank] f32: sum of p v, scales applied; max [C, S, H] f32: the running
    maximum of the scores in units of log2; sum [C, S, H] f32: sum of p = 2^(score - max). A split without a key: 0, -inf, 0.
    """

    acc: torch.Tensor
    max: torch.Tensor
    sum: torch.Tensor


def sparse_mla_parts(q, kv_buffer, kv_indptr, kv_indices, softmax_scale: float, *, profile: Profile, recipe: Recipe,
                     block_k: int, kv_splits: int, kv_scale=None, kv_lora_rank: int = 512, q_scale=None,
                     exact: Collection[str] = (), exact_rows: torch.Tensor | None = None) -> Parts:
    """Arguments as in sparse_mla_fwd, already checked; negative indices are holes. Memory stays under about 1 GiB.

    exact: operands ("q", "k", "v", "p") that enter their product unrounded, in f32, to take an error apart. "k" and "v"
    come from exact_rows [slots, R] f32 then, the rows that the cache was packed from (rotated, under a Hadamard recipe).
    """
    tokens, heads, width = q.shape
    packed = kv_scale is None and cache.is_packed(kv_buffer)
    if kv_buffer.dtype == torch.bfloat16:
        kv_scale = None
    arithmetic = _Arithmetic(profile, recipe, frozenset(exact))
    starts, lengths = kv_indptr[:-1].long(), kv_indptr.long().diff()
    per_split = -(-(-(-lengths // block_k)) // kv_splits) * block_k  # whole tiles, as many in each split but the last
    first = per_split[:, None] * torch.arange(kv_splits, device=q.device)
    split_lengths = torch.minimum(lengths[:, None] - first, per_split[:, None]).clamp_min(0)
    split_starts = starts[:, None] + first

    parts = Parts(
        torch.zeros(tokens, kv_splits, heads, kv_lora_rank, device=q.device),
        torch.full((tokens, kv_splits, heads), -torch.inf, device=q.device),
        torch.zeros(tokens, kv_splits, heads, device=q.device),
    )
    per_token = max(1, int(lengths.max()) if tokens else 1) * width * 4 + kv_splits * heads * (width + 2 * kv_lora_rank) * 4
    step = max(1, _BUDGET // per_token)
    with full_precision_matmul():
        for lo in range(0, tokens, step):
            part = slice(lo, lo + step)
            slot = lists.padded(split_starts[part].flatten(), split_lengths[part].flatten(), kv_indices, block_k)
            pool = lists.gather_pool(kv_buffer, slot, profile.encoding, packed=packed)
            k = v = (pool, kv_scale)
            if {"k", "v"} & arithmetic.exact:
                assert exact_rows is not None
                unrounded = lists.gather_pool(exact_rows, slot, profile.encoding)
                if packed:  # keeps the rope columns' product apart, whose Q has no scale
                    unrounded = unrounded._replace(scales=unrounded.rows.new_ones(len(unrounded.rows), cache.GROUPS))
                k = (unrounded, None) if "k" in exact else k
                v = (unrounded, None) if "v" in exact else v
            q_terms, q_row_scale = _q_terms(q[part], q_scale, arithmetic, kv_lora_rank, kv_lora_rank if packed else width)
            done = _tiles(q_terms, q_row_scale, k, v, slot, softmax_scale, arithmetic, block_k, kv_splits, kv_lora_rank, q_given=q_scale is not None)
            for whole, piece in zip(parts, done):
                whole[part] = piece.view(whole[part].shape)
    if recipe.hadamard:
        parts = parts._replace(acc=hadamard(parts.acc))
    return parts


class _Arithmetic:
    """How operands are rounded and products are summed under one profile and recipe."""

    def __init__(self, profile: Profile, recipe: Recipe, exact: frozenset[str]):
        self.recipe, self.exact, self.encoding = recipe, exact, profile.encoding
        self.q = "bf16" if "q" in exact else recipe.q
        self.p = "exact" if "p" in exact else recipe.p
        self.p_scale = profile.p_scale_of(recipe) if self.p.startswith("fp8") else 1.0
        # A fp8 unit multiplies codes only.
        self.short_scores = recipe.accumulate != "f32" and self.q.startswith("fp8") and "k" not in exact
        self.short_values = recipe.accumulate != "f32" and self.p.startswith("fp8") and "v" not in exact

    def terms(self, x: torch.Tensor, kind: str) -> list[torch.Tensor]:
        """x [...] f32 as the operands that stand for it: one, or a high and a low one."""
        high = formats.decode(formats.encode(x, self.encoding), self.encoding)
        if kind == "fp8":
            return [high]
        return [high, formats.decode(formats.encode(x - high, self.encoding), self.encoding)]

    def p_terms(self, p: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor | float]:
        """A tile's P [batch, H, keys] as operands, and what their product is multiplied by (the P scale aside)."""
        if self.p == "exact":
            return [p], 1.0
        if self.p == "bf16":
            return [p.bfloat16().float()], 1.0
        unscale: torch.Tensor | float = 1.0
        x = p * self.p_scale
        if self.recipe.p_scale == "tile":
            mantissa, exponent = torch.frexp(p.amax(-1, keepdim=True))
            exponent = exponent - (mantissa == 0.5).int()  # of the smallest power of two that is not below the largest p
            exponent = exponent.clamp(-64, 64)
            x, unscale = torch.ldexp(x, -exponent), torch.ldexp(torch.ones_like(mantissa), exponent)
        return self.terms(x, self.p), unscale

    def scores(self, q_terms: list[torch.Tensor], k: torch.Tensor, codes: bool = True) -> torch.Tensor:
        """q k^T [batch, H, keys], q's terms [batch, H, R], k [batch, keys, R]. codes: both are fp8's, if Q is."""
        if not (self.short_scores and codes):
            return functools.reduce(torch.add, (torch.bmm(q, k.mT) for q in q_terms))
        step = _PROMOTED_COLUMNS if self.recipe.accumulate == "fp22_promoted" else k.shape[-1]
        total = k.new_zeros(k.shape[0], q_terms[0].shape[1], k.shape[1])
        for lo in range(0, k.shape[-1], step):
            columns = slice(lo, lo + step)
            part = torch.zeros_like(total)
            for q in q_terms:
                part = short_sum(part, q[..., columns], k[..., columns], 1 - self.encoding.bias)
            total = total + part
        return total

    def add_values(self, acc: torch.Tensor, p: torch.Tensor, v: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        """acc + scale * p v: p [batch, H, keys] before its rounding, v [batch, keys, columns]."""
        terms, unscale = self.p_terms(p)
        plain = isinstance(unscale, float) and isinstance(scale, float)
        if not self.short_values:
            if plain:
                for term in terms:
                    acc = torch.baddbmm(acc, term, v)
                return acc
            return acc + sum(torch.bmm(term, v) for term in terms) * (unscale * scale)
        in_unit = plain and self.recipe.accumulate == "fp22"
        part = acc if in_unit else torch.zeros_like(acc)
        for term in terms:
            part = short_sum(part, term, v.mT, 1 - self.encoding.bias)
        return part if in_unit else acc + part * (unscale * scale)


_PROMOTED_COLUMNS = 128


def _q_terms(q, q_scale, arithmetic, kv_lora_rank, rounded_width):
    """Q's operands, each [c, H, R] f32, and the scale [c, H] that is left out of them.

    rounded_width: how many columns an fp8 Q rounds; a packed cache's rope columns are bf16, and so are Q's beside them
    (the scale is then that of the latent columns alone).
    """
    tokens, heads, _ = q.shape
    recipe, fmt = arithmetic.recipe, arithmetic.encoding
    if q_scale is not None:  # given in fp8: its codes are what the product gets
        return [widen_q(q, q_scale.new_ones(1), fmt, torch.float32)], q_scale.reshape(1, 1).expand(tokens, heads)
    wide = q.float()
    if recipe.hadamard:
        wide = torch.cat([hadamard(wide[..., :kv_lora_rank]), wide[..., kv_lora_rank:]], -1)
    if arithmetic.q == "bf16":
        return [wide if "q" in arithmetic.exact else wide.bfloat16().float()], wide.new_ones(tokens, heads)
    largest = wide[..., :rounded_width].abs().nan_to_num(0.0, posinf=torch.inf).amax(-1)
    if recipe.q_granularity == "head_block":
        blocks = -(-heads // HEAD_BLOCK)
        padded = torch.nn.functional.pad(largest, (0, blocks * HEAD_BLOCK - heads)).view(tokens, blocks, HEAD_BLOCK)
        largest = padded.amax(-1, keepdim=True).expand_as(padded).reshape(tokens, -1)[:, :heads]
    elif recipe.q_granularity == "tensor":
        largest = largest.amax().expand_as(largest)
    largest = largest.clamp_min(SMALLEST_AMAX)
    # A tensor over a tensor: torch takes number / tensor, and on CUDA tensor / number, through a reciprocal, whose last
    # bit can move a code that lies on a tie.
    highest = largest.new_tensor(fmt.max_finite)
    terms = arithmetic.terms(wide[..., :rounded_width] * (highest / largest)[..., None], arithmetic.q)
    rope = wide[..., rounded_width:]
    terms = [torch.cat([term, rope if i == 0 else torch.zeros_like(rope)], -1) for i, term in enumerate(terms)]
    return terms, largest / highest


def _tiles(q_terms, q_row_scale, k, v, slot, softmax_scale, arithmetic, block_k, kv_splits, kv_lora_rank, q_given):
    """Parts of `slot`'s lists. k, v: (pool, per-tensor scale or None) that each side's rows come from; both share `at`."""
    q_terms = [q.repeat_interleave(kv_splits, 0) for q in q_terms]
    device = q_row_scale.device
    score_scale = torch.tensor(softmax_scale * LOG2_E, dtype=torch.float32, device=device) * q_row_scale
    rope_scale = torch.tensor(softmax_scale * LOG2_E, dtype=torch.float32, device=device) * (q_row_scale if q_given else torch.ones_like(q_row_scale))
    (k_pool, k_scale), (v_pool, v_scale) = k, v
    if k_scale is not None:
        score_scale = score_scale * k_scale
    value_scale = torch.ones(1, device=device) if v_scale is None else v_scale.clone()
    value_scale = value_scale / value_scale.new_tensor(arithmetic.p_scale)
    score_scale, rope_scale = (x.repeat_interleave(kv_splits, 0)[..., None] for x in (score_scale, rope_scale))

    batch, heads, _ = q_terms[0].shape
    acc = torch.zeros(batch, heads, kv_lora_rank, device=device)
    running_max = torch.full((batch, heads, 1), -torch.inf, device=device)
    running_sum = torch.zeros(batch, heads, 1, device=device)
    for lo in range(0, slot.shape[1], block_k):
        at = k_pool.at[:, lo : lo + block_k]
        k_rows = k_pool.rows[at]
        v_rows = k_rows if v_pool is k_pool else v_pool.rows[at]
        if k_pool.scales is None:
            scores = arithmetic.scores(q_terms, k_rows) * score_scale
        else:
            scores = _group_scores(q_terms, k_rows, k_pool.scales[at].mT, score_scale, rope_scale, arithmetic)
        scores = scores.masked_fill((slot[:, lo : lo + block_k] < 0)[:, None, :], -torch.inf)
        new_max = torch.maximum(running_max, scores.amax(-1, keepdim=True))
        safe_max = new_max.masked_fill(new_max == -torch.inf, 0.0)  # no key yet: -inf - -inf would be NaN
        alpha = torch.exp2(running_max - safe_max)
        p = torch.exp2(scores - safe_max)
        running_sum = running_sum * alpha + p.sum(-1, keepdim=True)  # before P is rounded
        if v_pool.scales is None:
            acc = arithmetic.add_values(acc * alpha, p, v_rows[..., :kv_lora_rank])
        else:
            acc = _add_group_values(acc * alpha, p, v_rows, v_pool.scales[at].mT, arithmetic)
        running_max = new_max
    return acc * value_scale, running_max, running_sum


def _group_scores(q_terms, rows, scales, score_scale, rope_scale, arithmetic):
    """Scores over a packed tile: each group's product times its keys' scales, then the rope columns' product.

    scales [batch, groups, keys].
    """
    latent = torch.zeros(1, device=rows.device)
    for g in range(cache.GROUPS):
        columns = slice(g * cache.GROUP, (g + 1) * cache.GROUP)
        latent = latent + arithmetic.scores([q[..., columns] for q in q_terms], rows[..., columns]) * scales[:, g, None, :]
    rope = slice(cache.GROUP * cache.GROUPS, None)
    return latent * score_scale + arithmetic.scores([q_terms[0][..., rope]], rows[..., rope], codes=False) * rope_scale


def _add_group_values(acc, p, rows, scales, arithmetic):
    """acc + the sum of p v over a packed tile: per group, p times its keys' scales over the tile's largest is rounded,
    and that largest scale multiplies the product. So what is rounded is at most 1 (times the P scale) in every group."""
    parts = []
    for g in range(cache.GROUPS):
        columns = slice(g * cache.GROUP, (g + 1) * cache.GROUP)
        largest = scales[:, g].abs().nan_to_num(0.0, posinf=torch.inf).amax(-1)[:, None, None]
        share = scales[:, g, None, :] / torch.where(largest == 0, 1.0, largest)
        parts.append(arithmetic.add_values(acc[..., columns], p * share, rows[..., columns], largest))
    return torch.cat(parts, -1)


def merge(parts: Parts, attn_sink: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """out [C, H, kv_lora_rank] f32 and natural-log LSE [C, H] f32 of all splits, in the order of the merge kernel.

    attn_sink [H] f32, natural logarithm: one more key without a value.
    """
    largest = parts.max.amax(1, keepdim=True)
    safe = largest.masked_fill(largest == -torch.inf, 0.0)
    weight = torch.exp2(parts.max - safe)
    total = (parts.sum * weight).sum(1)
    acc = (parts.acc * weight[..., None]).sum(1)
    largest, safe = largest[:, 0], safe[:, 0]
    out = acc / torch.where(total == 0, 1.0, total)[..., None]
    log2_sum = torch.where(total == 0, -torch.inf, safe + torch.log2(total))
    lse = log2_sum * LN_2
    if attn_sink is not None:
        with_sink = torch.logaddexp(lse, attn_sink[None, :])
        out = out * torch.where(with_sink == -torch.inf, 0.0, torch.exp(lse - with_sink))[..., None]
        lse = with_sink
    return out, lse
