"""Sparse MLA in f32 or f64 over the dequantized cache: the truth that kernels and emulator are held against.

Nothing here is rounded to 16 bits or fewer, and the softmax is taken in one piece, not tile by tile. The cache's own
rounding is not an error here: the reference reads the same codes.
"""

from __future__ import annotations

import torch

from mla_lab import cache, formats, lists
from mla_lab.arch import Profile, get_profile
from mla_lab.numerics import full_precision_matmul

_BUDGET = 256 << 20
"""Bytes of gathered rows in work at once; 16K query tokens stay far below 4 GiB in all."""


def sparse_mla(q, kv_buffer, kv_indptr, kv_indices, softmax_scale: float, *, kv_scale=None, kv_lora_rank: int = 512,
               q_scale=None, attn_sink=None, arch: str | Profile | None = None, dtype: torch.dtype = torch.float32):
    """out [C, H, kv_lora_rank] and natural-log LSE [C, H], both in `dtype` (torch.float32 or torch.float64).

    Arguments as in sparse_mla_fwd, except that q may be of any float type (fp8 with q_scale), and kv_buffer f32 [slots,
    R] too (rows that nothing has rounded); negative indices are holes. `arch` says in which encoding fp8 bytes are read. A query without a key: zeros and -inf (with a sink, the sink).
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype: got {dtype}; accepted: torch.float32, torch.float64")
    encoding = get_profile(arch, q.device).encoding
    q = widen_q(q, q_scale, encoding, dtype)
    tokens, heads, width = q.shape
    starts, lengths = kv_indptr[:-1].long(), kv_indptr.long().diff()
    # The output scales with V's scale and the scores with K's: the rows themselves stay as the cache has them.
    packed = kv_scale is None and cache.is_packed(kv_buffer)
    scale = 1.0 if packed or kv_buffer.dtype in (torch.bfloat16, torch.float32) else kv_scale.to(dtype).reshape(1)
    out = torch.zeros(tokens, heads, kv_lora_rank, dtype=dtype, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=dtype, device=q.device)
    per_token = max(1, int(lengths.max()) if tokens else 1) * (width * dtype.itemsize + heads * dtype.itemsize * 4)
    step = max(1, _BUDGET // per_token)
    with full_precision_matmul():
        for lo in range(0, tokens, step):
            part = slice(lo, lo + step)
            slot = lists.padded(starts[part], lengths[part], kv_indices)
            if slot.shape[1] == 0:
                continue
            pool = lists.gather_pool(kv_buffer, slot, encoding, dtype, packed)
            rows = pool.rows if pool.scales is None else cache.apply_group_scales(pool.rows, pool.scales)
            rows = rows[pool.at]
            scores = torch.bmm(q[part], rows.mT) * (scale * softmax_scale)
            scores = scores.masked_fill((slot < 0)[:, None, :], -torch.inf)
            lse[part] = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - lse[part].masked_fill(lse[part] == -torch.inf, 0)[..., None])
            out[part] = torch.bmm(weights, rows[..., :kv_lora_rank]) * scale
    if attn_sink is not None:
        sink = attn_sink.to(dtype)[None, :]
        total = torch.logaddexp(lse, sink)
        share = torch.where(total == -torch.inf, 0, torch.exp(lse - total))
        out, lse = out * share[..., None], total
    return out, lse


def widen_q(q, q_scale, encoding, dtype):
    """q as `dtype`, exactly; fp8 (typed or uint8) by `encoding`, times q_scale."""
    if q.dtype in formats.FORMAT_OF_DTYPE or q.dtype == torch.uint8:
        return formats.decode(q, encoding).to(dtype) * q_scale.to(dtype).reshape(1)
    return q.to(dtype)
