"""Every refusal that these two caches can meet: a ValueError with the argument, what came, and what is accepted."""

import numpy as np
import pytest
import torch

from cases import DEVICE
from mla_lab import Recipe, cache, sparse_mla_fwd

C, H, RANK, ROPE, SLOTS = 2, 4, 64, 16, 40
OTHER = "meta"


def arguments(**changes):
    g = torch.Generator().manual_seed(0)
    packed = cache.pack_fp8_scalar(torch.randn(SLOTS, RANK + ROPE, generator=g), "e4m3fnuz")
    usual = dict(
        q=torch.randn(C, H, RANK + ROPE, generator=g).bfloat16(), kv_buffer=packed.buffer,
        kv_indptr=torch.tensor([0, 5, 9], dtype=torch.int32), kv_indices=torch.arange(9, dtype=torch.int32), softmax_scale=0.1,
        kv_scale=packed.scale, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, arch="gfx942",
    )
    made = {**usual, **changes}
    return {k: on_device(v) if isinstance(v, torch.Tensor) and v.device.type != OTHER else v for k, v in made.items()}


def on_device(tensor):
    """On DEVICE with the same strides: `to` alone would make a strided tensor dense."""
    if tensor.is_contiguous():
        return tensor.to(DEVICE)
    return torch.as_strided(tensor._base.to(DEVICE), tensor.shape, tensor.stride(), tensor.storage_offset())


def bf16(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def u8(*shape):
    return torch.zeros(*shape, dtype=torch.uint8)


ONE = torch.ones(1)
REFUSALS = {
    "q not 3-D": (dict(q=bf16(C, RANK + ROPE)), r"q: got shape \(2, 80\); accepted: \[tokens, heads, 80\]"),
    "q of no heads": (dict(q=bf16(C, 0, 80)), "q: got 0 heads; accepted: 1 or more"),
    "q of another width": (dict(q=bf16(C, H, 64)), r"q: got rows of 64; accepted: kv_lora_rank \+ qk_rope_head_dim = 64 \+ 16 = 80"),
    "q in f32": (dict(q=torch.zeros(C, H, 80)), "q: got torch.float32; accepted: torch.bfloat16, or torch.float8_e4m3fnuz with q_scale"),
    "q in f16": (dict(q=torch.zeros(C, H, 80, dtype=torch.float16)), "q: got torch.float16; accepted"),
    "q in the other encoding": (dict(q=u8(C, H, 80).view(torch.float8_e4m3fn), q_scale=ONE), "q: got e4m3fn .*, where gfx942 reads e4m3fnuz"),
    "q with a last stride": (dict(q=bf16(C, H, 160)[..., ::2]), "q: got stride 2 in its last dimension; accepted: 1"),
    "fp8 q without q_scale": (dict(q=u8(C, H, 80).view(torch.float8_e4m3fnuz)), "q_scale: got None with an fp8 q"),
    "q_scale of another type": (dict(q=u8(C, H, 80).view(torch.float8_e4m3fnuz), q_scale=ONE.double()), "q_scale: got torch.float64 of shape"),
    "q_scale with a bf16 q": (dict(q_scale=ONE), "q_scale: got a scale with a bf16 q; accepted: None"),
    "a rank that is no power of two": (dict(kv_lora_rank=48, q=bf16(C, H, 64)), "kv_lora_rank: got 48; accepted: a power of two"),
    "a negative rope": (dict(qk_rope_head_dim=-1), "qk_rope_head_dim: got -1; accepted"),
    "cache on another device": (dict(kv_buffer=bf16(SLOTS, 80).to(OTHER)), "kv_buffer: got a tensor on meta; accepted: one on q's device"),
    "cache of another rank": (dict(kv_buffer=bf16(80)), r"kv_buffer: got shape \(80,\); accepted: \[slots, 80\], \[blocks, block, 80\] or"),
    "cache of four dimensions, not of one row": (dict(kv_buffer=bf16(2, 3, 1, 80)), r"kv_buffer: got shape \(2, 3, 1, 80\)"),
    "cache of another width": (dict(kv_buffer=bf16(SLOTS, 64)), r"kv_buffer: got rows of 64; accepted: .* = 80"),
    "a packed width": (dict(kv_buffer=u8(4, 8, 656), kv_scale=None), "kv_buffer: got rows of 656"),
    "cache with a last stride": (dict(kv_buffer=bf16(SLOTS, 160)[:, ::2]), "kv_buffer: got stride 2"),
    "e4m3fn where e4m3fnuz is read": (dict(kv_buffer=u8(SLOTS, 80).view(torch.float8_e4m3fn)), "kv_buffer: got e4m3fn .*, where this arch reads e4m3fnuz"),
    "e4m3fnuz where e4m3fn is read": (dict(arch="gfx950"), "kv_buffer: got e4m3fnuz .*, where this arch reads e4m3fn;"),
    "e5m2": (dict(kv_buffer=u8(SLOTS, 80).view(torch.float8_e5m2)), "kv_buffer: got e5m2 "),
    "e5m2fnuz": (dict(kv_buffer=u8(SLOTS, 80).view(torch.float8_e5m2fnuz)), "kv_buffer: got e5m2fnuz "),
    "int8": (dict(kv_buffer=u8(SLOTS, 80).view(torch.int8)), "kv_buffer: got torch.int8; accepted: torch.bfloat16, torch.float8_e4m3fnuz, or torch.uint8"),
    "bool": (dict(kv_buffer=u8(SLOTS, 80).bool()), "kv_buffer: got torch.bool; accepted"),
    "f16 cache": (dict(kv_buffer=torch.zeros(SLOTS, 80, dtype=torch.float16)), "kv_buffer: got torch.float16; accepted"),
    "fp8 without kv_scale": (dict(kv_scale=None), r"kv_scale: got None with an fp8 cache .*; accepted: a \[1\] float32 tensor"),
    "uint8 without kv_scale": (dict(kv_buffer=u8(SLOTS, 80), kv_scale=None), "kv_scale: got None with an fp8 cache"),
    "kv_scale a number": (dict(kv_scale=0.5), r"kv_scale: got 0.5 \(float\); accepted: a torch.Tensor"),
    "q a list": (dict(q=[1.0]), r"q: got \[1.0\] \(list\); accepted: a torch.Tensor"),
    "no cache": (dict(kv_buffer=None), r"kv_buffer: got None \(NoneType\); accepted: a torch.Tensor"),
    "indices in numpy": (dict(kv_indices=np.arange(9)), r"kv_indices: got array\(.*\(ndarray\); accepted: a torch.Tensor"),
    "has_invalid a number": (dict(has_invalid=2), "has_invalid: got 2; accepted: True, False"),
    "kv_lora_rank a bool": (dict(kv_lora_rank=True), "kv_lora_rank: got True; accepted: a power of two"),
    "arch a list": (dict(arch=["gfx942"]), r"arch: got \['gfx942'\]; accepted: gfx942"),
    "kv_scale f64": (dict(kv_scale=ONE.double()), r"kv_scale: got torch.float64 of shape \(1,\)"),
    "kv_scale 0-d": (dict(kv_scale=torch.tensor(1.0)), r"kv_scale: got torch.float32 of shape \(\)"),
    "kv_scale (1, 1)": (dict(kv_scale=torch.ones(1, 1)), r"kv_scale: got torch.float32 of shape \(1, 1\)"),
    "kv_scale per column": (dict(kv_scale=torch.ones(80)), r"kv_scale: got torch.float32 of shape \(80,\)"),
    "kv_scale on another device": (dict(kv_scale=ONE.to(OTHER)), "kv_scale: got a tensor on meta; accepted"),
    "lists swapped": (dict(kv_indptr=torch.arange(9, dtype=torch.int32), kv_indices=torch.tensor([0, 5, 9], dtype=torch.int32)), "kv_indptr: got 9 entries for 2 query tokens; accepted: 3 .*swapped"),
    "indptr too short": (dict(kv_indptr=torch.tensor([0, 9], dtype=torch.int32)), "kv_indptr: got 2 entries for 2 query tokens; accepted: 3$"),
    "indptr f32": (dict(kv_indptr=torch.zeros(3)), "kv_indptr: got torch.float32; accepted: torch.int32, torch.int64"),
    "indices int16": (dict(kv_indices=torch.zeros(9, dtype=torch.int16)), "kv_indices: got torch.int16; accepted"),
    "indices 2-D": (dict(kv_indices=torch.zeros(3, 3, dtype=torch.int32)), r"kv_indices: got shape \(3, 3\); accepted: one dimension"),
    "indptr 2-D": (dict(kv_indptr=torch.zeros(3, 1, dtype=torch.int32)), r"kv_indptr: got shape \(3, 1\)"),
    "indices with a stride": (dict(kv_indices=torch.zeros(18, dtype=torch.int32)[::2]), "kv_indices: got stride 2; accepted: 1"),
    "indptr on another device": (dict(kv_indptr=torch.zeros(3, dtype=torch.int32, device=OTHER)), "kv_indptr: got a tensor on meta"),
    "indices on another device": (dict(kv_indices=torch.zeros(9, dtype=torch.int32, device=OTHER)), "kv_indices: got a tensor on meta"),
    "dot_precision": (dict(dot_precision="fp16"), "dot_precision: got 'fp16'; accepted: bf16, fp8"),
    "fp8 dots on a bf16 cache": (dict(kv_buffer=bf16(SLOTS, 80), dot_precision="fp8"), "dot_precision: got 'fp8' with a bf16 cache; accepted: 'bf16', or an fp8 cache"),
    "an fp8 recipe on a bf16 cache": (dict(kv_buffer=bf16(SLOTS, 80), recipe=Recipe("bf16", "fp8")), "recipe: got Recipe.* with a bf16 cache"),
    "recipe of another type": (dict(recipe=8), "recipe: got 8; accepted: None, a mla_lab.Recipe, or one of 'bf16', 'fp8'"),
    "recipe of another name": (dict(recipe="fp4"), "recipe: got 'fp4'; accepted: None, a mla_lab.Recipe, or one of 'bf16', 'fp8'"),
    "recipe and dot_precision": (dict(recipe=Recipe(), dot_precision="fp8"), "recipe: got .* beside dot_precision='fp8'; accepted: one of the two"),
    "out f32": (dict(out=torch.zeros(C, H, RANK)), "out: got torch.float32; accepted: torch.bfloat16"),
    "out too narrow": (dict(out=bf16(C, H, 32)), r"out: got shape \(2, 4, 32\); accepted: \[2, 4, 64 or more\]"),
    "out of other heads": (dict(out=bf16(C, 5, RANK)), r"out: got shape \(2, 5, 64\)"),
    "out with a last stride": (dict(out=bf16(C, H, 128)[..., ::2]), "out: got stride 2 in its last dimension"),
    "out whose rows overlap": (dict(out=bf16(1, H, RANK).expand(C, H, RANK)), r"out: got strides \(0, 64, 1\), whose rows overlap"),
    "out on another device": (dict(out=bf16(C, H, RANK).to(OTHER)), "out: got a tensor on meta"),
    "sink of another length": (dict(attn_sink=torch.zeros(3)), r"attn_sink: got torch.float32 of shape \(3,\); accepted: float32 of shape \(4,\)"),
    "sink bf16": (dict(attn_sink=bf16(4)), "attn_sink: got torch.bfloat16"),
    "sink on another device": (dict(attn_sink=torch.zeros(4, device=OTHER)), "attn_sink: got a tensor on meta"),
    "kv_splits 0": (dict(kv_splits=0), "kv_splits: got 0; accepted: None, or an integer from 1 to 65,535"),
    "kv_splits beyond a grid": (dict(kv_splits=2**40), "kv_splits: got 1099511627776; accepted"),
    "kv_splits 1.5": (dict(kv_splits=1.5), "kv_splits: got 1.5; accepted"),
    "softmax_scale 0": (dict(softmax_scale=0.0), r"softmax_scale: got 0.0; accepted: a number from 2\^-64 to 2\^64"),
    "softmax_scale beyond f32": (dict(softmax_scale=1e300), r"softmax_scale: got 1e\+300; accepted"),
    "softmax_scale below f32": (dict(softmax_scale=1e-46), "softmax_scale: got 1e-46; accepted"),
    "softmax_scale beyond a float": (dict(softmax_scale=10**400), "softmax_scale: got 10+; accepted"),
    "softmax_scale negative": (dict(softmax_scale=-1.0), "softmax_scale: got -1.0"),
    "softmax_scale NaN": (dict(softmax_scale=float("nan")), "softmax_scale: got nan"),
    "softmax_scale infinite": (dict(softmax_scale=float("inf")), "softmax_scale: got inf"),
    "arch": (dict(arch="gfx90a"), "arch: got 'gfx90a'; accepted: gfx942, gfx950, sm_90"),
    "backend": (dict(backend="cuda"), "backend: got 'cuda'; accepted: auto, triton, hopper, cdna, emulate"),
}


@pytest.mark.parametrize("what", REFUSALS, ids=str)
def test_refusal(what):
    changes, message = REFUSALS[what]
    with pytest.raises(ValueError, match=message):
        sparse_mla_fwd(**arguments(**changes))


def test_the_unchanged_arguments_are_accepted():
    """Else every refusal above could have another cause."""
    out, lse = sparse_mla_fwd(**arguments())
    assert out.shape == (C, H, RANK) and out.dtype == torch.bfloat16 and lse is None
    kv_scale = None
    for buffer in (bf16(SLOTS, 80), bf16(SLOTS, 1, 1, 80), bf16(4, 10, 80)):
        assert sparse_mla_fwd(**arguments(kv_buffer=buffer, kv_scale=kv_scale))[0].isfinite().all()
        kv_scale = ONE  # ignored with a bf16 cache


DATA = {
    "an index out of range": (dict(kv_indices=torch.tensor([0, 1, 2, 3, 40, 5, 6, 7, 8], dtype=torch.int32)), "kv_indices: got 40 at position 4; accepted: 0 to 39"),
    "a hole where none is allowed": (dict(kv_indices=torch.tensor([0, 1, -1, 3, 4, 5, 6, 7, 8], dtype=torch.int32)), "kv_indices: got -1 at position 2; .*has_invalid=True"),
    "below a hole": (dict(kv_indices=torch.tensor([0, 1, -2, 3, 4, 5, 6, 7, 8], dtype=torch.int32), has_invalid=True), "kv_indices: got -2 at position 2; accepted: 0 to 39, or -1"),
    "indptr that does not start at 0": (dict(kv_indptr=torch.tensor([1, 5, 9], dtype=torch.int32)), "kv_indptr: got 1 at position 0; accepted: it starts at 0"),
    "indptr that decreases": (dict(kv_indptr=torch.tensor([0, 10, 9], dtype=torch.int32)), "kv_indptr: got 9 after 10 at position 2; accepted: it never decreases"),
    "indptr with another end": (dict(kv_indptr=torch.tensor([0, 5, 8], dtype=torch.int32)), "kv_indptr: got 8 at position 2; accepted: its end is the number of indices, 9"),
    "a scale of zero": (dict(kv_scale=torch.zeros(1)), "kv_scale: got 0.0; accepted: a finite value above 0"),
    "a scale of NaN": (dict(kv_scale=torch.full((1,), float("nan"))), "kv_scale: got nan"),
    "a negative q_scale": (dict(q=u8(C, H, 80).view(torch.float8_e4m3fnuz), q_scale=-ONE), "q_scale: got -1.0"),
}


@pytest.mark.parametrize("options", [dict(backend="emulate"), dict(backend="triton", check_indices=True)], ids=["emulate", "check_indices"])
@pytest.mark.parametrize("what", DATA, ids=str)
def test_what_needs_a_look_at_the_data(what, options):
    changes, message = DATA[what]
    with pytest.raises(ValueError, match=message):
        sparse_mla_fwd(**arguments(**changes, **options))


@pytest.mark.parametrize("precision, rank, fits", [
    ("bf16", 1024, r"32 keys under bf16 dots needs 67,072 B of gfx942's 65,536 B of shared memory; a tile of 16 keys would fit \(33,536 B\)"),
    ("fp8", 1024, r"64 keys under fp8 dots needs 67,584 B of gfx942's 65,536 B of shared memory; a tile of 32 keys would fit \(33,792 B\)"),
    ("bf16", 4096, "no tile of 16 keys or more would fit"),
])
def test_a_tile_that_cannot_fit_is_refused(precision, rank, fits):
    made = arguments(q=bf16(C, H, rank), kv_buffer=u8(SLOTS, rank), kv_lora_rank=rank, qk_rope_head_dim=0, dot_precision=precision)
    with pytest.raises(ValueError, match=f"kv_lora_rank: got {rank} .*{fits}"):
        sparse_mla_fwd(**made)


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch):
    from mla_lab import portable

    monkeypatch.setattr(portable, "INTERPRETED", False)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="backend: got 'triton' on cpu; accepted there: 'emulate', or 'triton' with TRITON_INTERPRET=1"):
            sparse_mla_fwd(**arguments(backend="triton"))


def packed_arguments(**changes):
    packed = cache.pack_fp8_dsv32(torch.randn(4, 10, 576, generator=torch.Generator().manual_seed(0)), "e4m3fnuz")
    return arguments(**dict(q=bf16(C, H, 576), kv_buffer=packed.buffer, kv_scale=None, kv_lora_rank=512, qk_rope_head_dim=64) | changes)


PACKED_REFUSALS = {
    "a packed cache with kv_scale": (dict(kv_scale=ONE), "kv_scale: got one with a packed cache .*; accepted: None"),
    "another width": (dict(kv_buffer=u8(4, 10, 655)), "kv_scale: got None with an fp8 cache|kv_buffer: got rows of 655"),
    "two dimensions": (dict(kv_buffer=u8(40, 656)), r"kv_buffer: got rows of 656 \(rows of 656 are packed ones: uint8 \[blocks, block, 656\]"),
    "int8": (dict(kv_buffer=u8(4, 10, 656).view(torch.int8)), "kv_buffer: got torch.int8"),
    "typed fp8": (dict(kv_buffer=u8(4, 10, 656).view(torch.float8_e4m3fnuz)), "kv_buffer: got rows of 656"),
    "another rank": (dict(kv_lora_rank=256, q=bf16(C, H, 320)), "kv_buffer: got rows of 656"),
    "a last stride": (dict(kv_buffer=u8(4, 10, 1312)[..., ::2]), "kv_buffer: got stride 2"),
    "rows that are not aligned": (dict(kv_buffer=u8(4, 10, 658)[..., :656]), "kv_buffer: got strides and offset .*multiples of 4"),
}


@pytest.mark.parametrize("what", PACKED_REFUSALS, ids=str)
def test_refusal_of_a_packed_cache(what):
    changes, message = PACKED_REFUSALS[what]
    with pytest.raises(ValueError, match=message):
        sparse_mla_fwd(**packed_arguments(**changes))
    assert sparse_mla_fwd(**packed_arguments())[0].shape == (C, H, 512)


def test_forward_only_into_an_out_that_wants_gradients():
    a = arguments()
    out = bf16(C, H, RANK).to(DEVICE).requires_grad_()
    sparse_mla_fwd(**a, out=out)
    assert torch.equal(out.detach(), sparse_mla_fwd(**a)[0])


@pytest.mark.parametrize("shape", [(0, 32), (3, 0, 32), (0, 4, 32)])
def test_a_cache_of_no_slots(shape):
    q, buffer = torch.ones(2, 3, 32, dtype=torch.bfloat16, device=DEVICE), bf16(*shape).to(DEVICE)
    indptr, none = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (3, 0))
    options = dict(kv_lora_rank=32, qk_rope_head_dim=0, return_lse=True, backend="emulate")
    out, lse = sparse_mla_fwd(q, buffer, indptr, none, 0.1, **options)
    assert (out == 0).all() and (lse == -torch.inf).all()
    with pytest.raises(ValueError, match="accepted: none, since the cache has no slots"):
        sparse_mla_fwd(q, buffer, torch.tensor([0, 1, 1], dtype=torch.int32, device=DEVICE), indptr[:1], 0.1, **options)
