"""sparse_mla_fwd as a torch operator, `torch.ops.mla_lab.sparse_mla_fwd`: for torch.compile and torch.export.

    out, lse = torch.ops.mla_lab.sparse_mla_fwd(q, kv_buffer, kv_indptr, kv_indices, softmax_scale, kv_scale=kv_scale, ...)

It takes what mla_lab.sparse_mla_fwd takes, less what an operator cannot (out, skip_reduce; the recipe is given by q_dots,
p_dots and p_scale), and always returns the LSE. Importing mla_lab registers it.
"""

from __future__ import annotations

import torch

from mla_lab.attention import sparse_mla_fwd
from mla_lab.recipe import Recipe


@torch.library.custom_op("mla_lab::sparse_mla_fwd", mutates_args=())
def operator(q: torch.Tensor, kv_buffer: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, softmax_scale: float,
             kv_scale: torch.Tensor | None = None, q_scale: torch.Tensor | None = None, attn_sink: torch.Tensor | None = None, *, kv_lora_rank: int = 512, qk_rope_head_dim: int = 64, kv_splits: int | None = None,
             has_invalid: bool = False, q_dots: str = "bf16", p_dots: str = "bf16", p_scale: float | None = None,
             arch: str | None = None,
             backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    """(out [C, H, kv_lora_rank] bf16, LSE [C, H] f32)."""
    out, lse = sparse_mla_fwd(
        q, kv_buffer, kv_indptr, kv_indices, softmax_scale, kv_scale=kv_scale, kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim, kv_splits=kv_splits, has_invalid=has_invalid, q_scale=q_scale, attn_sink=attn_sink,
        arch=arch, backend=backend, recipe=Recipe(q_dots, p_dots, p_scale), return_lse=True,
    )
    return out, lse


@operator.register_fake
def _(q, kv_buffer, kv_indptr, kv_indices, softmax_scale, kv_scale=None, q_scale=None, attn_sink=None, *, kv_lora_rank=512, **others):
    tokens, heads, _ = q.shape
    return q.new_empty(tokens, heads, kv_lora_rank, dtype=torch.bfloat16), q.new_empty(tokens, heads, dtype=torch.float32)
