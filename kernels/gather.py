"""The floor of a sparse attention kernel: gather the same rows, and only add them up."""

import triton
import triton.language as tl


@triton.jit
def gather_only(rows, indices, out, topk, per_split, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, BLOCK_K: tl.constexpr):
    """Grid: (tokens, splits). rows [slots, WIDTH] int32 words, out [tokens * splits, WIDTH]: each split's sum of words."""
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    column = tl.arange(0, WIDTH_PAD)
    inside_row = column < WIDTH
    total = tl.zeros([WIDTH_PAD], tl.int32)
    first = split * per_split
    for lo in range(first, tl.minimum(first + per_split, topk), BLOCK_K):
        at = lo + tl.arange(0, BLOCK_K)
        inside = (at < topk) & (at < first + per_split)
        slot = tl.load(indices + token * topk + at, mask=inside, other=0).to(tl.int64)
        tile = tl.load(rows + slot[:, None] * WIDTH + column[None, :], mask=inside[:, None] & inside_row[None, :], other=0)
        total += tl.sum(tile, 0)
    tl.store(out + (token * tl.num_programs(1) + split) * WIDTH + column, total, mask=inside_row)
