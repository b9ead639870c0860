"""Layouts and launch of kernels/cdna.py, for AMD's CDNA3 and CDNA4, and for Hopper, which runs the same body.

Where Gluon differs between Triton 3.6 and 3.9: nothing that this kernel uses. AMDMFMALayout takes three instruction
dimensions in all of them, and SharedLinearLayout an alignment. What none of them has is a plain fp8 product of 128
columns on gfx950 (v_mfma_f32_16x16x128_f8f6f4): gfx950 gets the one of 32. Triton 3.6 rounds to
e4m3fn in software on gfx950, 3.7 and later by the hardware's conversion.
"""

from __future__ import annotations

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDMFMALayout

from mla_lab.arch import HEAD_BLOCK, Launch, Profile, device_arch
from mla_lab.cache import flat_rows, slots
from mla_lab.kernels import cdna as kernels
from mla_lab.numerics import LOG2_E
from mla_lab.portable import TESTED_CASTS, as_bytes, attend_and_merge, native_encoding
from mla_lab.recipe import Recipe

MFMA_VERSION = {"gfx942": 3, "gfx950": 4}


def check(recipe: Recipe, kv_lora_rank: int, qk_rope_head_dim: int, kind: str, fp8_q: bool) -> None:
    """ValueError, naming the argument, for what this kernel does not run."""
    if recipe.q != recipe.p or recipe.q == "fp8x2" or recipe.q_granularity != "head_block":
        raise ValueError(f"recipe: got {recipe} for the cdna kernel; accepted there: bf16 dots, or fp8 dots with one term and a scale per head block")
    if kind == "fp8_dsv32_mla":
        raise ValueError("kv_buffer: got a packed cache for the cdna kernel; accepted there: bf16 and fp8_scalar")
    if fp8_q:
        raise ValueError("q: got fp8 for the cdna kernel; accepted there: torch.bfloat16")
    if kv_lora_rank < 64:
        raise ValueError(f"kv_lora_rank: got {kv_lora_rank} for the cdna kernel; accepted there: 64 or more")
    if qk_rope_head_dim and (qk_rope_head_dim < 32 or qk_rope_head_dim & (qk_rope_head_dim - 1)):
        raise ValueError(f"qk_rope_head_dim: got {qk_rope_head_dim} for the cdna kernel; accepted there: 0, or a power of two of 32 or more")


def constants(target: str, profile: Profile, recipe: Recipe, launch: Launch, *, kv_lora_rank: int, qk_rope_head_dim: int, kv_block: int,
              cache_fp8: bool, native_dot: bool, native_cast: bool, has_invalid: bool, has_sink: bool, write_lse: bool, write_parts: bool,
              kv_row_pad: int | None = None) -> dict:
    """The constexpr arguments of kernels.attend_cdna: for the device `target` ("gfx942", "gfx950", else NVIDIA), numerics of `profile`.

    kv_row_pad: elements between the tile's rows; None is 8 under bf16 dots and 16 under fp8, as in the published decode kernel.
    """
    fp8, block_k, warps = recipe.dots == "fp8", launch.block_k, launch.num_warps
    amd = target in MFMA_VERSION
    one_byte_operands = fp8 and native_dot
    if amd:
        version = MFMA_VERSION[target]
        columns = 32 if one_byte_operands or version == 4 else 16  # that one instruction contracts
        mma, k_width = AMDMFMALayout(version, [16, 16, columns], True, [1, warps]), columns // 4
    else:
        mma, k_width = gl.NVMMADistributedLayout([2, 0], [1, warps], [16, 8]), 4 if one_byte_operands else 2
    lanes = 64 if amd else 32
    pad = 16 if fp8 else 8  # elements, of the rope tile's rows always
    vector = 16 if cache_fp8 else 8  # 16 bytes of the pool for a lane

    def gathered(columns):
        across = min(lanes, columns // vector)
        return gl.BlockedLayout([1, vector], [lanes // across, across], [warps, 1], [1, 0])

    def padded(columns, by):
        return gl.PaddedSharedLayout.with_identity_for([[columns, by]], [block_k, columns], [1, 0])

    rope = max(qk_rope_head_dim, 32)  # without rope the layouts are not used
    bits = lambda n: range(n.bit_length() - 1)
    # At the start of a line of all 32 banks, 128 bytes: it is this that counts the last row's padding in.
    p_tile = gl.SharedLinearLayout([[0, 1 << i] for i in bits(block_k)] + [[1 << i, 0] for i in bits(HEAD_BLOCK)], [], 128)
    return dict(
        RANK=kv_lora_rank, ROPE=qk_rope_head_dim, KV_BLOCK=kv_block, BLOCK_K=block_k, FP8_MAX=profile.encoding.max_finite,
        CACHE_FP8=cache_fp8, FP8_DOTS=fp8, FNUZ=profile.encoding.fnuz, HAS_INVALID=has_invalid, HAS_SINK=has_sink,
        WRITE_LSE=write_lse, WRITE_PARTS=write_parts, NATIVE_DOT=native_dot, NATIVE_CAST=native_cast, MFMA=amd, MMA=mma, K_WIDTH=k_width,
        LOAD=gathered(kv_lora_rank), ROPE_LOAD=gathered(rope), TILE=padded(kv_lora_rank, pad if kv_row_pad is None else kv_row_pad),
        ROPE_TILE=padded(rope, pad), P_TILE=p_tile,
    )


def sparse_mla(q, kv_buffer, kv_indptr, kv_indices, softmax_scale: float, *, profile: Profile, recipe: Recipe, launch: Launch, kv_splits: int,
               kv_scale, kv_lora_rank: int, q_scale, attn_sink, has_invalid: bool, out, return_lse: bool, skip_reduce: bool):
    """(out, lse or None), or (Parts, None) with skip_reduce. Arguments already checked, by `check` too."""
    _, heads, width = q.shape
    target = device_arch(q.device)
    native = native_encoding(q.device) == profile.encoding
    rows = flat_rows(as_bytes(kv_buffer))

    def attend(out, lse, parts, sink):
        compile_time = constants(
            target, profile, recipe, launch, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=width - kv_lora_rank, kv_block=rows.shape[1],
            cache_fp8=kv_scale is not None, native_dot=native, native_cast=native and (target in TESTED_CASTS or target in MFMA_VERSION),
            has_invalid=has_invalid, has_sink=sink is not None, write_lse=lse is not None, write_parts=parts is not None,
        )
        kernels.attend_cdna[(q.shape[0], triton.cdiv(heads, HEAD_BLOCK), kv_splits)](
            q, rows, kv_indptr, kv_indices, kv_scale, sink, out, lse, *(parts or (None, None, None)),
            softmax_scale * LOG2_E, profile.p_scale_of(recipe), slots(kv_buffer), heads, kv_splits,
            q.stride(0), q.stride(1), rows.stride(0), rows.stride(1), out.stride(0), out.stride(1), **compile_time, num_warps=launch.num_warps,
        )

    return attend_and_merge(attend, q, kv_lora_rank, kv_splits, attn_sink, out, return_lse, skip_reduce)
