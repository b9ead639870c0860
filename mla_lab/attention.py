"""sparse_mla_fwd: check the arguments, tell the cache apart, choose a kernel, launch it."""

from __future__ import annotations

import math

import torch

from mla_lab import cache, cdna, emulate, hopper, lists, portable
from mla_lab.arch import HEAD_BLOCK, Profile, check_fits, choose_kv_splits, get_profile
from mla_lab.formats import FORMAT_OF_DTYPE
from mla_lab.recipe import DOTS, NAMED, Recipe, check_scale

BACKENDS = ("auto", "triton", "hopper", "cdna", "emulate")

MOST_SPLITS = 65_535
"""What a CUDA grid has room for in its third dimension."""


@torch.no_grad()
def sparse_mla_fwd(q, kv_buffer, kv_indptr, kv_indices, softmax_scale, *, kv_scale=None, kv_lora_rank=512,
                   qk_rope_head_dim=64, kv_splits=None, skip_reduce=False, has_invalid=False, dot_precision="bf16",
                   q_scale=None, out=None, return_lse=False, attn_sink=None, arch=None, recipe=None, backend="auto",
                   check_indices=False):
    """Sparse (top-k gathered) multi-head latent attention, forward. C query tokens, H heads, R = rank + rope columns.

    q: [C, H, R] bf16, or fp8 in the arch's encoding with q_scale [1] f32. kv_buffer: [slots, R], [blocks, block, R] or
    [slots, 1, 1, R], bf16, or fp8 in the arch's encoding (typed, or a uint8 view) with kv_scale [1] f32; or, for 512 + 64
    columns, a packed cache [blocks, block, 656] uint8 without kv_scale (see mla_lab.cache). Strides are honoured.
    kv_indptr: [C + 1] int32 or int64, prefix sums of each query's number of keys. kv_indices: flat int32 or int64
    slots; with has_invalid, -1 is a hole. out: optional [C, H, >= kv_lora_rank] bf16, written in its leading columns.
    attn_sink: [H] f32, natural log: one more key without a value.

    dot_precision "bf16" or "fp8", or a Recipe (or the name of one in recipe.NAMED) in its place (recipe=), says what both
    products run in; the Triton kernel refuses what only the emulator does (see mla_lab.Recipe). arch: a profile's
    name ("gfx942", "gfx950", "sm_90") or None for the running device's (gfx942 on a CPU). kv_splits: split-K; None
    leaves it to the launch policy. backend: "auto" (portable Triton on a GPU, the emulator elsewhere), "triton", "hopper" (Gluon; e4m3fn profiles, rank 512, rope 0 or 64, rows at multiples of
    16 bytes), "cdna" (Gluon, on AMD's CDNA; bf16 or fp8 dots over bf16 and fp8_scalar caches), "emulate".

    Returns (out [C, H, kv_lora_rank] bf16, natural-log LSE [C, H] f32 or None). A query without a key gives zeros and
    -inf (the sink, where there is one). With skip_reduce it returns (Parts, None) instead, the splits unmerged and without
    the sink (see emulate.Parts), for merge_parts. An index out of range is a ValueError in the emulator and under check_indices (which reads device
    data); elsewhere its own query becomes NaN and nothing is read there.

    Forward only: no gradient passes. Raises ValueError, naming the argument, what came and what is accepted.
    """
    for name, value in (("q", q), ("kv_buffer", kv_buffer), ("kv_indptr", kv_indptr), ("kv_indices", kv_indices)):
        _check_tensor(name, value)
    for name, value in (("kv_scale", kv_scale), ("q_scale", q_scale), ("out", out), ("attn_sink", attn_sink)):
        if value is not None:
            _check_tensor(name, value)
    for name, value in (("skip_reduce", skip_reduce), ("has_invalid", has_invalid), ("return_lse", return_lse), ("check_indices", check_indices)):
        if not isinstance(value, bool):
            raise ValueError(f"{name}: got {value!r}; accepted: True, False")
    _check_q(q, kv_lora_rank, qk_rope_head_dim)
    profile = get_profile(arch, q.device)
    recipe = _choose_recipe(dot_precision, recipe)
    kind = _check_cache(q, kv_buffer, kv_scale, kv_lora_rank, qk_rope_head_dim, profile)
    if kind == "bf16":
        kv_scale = None
        if recipe.needs_fp8_cache:
            name, got = ("dot_precision", repr(dot_precision)) if dot_precision != "bf16" else ("recipe", recipe)
            raise ValueError(f"{name}: got {got} with a bf16 cache; accepted: 'bf16', or an fp8 cache (its codes feed the product)")
    q_scale = _check_q_type(q, q_scale, profile)
    if q_scale is not None and (recipe.q == "fp8x2" or recipe.hadamard):
        raise ValueError(f"recipe: got {recipe} with an fp8 q, whose rounding is done; accepted: q='fp8' or 'bf16' without hadamard, or a bf16 q")
    _check_lists(q, kv_indptr, kv_indices)
    _check_rest(q, softmax_scale, kv_splits, out, attn_sink, kv_lora_rank, backend)
    check_fits(profile, recipe.dots, kv_lora_rank, qk_rope_head_dim)

    tokens, heads, _ = q.shape
    backend = chosen_backend(q, kv_buffer, kv_lora_rank, recipe, profile, backend)
    if backend in ("triton", "hopper", "cdna"):
        portable.check_recipe(recipe)
    if backend == "cdna":
        cdna.check(recipe, kv_lora_rank, qk_rope_head_dim, kind, q_scale is not None)
    if check_indices or backend == "emulate":
        lists.check(kv_indptr, kv_indices, cache.slots(kv_buffer), has_invalid)
        _check_scale_values(kv_scale=kv_scale, q_scale=q_scale)
    launch = profile.launch(recipe.dots)
    if kv_splits is None:
        kv_splits = choose_kv_splits(profile, tokens, heads, kv_indices.numel() // max(tokens, 1), launch.block_k, *_programs(profile, q, kv_buffer, kv_scale, kv_lora_rank, recipe, backend))

    if backend in ("triton", "hopper", "cdna"):
        return {"triton": portable, "hopper": hopper, "cdna": cdna}[backend].sparse_mla(
            q, kv_buffer, kv_indptr, kv_indices, softmax_scale, profile=profile, recipe=recipe, launch=launch, kv_splits=kv_splits,
            kv_scale=kv_scale, kv_lora_rank=kv_lora_rank, q_scale=q_scale, attn_sink=attn_sink, has_invalid=has_invalid,
            out=out, return_lse=return_lse, skip_reduce=skip_reduce,
        )
    parts = emulate.sparse_mla_parts(
        q, kv_buffer, kv_indptr, kv_indices, softmax_scale, profile=profile, recipe=recipe, block_k=launch.block_k,
        kv_splits=kv_splits, kv_scale=kv_scale, kv_lora_rank=kv_lora_rank, q_scale=q_scale,
    )
    if skip_reduce:
        return parts, None
    result, lse = emulate.merge(parts, attn_sink)
    out = result.bfloat16() if out is None else out[..., :kv_lora_rank].copy_(result)
    return out, (lse if return_lse else None)


def merge_parts(parts, attn_sink=None):
    """(out [C, H, kv_lora_rank] bf16, natural-log LSE [C, H] f32) of Parts, or of a list of Parts over disjoint keys.

    For context parallelism: each rank attends over its own keys with skip_reduce=True, and their parts merge to what one
    call over all keys gives. attn_sink [H] f32 belongs here, once, not to the ranks. No synchronization. Raises
    ValueError for an empty list, or for parts of different tokens, heads or ranks.
    """
    every = [parts] if isinstance(parts, emulate.Parts) else list(parts)
    if not every:
        raise ValueError("parts: got an empty list; accepted: Parts, or a list of one or more")
    shapes = {(p.acc.shape[0], *p.acc.shape[2:]) for p in every}
    if len(shapes) > 1:
        raise ValueError(f"parts: got (tokens, heads, rank) {sorted(shapes)}; accepted: the same for all")
    out, lse = emulate.merge(emulate.Parts(*(torch.cat(tensors, 1) for tensors in zip(*every))), attn_sink)
    return out.bfloat16(), lse


def _check_tensor(name, value):
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}: got {value!r:.60} ({type(value).__name__}); accepted: a torch.Tensor")


def _is_whole(value, least):
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_q(q, kv_lora_rank, qk_rope_head_dim):
    if not _is_whole(kv_lora_rank, 1) or kv_lora_rank & (kv_lora_rank - 1):
        raise ValueError(f"kv_lora_rank: got {kv_lora_rank!r}; accepted: a power of two")
    if not _is_whole(qk_rope_head_dim, 0):
        raise ValueError(f"qk_rope_head_dim: got {qk_rope_head_dim!r}; accepted: 0 or a positive integer")
    width = kv_lora_rank + qk_rope_head_dim
    if q.dim() != 3:
        raise ValueError(f"q: got shape {tuple(q.shape)}; accepted: [tokens, heads, {width}]")
    if q.shape[1] < 1:
        raise ValueError(f"q: got {q.shape[1]} heads; accepted: 1 or more")
    if q.shape[2] != width:
        raise ValueError(f"q: got rows of {q.shape[2]}; accepted: kv_lora_rank + qk_rope_head_dim = {kv_lora_rank} + {qk_rope_head_dim} = {width}")
    if q.numel() and q.stride(-1) != 1:
        raise ValueError(f"q: got stride {q.stride(-1)} in its last dimension; accepted: 1")


def _check_q_type(q, q_scale, profile):
    """q_scale where q is fp8, else None."""
    if q.dtype == torch.bfloat16:
        if q_scale is not None:
            raise ValueError("q_scale: got a scale with a bf16 q; accepted: None (the kernel quantizes a bf16 q itself)")
        return None
    encoding = profile.encoding
    other = FORMAT_OF_DTYPE.get(q.dtype)
    if other is not None and other != encoding:
        raise ValueError(f"q: got {other.name} ({q.dtype}), where {profile.name} reads {encoding.name}; accepted: torch.bfloat16, {encoding.torch_dtype}")
    if other is None:
        raise ValueError(f"q: got {q.dtype}; accepted: torch.bfloat16, or {encoding.torch_dtype} with q_scale")
    if q_scale is None:
        raise ValueError(f"q_scale: got None with an fp8 q ({q.dtype}); accepted: a [1] float32 tensor")
    if q_scale.dtype != torch.float32 or tuple(q_scale.shape) != (1,) or q_scale.device != q.device:
        raise ValueError(f"q_scale: got {q_scale.dtype} of shape {tuple(q_scale.shape)} on {q_scale.device}; accepted: a [1] float32 tensor on {q.device}")
    return q_scale


def _check_cache(q, kv_buffer, kv_scale, kv_lora_rank, qk_rope_head_dim, profile: Profile):
    if kv_buffer.device != q.device:
        raise ValueError(f"kv_buffer: got a tensor on {kv_buffer.device}; accepted: one on q's device, {q.device}")
    return cache.identify(kv_buffer, kv_scale, kv_lora_rank, qk_rope_head_dim, profile.encoding)


def _choose_recipe(dot_precision, recipe) -> Recipe:
    if not isinstance(dot_precision, str) or dot_precision not in DOTS:
        raise ValueError(f"dot_precision: got {dot_precision!r}; accepted: {', '.join(DOTS)}")
    if recipe is None:
        return DOTS[dot_precision]
    if isinstance(recipe, str) and recipe in NAMED:
        recipe = NAMED[recipe]
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe: got {recipe!r}; accepted: None, a mla_lab.Recipe, or one of {', '.join(map(repr, NAMED))}")
    if dot_precision != "bf16":
        raise ValueError(f"recipe: got {recipe} beside dot_precision={dot_precision!r}; accepted: one of the two")
    return recipe


def _check_lists(q, kv_indptr, kv_indices):
    tokens = q.shape[0]
    for name, tensor in (("kv_indptr", kv_indptr), ("kv_indices", kv_indices)):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name}: got {tensor.dtype}; accepted: torch.int32, torch.int64")
        if tensor.dim() != 1:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}; accepted: one dimension")
        if tensor.device != q.device:
            raise ValueError(f"{name}: got a tensor on {tensor.device}; accepted: one on q's device, {q.device}")
        if tensor.numel() > 1 and tensor.stride(0) != 1:
            raise ValueError(f"{name}: got stride {tensor.stride(0)}; accepted: 1")
    if kv_indptr.numel() != tokens + 1:
        swapped = " (are kv_indptr and kv_indices swapped?)" if kv_indices.numel() == tokens + 1 else ""
        raise ValueError(f"kv_indptr: got {kv_indptr.numel()} entries for {tokens} query tokens; accepted: {tokens + 1}{swapped}")


def _check_rest(q, softmax_scale, kv_splits, out, attn_sink, kv_lora_rank, backend):
    check_scale(softmax_scale, "softmax_scale")
    if kv_splits is not None and not (_is_whole(kv_splits, 1) and kv_splits <= MOST_SPLITS):
        raise ValueError(f"kv_splits: got {kv_splits!r}; accepted: None, or an integer from 1 to {MOST_SPLITS:,}")
    tokens, heads, _ = q.shape
    if out is not None:
        if out.dtype != torch.bfloat16:
            raise ValueError(f"out: got {out.dtype}; accepted: torch.bfloat16")
        if out.dim() != 3 or tuple(out.shape[:2]) != (tokens, heads) or out.shape[2] < kv_lora_rank:
            raise ValueError(f"out: got shape {tuple(out.shape)}; accepted: [{tokens}, {heads}, {kv_lora_rank} or more]")
        if out.numel() and out.stride(-1) != 1:
            raise ValueError(f"out: got stride {out.stride(-1)} in its last dimension; accepted: 1")
        if out.numel() and any(size > 1 and stride < kv_lora_rank for size, stride in zip(out.shape[:2], out.stride()[:2])):
            raise ValueError(f"out: got strides {out.stride()}, whose rows overlap; accepted: rows of {kv_lora_rank} or more apart")
        if out.device != q.device:
            raise ValueError(f"out: got a tensor on {out.device}; accepted: one on q's device, {q.device}")
    if attn_sink is not None:
        if attn_sink.dtype != torch.float32 or tuple(attn_sink.shape) != (heads,):
            raise ValueError(f"attn_sink: got {attn_sink.dtype} of shape {tuple(attn_sink.shape)}; accepted: float32 of shape ({heads},)")
        if attn_sink.device != q.device or (heads > 1 and attn_sink.stride(0) != 1):
            raise ValueError(f"attn_sink: got a tensor on {attn_sink.device} of stride {attn_sink.stride(0)}; accepted: a contiguous one on {q.device}")
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}; accepted: {', '.join(BACKENDS)}")


def chosen_backend(q, kv_buffer, kv_lora_rank: int, recipe: Recipe, profile: Profile, backend: str = "auto") -> str:
    """The backend that a call runs on: "auto" resolved, another as it is. ValueError where it does not run here."""
    device = q.device
    if backend == "auto":
        if device.type != "cuda":
            return "emulate"
        return "triton"
    if backend == "cdna" and device.type != "cuda":
        raise ValueError(f"backend: got 'cdna' on {device}; accepted there: 'emulate' (Gluon has no interpreter; mla-lab compile compiles it)")
    if backend == "hopper":
        refused = hopper.refusal(profile, recipe, q, kv_buffer, kv_lora_rank)
        if refused:
            raise ValueError(refused)
    if backend == "triton" and device.type != "cuda" and not portable.INTERPRETED:
        raise ValueError(
            f"backend: got 'triton' on {device}; accepted there: 'emulate', or 'triton' with TRITON_INTERPRET=1 set before mla_lab is imported"
        )
    return backend


def _programs(profile, q, kv_buffer, kv_scale, kv_lora_rank, recipe, backend):
    """Heads of a program and programs per compute unit, for the split policy."""
    if backend == "hopper":
        launch = hopper.chosen_launch(profile, q, kv_buffer, kv_scale, kv_lora_rank, recipe)
        return launch.heads_block, launch.programs_per_unit
    return HEAD_BLOCK, 1


def _check_scale_values(**scales):
    for name, scale in scales.items():
        if scale is not None and not (math.isfinite(float(scale)) and float(scale) > 0):
            raise ValueError(f"{name}: got {float(scale)}; accepted: a finite value above 0")
