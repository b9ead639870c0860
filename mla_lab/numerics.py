"""Small pieces of arithmetic that cache, reference and emulator share, and a model of how Hopper sums fp8 products."""

from __future__ import annotations

import contextlib
import functools
import math

import torch

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


@contextlib.contextmanager
def full_precision_matmul():
    """f32 matrix products in f32, also where the caller has allowed TF32 on the GPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@functools.cache
def _hadamard_matrix(width: int) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < width:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / math.sqrt(width)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """[..., n] f32 times the orthonormal Hadamard matrix of n, a power of two. It is its own inverse."""
    with full_precision_matmul():
        return x @ _hadamard_matrix(x.shape[-1]).to(x.device)


SHORT_SUM_COLUMNS = 32
"""Columns that one Hopper fp8 instruction contracts (wgmma ... k32)."""

_SHORT_BITS = 13
_NO_EXPONENT = -100
"""Below every product of fp8 values (2^-20 at least), and high enough that its inverse is an f32."""


def short_sum(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor, smallest_exponent: int) -> torch.Tensor:
    """acc + a b^T as Hopper's fp8 unit sums it: acc [..., M, N], a [..., M, K], b [..., N, K], all f32, the result too.

    32 columns at a time: the products and the accumulator are aligned to the largest exponent among them, cut off (not
    rounded) below 2^-13 of it, summed exactly, and the sum is cut off to 13 fraction bits. A product's exponent is the
    sum of its factors', of which a subnormal has `smallest_exponent` (that of the smallest normal number); a product
    that is zero has none. Found by fitting the sums of an H200 (data/measured/h200/fp8_accumulation.safetensors), which
    it gives back to the bit; "13 to 14 bits" was public before (DeepSeek-V3's and SageAttention2's reports).
    """
    columns = a.shape[-1]
    if columns % SHORT_SUM_COLUMNS:
        pad = SHORT_SUM_COLUMNS - columns % SHORT_SUM_COLUMNS
        a, b = (torch.nn.functional.pad(x, (0, pad)) for x in (a, b))
    exponent_a, exponent_b = (_exponent(x).clamp_min(smallest_exponent) for x in (a, b))
    for lo in range(0, a.shape[-1], SHORT_SUM_COLUMNS):
        part = slice(lo, lo + SHORT_SUM_COLUMNS)
        products = a[..., :, None, part] * b[..., None, :, part]
        exponents = (exponent_a[..., :, None, part] + exponent_b[..., None, :, part]).masked_fill_(products == 0, _NO_EXPONENT)
        unit = torch.maximum(exponents.amax(-1), _exponent(acc)) - _SHORT_BITS
        total = torch.ldexp(products, -unit[..., None]).trunc_().sum(-1) + torch.ldexp(acc, -unit).trunc()
        cut = (_exponent(total) - _SHORT_BITS).clamp_min(0)
        acc = torch.ldexp(torch.ldexp(total, -cut).trunc(), cut + unit)
    return acc


def _exponent(x):
    """floor(log2 |x|), int32; _NO_EXPONENT for 0 and for what is smaller still."""
    return (torch.frexp(x).exponent - 1).masked_fill(x == 0, _NO_EXPONENT).clamp_min(_NO_EXPONENT)
