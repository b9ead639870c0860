"""Compile the portable kernel for an architecture that is not here, on a machine without a GPU.

Triton's wheel carries the AMD and NVIDIA code generators. TRITON_INTERPRET must not be set in this process: under it
there is nothing to compile.
"""

from __future__ import annotations

import re
from collections import Counter

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mla_lab import portable
from mla_lab.arch import get_profile
from mla_lab.kernels import sparse_mla as kernels
from mla_lab.kernels import sparse_mla_packed as packed_kernels
from mla_lab.recipe import Recipe

TARGETS = {"gfx942": GPUTarget("hip", "gfx942", 64), "gfx950": GPUTarget("hip", "gfx950", 64), "sm_90": GPUTarget("cuda", 90, 32)}

POINTERS = {"q": None, "kv": None, "indptr": "*i32", "indices": "*i32", "q_scale": "*fp32", "kv_scale": "*fp32", "sink": "*fp32",
            "out": "*bf16", "lse": "*fp32", "part_acc": "*fp32", "part_max": "*fp32", "part_sum": "*fp32"}
SCALARS = {"score_scale": "fp32", "p_scale": "fp32", "slots": "i32", "heads": "i32", "splits": "i32", "stride_q_token": "i64",
           "stride_q_head": "i64", "stride_kv_block": "i64", "stride_kv_row": "i64", "stride_out_token": "i64", "stride_out_head": "i64"}


def compile_attend(arch: str, recipe: Recipe, *, cache: str = "fp8_scalar", kv_lora_rank: int = 512, qk_rope_head_dim: int = 0,
                   write_parts: bool = False, native_cast: bool = False) -> dict:
    """kernels.attend (attend_packed for cache="fp8_dsv32_mla") for `arch` with its launch configuration: name, shared memory in bytes, matrix instructions by
    name and count, register counts and spills (AMD), and the assembly text.

    native_cast: P and Q are rounded by the hardware's conversion. Raises ValueError for an unknown arch or cache, or
    under TRITON_INTERPRET.
    """
    profile = get_profile(arch)
    if portable.INTERPRETED:
        raise ValueError("TRITON_INTERPRET: got 1; accepted: unset (the interpreter compiles nothing)")
    if cache not in ("bf16", "fp8_scalar", "fp8_dsv32_mla"):
        raise ValueError(f"cache: got {cache!r}; accepted: bf16, fp8_scalar, fp8_dsv32_mla")
    packed = cache == "fp8_dsv32_mla"
    launch = profile.launch(recipe.dots)
    compile_time = portable.constants(
        profile, recipe, launch, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim, kv_block=1, cache_fp8=cache != "bf16",
        q_given=False, native_dot=True, native_cast=native_cast, has_invalid=False, has_sink=False, write_lse=True,
        write_parts=write_parts, interpret=False,
    )
    signature = dict(POINTERS, q="*bf16")
    unused = ["q_scale", "sink"] + (["out", "lse"] if write_parts else ["part_acc", "part_max", "part_sum"])
    if packed:
        # The same cache three times, and no scale beside it.
        del signature["kv_scale"]
        names = [n for n in signature if n != "kv"]
        signature = {"q": "*bf16", "codes": "*u8", "scales": "*fp32", "ropes": "*bf16"} | {n: signature[n] for n in names}
        compile_time = {name: compile_time[name] for name in portable.PACKED_CONSTANTS}
    else:
        signature["kv"] = "*bf16" if cache == "bf16" else "*u8"
        unused += ["kv_scale"] if cache == "bf16" else []
    signature = signature | SCALARS | dict.fromkeys(compile_time, "constexpr")
    signature |= dict.fromkeys(unused, "constexpr")
    compile_time |= dict.fromkeys(unused)
    source = ASTSource(fn=packed_kernels.attend_packed if packed else kernels.attend, signature=signature, constexprs=compile_time, attrs=_aligned(signature))
    compiled = triton.compile(source, target=TARGETS[profile.name], options=dict(num_warps=launch.num_warps, num_stages=launch.num_stages))
    text = compiled.asm["ptx" if profile.name == "sm_90" else "amdgcn"]
    instructions = r"\b(wgmma\.mma_async\.\S+|mma\.sync\.\S+)" if profile.name == "sm_90" else r"\b(v_s?mfma\w+)"
    result = dict(arch=profile.name, name=compiled.metadata.name, shared_memory=compiled.metadata.shared,
                  matrix_instructions=dict(Counter(re.findall(instructions, text))), asm=text)
    for key in ("vgpr_count", "agpr_count", "vgpr_spill_count", "sgpr_spill_count"):
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        result[key] = int(found[1]) if found else None
    return result


def _aligned(signature):
    """Pointers and strides are multiples of 16, as they are at run time: without it no load is vectorised."""
    names = list(signature)
    return {(names.index(n),): [["tt.divisibility", 16]] for n, kind in signature.items() if kind.startswith("*") or n.startswith("stride_")}
