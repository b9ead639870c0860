"""Launches kernels/sparse_mla.py and sparse_mla_packed.py: portable Triton on a GPU, or in its interpreter on a CPU."""

from __future__ import annotations

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from mla_lab.arch import HEAD_BLOCK, Launch, Profile, device_arch
from mla_lab.cache import flat_rows, is_packed, slots
from mla_lab.emulate import Parts
from mla_lab.formats import E4M3FN, E4M3FNUZ, FORMAT_OF_DTYPE, Fp8Format
from mla_lab.kernels import sparse_mla as kernels
from mla_lab.kernels import sparse_mla_packed as packed_kernels
from mla_lab.numerics import LOG2_E
from mla_lab.recipe import Recipe

INTERPRETED = isinstance(kernels.attend, InterpretedFunction)

SMALLEST_DOT = 32
"""A product of fp8 values contracts over at least 32 columns; narrower ones are padded with zeros."""


PACKED_CONSTANTS = ("KV_BLOCK", "BLOCK_K", "FP8_MAX", "Q_FP8", "Q_LOW", "Q_PER_HEAD", "Q_GIVEN", "P_FP8", "P_LOW", "FNUZ", "HAS_INVALID", "HAS_SINK", "WRITE_LSE",
                    "WRITE_PARTS", "NATIVE_DOT", "NATIVE_CAST", "INTERPRET")
"""Those of `constants` that kernels.attend_packed takes: its widths are fixed."""


def constants(profile: Profile, recipe: Recipe, launch: Launch, *, kv_lora_rank: int, qk_rope_head_dim: int, kv_block: int,
              cache_fp8: bool, q_given: bool, native_dot: bool, native_cast: bool, has_invalid: bool, has_sink: bool,
              write_lse: bool, write_parts: bool, interpret: bool) -> dict:
    """The constexpr arguments of kernels.attend, for a launch or for an ahead-of-time compilation."""
    return dict(
        RANK=kv_lora_rank, RANK_PAD=max(kv_lora_rank, SMALLEST_DOT),
        ROPE=qk_rope_head_dim, ROPE_PAD=max(triton.next_power_of_2(qk_rope_head_dim), SMALLEST_DOT),
        KV_BLOCK=kv_block, BLOCK_K=launch.block_k, FP8_MAX=profile.encoding.max_finite,
        CACHE_FP8=cache_fp8, Q_FP8=recipe.q != "bf16", Q_LOW=recipe.q == "fp8x2", Q_PER_HEAD=recipe.q_granularity == "head", Q_GIVEN=q_given,
        P_FP8=recipe.p != "bf16", P_LOW=recipe.p == "fp8x2", FNUZ=profile.encoding.fnuz,
        HAS_INVALID=has_invalid, HAS_SINK=has_sink, WRITE_LSE=write_lse, WRITE_PARTS=write_parts,
        NATIVE_DOT=native_dot, NATIVE_CAST=native_cast, INTERPRET=interpret,
    )


def check_recipe(recipe: Recipe) -> None:
    """ValueError for what only the emulator does."""
    for name, runs in (("hadamard", (False,)), ("accumulate", ("f32",)), ("q_granularity", ("head_block", "head"))):
        if getattr(recipe, name) not in runs:
            raise ValueError(f"recipe.{name}: got {getattr(recipe, name)!r} for the Triton kernel; accepted there: {', '.join(map(repr, runs))}; backend='emulate' runs it")
    if recipe.p_scale == "tile":
        raise ValueError("recipe.p_scale: got 'tile' for the Triton kernel; accepted there: None, 'largest', or a number; backend='emulate' runs it")


MERGED_COLUMNS, MERGED_SPLITS = 128, 32
"""The merge's tile: a program reads 16 KB at once."""

TESTED_CASTS = ("sm_90",)
"""Devices whose own fp8 conversions tests/test_codec.py has found equal to the exact codec; others use the codec."""


def native_encoding(device: torch.device) -> Fp8Format | None:
    """The e4m3 encoding that this device's matrix unit multiplies; None where it has none."""
    if device.type != "cuda":
        return None
    if torch.version.hip:
        return {"gfx942": E4M3FNUZ, "gfx950": E4M3FN}.get(device_arch(device))
    return E4M3FN if torch.cuda.get_device_capability(device) >= (8, 9) else None


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """An fp8 tensor as uint8, another as it is."""
    return tensor.view(torch.uint8) if tensor.dtype in FORMAT_OF_DTYPE else tensor


def sparse_mla(q, kv_buffer, kv_indptr, kv_indices, softmax_scale: float, *, profile: Profile, recipe: Recipe, launch: Launch,
               kv_splits: int, kv_scale, kv_lora_rank: int, q_scale, attn_sink, has_invalid: bool, out, return_lse: bool,
               skip_reduce: bool):
    """(out, lse or None), or (Parts, None) with skip_reduce. Arguments already checked."""
    _, heads, width = q.shape
    native = native_encoding(q.device) == profile.encoding
    rows = flat_rows(as_bytes(kv_buffer))
    packed = kv_scale is None and is_packed(kv_buffer)

    def attend(out, lse, parts, sink):
        compile_time = constants(
            profile, recipe, launch, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=width - kv_lora_rank, kv_block=rows.shape[1],
            cache_fp8=kv_scale is not None, q_given=q_scale is not None, native_dot=native,
            native_cast=native and device_arch(q.device) in TESTED_CASTS, has_invalid=has_invalid, has_sink=sink is not None,
            write_lse=lse is not None, write_parts=parts is not None, interpret=INTERPRETED,
        )
        if packed:
            cache_arguments = (rows, rows.view(torch.float32), rows.view(torch.bfloat16))
            compile_time = {name: compile_time[name] for name in PACKED_CONSTANTS}
        else:
            cache_arguments = (rows,)
        kernel = packed_kernels.attend_packed if packed else kernels.attend
        kernel[(q.shape[0], triton.cdiv(heads, HEAD_BLOCK), kv_splits)](
            as_bytes(q), *cache_arguments, kv_indptr, kv_indices, q_scale, *(() if packed else (kv_scale,)), sink, out, lse, *(parts or (None, None, None)),
            softmax_scale * LOG2_E, profile.p_scale_of(recipe), slots(kv_buffer), heads, kv_splits,
            q.stride(0), q.stride(1), rows.stride(0), rows.stride(1), out.stride(0), out.stride(1),
            **compile_time, num_warps=launch.num_warps, num_stages=launch.num_stages,
        )

    return attend_and_merge(attend, q, kv_lora_rank, kv_splits, attn_sink, out, return_lse, skip_reduce)


def attend_and_merge(attend, q, kv_lora_rank: int, kv_splits: int, attn_sink, out, return_lse: bool, skip_reduce: bool, dependent: bool = False):
    """Makes what a kernel writes, calls attend(out, lse or None, parts or None, sink or None), and merges the parts.

    dependent: the merge is launched while the kernel still runs, and waits for it on the device (Hopper only).
    With one split the kernel writes out (and lse) itself, sink included; else the parts, and the merge does the rest.
    """
    tokens, heads, _ = q.shape
    if out is None:
        out = torch.empty(tokens, heads, kv_lora_rank, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(tokens, heads, device=q.device) if return_lse else None
    parts = None
    if kv_splits > 1 or skip_reduce:
        parts = Parts(
            torch.empty(tokens, kv_splits, heads, kv_lora_rank, device=q.device),
            torch.empty(tokens, kv_splits, heads, device=q.device),
            torch.empty(tokens, kv_splits, heads, device=q.device),
        )
    if tokens > 0:
        attend(out, lse, parts, attn_sink if parts is None else None)
    if parts is None:
        return out[..., :kv_lora_rank], lse
    if skip_reduce:
        return parts, None
    if tokens > 0:
        columns = min(kv_lora_rank, MERGED_COLUMNS)
        splits_pad = triton.next_power_of_2(kv_splits)
        kernels.merge[(tokens, heads, kv_lora_rank // columns)](
            *parts, attn_sink, out, lse, heads, kv_splits, out.stride(0), out.stride(1), RANK=kv_lora_rank, COLUMNS=columns,
            SPLITS_PAD=splits_pad, STEP=min(splits_pad, MERGED_SPLITS), HAS_SINK=attn_sink is not None, WRITE_LSE=return_lse, DEPENDENT=dependent, INTERPRET=INTERPRETED,
            **(dict(launch_pdl=True) if dependent else {}),
        )
    return out[..., :kv_lora_rank], lse
