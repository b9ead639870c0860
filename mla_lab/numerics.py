"""Small pieces of arithmetic that reference and emulator share."""

from __future__ import annotations

import contextlib
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
