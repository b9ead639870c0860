"""Sizes that break others, on a GPU: pools past 2^31 and 2^32 bytes, many tokens, large outputs."""

import pytest
import torch

from cases import DEVICE
from mla_lab import cache, metrics, reference, sparse_mla_fwd

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="takes a GPU with tens of GB of memory")


def pool(kind, slots, width):
    """A pool of the given number of slots, random in its first and last rows, NaN between: nobody asks for those."""
    ends = torch.cat([torch.arange(64), torch.arange(slots - 64, slots)]).to(DEVICE)
    rows = torch.randn(128, width, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    if kind == "bf16":
        buffer = torch.full((slots, width), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        buffer[ends] = rows.bfloat16()
        return buffer, None, ends
    if kind == "fp8_scalar":
        packed = cache.pack_fp8_scalar(rows, "e4m3fn")
        buffer = torch.full((slots, width), 0x7F, dtype=torch.uint8, device=DEVICE)
        buffer[ends] = packed.buffer.view(torch.uint8)
        return buffer, packed.scale, ends
    packed = cache.pack_fp8_dsv32(rows, "e4m3fn")
    buffer = torch.full((slots // 64, 64, 656), 0xFF, dtype=torch.uint8, device=DEVICE)
    buffer.view(-1, 656)[ends] = packed.buffer[:, 0]
    return buffer, None, ends


@pytest.mark.parametrize("gib", [2.5, 5])
@pytest.mark.parametrize("kind, dots", [("bf16", "bf16"), ("fp8_scalar", "bf16"), ("fp8_scalar", "fp8"), ("fp8_dsv32_mla", "bf16"), ("fp8_dsv32_mla", "fp8")])
def test_slots_at_both_ends_of_a_large_pool(kind, dots, gib):
    row = {"bf16": 1152, "fp8_scalar": 576, "fp8_dsv32_mla": 656}[kind]
    slots = int(gib * 2**30) // row // 64 * 64
    buffer, scale, ends = pool(kind, slots, 576)
    q = torch.randn(2, 16, 576, device=DEVICE).bfloat16()
    indptr = torch.tensor([0, 128, 256], dtype=torch.int32, device=DEVICE)
    indices = ends.repeat(2).int()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, lse = sparse_mla_fwd(q, buffer, indptr, indices, 0.04, kv_scale=scale, dot_precision=dots, arch="sm_90", return_lse=True)
    assert torch.cuda.max_memory_allocated() - before < 2**27, "the pool is addressed where it lies, not copied"
    want, want_lse = reference.sparse_mla(q, buffer, indptr, indices, 0.04, kv_scale=scale, arch="sm_90")
    assert metrics.relative_l2(out, want) < (4e-3 if dots == "bf16" else 0.055)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-4 if dots == "bf16" else 0.15)


def test_a_slice_of_a_larger_pool_of_which_a_copy_would_not_fit():
    """Every second block of a pool that takes more than half of the memory."""
    free, _ = torch.cuda.mem_get_info()
    blocks = int(free * 0.55) // (64 * 656 * 2)
    whole = torch.zeros(blocks, 2, 64, 656, dtype=torch.uint8, device=DEVICE)
    packed = cache.pack_fp8_dsv32(torch.randn(2, 64, 576, device=DEVICE), "e4m3fn")
    half = whole[:, 1]
    half[0], half[blocks - 1] = packed.buffer
    indices = torch.cat([torch.arange(64), torch.arange((blocks - 1) * 64, blocks * 64)]).to(DEVICE)
    q = torch.randn(1, 16, 576, device=DEVICE).bfloat16()
    out, _ = sparse_mla_fwd(q, half, torch.tensor([0, 128], device=DEVICE), indices, 0.04, arch="sm_90")
    want, _ = sparse_mla_fwd(q, packed.buffer, torch.tensor([0, 128], device=DEVICE), torch.arange(128, device=DEVICE), 0.04, arch="sm_90")
    assert torch.equal(out, want)


def test_70_000_tokens_in_one_call():
    q = torch.randn(70_000, 16, 512, device=DEVICE).bfloat16()
    packed = cache.pack_fp8_scalar(torch.randn(1000, 512, device=DEVICE), "e4m3fn")
    indices = torch.randint(0, 1000, (70_000 * 8,), dtype=torch.int32, device=DEVICE)
    indptr = torch.arange(70_001, dtype=torch.int32, device=DEVICE) * 8
    for splits in (1, 2):
        out, lse = sparse_mla_fwd(q, packed.buffer, indptr, indices, 0.04, kv_scale=packed.scale, qk_rope_head_dim=0, dot_precision="fp8", arch="sm_90", kv_splits=splits, return_lse=True)
        for at in (0, 65_535, 65_536, 69_999):
            want, _ = reference.sparse_mla(q[at : at + 1], packed.buffer, indptr[:2], indices[8 * at : 8 * at + 8], 0.04, kv_scale=packed.scale, arch="sm_90")
            assert metrics.relative_l2(out[at : at + 1], want) < 0.08  # 8 keys average P's rounding little
    assert lse.isfinite().all()


def test_an_output_of_more_than_2_to_the_31_elements():
    tokens, heads = 33_000, 128  # * 512 = 2.16e9
    q = torch.randn(tokens, heads, 512, dtype=torch.bfloat16, device=DEVICE)
    kv = torch.randn(500, 512, device=DEVICE).bfloat16()
    indices = torch.randint(0, 500, (tokens * 4,), dtype=torch.int32, device=DEVICE)
    indptr = torch.arange(tokens + 1, dtype=torch.int32, device=DEVICE) * 4
    out, _ = sparse_mla_fwd(q, kv, indptr, indices, 0.04, qk_rope_head_dim=0, arch="sm_90")
    assert out.numel() > 2**31
    for at in (0, 32_768, tokens - 1):
        want, _ = reference.sparse_mla(q[at : at + 1], kv, indptr[:2], indices[4 * at : 4 * at + 4], 0.04, arch="sm_90")
        assert metrics.relative_l2(out[at : at + 1], want) < 4e-3
