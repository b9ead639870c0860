"""Sparse MLA forward over DeepSeek-V3.2's packed cache, in portable Triton: 656 bytes a row.

A row is 512 fp8 codes, 4 f32 scales (one per group of 128 columns) and 64 bf16 rope columns. No code is ever multiplied
by its scale: a group's scale is the same for all 128 columns of a key, so on the QK side it multiplies that key's
partial score, and on the PV side the key's p. So the codes feed the matrix products as they are, in fp8 too, and K and V
are not rounded a second time. On the PV side p times scale over the tile's largest scale is rounded (at most 1, times
the P scale under fp8), and the product is multiplied by that largest scale.

The constants are those of sparse_mla.attend; the four groups are written out, since Triton cannot index a register tile.
"""

import triton
import triton.language as tl

from mla_lab.kernels.sparse_mla import (
    HEAD_BLOCK,
    _bf16_operand,
    _encode,
    _finish,
    _fp8_operand,
    _key_range,
    _load_q,
    _low_operand,
    _shared_largest,
    _softmax_step,
    _store_bf16,
    _tile_rows,
    _widen,
)

GROUP = tl.constexpr(128)
LATENT = tl.constexpr(512)
ROPE = tl.constexpr(64)


def kernel_name(specialization):
    c = specialization.constants
    q, p = (("fp8x2" if c[f"{k}_LOW"] else "fp8") if c[f"{k}_FP8"] else "bf16" for k in "QP")
    return f"sparse_mla_fwd_{'e4m3fnuz' if c['FNUZ'] else 'e4m3fn'}_dsv32_cache_{q}_qk_{p}_pv"


@triton.jit
def _operand(x, ROUND_FP8: tl.constexpr, FNUZ: tl.constexpr, NATIVE_DOT: tl.constexpr, NATIVE_CAST: tl.constexpr, INTERPRET: tl.constexpr):
    """f32 as an operand, rounded to fp8 or to bf16."""
    if ROUND_FP8:
        return _fp8_operand(_encode(x, FNUZ, NATIVE_CAST), FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
    else:
        return _bf16_operand(x, INTERPRET)


@triton.jit
def _codes_operand(code, IN_FP8: tl.constexpr, FNUZ: tl.constexpr, NATIVE_DOT: tl.constexpr, NATIVE_CAST: tl.constexpr, INTERPRET: tl.constexpr):
    if IN_FP8:
        return _fp8_operand(code, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
    else:
        return _widen(code, FNUZ, NATIVE_CAST, INTERPRET)


@triton.jit
def _group_scores(q_operand, q_low, code, key_scale, Q_FP8: tl.constexpr, Q_LOW: tl.constexpr, FNUZ: tl.constexpr, NATIVE_DOT: tl.constexpr, NATIVE_CAST: tl.constexpr, INTERPRET: tl.constexpr):
    k = _codes_operand(code, Q_FP8, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
    scores = tl.dot(q_operand, tl.trans(k), input_precision="ieee")
    if Q_LOW:
        scores = tl.dot(q_low, tl.trans(k), scores, input_precision="ieee")
    return scores * key_scale[None, :]


@triton.jit
def _group_values(acc, alpha, p, code, key_scale, p_scale, P_FP8: tl.constexpr, P_LOW: tl.constexpr, FNUZ: tl.constexpr, NATIVE_DOT: tl.constexpr, NATIVE_CAST: tl.constexpr, INTERPRET: tl.constexpr):
    largest = tl.max(tl.abs(key_scale), 0)
    share = tl.div_rn(key_scale, tl.zeros_like(key_scale) + tl.where(largest == 0.0, 1.0, largest))
    x = p * share[None, :] * p_scale
    v = _codes_operand(code, P_FP8, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
    values = tl.dot(_operand(x, P_FP8, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET), v, input_precision="ieee")
    if P_LOW:
        values = tl.dot(_low_operand(x, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET), v, values, input_precision="ieee")
    return acc * alpha[:, None] + values * largest


@triton.jit
def _write_group(acc, g: tl.constexpr, row_max, row_sum, sink_row, part_acc, part, out_row, head_in, WRITE_PARTS: tl.constexpr, HAS_SINK: tl.constexpr, INTERPRET: tl.constexpr):
    column = g * GROUP + tl.arange(0, GROUP)
    if WRITE_PARTS:
        tl.store(part_acc + part[:, None] * LATENT + column[None, :], acc, mask=head_in[:, None])
    else:
        rows, _ = _finish(acc, row_max, row_sum, sink_row, HAS_SINK)
        _store_bf16(out_row + column[None, :], rows, head_in[:, None], INTERPRET)


@triton.jit(repr=kernel_name)
def attend_packed(q, codes, scales, ropes, indptr, indices, q_scale, sink, out, lse, part_acc, part_max, part_sum,
                  score_scale, p_scale, slots, heads, splits,
                  stride_q_token, stride_q_head, stride_kv_block, stride_kv_row, stride_out_token, stride_out_head,
                  KV_BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, FP8_MAX: tl.constexpr,
                  Q_FP8: tl.constexpr, Q_LOW: tl.constexpr, Q_PER_HEAD: tl.constexpr, Q_GIVEN: tl.constexpr,
                  P_FP8: tl.constexpr, P_LOW: tl.constexpr, FNUZ: tl.constexpr,
                  HAS_INVALID: tl.constexpr, HAS_SINK: tl.constexpr, WRITE_LSE: tl.constexpr, WRITE_PARTS: tl.constexpr,
                  NATIVE_DOT: tl.constexpr, NATIVE_CAST: tl.constexpr, INTERPRET: tl.constexpr):
    """Grid: (tokens, head blocks, splits). codes, scales, ropes: the same cache as uint8, f32 and bf16; strides in bytes."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    split = tl.program_id(2)
    head_in = head < heads
    column = tl.arange(0, GROUP)
    rope = tl.arange(0, ROPE)

    q_row = q + token * stride_q_token + head.to(tl.int64)[:, None] * stride_q_head
    here = head_in[:, None] & (column[None, :] < GROUP)
    q0 = _load_q(q_row + column[None, :], here, Q_GIVEN, FNUZ, NATIVE_CAST, INTERPRET)
    q1 = _load_q(q_row + GROUP + column[None, :], here, Q_GIVEN, FNUZ, NATIVE_CAST, INTERPRET)
    q2 = _load_q(q_row + 2 * GROUP + column[None, :], here, Q_GIVEN, FNUZ, NATIVE_CAST, INTERPRET)
    q3 = _load_q(q_row + 3 * GROUP + column[None, :], here, Q_GIVEN, FNUZ, NATIVE_CAST, INTERPRET)
    q_rope = _load_q(q_row + LATENT + rope[None, :], head_in[:, None] & (rope[None, :] < ROPE), Q_GIVEN, FNUZ, NATIVE_CAST, INTERPRET)
    scale = tl.zeros([HEAD_BLOCK], tl.float32) + score_scale
    rope_scale = scale
    if Q_GIVEN:
        scale = scale * tl.load(q_scale)
        rope_scale = scale
    elif Q_FP8:  # of the latent columns alone: the rope columns stay in bf16, as the cache's are
        largest = tl.maximum(tl.maximum(tl.max(tl.abs(q0), 1), tl.max(tl.abs(q1), 1)), tl.maximum(tl.max(tl.abs(q2), 1), tl.max(tl.abs(q3), 1)))
        largest = _shared_largest(largest, Q_PER_HEAD)
        to_codes = tl.div_rn(tl.full([HEAD_BLOCK], FP8_MAX, tl.float32), largest)[:, None]
        scale = scale * tl.div_rn(largest, tl.full([HEAD_BLOCK], FP8_MAX, tl.float32))
        q0, q1, q2, q3 = q0 * to_codes, q1 * to_codes, q2 * to_codes, q3 * to_codes
    low0, low1, low2, low3 = q0, q1, q2, q3
    if Q_LOW:
        low0 = _low_operand(q0, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
        low1 = _low_operand(q1, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
        low2 = _low_operand(q2, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
        low3 = _low_operand(q3, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
    q0 = _operand(q0, Q_FP8, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
    q1 = _operand(q1, Q_FP8, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
    q2 = _operand(q2, Q_FP8, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
    q3 = _operand(q3, Q_FP8, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
    q_rope = _bf16_operand(q_rope, INTERPRET)
    value_scale = tl.full([], 1.0, tl.float32)
    if P_FP8:
        value_scale = tl.div_rn(value_scale, p_scale)

    start, first, last = _key_range(indptr, token, split, splits, BLOCK_K)
    row_max = tl.full([HEAD_BLOCK], float("-inf"), tl.float32)
    row_sum = tl.zeros([HEAD_BLOCK], tl.float32)
    acc0 = tl.zeros([HEAD_BLOCK, GROUP], tl.float32)
    acc1 = tl.zeros([HEAD_BLOCK, GROUP], tl.float32)
    acc2 = tl.zeros([HEAD_BLOCK, GROUP], tl.float32)
    acc3 = tl.zeros([HEAD_BLOCK, GROUP], tl.float32)
    for lo in range(first, last, BLOCK_K):
        row, valid, wrong = _tile_rows(indices, start, lo, last, slots, stride_kv_block, stride_kv_row, KV_BLOCK, BLOCK_K, HAS_INVALID)
        tile = codes + row[:, None] + column[None, :]
        there = valid[:, None] & (column[None, :] < GROUP)
        c0 = tl.load(tile, mask=there, other=0)
        c1 = tl.load(tile + GROUP, mask=there, other=0)
        c2 = tl.load(tile + 2 * GROUP, mask=there, other=0)
        c3 = tl.load(tile + 3 * GROUP, mask=there, other=0)
        key_scale = scales + row // 4 + LATENT // 4
        s0 = tl.load(key_scale, mask=valid, other=0.0)
        s1 = tl.load(key_scale + 1, mask=valid, other=0.0)
        s2 = tl.load(key_scale + 2, mask=valid, other=0.0)
        s3 = tl.load(key_scale + 3, mask=valid, other=0.0)
        k_rope = tl.load(ropes + row[:, None] // 2 + (LATENT + 16) // 2 + rope[None, :], mask=valid[:, None] & (rope[None, :] < ROPE), other=0.0)
        if INTERPRET:
            k_rope = k_rope.to(tl.float32)

        scores = _group_scores(q0, low0, c0, s0, Q_FP8, Q_LOW, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
        scores += _group_scores(q1, low1, c1, s1, Q_FP8, Q_LOW, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
        scores += _group_scores(q2, low2, c2, s2, Q_FP8, Q_LOW, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
        scores += _group_scores(q3, low3, c3, s3, Q_FP8, Q_LOW, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
        scores = scores * scale[:, None] + tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee") * rope_scale[:, None]
        p, alpha, row_max, row_sum = _softmax_step(scores, valid, wrong, row_max, row_sum)
        acc0 = _group_values(acc0, alpha, p, c0, s0, p_scale, P_FP8, P_LOW, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
        acc1 = _group_values(acc1, alpha, p, c1, s1, p_scale, P_FP8, P_LOW, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
        acc2 = _group_values(acc2, alpha, p, c2, s2, p_scale, P_FP8, P_LOW, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)
        acc3 = _group_values(acc3, alpha, p, c3, s3, p_scale, P_FP8, P_LOW, FNUZ, NATIVE_DOT, NATIVE_CAST, INTERPRET)

    part = (token * splits + split) * heads + head
    out_row = out + token * stride_out_token + head.to(tl.int64)[:, None] * stride_out_head
    sink_row = row_max
    if HAS_SINK:
        sink_row = tl.load(sink + head, mask=head_in, other=0.0)
    _write_group(acc0 * value_scale, 0, row_max, row_sum, sink_row, part_acc, part, out_row, head_in, WRITE_PARTS, HAS_SINK, INTERPRET)
    _write_group(acc1 * value_scale, 1, row_max, row_sum, sink_row, part_acc, part, out_row, head_in, WRITE_PARTS, HAS_SINK, INTERPRET)
    _write_group(acc2 * value_scale, 2, row_max, row_sum, sink_row, part_acc, part, out_row, head_in, WRITE_PARTS, HAS_SINK, INTERPRET)
    _write_group(acc3 * value_scale, 3, row_max, row_sum, sink_row, part_acc, part, out_row, head_in, WRITE_PARTS, HAS_SINK, INTERPRET)
    if WRITE_PARTS:
        tl.store(part_max + part, row_max, mask=head_in)
        tl.store(part_sum + part, row_sum, mask=head_in)
    elif WRITE_LSE:
        _, rows_lse = _finish(acc0, row_max, row_sum, sink_row, HAS_SINK)
        tl.store(lse + token * heads + head, rows_lse, mask=head_in)
