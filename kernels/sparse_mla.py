"""Sparse MLA forward in portable Triton: one source for AMD, NVIDIA and Triton's interpreter on a CPU.

`attend` works on one query token, one block of 16 heads and one split of the query's keys: it walks over tiles of
BLOCK_K gathered rows with an online softmax. `merge` joins the splits. What the constants choose:

    CACHE_FP8    the rows are fp8 codes, else bf16
    Q_FP8        Q enters the product as fp8: quantized here (one scale per token and head block), or given so
    Q_PER_HEAD   with a scale per head instead
    P_FP8        P is multiplied by p_scale and rounded to fp8; V enters as the cache's codes
    Q_LOW, P_LOW a second fp8 term: what the first one's rounding left, a product of its own
    NATIVE_DOT   the device's matrix unit multiplies this encoding; else codes are widened to bf16, which is exact and
                 gives the same products (gfx942's e4m3fnuz on Hopper)
    NATIVE_CAST  the device's own fp8 conversions are used; else the integer codec
    INTERPRET    operands stay in f32 and bf16 is rounded by hand: the interpreter multiplies bf16's bit patterns and
                 truncates its casts

The per-tensor KV scale never touches a tile: it is in the score scale (K) and in the epilogue (V). The softmax's sum
is taken over p before it is rounded. Offsets are 64-bit throughout: pools larger than 2^31 bytes are usual.
"""

import triton
import triton.language as tl

from mla_lab.kernels.codec import decode_f32, decode_native, encode_f32, encode_native, round_to_bf16

HEAD_BLOCK = tl.constexpr(16)
SMALLEST_AMAX = tl.constexpr(2.0**-100)
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


def kernel_name(specialization):
    """Names in a trace: kernels that differ in dots, cache or encoding differ in name."""
    c = specialization.constants
    q, p = (("fp8x2" if c[f"{k}_LOW"] else "fp8") if c[f"{k}_FP8"] else "bf16" for k in "QP")
    cache = ("e4m3fnuz" if c["FNUZ"] else "e4m3fn") if c["CACHE_FP8"] else "bf16"
    return f"sparse_mla_fwd_{cache}_cache_{q}_qk_{p}_pv"


@triton.jit
def _encode(x, FNUZ: tl.constexpr, NATIVE_CAST: tl.constexpr):
    if NATIVE_CAST:
        return encode_native(x, 0x7E, FNUZ)
    elif FNUZ:
        return encode_f32(x, 3, 8, 0x7F, 0x80, True)
    else:
        return encode_f32(x, 3, 7, 0x7E, 0x7F, False)


@triton.jit
def _widen(code, FNUZ: tl.constexpr, NATIVE_CAST: tl.constexpr, INTERPRET: tl.constexpr):
    """fp8 codes to bf16, exactly (to f32 in the interpreter)."""
    if INTERPRET:
        return decode_f32(code, 3, 8 if FNUZ else 7, 0x7F if FNUZ else 0x7E, FNUZ)
    elif NATIVE_CAST:
        return decode_native(code, FNUZ)
    else:
        wide = decode_f32(code, 3, 8 if FNUZ else 7, 0x7F if FNUZ else 0x7E, FNUZ)
        # The value fits into the upper half: taking it spares the rounding, a long path where bf16 casts are software.
        return (wide.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _fp8_operand(code, FNUZ: tl.constexpr, NATIVE_DOT: tl.constexpr, NATIVE_CAST: tl.constexpr, INTERPRET: tl.constexpr):
    """fp8 codes as the operand of a product that is to run in fp8."""
    if NATIVE_DOT:
        return code.to(tl.float8e4b8 if FNUZ else tl.float8e4nv, bitcast=True)
    else:
        return _widen(code, FNUZ, NATIVE_CAST, INTERPRET)


@triton.jit
def _low_operand(x, FNUZ: tl.constexpr, NATIVE_DOT: tl.constexpr, NATIVE_CAST: tl.constexpr, INTERPRET: tl.constexpr):
    """The second fp8 term of x: what the first one's rounding left, in the same scale."""
    left = x - _widen(_encode(x, FNUZ, NATIVE_CAST), FNUZ, NATIVE_CAST, INTERPRET).to(tl.float32)
    return _fp8_operand(_encode(left, FNUZ, NATIVE_CAST), FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)


@triton.jit
def _bf16_operand(x, INTERPRET: tl.constexpr):
    """f32 as a bf16 operand, rounded to nearest even."""
    if INTERPRET:
        return round_to_bf16(x)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def _load_q(at, mask, Q_GIVEN: tl.constexpr, FNUZ: tl.constexpr, NATIVE_CAST: tl.constexpr, INTERPRET: tl.constexpr):
    """Q in f32 (bf16 and fp8 widen exactly)."""
    if Q_GIVEN:
        return _widen(tl.load(at, mask=mask, other=0), FNUZ, NATIVE_CAST, INTERPRET).to(tl.float32)
    else:
        return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_kv(at, mask, CACHE_FP8: tl.constexpr, INTERPRET: tl.constexpr):
    if CACHE_FP8:
        return tl.load(at, mask=mask, other=0)
    elif INTERPRET:
        return tl.load(at, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _store_bf16(at, x, mask, INTERPRET: tl.constexpr):
    if INTERPRET:
        x = round_to_bf16(x)
    tl.store(at, x.to(tl.bfloat16), mask=mask)


@triton.jit
def _finish(acc, row_max, row_sum, sink, HAS_SINK: tl.constexpr):
    """The output row and its natural-log LSE from a sum of p v, the scores' maximum (log2) and the sum of p.

    No key at all: zeros and -inf. A sink is one more key without a value.
    """
    empty = row_sum == 0.0
    out = acc / tl.where(empty, 1.0, row_sum)[:, None]
    lse2 = tl.where(empty, float("-inf"), row_max + tl.log2(row_sum))
    if HAS_SINK:
        sink2 = sink * LOG2_E
        top = tl.maximum(lse2, sink2)
        base = tl.where(tl.abs(top) == float("inf"), 0.0, top)
        total2 = base + tl.log2(tl.exp2(lse2 - base) + tl.exp2(sink2 - base))
        # An infinite sink leaves no weight to any key, and is the LSE.
        share = tl.where(empty | (sink2 == float("inf")), 0.0, tl.exp2(lse2 - total2))
        out = out * share[:, None]
        lse2 = tl.where(tl.abs(top) == float("inf"), top, total2)
    return out, lse2 * LN_2


@triton.jit
def _key_range(indptr, token, split, splits, BLOCK_K: tl.constexpr):
    """Where a token's list starts, and from where to where in it a split goes: whole tiles, as many in each but the last."""
    start = tl.load(indptr + token).to(tl.int64)
    keys = (tl.load(indptr + token + 1).to(tl.int64) - start).to(tl.int32)
    per_split = tl.cdiv(tl.cdiv(keys, BLOCK_K), splits) * BLOCK_K
    first = split * per_split
    return start, first, tl.minimum(first + per_split, keys)


@triton.jit
def _tile_rows(indices, start, lo, last, slots, stride_kv_block, stride_kv_row, KV_BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, HAS_INVALID: tl.constexpr):
    """Of a tile of listed keys: the rows' offsets in bytes or elements, which are there, and which are out of range."""
    at = lo + tl.arange(0, BLOCK_K)
    listed = at < last
    slot = tl.load(indices + start + at, mask=listed, other=-1).to(tl.int64)
    valid = (slot >= 0) & (slot < slots)
    if HAS_INVALID:
        wrong = listed & ((slot < -1) | (slot >= slots))
    else:
        wrong = listed & ~valid
    return (slot // KV_BLOCK) * stride_kv_block + (slot % KV_BLOCK) * stride_kv_row, valid, wrong


@triton.jit
def _shared_largest(largest, Q_PER_HEAD: tl.constexpr):
    """From each head's largest magnitude [HEAD_BLOCK] that of those which share a scale, kept away from zero."""
    if not Q_PER_HEAD:
        largest = tl.zeros_like(largest) + tl.max(largest, 0)
    return tl.maximum(largest, SMALLEST_AMAX)


@triton.jit
def _softmax_step(scores, valid, wrong, row_max, row_sum):
    """Masks a tile's scores (log2) and moves the online softmax on: p, what the accumulator shrinks by, maximum, sum."""
    scores = tl.where(valid[None, :], scores, float("-inf"))
    scores = tl.where(wrong[None, :], float("nan"), scores)
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # no key yet: -inf - -inf would be NaN
    alpha = tl.exp2(row_max - safe_max)
    p = tl.exp2(scores - safe_max[:, None])
    return p, alpha, new_max, row_sum * alpha + tl.sum(p, 1)


@triton.jit(repr=kernel_name)
def attend(q, kv, indptr, indices, q_scale, kv_scale, sink, out, lse, part_acc, part_max, part_sum,
           score_scale, p_scale, slots, heads, splits,
           stride_q_token, stride_q_head, stride_kv_block, stride_kv_row, stride_out_token, stride_out_head,
           RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
           KV_BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, FP8_MAX: tl.constexpr,
           CACHE_FP8: tl.constexpr, Q_FP8: tl.constexpr, Q_LOW: tl.constexpr, Q_PER_HEAD: tl.constexpr, Q_GIVEN: tl.constexpr,
           P_FP8: tl.constexpr, P_LOW: tl.constexpr, FNUZ: tl.constexpr,
           HAS_INVALID: tl.constexpr, HAS_SINK: tl.constexpr, WRITE_LSE: tl.constexpr, WRITE_PARTS: tl.constexpr,
           NATIVE_DOT: tl.constexpr, NATIVE_CAST: tl.constexpr, INTERPRET: tl.constexpr):
    """Grid: (tokens, head blocks, splits).

    score_scale: softmax_scale * log2(e). Writes out (and lse), or with WRITE_PARTS part_acc [tokens, splits, heads,
    RANK], part_max and part_sum [tokens, splits, heads]. An index out of range makes its query NaN and is never read.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    split = tl.program_id(2)
    head_in = head < heads
    rank = tl.arange(0, RANK_PAD)
    rank_in = rank < RANK

    # Q, once per program.
    q_row = q + token * stride_q_token + head.to(tl.int64)[:, None] * stride_q_head
    q_latent = _load_q(q_row + rank[None, :], head_in[:, None] & rank_in[None, :], Q_GIVEN, FNUZ, NATIVE_CAST, INTERPRET)
    if ROPE > 0:
        rope = tl.arange(0, ROPE_PAD)
        rope_in = rope < ROPE
        q_rope = _load_q(q_row + RANK + rope[None, :], head_in[:, None] & rope_in[None, :], Q_GIVEN, FNUZ, NATIVE_CAST, INTERPRET)
    scale = tl.zeros([HEAD_BLOCK], tl.float32) + score_scale
    if Q_GIVEN:
        scale = scale * tl.load(q_scale)
    elif Q_FP8:
        largest = tl.max(tl.abs(q_latent), 1)
        if ROPE > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(q_rope), 1))
        largest = _shared_largest(largest, Q_PER_HEAD)
        # div_rn: the plain division is approximate on NVIDIA, and a last bit can move a code.
        to_codes = tl.div_rn(tl.full([HEAD_BLOCK], FP8_MAX, tl.float32), largest)
        scale = scale * tl.div_rn(largest, tl.full([HEAD_BLOCK], FP8_MAX, tl.float32))
        q_latent = q_latent * to_codes[:, None]
        if ROPE > 0:
            q_rope = q_rope * to_codes[:, None]
    if Q_FP8:  # values that are codes already pass through unchanged
        if Q_LOW:
            q_latent_low = _low_operand(q_latent, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
            if ROPE > 0:
                q_rope_low = _low_operand(q_rope, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
        q_latent = _fp8_operand(_encode(q_latent, FNUZ, NATIVE_CAST), FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
        if ROPE > 0:
            q_rope = _fp8_operand(_encode(q_rope, FNUZ, NATIVE_CAST), FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
    else:
        q_latent = _bf16_operand(q_latent, INTERPRET)
        if ROPE > 0:
            q_rope = _bf16_operand(q_rope, INTERPRET)

    value_scale = tl.full([], 1.0, tl.float32)
    if CACHE_FP8:
        value_scale = tl.load(kv_scale)
        scale = scale * value_scale
    if P_FP8:
        value_scale = tl.div_rn(value_scale, p_scale)

    start, first, last = _key_range(indptr, token, split, splits, BLOCK_K)
    row_max = tl.full([HEAD_BLOCK], float("-inf"), tl.float32)
    row_sum = tl.zeros([HEAD_BLOCK], tl.float32)
    acc = tl.zeros([HEAD_BLOCK, RANK_PAD], tl.float32)
    for lo in range(first, last, BLOCK_K):
        row, valid, wrong = _tile_rows(indices, start, lo, last, slots, stride_kv_block, stride_kv_row, KV_BLOCK, BLOCK_K, HAS_INVALID)
        row = kv + row
        latent = _load_kv(row[:, None] + rank[None, :], valid[:, None] & rank_in[None, :], CACHE_FP8, INTERPRET)

        if CACHE_FP8:
            if Q_FP8:
                k = _fp8_operand(latent, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
            else:
                k = _widen(latent, FNUZ, NATIVE_CAST, INTERPRET)
        else:
            k = latent
        scores = tl.dot(q_latent, tl.trans(k), input_precision="ieee")
        if Q_LOW:
            scores = tl.dot(q_latent_low, tl.trans(k), scores, input_precision="ieee")
        if ROPE > 0:
            k_rope = _load_kv(row[:, None] + RANK + rope[None, :], valid[:, None] & rope_in[None, :], CACHE_FP8, INTERPRET)
            if CACHE_FP8:
                if Q_FP8:
                    k_rope = _fp8_operand(k_rope, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
                else:
                    k_rope = _widen(k_rope, FNUZ, NATIVE_CAST, INTERPRET)
            scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
            if Q_LOW:
                scores = tl.dot(q_rope_low, tl.trans(k_rope), scores, input_precision="ieee")
        p, alpha, row_max, row_sum = _softmax_step(scores * scale[:, None], valid, wrong, row_max, row_sum)
        if P_FP8:
            p_operand = _fp8_operand(_encode(p * p_scale, FNUZ, NATIVE_CAST), FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
            v = _fp8_operand(latent, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
        else:
            p_operand = _bf16_operand(p, INTERPRET)
            v = _widen(latent, FNUZ, NATIVE_CAST, INTERPRET) if CACHE_FP8 else latent
        acc = tl.dot(p_operand, v, acc * alpha[:, None], input_precision="ieee")
        if P_LOW:
            acc = tl.dot(_low_operand(p * p_scale, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET), v, acc, input_precision="ieee")

    acc = acc * value_scale
    if WRITE_PARTS:
        part = (token * splits + split) * heads + head
        tl.store(part_acc + part[:, None] * RANK + rank[None, :], acc, mask=head_in[:, None] & rank_in[None, :])
        tl.store(part_max + part, row_max, mask=head_in)
        tl.store(part_sum + part, row_sum, mask=head_in)
    else:
        sink_row = row_max
        if HAS_SINK:
            sink_row = tl.load(sink + head, mask=head_in, other=0.0)
        rows, rows_lse = _finish(acc, row_max, row_sum, sink_row, HAS_SINK)
        out_row = out + token * stride_out_token + head.to(tl.int64)[:, None] * stride_out_head
        _store_bf16(out_row + rank[None, :], rows, head_in[:, None] & rank_in[None, :], INTERPRET)
        if WRITE_LSE:
            tl.store(lse + token * heads + head, rows_lse, mask=head_in)


@triton.jit
def merge(part_acc, part_max, part_sum, sink, out, lse, heads, splits, stride_out_token, stride_out_head,
          RANK: tl.constexpr, COLUMNS: tl.constexpr, SPLITS_PAD: tl.constexpr, STEP: tl.constexpr, HAS_SINK: tl.constexpr, WRITE_LSE: tl.constexpr, DEPENDENT: tl.constexpr, INTERPRET: tl.constexpr):
    """Grid: (tokens, heads, RANK / COLUMNS). Joins the splits of some columns of one token and head, STEP splits at a time.

    DEPENDENT: launched before the parts are there (Hopper's programmatic dependent launch), and waits for them.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.arange(0, SPLITS_PAD)
    part = (token * splits + split) * heads + head
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    maxima = tl.load(part_max + part, mask=split < splits, other=float("-inf"))
    sums = tl.load(part_sum + part, mask=split < splits, other=0.0)
    row_max = tl.max(maxima, 0)
    safe_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.sum(sums * tl.exp2(maxima - safe_max), 0)
    acc = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, splits, STEP):
        some = first + tl.arange(0, STEP)
        one = (token * splits + some) * heads + head
        weight = tl.exp2(tl.load(part_max + one, mask=some < splits, other=float("-inf")) - safe_max)
        rows = tl.load(part_acc + one[:, None] * RANK + column[None, :], mask=(some < splits)[:, None], other=0.0)
        acc += tl.sum(weight[:, None] * rows, 0)

    sink_row = tl.full([1], 0.0, tl.float32)
    if HAS_SINK:
        sink_row += tl.load(sink + head)
    rows, rows_lse = _finish(acc[None, :], tl.full([1], 0.0, tl.float32) + safe_max, tl.full([1], 0.0, tl.float32) + row_sum, sink_row, HAS_SINK)
    out_row = out + token * stride_out_token + head.to(tl.int64) * stride_out_head
    _store_bf16(out_row + column[None, :], rows, column[None, :] < RANK, INTERPRET)
    if WRITE_LSE:
        tl.store(lse + token * heads + head + tl.arange(0, 1), rows_lse, mask=tl.program_id(2) + tl.arange(0, 1) == 0)
