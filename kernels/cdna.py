"""Sparse MLA forward in Gluon, for CDNA3 and CDNA4 from one source: every layout is stated, so that LDS is known to the byte.

The keys' tile is staged once in LDS, padded so that neighbouring rows fall on different banks, and read twice: transposed
as QK's right operand, and as it lies as PV's. Under fp8 dots it holds the cache's own codes, one byte each; under bf16 dots
bf16, an fp8 cache widened on the way in. P goes through LDS to change from the first product's result layout to the
second's operand layout. Nothing else stays there, and what reductions need for a moment fits into P's place, so that a
workgroup's LDS is

    element * (BLOCK_K * (RANK + pad) + [ROPE > 0] * BLOCK_K * (ROPE + pad0) + 16 * BLOCK_K)

as in the published kernel (data/published/README.md; mla_lab.arch.tile_bytes).

The layouts are arguments: with MFMA layouts it runs on AMD, with NVIDIA's mma.sync layouts (MFMA=False) the same body runs
on Hopper, which is where its numerics are executed. What that leaves unexecuted: MFMA itself and its layouts, AMD's
fp8 conversions, LDS bank behaviour and barriers on AMD.

What the constants choose is said in sparse_mla.py; here both products run in one precision (FP8_DOTS).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import mfma
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from mla_lab.kernels.sparse_mla import _encode, _finish, _fp8_operand, _softmax_step, _widen

HEAD_BLOCK = gl.constexpr(16)
SMALLEST_AMAX = gl.constexpr(2.0**-100)


def kernel_name(specialization):
    c = specialization.constants
    dots = "fp8" if c["FP8_DOTS"] else "bf16"
    cache = ("e4m3fnuz" if c["FNUZ"] else "e4m3fn") if c["CACHE_FP8"] else "bf16"
    return f"sparse_mla_fwd_cdna_{cache}_cache_{dots}_qk_{dots}_pv"


@gluon.jit
def _dot(a, b, acc, MFMA: gl.constexpr):
    if MFMA:
        return mfma(a, b, acc)
    else:
        return mma_v2(a, b, acc)


@gluon.jit
def _operand(x, FP8_DOTS: gl.constexpr, FNUZ: gl.constexpr, NATIVE_DOT: gl.constexpr, NATIVE_CAST: gl.constexpr):
    """What LDS holds, as an operand: codes as fp8 (or widened, where the matrix unit has another encoding), bf16 as it is."""
    if FP8_DOTS:
        return _fp8_operand(x, FNUZ, NATIVE_DOT, NATIVE_CAST, False)
    else:
        return x


@gluon.jit
def _stage(at, mask, CACHE_FP8: gl.constexpr, FP8_DOTS: gl.constexpr, FNUZ: gl.constexpr, NATIVE_CAST: gl.constexpr):
    """A tile of rows from the pool, as it goes to LDS."""
    if CACHE_FP8:
        tile = gl.load(at, mask=mask, other=0)
        if not FP8_DOTS:
            tile = _widen(tile, FNUZ, NATIVE_CAST, False)
    else:
        tile = gl.load(at, mask=mask, other=0.0)
    return tile


@gluon.jit(repr=kernel_name)
def attend_cdna(q, kv, indptr, indices, kv_scale, sink, out, lse, part_acc, part_max, part_sum,
                score_scale, p_scale, slots, heads, splits,
                stride_q_token, stride_q_head, stride_kv_block, stride_kv_row, stride_out_token, stride_out_head,
                RANK: gl.constexpr, ROPE: gl.constexpr, KV_BLOCK: gl.constexpr, BLOCK_K: gl.constexpr, FP8_MAX: gl.constexpr,
                CACHE_FP8: gl.constexpr, FP8_DOTS: gl.constexpr, FNUZ: gl.constexpr,
                HAS_INVALID: gl.constexpr, HAS_SINK: gl.constexpr, WRITE_LSE: gl.constexpr, WRITE_PARTS: gl.constexpr,
                NATIVE_DOT: gl.constexpr, NATIVE_CAST: gl.constexpr,
                MFMA: gl.constexpr, MMA: gl.constexpr, K_WIDTH: gl.constexpr, LOAD: gl.constexpr, ROPE_LOAD: gl.constexpr,
                TILE: gl.constexpr, ROPE_TILE: gl.constexpr, P_TILE: gl.constexpr):
    """Grid: (tokens, head blocks, splits). Writes what sparse_mla.attend writes.

    MMA: the layout of both products' results [16, keys] and [16, RANK]. K_WIDTH: contiguous contraction columns of a
    lane's operand. LOAD, ROPE_LOAD: blocked layouts of a tile as it is gathered. TILE, ROPE_TILE, P_TILE: in LDS.
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, K_WIDTH)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, K_WIDTH)
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, MMA)

    token = gl.program_id(0).to(gl.int64)
    block = gl.program_id(1) * HEAD_BLOCK
    split = gl.program_id(2)

    # Q straight into the operand's layout: no conversion, no LDS.
    q_head = block + gl.arange(0, HEAD_BLOCK, layout=gl.SliceLayout(1, LEFT))
    q_column = gl.arange(0, RANK, layout=gl.SliceLayout(0, LEFT))
    q_row = q + token * stride_q_token + q_head.to(gl.int64)[:, None] * stride_q_head
    q_latent = gl.load(q_row + q_column[None, :], mask=(q_head < heads)[:, None], other=0.0)
    if ROPE > 0:
        rope_column = gl.arange(0, ROPE, layout=gl.SliceLayout(0, LEFT))
        q_rope = gl.load(q_row + RANK + rope_column[None, :], mask=(q_head < heads)[:, None], other=0.0)
    scale = score_scale
    if FP8_DOTS:
        wide = q_latent.to(gl.float32)
        largest = gl.max(gl.max(gl.abs(wide), 1), 0)
        if ROPE > 0:
            wide_rope = q_rope.to(gl.float32)
            largest = gl.maximum(largest, gl.max(gl.max(gl.abs(wide_rope), 1), 0))
        largest = gl.maximum(largest, SMALLEST_AMAX)
        # div_rn: a last bit can move a code.
        highest = largest * 0.0 + FP8_MAX
        to_codes = gl.div_rn(highest, largest)
        scale = scale * gl.div_rn(largest, highest)
        q_latent = _fp8_operand(_encode(wide * to_codes, FNUZ, NATIVE_CAST), FNUZ, NATIVE_DOT, NATIVE_CAST, False)
        if ROPE > 0:
            q_rope = _fp8_operand(_encode(wide_rope * to_codes, FNUZ, NATIVE_CAST), FNUZ, NATIVE_DOT, NATIVE_CAST, False)

    value_scale = score_scale * 0.0 + 1.0
    if CACHE_FP8:
        value_scale = gl.load(kv_scale)
        scale = scale * value_scale
    if FP8_DOTS:
        value_scale = gl.div_rn(value_scale, p_scale)

    start = gl.load(indptr + token).to(gl.int64)
    keys = (gl.load(indptr + token + 1).to(gl.int64) - start).to(gl.int32)
    per_split = gl.cdiv(gl.cdiv(keys, BLOCK_K), splits) * BLOCK_K
    first = split * per_split
    last = gl.minimum(first + per_split, keys)

    key_in_tile = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, LOAD))
    key_of_score = gl.arange(0, BLOCK_K, layout=COLUMNS)
    column = gl.arange(0, RANK, layout=gl.SliceLayout(0, LOAD))
    row_max = gl.full([HEAD_BLOCK], float("-inf"), gl.float32, layout=ROWS)
    row_sum = gl.zeros([HEAD_BLOCK], gl.float32, layout=ROWS)
    acc = gl.zeros([HEAD_BLOCK, RANK], gl.float32, layout=MMA)
    element: gl.constexpr = gl.uint8 if FP8_DOTS else gl.bfloat16
    for lo in range(first, last, BLOCK_K):
        if ROPE > 0:  # P has a place of its own beside the rope tile's, as published; without rope it shares that of the reductions
            p_tile = gl.allocate_shared_memory(element, [HEAD_BLOCK, BLOCK_K], P_TILE)
        at = lo + key_in_tile
        slot = gl.load(indices + start + at, mask=at < last, other=-1).to(gl.int64)
        there = (slot >= 0) & (slot < slots)
        row = kv + (slot // KV_BLOCK) * stride_kv_block + (slot % KV_BLOCK) * stride_kv_row
        tile = gl.allocate_shared_memory(element, [BLOCK_K, RANK], TILE,
                                         _stage(row[:, None] + column[None, :], there[:, None], CACHE_FP8, FP8_DOTS, FNUZ, NATIVE_CAST))
        k = _operand(tile.permute((1, 0)).load(RIGHT), FP8_DOTS, FNUZ, NATIVE_DOT, NATIVE_CAST)
        scores = _dot(q_latent, k, gl.zeros([HEAD_BLOCK, BLOCK_K], gl.float32, layout=MMA), MFMA)
        if ROPE > 0:
            rope_at = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, ROPE_LOAD))
            rope_slot = gl.load(indices + start + lo + rope_at, mask=lo + rope_at < last, other=-1).to(gl.int64)
            rope_there = (rope_slot >= 0) & (rope_slot < slots)
            rope_row = kv + (rope_slot // KV_BLOCK) * stride_kv_block + (rope_slot % KV_BLOCK) * stride_kv_row + RANK
            rope_of_tile = gl.arange(0, ROPE, layout=gl.SliceLayout(0, ROPE_LOAD))
            rope_tile = gl.allocate_shared_memory(element, [BLOCK_K, ROPE], ROPE_TILE,
                                                  _stage(rope_row[:, None] + rope_of_tile[None, :], rope_there[:, None], CACHE_FP8, FP8_DOTS, FNUZ, NATIVE_CAST))
            k_rope = _operand(rope_tile.permute((1, 0)).load(RIGHT), FP8_DOTS, FNUZ, NATIVE_DOT, NATIVE_CAST)
            scores = _dot(q_rope, k_rope, scores, MFMA)

        score_slot = gl.load(indices + start + lo + key_of_score, mask=lo + key_of_score < last, other=-1).to(gl.int64)
        valid = (score_slot >= 0) & (score_slot < slots)
        listed = lo + key_of_score < last
        if HAS_INVALID:
            wrong = listed & ((score_slot < -1) | (score_slot >= slots))
        else:
            wrong = listed & ~valid
        p, alpha, row_max, row_sum = _softmax_step(scores * scale, valid, wrong, row_max, row_sum)
        if FP8_DOTS:
            rounded = _encode(p * p_scale, FNUZ, NATIVE_CAST)
        else:
            rounded = p.to(gl.bfloat16)
        if ROPE > 0:
            p_tile.store(rounded)
        else:
            p_tile = gl.allocate_shared_memory(element, [HEAD_BLOCK, BLOCK_K], P_TILE, rounded)
        p_operand = _operand(p_tile.load(LEFT), FP8_DOTS, FNUZ, NATIVE_DOT, NATIVE_CAST)
        v = _operand(tile.load(RIGHT), FP8_DOTS, FNUZ, NATIVE_DOT, NATIVE_CAST)
        acc = _dot(p_operand, v, acc * alpha[:, None], MFMA)

    acc = acc * value_scale
    head = block + gl.arange(0, HEAD_BLOCK, layout=ROWS)
    head_in = head < heads
    out_column = gl.arange(0, RANK, layout=COLUMNS)
    if WRITE_PARTS:
        part = (token * splits + split) * heads + head
        gl.store(part_acc + part[:, None] * RANK + out_column[None, :], acc, mask=head_in[:, None])
        gl.store(part_max + part, row_max, mask=head_in)
        gl.store(part_sum + part, row_sum, mask=head_in)
    else:
        sink_row = row_max
        if HAS_SINK:
            sink_row = gl.load(sink + head, mask=head_in, other=0.0)
        rows, rows_lse = _finish(acc, row_max, row_sum, sink_row, HAS_SINK)
        out_row = out + token * stride_out_token + head.to(gl.int64)[:, None] * stride_out_head
        gl.store(out_row + out_column[None, :], rows.to(gl.bfloat16), mask=head_in[:, None])
        if WRITE_LSE:
            gl.store(lse + token * heads + head, rows_lse, mask=head_in)
