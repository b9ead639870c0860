"""Asks a Hopper GPU how it adds up fp8 products: writes operands and the unit's own sums, bit for bit.

    python tools/probe_accumulation.py data/measured/h200/fp8_accumulation.safetensors

For each kind of operands: `kind.a` [64, K] and `kind.b` [64, K] e4m3fn codes, `kind.c` and `kind.d` [64, 64] f32,
d = c + a b as wgmma computed it. mla_lab.numerics.short_sum is the model of it; tests/test_numerics.py holds it
against these files.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import triton
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mla_lab import formats  # noqa: E402
from mla_lab.kernels.probe import fp8_product  # noqa: E402

M = N = 64


def codes(values):
    return formats.encode(torch.from_numpy(values.astype(np.float32)), "e4m3fn")


def cases(rng):
    """name: (a, b, c), values of every exponent that e4m3 has, against accumulators above, at and below them."""
    def normal(*shape):
        return rng.standard_normal(shape)

    def wide(*shape):
        return rng.choice([-1, 1], shape) * 2.0 ** rng.uniform(-9, 8.7, shape)

    def sparse(k, keep):
        a = np.zeros((M, k))
        for row in a:
            row[rng.choice(k, keep, replace=False)] = wide(keep)
        return a

    zero = np.zeros((M, N))
    yield "normal", (normal(M, 32), normal(N, 32), zero)
    yield "wide", (wide(M, 32), wide(N, 32), zero)
    yield "wide_and_sum", (wide(M, 32), wide(N, 32), normal(M, N) * 2.0 ** rng.uniform(-12, 16, (M, N)))
    yield "normal_and_sum", (normal(M, 32), normal(N, 32), normal(M, N) * 2.0 ** rng.uniform(-6, 14, (M, N)))
    yield "one_product", (sparse(32, 1), wide(N, 32), normal(M, N) * 2.0 ** rng.uniform(-12, 12, (M, N)))
    yield "two_products", (sparse(32, 2), wide(N, 32), zero)
    yield "sum_alone", (np.zeros((M, 32)), wide(N, 32), normal(M, N))
    yield "positive_128", (np.abs(wide(M, 128)), np.abs(wide(N, 128)), zero)
    yield "normal_512", (normal(M, 512) * 50, normal(N, 512) * 50, zero)


def main(path):
    tensors = {}
    for name, (a, b, c) in cases(np.random.default_rng(0)):
        a, b = codes(a).cuda(), codes(b).cuda()
        c = torch.from_numpy(c.astype(np.float32)).cuda()
        d = torch.empty_like(c)
        compiled = fp8_product[(1,)](a, b, c, d, K=a.shape[1], M=M, N=N, num_warps=4)
        instructions = [line.split()[0] for line in compiled.asm["ptx"].splitlines() if "wgmma.mma_async" in line]
        assert instructions and all("e4m3.e4m3" in i for i in instructions), instructions
        exact = formats.decode(a, "e4m3fn").double() @ formats.decode(b, "e4m3fn").double().mT + c.double()
        print(f"{name}: {len(instructions)} x {instructions[0]}, relative L2 against f64 {float((d.double() - exact).norm() / exact.norm()):.2e}")
        tensors |= {f"{name}.{k}": v.cpu().contiguous() for k, v in dict(a=a, b=b, c=c, d=d).items()}
    metadata = dict(device=torch.cuda.get_device_name(), versions=f"torch {torch.__version__}, triton {triton.__version__}", seed="0",
                    command="python tools/probe_accumulation.py data/measured/h200/fp8_accumulation.safetensors")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata)


if __name__ == "__main__":
    main(sys.argv[1])
