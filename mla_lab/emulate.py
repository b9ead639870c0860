"""The kernel's numerics in vectorised torch, on any device and for any profile: the fast twin of kernels/sparse_mla.py.

What is the same to the bit: every rounding to fp8 and bf16, the order of the tiles, the running maximum that each
tile's P is taken against, the splits and their merge. What is not: the order of the f32 sums within one matrix
product, which no kernel promises either. Products of fp8 or bf16 values are exact in f32, so that a product in f32
here equals one in a matrix core that accumulates in f32, up to that order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mla_lab import cache, formats, lists
from mla_lab.arch import HEAD_BLOCK, Profile
from mla_lab.numerics import LOG2_E, LN_2, full_precision_matmul
from mla_lab.recipe import Recipe
from mla_lab.reference import widen_q

SMALLEST_AMAX = 2.0**-100
"""An all-zero Q block must not divide by zero; kernels/sparse_mla.py has the same constant."""

_BUDGET = 256 << 20


class Parts(NamedTuple):
    """Unmerged splits. acc [C, S, H, kv_lora_rank] f32: sum of p v, scales applied; max [C, S, H] f32: the running
    maximum of the scores in units of log2; sum [C, S, H] f32: sum of p = 2^(score - max). A split without a key: 0, -inf, 0.
    """

    acc: torch.Tensor
    max: torch.Tensor
    sum: torch.Tensor


def sparse_mla_parts(q, kv_buffer, kv_indptr, kv_indices, softmax_scale: float, *, profile: Profile, recipe: Recipe,
                     block_k: int, kv_splits: int, kv_scale=None, kv_lora_rank: int = 512, q_scale=None) -> Parts:
    """Arguments as in sparse_mla_fwd, already checked; negative indices are holes. Memory stays under about 1 GiB."""
    tokens, heads, width = q.shape
    packed = kv_scale is None and cache.is_packed(kv_buffer)
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
            q_rows, q_row_scale = _round_q(q[part], q_scale, profile, recipe, kv_lora_rank if packed else width)
            done = _tiles(q_rows, q_row_scale, pool, slot, softmax_scale, kv_scale if kv_buffer.dtype != torch.bfloat16 else None,
                          profile, recipe, block_k, kv_splits, kv_lora_rank, q_given=q_scale is not None)
            for whole, piece in zip(parts, done):
                whole[part] = piece.view(whole[part].shape)
    return parts


def _round_q(q, q_scale, profile, recipe, rounded_width):
    """Q's values as they enter the matrix product [c, H, R] f32, and the scale [c, H] that is left out of them.

    rounded_width: how many columns an fp8 Q rounds; a packed cache's rope columns are bf16, and so are Q's beside them
    (the scale is then that of the latent columns alone).
    """
    tokens, heads, width = q.shape
    fmt = profile.encoding
    if q_scale is not None:  # given in fp8: its codes are what the product gets
        return widen_q(q, q_scale.new_ones(1), fmt, torch.float32), q_scale.reshape(1, 1).expand(tokens, heads)
    wide = q.float()
    if recipe.q == "bf16":
        return wide, wide.new_ones(tokens, heads)
    blocks = -(-heads // HEAD_BLOCK)
    padded = torch.nn.functional.pad(wide[..., :rounded_width], (0, 0, 0, blocks * HEAD_BLOCK - heads)).reshape(tokens, blocks, HEAD_BLOCK * rounded_width)
    largest = padded.abs().nan_to_num(0.0, posinf=torch.inf).amax(-1, keepdim=True).clamp_min(SMALLEST_AMAX)
    # A tensor over a tensor: torch takes number / tensor, and on CUDA tensor / number, through a reciprocal, whose last
    # bit can move a code that lies on a tie.
    highest = largest.new_tensor(fmt.max_finite)
    codes = formats.encode(padded * (highest / largest), fmt)
    rounded = formats.decode(codes, fmt).view(tokens, blocks * HEAD_BLOCK, rounded_width)[:, :heads]
    rounded = torch.cat([rounded, wide[..., rounded_width:]], -1)
    return rounded, (largest / highest).expand(-1, -1, HEAD_BLOCK).reshape(tokens, -1)[:, :heads]


def _tiles(q, q_row_scale, pool, slot, softmax_scale, kv_scale, profile, recipe, block_k, kv_splits, kv_lora_rank, q_given):
    q = q.repeat_interleave(kv_splits, 0)
    score_scale = torch.tensor(softmax_scale * LOG2_E, dtype=torch.float32, device=q.device) * q_row_scale
    rope_scale = torch.tensor(softmax_scale * LOG2_E, dtype=torch.float32, device=q.device) * (q_row_scale if q_given else torch.ones_like(q_row_scale))
    value_scale = torch.ones(1, device=q.device)
    if kv_scale is not None:
        score_scale = score_scale * kv_scale
        value_scale = kv_scale.clone()
    p_scale = 1.0
    if recipe.p == "fp8":
        p_scale = profile.p_scale if recipe.p_scale is None else recipe.p_scale
        value_scale = value_scale / value_scale.new_tensor(p_scale)
    score_scale, rope_scale = (x.repeat_interleave(kv_splits, 0)[..., None] for x in (score_scale, rope_scale))

    batch, heads, _ = q.shape
    acc = torch.zeros(batch, heads, kv_lora_rank, device=q.device)
    running_max = torch.full((batch, heads, 1), -torch.inf, device=q.device)
    running_sum = torch.zeros(batch, heads, 1, device=q.device)
    for lo in range(0, slot.shape[1], block_k):
        at = pool.at[:, lo : lo + block_k]
        rows = pool.rows[at]
        if pool.scales is None:
            scores = torch.bmm(q, rows.mT) * score_scale
        else:
            scales = pool.scales[at].mT  # [batch, groups, keys]
            scores = _group_scores(q, rows, scales, score_scale, rope_scale)
        scores = scores.masked_fill((slot[:, lo : lo + block_k] < 0)[:, None, :], -torch.inf)
        new_max = torch.maximum(running_max, scores.amax(-1, keepdim=True))
        safe_max = new_max.masked_fill(new_max == -torch.inf, 0.0)  # no key yet: -inf - -inf would be NaN
        alpha = torch.exp2(running_max - safe_max)
        p = torch.exp2(scores - safe_max)
        running_sum = running_sum * alpha + p.sum(-1, keepdim=True)  # before P is rounded
        if pool.scales is None:
            acc = torch.baddbmm(acc * alpha, _round_p(p, p_scale, profile, recipe), rows[..., :kv_lora_rank])
        else:
            acc = acc * alpha + _group_values(p, rows, scales, p_scale, profile, recipe)
        running_max = new_max
    return acc * value_scale, running_max, running_sum


def _group_scores(q, rows, scales, score_scale, rope_scale):
    """Scores over a packed tile: each group's product times its keys' scales, then the rope columns' product."""
    latent = torch.zeros(1, device=q.device)
    for g in range(cache.GROUPS):
        columns = slice(g * cache.GROUP, (g + 1) * cache.GROUP)
        latent = latent + torch.bmm(q[..., columns], rows[..., columns].mT) * scales[:, g, None, :]
    rope = slice(cache.GROUP * cache.GROUPS, None)
    return latent * score_scale + torch.bmm(q[..., rope], rows[..., rope].mT) * rope_scale


def _group_values(p, rows, scales, p_scale, profile, recipe):
    """Sum of p v over a packed tile: per group, p times its keys' scales over the tile's largest is rounded, and that
    largest scale multiplies the product. So what is rounded is at most 1 (times the P scale) in every group."""
    parts = []
    for g in range(cache.GROUPS):
        columns = slice(g * cache.GROUP, (g + 1) * cache.GROUP)
        largest = scales[:, g].abs().nan_to_num(0.0, posinf=torch.inf).amax(-1)[:, None, None]
        share = scales[:, g, None, :] / torch.where(largest == 0, 1.0, largest)
        parts.append(torch.bmm(_round_p(p * share, p_scale, profile, recipe), rows[..., columns]) * largest)
    return torch.cat(parts, -1)


def _round_p(p, p_scale, profile, recipe):
    if recipe.p == "bf16":
        return p.bfloat16().float()
    return formats.decode(formats.encode(p * p_scale, profile.encoding), profile.encoding)


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
