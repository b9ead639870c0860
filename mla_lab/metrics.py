"""How far an output is from the truth."""

from __future__ import annotations

import torch

from mla_lab import formats


def relative_l2(got: torch.Tensor, truth: torch.Tensor) -> float:
    """|got - truth| / |truth| over all elements, in f64. NaN if either holds one; 0 where both are zero."""
    difference, norm = (got.double() - truth.double()).norm(), truth.double().norm()
    return float(difference / norm) if norm != 0 else float(difference)


def max_relative(got: torch.Tensor, truth: torch.Tensor, floor: float = 0.1) -> float:
    """The largest |got - truth| / |truth| of any element, in f64, over those with |truth| >= floor * max |truth|.

    An element near zero is the sum of many that cancelled, and its quotient says how well they did, not how good the
    kernel is. Elements that are equal, infinities too, count as 0.
    """
    got, truth = got.double(), truth.double()
    same = got == truth
    finite = truth[torch.isfinite(truth)]
    largest = finite.abs().max() if finite.numel() else truth.new_tensor(0.0)
    counted = ~same & ~(truth.abs() < floor * largest)
    if not bool(counted.any()):
        return 0.0
    return float(((got - truth).abs() / truth.abs())[counted].max())


def kept_mass(p: torch.Tensor, encoding, p_scale: float) -> torch.Tensor:
    """Share of the softmax mass that survives P's rounding, [...] from p [..., keys] (before normalization, f32).

    1 is right. It falls below 1 where a tail flushes to zero in the numerator while the sum, taken before the
    rounding, keeps it; and above the encoding's range, where the largest p saturates.
    """
    rounded = formats.decode(formats.encode((p * p_scale).float(), encoding), encoding) / p_scale
    return rounded.sum(-1) / p.float().sum(-1)


def lost_tail(encoding, p_scale: float, keys: int) -> float:
    """The largest share of the softmax mass that `keys - 1` alike keys below one dominant key can lose to the flush.

    They flush together where S p is at the flush threshold t or below; at it they weigh p = t / S each, and so
    (keys - 1) t / S out of 1 + (keys - 1) t / S. Below it they weigh less, above it they are kept.
    """
    weight = (keys - 1) * formats.get_format(encoding).flush_threshold / p_scale
    return weight / (1 + weight)
