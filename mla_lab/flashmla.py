"""The FlashMLA face: sparse prefill as users of `flash_mla_sparse_fwd` call it, on top of sparse_mla_fwd."""

from __future__ import annotations

import math

import torch

from mla_lab import cache
from mla_lab.attention import merge_parts, sparse_mla_fwd
from mla_lab.numerics import LN_2


def to_lists(indices: torch.Tensor, slots: int, topk_length: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The padded form that other libraries use to (kv_indptr [T + 1], kv_indices [T * topk]), for has_invalid=True.

    indices: [T, topk] or [T, 1, topk] int32 or int64; negative ones, and those at or beyond `slots`, are holes. topk_length:
    [T] integers, how many of each row count. On the device and without a synchronization: holes stay in the lists as
    -1, and every list has topk entries. Raises ValueError for other shapes or types.
    """
    if indices.dim() == 3 and indices.shape[1] == 1:
        indices = indices[:, 0]
    if indices.dim() != 2:
        raise ValueError(f"indices: got shape {tuple(indices.shape)}; accepted: [tokens, topk] or [tokens, 1, topk]")
    if indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"indices: got {indices.dtype}; accepted: torch.int32, torch.int64")
    tokens, topk = indices.shape
    if tokens * topk >= 2**31:
        raise ValueError(f"indices: got {tokens} x {topk}; accepted: fewer than 2^31 in one call (kv_indptr is int32)")
    valid = (indices >= 0) & (indices < slots)
    if topk_length is not None:
        if tuple(topk_length.shape) != (tokens,) or topk_length.is_floating_point() or topk_length.device != indices.device:
            got = f"{topk_length.dtype} of shape {tuple(topk_length.shape)} on {topk_length.device}"
            raise ValueError(f"topk_length: got {got}; accepted: integers of shape ({tokens},) on {indices.device}")
        valid &= torch.arange(topk, device=indices.device) < topk_length[:, None]
    indptr = torch.arange(tokens + 1, dtype=torch.int32, device=indices.device) * topk
    return indptr, torch.where(valid, indices, -1).flatten().to(torch.int32)


def flash_mla_sparse_fwd(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int = 512,
                         attn_sink: torch.Tensor | None = None, topk_length: torch.Tensor | None = None, *, arch=None, backend="auto"):
    """(out [T, H, d_v] bf16, max_logits [T, H] f32, lse [T, H] f32), as FlashMLA's function of this name returns them.

    q: [T, H, Dqk] bf16. kv: [S, 1, Dqk] bf16. indices, topk_length: as for to_lists. attn_sink: [H] f32. arch, backend:
    as in sparse_mla_fwd (ours). lse is the natural logarithm and, like max_logits (which includes sm_scale), is taken
    before the sink; a row without a valid key has zeros, lse +inf and max_logits -inf. The sink multiplies the output by
    exp(lse) / (exp(lse) + exp(sink)). Raises ValueError as sparse_mla_fwd does, and for a kv of another shape.
    """
    if kv.dim() != 3 or kv.shape[1] != 1 or q.dim() != 3 or kv.shape[2] != q.shape[2]:
        raise ValueError(f"kv: got shape {tuple(kv.shape)} with q of shape {tuple(q.shape)}; accepted: [slots, 1, Dqk] with [tokens, heads, Dqk]")
    if indices.shape[0] != q.shape[0]:
        raise ValueError(f"indices: got {indices.shape[0]} rows for {q.shape[0]} query tokens; accepted: one each")
    indptr, flat = to_lists(indices, cache.slots(kv), topk_length)
    if attn_sink is not None and (attn_sink.dtype != torch.float32 or tuple(attn_sink.shape) != (q.shape[1],)):
        raise ValueError(f"attn_sink: got {attn_sink.dtype} of shape {tuple(attn_sink.shape)}; accepted: float32 of shape ({q.shape[1]},)")
    parts, _ = sparse_mla_fwd(q, kv, indptr, flat, sm_scale, kv_lora_rank=d_v, qk_rope_head_dim=q.shape[2] - d_v, has_invalid=True,
                              skip_reduce=True, arch=arch, backend=backend)
    out, lse = merge_parts(parts)
    max_logits = parts.max.amax(1) * LN_2
    empty = lse == -math.inf
    if attn_sink is not None:
        # exp(lse) / (exp(lse) + exp(sink)), and 1 or 0 for a sink of -inf or +inf.
        out = (out * torch.sigmoid(lse.masked_fill(empty, 0) - attn_sink)[..., None]).to(torch.bfloat16)
    return out, max_logits, lse.masked_fill(empty, math.inf)
