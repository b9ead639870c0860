"""One fp8 matrix product by the GPU's own unit, sums as short as it keeps them: what tools/probe_accumulation.py looks at."""

import triton
import triton.language as tl


@triton.jit
def fp8_product(a, b, c, d, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """d [n, M, N] = c + a b, f32; a [n, M, K] and b [n, N, K] are e4m3fn codes. Grid: (n,).

    64 rows or more make it one wgmma per 32 columns on Hopper. Triton's default there lets the sum, c included, stay in
    the matrix unit; naming max_num_imprecise_acc would add each partial sum in f32 outside.
    """
    n = tl.program_id(0)
    row, column, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + n * M * K + row[:, None] * K + k[None, :]).to(tl.float8e4nv, bitcast=True)
    right = tl.load(b + n * N * K + column[None, :] * K + k[:, None]).to(tl.float8e4nv, bitcast=True)
    at = n * M * N + row[:, None] * N + column[None, :]
    tl.store(d + at, tl.dot(left, right, tl.load(c + at)))
