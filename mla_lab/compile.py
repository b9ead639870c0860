"""Compile a kernel for an architecture that is not here, and read from the result what a compiler can tell.

Triton's wheel carries the AMD and NVIDIA code generators, so that no GPU is needed: matrix instructions, LDS, registers,
spills, code size, and how many waves these leave room for. TRITON_INTERPRET must not be set in this process: under it there
is nothing to compile. What was compiled is kept in Triton's own cache (~/.triton/cache, TRITON_CACHE_DIR), which knows it by
source, constants, target and version.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd
import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from mla_lab import cdna, hopper, portable
from mla_lab.arch import Launch, check_fits, get_profile
from mla_lab.kernels import cdna as cdna_kernels
from mla_lab.kernels import hopper as hopper_kernels
from mla_lab.kernels import sparse_mla as kernels
from mla_lab.kernels import sparse_mla_packed as packed_kernels
from mla_lab.recipe import BF16_DOTS, FP8_DOTS, Recipe

TARGETS = {"gfx942": GPUTarget("hip", "gfx942", 64), "gfx950": GPUTarget("hip", "gfx950", 64), "gfx1250": GPUTarget("hip", "gfx1250", 32), "sm_90": GPUTarget("cuda", 90, 32)}
KERNELS = ("portable", "cdna", "hopper")
NUMERICS = {"gfx1250": "gfx950"}
"""Whose profile an arch without one of its own takes: both read e4m3fn."""

POINTERS = {"q": None, "kv": None, "indptr": "*i32", "indices": "*i32", "q_scale": "*fp32", "kv_scale": "*fp32", "sink": "*fp32",
            "out": "*bf16", "lse": "*fp32", "part_acc": "*fp32", "part_max": "*fp32", "part_sum": "*fp32"}
SCALARS = {"score_scale": "fp32", "p_scale": "fp32", "slots": "i32", "heads": "i32", "splits": "i32", "stride_q_token": "i64",
           "stride_q_head": "i64", "stride_kv_block": "i64", "stride_kv_row": "i64", "stride_out_token": "i64", "stride_out_head": "i64"}


@dataclass(frozen=True)
class Point:
    """What is compiled. kernel: "portable", "cdna" or "hopper". cache: "bf16", "fp8_scalar", "fp8_dsv32_mla" (not cdna).

    launch: None takes the profile's. heads: of the call, and hopper: the hopper kernel's launch, in place of `launch` (None
    takes the configured one). native_cast: fp8 is rounded by the hardware's conversion, else by the integer codec.
    write_parts: the split-K form. kv_row_pad: of the cdna kernel's tile (None: the published decode kernel's).
    """

    arch: str
    recipe: Recipe = BF16_DOTS
    kernel: str = "portable"
    cache: str = "fp8_scalar"
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 0
    launch: Launch | None = None
    write_parts: bool = False
    native_cast: bool = True
    kv_row_pad: int | None = None
    heads: int = 16
    hopper: hopper.HopperLaunch | None = None


def compile_point(point: Point) -> dict:
    """The kernel of a Point, compiled: name, arch, shared_memory (bytes), matrix_instructions {name: count},
    loop_conversions {name: count} of fp8 conversions in the loop over tiles, registers as the compiler reports them
    (None where it does not), code_bytes, occupancy (see `occupancy`), and `files` {suffix: text}.

    Raises ValueError for another arch, kernel or cache, for a tile that does not fit, and under TRITON_INTERPRET.
    """
    if point.arch not in TARGETS:
        raise ValueError(f"arch: got {point.arch!r}; accepted: {', '.join(TARGETS)}")
    if portable.INTERPRETED:
        raise ValueError("TRITON_INTERPRET: got 1; accepted: unset (the interpreter compiles nothing)")
    if point.kernel not in KERNELS:
        raise ValueError(f"kernel: got {point.kernel!r}; accepted: {', '.join(KERNELS)}")
    if point.cache not in ("bf16", "fp8_scalar", "fp8_dsv32_mla"):
        raise ValueError(f"cache: got {point.cache!r}; accepted: bf16, fp8_scalar, fp8_dsv32_mla")
    if point.cache == "bf16" and point.recipe.needs_fp8_cache:
        raise ValueError(f"recipe: got {point.recipe} with a bf16 cache; accepted: bf16 dots, or an fp8 cache")
    profile = get_profile(NUMERICS.get(point.arch, point.arch))
    launch = point.launch or profile.launch(point.recipe.dots)
    portable.check_recipe(point.recipe)
    if point.kernel == "cdna":
        if point.arch not in (*cdna.MFMA_VERSION, "sm_90"):
            raise ValueError(f"arch: got {point.arch!r} for the cdna kernel; accepted there: {', '.join(cdna.MFMA_VERSION)}, sm_90")
        cdna.check(point.recipe, point.kv_lora_rank, point.qk_rope_head_dim, point.cache, False)
        check_fits(profile, point.recipe.dots, point.kv_lora_rank, point.qk_rope_head_dim, launch.block_k, point.kv_row_pad)
    if point.kernel == "hopper":
        if point.arch != "sm_90":
            raise ValueError(f"arch: got {point.arch!r} for the hopper kernel; accepted there: sm_90")
        hopper.check_geometry(point.recipe, point.kv_lora_rank, point.qk_rope_head_dim)
    source, options = _source(point, profile, launch)
    try:
        compiled = triton.compile(source, target=TARGETS[point.arch], options=options)
    except Exception as error:
        raise ValueError(f"{point.kernel} kernel: does not compile for {point.arch} ({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'})") from None
    budget = shared_budget(point.arch)
    if compiled.metadata.shared > budget:
        raise ValueError(f"block_k: got {launch.block_k}, with which the {point.kernel} kernel takes {compiled.metadata.shared:,} B of shared memory on {point.arch}; accepted: up to {budget:,} B")
    nvidia = point.arch == "sm_90"
    text = compiled.asm["ptx" if nvidia else "amdgcn"]
    found = dict(name=compiled.metadata.name, shared_memory=compiled.metadata.shared,
                 matrix_instructions=dict(Counter(re.findall(r"\b(wgmma\.mma_async\.\S+|mma\.sync\.\S+)" if nvidia else r"\b(v_s?w?mfma\w+|v_wmma\w+)", text))),
                 loop_conversions=dict(Counter(re.findall(r"\b(cvt\.\S*e4m3\S*)" if nvidia else r"\b(v_cvt\w*fp8\w*)", _loops(text, nvidia)))))
    found |= _nvidia_resources(compiled.asm["cubin"]) if nvidia else _amd_resources(text)
    found |= occupancy(point.arch, options["num_warps"], found)
    suffixes = ("ttgir", "llir", "ptx") if nvidia else ("ttgir", "llir", "amdgcn")
    return dict(arch=point.arch, kernel=point.kernel, **found, files={suffix: compiled.asm[suffix] for suffix in suffixes})


def compile_attend(arch: str, recipe: Recipe, **options) -> dict:
    """compile_point of the portable kernel with the integer codec, as it runs where no conversion has been tested."""
    return compile_point(Point(arch, recipe, **{"native_cast": False, **options}))


def _source(point, profile, launch):
    packed, fp8_cache = point.cache == "fp8_dsv32_mla", point.cache != "bf16"
    shared = dict(kv_lora_rank=point.kv_lora_rank, qk_rope_head_dim=point.qk_rope_head_dim, kv_block=1, cache_fp8=fp8_cache, native_dot=True,
                  native_cast=point.native_cast, has_invalid=False, has_sink=False, write_lse=not point.write_parts, write_parts=point.write_parts)
    signature = dict(POINTERS, q="*bf16", kv="*u8" if fp8_cache else "*bf16")
    if point.kernel == "cdna":
        compile_time = cdna.constants(point.arch, profile, point.recipe, launch, kv_row_pad=point.kv_row_pad, **shared)
        function, source_of = cdna_kernels.attend_cdna, GluonASTSource
        del signature["q_scale"]
        options = dict(num_warps=launch.num_warps)
    elif point.kernel == "hopper":
        kind = hopper.CACHES[point.cache]
        chosen = point.hopper or hopper.launches()[hopper.ShapeClass("16" if point.heads <= 16 else "more", point.qk_rope_head_dim, point.cache, point.recipe.q != "bf16", point.write_parts)]
        compile_time = hopper.constants(cache=kind, q_fp8=point.recipe.q != "bf16", p_fp8=point.recipe.p != "bf16", rope=point.qk_rope_head_dim, kv_block=1,
                                        q_given=False, q_per_head=point.recipe.q_granularity == "head", has_invalid=False, has_sink=False, write_lse=not point.write_parts,
                                        write_parts=point.write_parts, fp8_max=profile.encoding.max_finite, launch=chosen)
        function, source_of = hopper_kernels.attend_hopper, GluonASTSource
        signature = {"q": "*bf16", "kv": signature["kv"], "scales": "*fp32", "ropes": "*bf16"} | {n: signature[n] for n in signature if n not in ("q", "kv")}
        if not packed:
            signature |= dict(scales=signature["kv"], ropes=signature["kv"])
        options = dict(num_warps=chosen.warps) | ({} if chosen.registers is None else dict(maxnreg=chosen.registers))
    else:
        compile_time = portable.constants(profile, point.recipe, launch, q_given=False, interpret=False, **shared)
        function, source_of = (packed_kernels.attend_packed if packed else kernels.attend), ASTSource
        options = dict(num_warps=launch.num_warps, num_stages=launch.num_stages)
    unused = ["q_scale", "sink"] + (["out", "lse"] if point.write_parts else ["part_acc", "part_max", "part_sum"])
    if packed and point.kernel == "portable":
        # The same cache three times, and no scale beside it.
        names = [n for n in signature if n not in ("kv", "kv_scale")]
        signature = {"q": "*bf16", "codes": "*u8", "scales": "*fp32", "ropes": "*bf16"} | {n: signature[n] for n in names}
        compile_time = {name: compile_time[name] for name in portable.PACKED_CONSTANTS}
    elif point.cache != "fp8_scalar":
        unused.append("kv_scale")
    unused = [name for name in unused if name in signature]
    signature = signature | SCALARS | dict.fromkeys(compile_time, "constexpr") | dict.fromkeys(unused, "constexpr")
    return source_of(fn=function, signature=signature, constexprs=compile_time | dict.fromkeys(unused), attrs=_aligned(signature)), options


def _aligned(signature):
    """Pointers and strides are multiples of 16, as they are at run time: without it no load is vectorised."""
    names = list(signature)
    return {(names.index(n),): [["tt.divisibility", 16]] for n, kind in signature.items() if kind.startswith("*") or n.startswith("stride_")}


def _loops(text, nvidia):
    """The lines that lie in a loop. AMD's assembler says so beside each block; in PTX a loop ends in a branch backwards."""
    lines = text.splitlines()
    if not nvidia:
        inside, kept = False, []
        for line in lines:
            if re.match(r"\.LBB\d+_\d+:|; %bb\.\d+:", line):
                inside = "in Loop" in line or "Loop Header" in line
            elif re.match(r"\s+;.*Loop Header", line):
                inside = True
            if inside:
                kept.append(line)
        return "\n".join(kept)
    labels = {label[1]: i for i, line in enumerate(lines) if (label := re.match(r"\s*(\$\w+):", line))}
    inside = set()
    for i, line in enumerate(lines):
        target = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)
        if target and labels.get(target[1], i) < i:
            inside |= set(range(labels[target[1]], i))
    return "\n".join(lines[i] for i in sorted(inside))


def _amd_resources(text):
    of = lambda pattern: int(found[1]) if (found := re.search(pattern, text)) else None
    return dict(vgpr=of(r"\.vgpr_count:\s+(\d+)"), agpr=of(r"\.agpr_count:\s+(\d+)"), sgpr=of(r"\.sgpr_count:\s+(\d+)"),
                vgpr_spills=of(r"\.vgpr_spill_count:\s+(\d+)"), sgpr_spills=of(r"\.sgpr_spill_count:\s+(\d+)"),
                scratch_bytes=of(r"\.private_segment_fixed_size:\s+(\d+)"), code_bytes=of(r"; codeLenInByte = (\d+)"))


def _nvidia_resources(cubin):
    """Registers, spills (bytes of local memory) and size, from cuobjdump, which Triton's wheel has beside ptxas."""
    import triton.backends.nvidia

    tool = Path(next(iter(triton.backends.nvidia.__path__))) / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        run = lambda *what: subprocess.run([tool, *what, path], capture_output=True, text=True, check=True).stdout
        usage, sass = run("-res-usage"), run("-sass")
    registers, stack, local = (int(re.search(rf"\b{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    last = [int(at, 16) for at in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/", sass, re.M)]
    return dict(vgpr=registers, agpr=None, sgpr=None, vgpr_spills=0 if stack + local == 0 else None, sgpr_spills=None, scratch_bytes=stack + local,
                code_bytes=max(last) + 16)


# Registers of a SIMD's lane (AMD) or an SM (NVIDIA), how many of them go to a wave at a time, most waves or warps, and bytes
# of LDS of a CU, or shared memory of an SM. CDNA3 and CDNA4 ISA; LLVM's AMDGPU usage guide; CUDA programming guide, compute
# capability 9.0 (a CTA takes 1 KB more than it asks for).
_AMD = {"gfx942": dict(vgprs=512, vgpr_step=8, sgprs=800, sgpr_step=16, waves=8, lds=65_536), "gfx950": dict(vgprs=512, vgpr_step=8, sgprs=800, sgpr_step=16, waves=8, lds=163_840)}
_SM_90 = dict(registers=65_536, step=8, warps=64, ctas=32, shared=233_472, reserved=1_024)


def shared_budget(arch: str) -> int:
    """Bytes that one workgroup may take. gfx1250: 320 KB (LLVM's AMDGPU usage guide)."""
    return 327_680 if arch == "gfx1250" else get_profile(arch).shared_memory


def occupancy(arch: str, num_warps: int, found: dict) -> dict:
    """waves: per SIMD on AMD, CTAs per SM on NVIDIA, that registers and shared memory allow; limited_by: what allows the fewest.

    Nothing is said for gfx1250, whose limits are not public in the same form.
    """
    up = lambda value, step: -(-value // step) * step
    if arch == "sm_90":
        sm = _SM_90
        room = dict(registers=sm["registers"] // (up(found["vgpr"], sm["step"]) * 32 * num_warps), warps=sm["warps"] // num_warps, ctas=sm["ctas"],
                    shared_memory=sm["shared"] // (found["shared_memory"] + sm["reserved"]))
    elif arch in _AMD:
        cu = _AMD[arch]
        groups = cu["lds"] // found["shared_memory"] if found["shared_memory"] else cu["waves"]
        room = dict(vgpr=cu["vgprs"] // up(found["vgpr"], cu["vgpr_step"]), sgpr=cu["sgprs"] // up(found["sgpr"], cu["sgpr_step"]), waves=cu["waves"],
                    lds=groups * num_warps / 4)  # of the four SIMDs
    else:
        return dict(waves=None, limited_by=None)
    waves = min(room.values())
    return dict(waves=int(waves) if waves == int(waves) else waves, limited_by=", ".join(name for name, value in room.items() if value == waves))


def table(points: Sequence[Point], processes: int | None = None, files: Path | None = None) -> pd.DataFrame:
    """compile_point of each, in processes of their own, one row each; a point that is refused or fails says why in `error`.

    files: a folder for the compilers' texts.
    """
    points = list(points)
    rows = [None] * len(points)
    with concurrent.futures.ProcessPoolExecutor(processes or os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_row, point, files): i for i, point in enumerate(points)}
        for done in tqdm(concurrent.futures.as_completed(running), total=len(points), desc="compile"):
            rows[running[done]] = done.result()
    return pd.DataFrame(rows)


def _row(point, files):
    profile = get_profile(NUMERICS.get(point.arch, point.arch)) if point.arch in TARGETS else None
    launch = point.launch or (profile.launch(point.recipe.dots) if profile else Launch(0, 0, 0))
    row = dict(arch=point.arch, kernel=point.kernel, cache=point.cache, qk=point.recipe.q, pv=point.recipe.p, rank=point.kv_lora_rank, rope=point.qk_rope_head_dim, **asdict(launch))
    try:
        found = compile_point(point)
    except ValueError as error:
        return row | dict(error=str(error))
    if files:
        files.mkdir(parents=True, exist_ok=True)
        stem = "-".join(str(v) for v in row.values())
        for suffix, text in found["files"].items():
            (files / f"{stem}.{suffix}").write_text(text)
    counted = lambda counts: ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
    return row | {name: found[name] for name in ("shared_memory", "vgpr", "agpr", "sgpr", "vgpr_spills", "sgpr_spills", "scratch_bytes", "waves", "limited_by", "code_bytes")} | dict(
        matrix_instructions=counted(found["matrix_instructions"]), loop_conversions=counted(found["loop_conversions"]), error="")


def grid(archs: Sequence[str], kernel: str | None = None, block_ks: Sequence[int] = (32, 64, 128), num_warps: Sequence[int] = (4,), ropes: Sequence[int] = (0, 64),
         kv_lora_rank: int = 512, recipes: Sequence[Recipe] = (BF16_DOTS, FP8_DOTS)) -> list[Point]:
    """Each recipe over an fp8 cache, and bf16 dots over a bf16 cache too, for each tile and number of warps.

    kernel: None takes cdna where it has MFMA layouts, and the portable one elsewhere.
    """
    return [
        Point(arch, recipe, kernel=kernel or ("cdna" if arch in cdna.MFMA_VERSION else "portable"), cache=kind, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=rope,
              launch=replace(get_profile(NUMERICS.get(arch, arch)).launch(recipe.dots), block_k=block_k, num_warps=warps))
        for arch in archs for recipe in recipes for kind in (("fp8_scalar",) if recipe.needs_fp8_cache else ("bf16", "fp8_scalar"))
        for rope in ropes for block_k in block_ks for warps in num_warps
    ]
