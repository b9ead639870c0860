"""Ragged lists of keys: checks that read the data, padding to rectangles, and a small pool of just the rows asked for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mla_lab import cache


def check(kv_indptr: torch.Tensor, kv_indices: torch.Tensor, slots: int, has_invalid: bool) -> None:
    """Reads the device's data (so it synchronizes). ValueError, with the position, for what host metadata cannot show."""
    indptr = kv_indptr.tolist()
    if indptr[0] != 0:
        raise ValueError(f"kv_indptr: got {indptr[0]} at position 0; accepted: it starts at 0")
    for at, (low, high) in enumerate(zip(indptr, indptr[1:]), start=1):
        if high < low:
            raise ValueError(f"kv_indptr: got {high} after {low} at position {at}; accepted: it never decreases")
    if indptr[-1] != kv_indices.numel():
        raise ValueError(f"kv_indptr: got {indptr[-1]} at position {len(indptr) - 1}; accepted: its end is the number of indices, {kv_indices.numel()}")
    bad = (kv_indices >= slots) | (kv_indices < (-1 if has_invalid else 0))
    if bool(bad.any()):
        at = int(bad.nonzero()[0, 0])
        hole = ", or -1 for a hole" if has_invalid else " (-1 is a hole under has_invalid=True only)"
        raise ValueError(f"kv_indices: got {int(kv_indices[at])} at position {at}; accepted: {f'0 to {slots - 1}' if slots else 'none, since the cache has no slots'}{hole}")


def padded(starts: torch.Tensor, lengths: torch.Tensor, kv_indices: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """[B, L] int64 slots of the B lists kv_indices[start : start + length]; -1 where a list has ended.

    L is the longest length, rounded up to `multiple`.
    """
    longest = int(lengths.max()) if lengths.numel() else 0
    longest = -(-longest // multiple) * multiple
    at = torch.arange(longest, device=kv_indices.device)
    inside = at < lengths[:, None]
    where = torch.where(inside, starts[:, None] + at, 0)
    if kv_indices.numel() == 0:
        return torch.full(where.shape, -1, dtype=torch.int64, device=kv_indices.device)
    return torch.where(inside, kv_indices[where].long(), -1)


class Pool(NamedTuple):
    """rows: [n + 1, R], each slot that is asked for once, then a row of zeros. at: [B, L] places in `rows`.

    scales: [n + 1, 4] f32 of a packed cache's groups, or None. A hole has the place of the zeros: no slot's data, NaN or
    not, stands in for it.
    """

    rows: torch.Tensor
    at: torch.Tensor
    scales: torch.Tensor | None


def gather_pool(kv_buffer: torch.Tensor, slot: torch.Tensor, encoding, dtype: torch.dtype = torch.float32, packed: bool = False) -> Pool:
    """The rows of the slots [B, L] (negative: a hole), decoded to `dtype` without their scales. Reads no other row."""
    used, at = torch.unique(slot.clamp_min(-1), return_inverse=True)
    holes = bool(used.numel()) and int(used[0]) == -1
    used = used[1:] if holes else used
    rows, scales = cache.gather(kv_buffer, used, encoding, dtype, packed)
    rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    if scales is not None:
        scales = torch.cat([scales, scales.new_zeros(1, scales.shape[1])])
    at = at - 1 if holes else at
    return Pool(rows, torch.where(slot < 0, used.numel(), at), scales)
