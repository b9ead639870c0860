"""Layouts and launch of kernels/hopper.py: sparse MLA on NVIDIA's Hopper (sm_90).

Where Gluon differs between Triton 3.6 and 3.9 for this kernel: a workgroup's barrier is gl.thread_barrier in 3.6 and
gl.barrier from 3.7 on (kernels/hopper.py asks which is there).
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
from triton.experimental.gluon import language as gl

from mla_lab import kernels as package
from mla_lab.arch import Launch, Profile, device_arch
from mla_lab.cache import flat_rows, is_packed, slots
from mla_lab.formats import E4M3FN
from mla_lab.kernels import hopper as kernels
from mla_lab.numerics import LOG2_E
from mla_lab.portable import as_bytes, attend_and_merge
from mla_lab.recipe import Recipe

CACHES = {"bf16": 0, "fp8_scalar": 1, "fp8_dsv32_mla": 2}

DEPENDENT_MERGE = True
"""The merge of the splits is launched while the kernel still runs: a microsecond or so of a decode step's ten."""

BLOCK_K = 64
"""Keys of a tile: the 64 rows of a wgmma."""


@dataclass(frozen=True)
class HopperLaunch:
    """How the kernel is launched. heads_block: heads that a program serves, with `warps` warps; stages: tiles in shared memory.

    overlap: the products of neighbouring tiles run while a softmax is computed (three stages). registers: most of them per
    thread, so that more programs fit on an SM (None: as many as the compiler likes). programs_per_unit: see choose_kv_splits.
    """

    heads_block: int
    warps: int
    stages: int
    overlap: bool
    registers: int | None = None
    programs_per_unit: int = 1


@dataclass(frozen=True)
class ShapeClass:
    """What a launch is chosen by. heads: "16" or "more". few: the queries alone do not fill the device."""

    heads: str
    rope: int
    cache: str
    q_fp8: bool
    few: bool


def shape_class(profile: Profile, tokens: int, heads: int, rope: int, cache: str, q_fp8: bool) -> ShapeClass:
    many = heads > 16
    return ShapeClass("more" if many else "16", rope, cache, q_fp8, few=tokens * -(-heads // (64 if many else 16)) < profile.compute_units)


@functools.cache
def launches() -> dict[ShapeClass, HopperLaunch]:
    """kernels/configs/sm_90_hopper.json, which `mla-lab tune` writes."""
    table = json.loads((Path(package.__path__[0]) / "configs" / "sm_90_hopper.json").read_text())
    return {ShapeClass(**entry["class"]): HopperLaunch(**entry["launch"]) for entry in table["launches"]}


def refusal(profile: Profile, recipe: Recipe, q, kv_buffer, kv_lora_rank: int) -> str | None:
    """Why this kernel does not run a call (argument: what came; what is accepted), or None where it does."""
    device = q.device
    if device.type != "cuda" or device_arch(device) != "sm_90":
        return f"backend: got 'hopper' on {device_arch(device) if device.type == 'cuda' else device}; accepted there: 'auto'"
    if profile.encoding != E4M3FN:
        return f"arch: got {profile.name!r} for the hopper kernel, which reads {E4M3FN.name}; accepted there: 'sm_90', 'gfx950'"
    try:
        check_geometry(recipe, kv_lora_rank, q.shape[2] - kv_lora_rank)
    except ValueError as refused:
        return str(refused)
    rows = flat_rows(as_bytes(kv_buffer))
    strides = [rows.stride(0) * rows.element_size(), rows.stride(1) * rows.element_size()]
    if rows.data_ptr() % 16 or any(stride % 16 for stride in strides):
        return f"kv_buffer: got rows at {rows.data_ptr():#x} of strides {strides} bytes for the hopper kernel; accepted there: multiples of 16 bytes, which it copies at a time"
    return None


def check_geometry(recipe: Recipe, kv_lora_rank: int, qk_rope_head_dim: int) -> None:
    """ValueError for a recipe, rank or rope that the kernel is not written for."""
    if "fp8x2" in (recipe.q, recipe.p):
        raise ValueError(f"recipe: got {recipe} for the hopper kernel; accepted there: one term for q and p")
    if kv_lora_rank != 512:
        raise ValueError(f"kv_lora_rank: got {kv_lora_rank} for the hopper kernel; accepted there: 512")
    if qk_rope_head_dim not in (0, 64):
        raise ValueError(f"qk_rope_head_dim: got {qk_rope_head_dim} for the hopper kernel; accepted there: 0, 64")


def _bits(n: int) -> range:
    return range(n.bit_length() - 1)


def candidates(of: ShapeClass) -> list[HopperLaunch]:
    """What a search tries. Left out are those that the compiler serializes (registers) or that do not fit into shared memory."""
    wide, packed = of.cache == "bf16", of.cache == "fp8_dsv32_mla"
    if of.heads == "16":
        if wide:
            found = [HopperLaunch(16, 4, 2, False)] + ([] if of.rope else [HopperLaunch(16, 4, 3, False), HopperLaunch(16, 4, 3, True)])
        else:
            found = [HopperLaunch(16, 4, 2, False), HopperLaunch(16, 4, 3, False)]
            found += [HopperLaunch(16, 4, 3, True)] if of.q_fp8 or not packed else []
            found += [HopperLaunch(16, 4, 2, False, 168)] if of.q_fp8 and not of.rope else []
    else:
        found = [HopperLaunch(64, 8, n, False) for n in ((2,) if wide else (2, 3))]
        if not wide and not packed:
            found += [HopperLaunch(64, 8, 3, True)] if not (of.q_fp8 and of.rope) else []
            found += [HopperLaunch(32, 4, 2, False)]
    return [replace(one, programs_per_unit=n) for one in found for n in ((1, 2) if of.few else (1,))]


def constants(*, cache: int, q_fp8: bool, p_fp8: bool, rope: int, kv_block: int, q_given: bool, q_per_head: bool, has_invalid: bool,
              has_sink: bool, write_lse: bool, write_parts: bool, fp8_max: float, launch: HopperLaunch) -> dict:
    """The constexpr arguments of kernels.attend_hopper, for a launch or for an ahead-of-time compilation."""
    block_k, warps, heads_block, stages, overlap = BLOCK_K, launch.warps, launch.heads_block, launch.stages, launch.overlap
    groups = warps // 4
    latents = 128 if cache == 2 else 512
    s = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, heads_block // groups, 32 if q_fp8 else 16])
    o = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, heads_block, 16])
    # QK's left operand in registers: lane quarter: 4 columns of 16, lane eighth: key, warps: 16 keys.
    columns = 64
    keys = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]] + [[0, 16 << i] for i in _bits(columns // 16)] + [[64 << i, 0] for i in _bits(block_k // 64)],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]] + [[0, 0]] * (groups.bit_length() - 1), [], [block_k, columns])
    own = latents // (8 * warps)  # latents of a lane
    values = gl.DistributedLinearLayout(
        [[0, 1 << i] for i in _bits(own)] + [[1, 0], [8, 0]], [[2, 0], [4, 0]] + [[0, own << i] for i in range(3)],
        [[0, 8 * own << i] for i in _bits(warps)], [], [16, latents])
    if cache == 0:
        out = gl.BlockedLayout([8, 1], [32, 1], [2, warps // 2], [0, 1])
    else:
        out = gl.DistributedLinearLayout(
            [[1 << i, 0] for i in _bits(own)] + [[0, 1]] + [[0, 8 << i] for i in _bits(heads_block // 8)], [[0, 2], [0, 4]] + [[own << i, 0] for i in range(3)],
            [[8 * own << i, 0] for i in _bits(warps)], [], [latents, heads_block])
    return dict(ROPE=rope, KV_BLOCK=kv_block, BLOCK_K=block_k, HEADS=heads_block, STAGES=stages, WARPS=warps, OVERLAP=overlap, P_BUFFERS=2 if overlap and cache != 2 else 1, FP8_MAX=fp8_max, CACHE=cache, Q_FP8=q_fp8,
                Q_PER_HEAD=q_per_head, Q_GIVEN=q_given, P_FP8=p_fp8, HAS_INVALID=has_invalid, HAS_SINK=has_sink, WRITE_LSE=write_lse, WRITE_PARTS=write_parts,
                S=s, O=o, KEYS=keys, VALUES=values, OUT=out)


def kind_of(kv_buffer, kv_scale) -> str:
    return "fp8_scalar" if kv_scale is not None else ("fp8_dsv32_mla" if is_packed(kv_buffer) else "bf16")


def chosen_launch(profile: Profile, q, kv_buffer, kv_scale, kv_lora_rank: int, recipe: Recipe) -> HopperLaunch:
    tokens, heads, width = q.shape
    return launches()[shape_class(profile, tokens, heads, width - kv_lora_rank, kind_of(kv_buffer, kv_scale), recipe.q != "bf16")]


def sparse_mla(q, kv_buffer, kv_indptr, kv_indices, softmax_scale: float, *, profile: Profile, recipe: Recipe, launch: Launch, kv_splits: int,
               kv_scale, kv_lora_rank: int, q_scale, attn_sink, has_invalid: bool, out, return_lse: bool, skip_reduce: bool):
    """(out, lse or None), or (Parts, None) with skip_reduce. Arguments already checked, by `refusal` too."""
    _, heads, width = q.shape
    rows = flat_rows(as_bytes(kv_buffer))
    chosen = chosen_launch(profile, q, kv_buffer, kv_scale, kv_lora_rank, recipe)
    cache = CACHES[kind_of(kv_buffer, kv_scale)]
    kv_block, stride_block = rows.shape[1], rows.stride(0)
    if stride_block == kv_block * rows.stride(1):  # one long list of rows: no division by the block
        kv_block, stride_block = 1, rows.stride(1)
    views = (rows.view(torch.float32), rows.view(torch.bfloat16)) if cache == 2 else (rows, rows)

    def attend(out, lse, parts, sink):
        compile_time = constants(
            cache=cache, q_fp8=recipe.q != "bf16", p_fp8=recipe.p != "bf16", rope=width - kv_lora_rank, kv_block=kv_block,
            q_given=q_scale is not None, q_per_head=recipe.q_granularity == "head", has_invalid=has_invalid, has_sink=sink is not None,
            write_lse=lse is not None, write_parts=parts is not None, fp8_max=profile.encoding.max_finite, launch=chosen,
        )
        limit = {} if chosen.registers is None else dict(maxnreg=chosen.registers)
        kernels.attend_hopper[(q.shape[0], triton.cdiv(heads, chosen.heads_block), kv_splits)](
            as_bytes(q), rows, *views, kv_indptr, kv_indices, q_scale, kv_scale, sink, out, lse, *(parts or (None, None, None)),
            softmax_scale * LOG2_E, profile.p_scale_of(recipe), slots(kv_buffer), heads, kv_splits,
            q.stride(0), q.stride(1), stride_block, rows.stride(1), out.stride(0), out.stride(1), **compile_time, num_warps=chosen.warps, **limit,
        )

    return attend_and_merge(attend, q, kv_lora_rank, kv_splits, attn_sink, out, return_lse, skip_reduce, dependent=DEPENDENT_MERGE)
