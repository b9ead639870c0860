"""Sparse MLA forward in Gluon for Hopper (sm_90): the keys are the M side of both products.

With 16 heads the tensor core's 64 rows would be three quarters empty if the heads were its rows. So a warpgroup multiplies

    S^T [keys, heads] = K [keys, columns] . Q^T      and      O^T [latents, heads] += V^T [latents, keys] . P^T

and the heads are N, which may be 16. The same shape is what fp8 needs: V^T is the *left* operand, the one which wgmma takes from
registers too, so that the cache's bytes are widened between shared memory and the tensor core and never written back.

Rows are gathered by cp.async, raw, into a ring of STAGES tiles of BLOCK_K rows, swizzled by 128 bytes. Then, by cache and recipe:

    bf16 cache              both products read the tile where it lies
    fp8 cache, Q in fp8     QK reads the codes where they lie, in sums of 128 columns that are joined in f32: Hopper's fp8
                            sums keep some 14 bits
    fp8 cache, Q in bf16    K's codes are widened to f16 in registers, which is exact and one instruction for two of them
                            (bf16 takes several). Q is bf16 times a power of two, as f16: exact down to 2^-25 of the
                            head block's largest
    fp8 cache, PV           V's codes are widened to f16 in registers; P, rounded to fp8 or to bf16, is exact in f16, after
                            a factor of 2^15 in bf16's case. So fp8 PV has fp8's roundings and f32's sums

A contraction may run in any order that both operands agree on, and an output's rows may be in any order that the store knows.
So a lane takes from shared memory what lies side by side there (`_values_operand`, `_keys_operand`) and calls it the fragment.

What the constants choose is said in sparse_mla.py; RANK is 512, ROPE 0 or 64.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from mla_lab.kernels.sparse_mla import LN_2, LOG2_E, SMALLEST_AMAX

RANK = gl.constexpr(512)
GROUP = gl.constexpr(128)
CHUNK = gl.constexpr(64)  # columns of K that are widened at a time
QUANTUM = gl.constexpr(16)  # heads that share a scale of Q
P_FACTOR = gl.constexpr(32768.0)  # keeps bf16's p in f16's normal range down to 2^-29

BF16_CACHE = gl.constexpr(0)
FP8_CACHE = gl.constexpr(1)
PACKED_CACHE = gl.constexpr(2)

# Triton 3.6 calls it thread_barrier, 3.7 and later barrier.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def kernel_name(specialization):
    c = specialization.constants
    q, p = ("fp8" if c[f"{k}_FP8"] else "bf16" for k in "QP")
    return f"sparse_mla_fwd_hopper_{('bf16', 'e4m3fn', 'e4m3fn_dsv32')[c['CACHE']]}_cache_{q}_qk_{p}_pv"


@gluon.jit
def _lookup(indices, start, lo, last, BLOCK_K: gl.constexpr, LAYOUT: gl.constexpr):
    at = lo + gl.arange(0, BLOCK_K, layout=LAYOUT)
    return gl.load(indices + start + at, mask=at < last, other=-1)


@gluon.jit
def _copy(tile, kv, slot, slots, stride_block, stride_row, KV_BLOCK: gl.constexpr, COLUMNS: gl.constexpr, LOAD: gl.constexpr):
    """Starts the gather of a tile's columns. A slot that is not there fills with zeros."""
    there = (slot >= 0) & (slot < slots)
    wide = slot.to(gl.int64)
    row = kv + (wide // KV_BLOCK) * stride_block + (wide % KV_BLOCK) * stride_row
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LOAD))
    async_copy.async_copy_global_to_shared(tile, row[:, None] + column[None, :], mask=there[:, None])


@gluon.jit
def _fetch(ring, rope_ring, into, kv, ropes, slot, rope_slot, slots, stride_block, stride_row, KV_BLOCK: gl.constexpr, ROPE: gl.constexpr, CACHE: gl.constexpr, LOAD: gl.constexpr, ROPE_LOAD: gl.constexpr):
    """Starts the gather of one tile, rope columns included, into place `into` of the ring."""
    _copy(ring.index(into), kv, slot, slots, stride_block, stride_row, KV_BLOCK, RANK, LOAD)
    if ROPE > 0:
        if CACHE == PACKED_CACHE:
            _copy(rope_ring.index(into), ropes + (RANK + 16) // 2, rope_slot, slots, stride_block // 2, stride_row // 2, KV_BLOCK, ROPE, ROPE_LOAD)
        else:
            _copy(rope_ring.index(into), kv + RANK, rope_slot, slots, stride_block, stride_row, KV_BLOCK, ROPE, ROPE_LOAD)


@gluon.jit
def _to_f16(codes):
    return codes.to(gl.float8e4nv, bitcast=True).to(gl.float16)


@gluon.jit
def _permuted_columns(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The order in which _keys_operand contracts: lane quarter q has columns 4q to 4q+3 of 16, which a fragment calls 2q, 2q+1, 2q+8, 2q+9."""
    return x.reshape([ROWS, COLUMNS // 16, 4, 2, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, COLUMNS])


@gluon.jit
def _keys_operand(tile, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr, KEYS: gl.constexpr, S: gl.constexpr):
    """K's codes [BLOCK_K, COLUMNS] as f16, QK's left operand in registers. KEYS: who loads what."""
    return gl.convert_layout(_permuted_columns(_to_f16(tile.load(KEYS)), BLOCK_K, COLUMNS), gl.DotOperandLayout(0, S, 2))


@gluon.jit
def _values_operand(tile, BLOCK: gl.constexpr, LATENTS: gl.constexpr, WARPS: gl.constexpr, VALUES: gl.constexpr, O: gl.constexpr):
    """V's codes [BLOCK keys, LATENTS] as f16, transposed, PV's left operand in registers; its rows in the order of _rows_to_latents."""
    PAIRS: gl.constexpr = LATENTS // (16 * WARPS)
    v = _to_f16(tile.load(VALUES)).permute((1, 0)).reshape([WARPS, 8, PAIRS, 2, BLOCK])
    return gl.convert_layout(v.permute((2, 0, 3, 1, 4)).reshape([LATENTS, BLOCK]), gl.DotOperandLayout(0, O, 2))


@gluon.jit
def _rows_to_latents(acc, LATENTS: gl.constexpr, HEADS: gl.constexpr, WARPS: gl.constexpr):
    PAIRS: gl.constexpr = LATENTS // (16 * WARPS)
    return acc.reshape([PAIRS, WARPS, 2, 8, HEADS]).permute((1, 3, 0, 2, 4)).reshape([LATENTS, HEADS])


@gluon.jit
def _quantize_q(x, largest, FP8_MAX: gl.constexpr, Q_FP8: gl.constexpr):
    """Q's factor per head, as what to multiply by and what undoes it."""
    if Q_FP8:
        top = gl.zeros_like(largest) + FP8_MAX
        return gl.div_rn(top, largest), gl.div_rn(largest, top)
    else:  # a power of two that brings the largest to [2^14, 2^15)
        exponent = (largest.to(gl.int32, bitcast=True) >> 23) & 0xFF
        up = ((127 + 14 + 127 - exponent) << 23).to(gl.float32, bitcast=True)
        down = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
        return up, down


@gluon.jit
def _p_operand(p, p_scale, P_FP8: gl.constexpr, CACHE: gl.constexpr):
    """P, rounded as the recipe says, in the type that PV multiplies."""
    if CACHE == BF16_CACHE:
        return p.to(gl.bfloat16)
    elif P_FP8:
        return (p * p_scale).to(gl.float8e4nv).to(gl.float16)
    else:
        return (p.to(gl.bfloat16).to(gl.float32) * P_FACTOR).to(gl.float16)


@gluon.jit
def _widened_scores(tile, q_tile, s, start: gl.constexpr, add: gl.constexpr, BLOCK_K: gl.constexpr, KEYS: gl.constexpr, S: gl.constexpr):
    return warpgroup_mma(_keys_operand(tile.slice(start, CHUNK, 1), BLOCK_K, CHUNK, KEYS, S), q_tile.slice(start, CHUNK, 1).permute((1, 0)), s, use_acc=add, is_async=True)


@gluon.jit
def _group_scores(tile, q_tile, g: gl.constexpr, BLOCK_K: gl.constexpr, HEADS: gl.constexpr, Q_FP8: gl.constexpr, KEYS: gl.constexpr, S: gl.constexpr):
    """Starts K . Q^T of one group of columns."""
    none = gl.zeros([BLOCK_K, HEADS], gl.float32, layout=S)
    q_part = q_tile.slice(g * GROUP, GROUP, 1).permute((1, 0))
    if Q_FP8:
        k = tile._reinterpret(gl.float8e4nv, [BLOCK_K, RANK], tile.layout)
        return warpgroup_mma(k.slice(g * GROUP, GROUP, 1), q_part, none, use_acc=False, is_async=True)
    else:
        s = _widened_scores(tile, q_tile, none, g * GROUP, False, BLOCK_K, KEYS, S)
        return _widened_scores(tile, q_tile, s, g * GROUP + CHUNK, True, BLOCK_K, KEYS, S)


@gluon.jit
def _rope_scores(rope_tile, q_rope_tile, BLOCK_K: gl.constexpr, HEADS: gl.constexpr, ROPE: gl.constexpr, CACHE: gl.constexpr, S: gl.constexpr):
    """Starts K . Q^T of the rope columns: bf16 in the packed cache, fp8 in the other."""
    if CACHE == PACKED_CACHE:  # a bf16 product: its layout differs in the instruction's columns alone
        WIDE: gl.constexpr = gl.NVMMADistributedLayout(S.version, S.warps_per_cta, [S.instr_shape[0], S.instr_shape[1], 16])
        return warpgroup_mma(rope_tile, q_rope_tile.permute((1, 0)), gl.zeros([BLOCK_K, HEADS], gl.float32, layout=WIDE), use_acc=False, is_async=True)
    else:
        k_rope = rope_tile._reinterpret(gl.float8e4nv, [BLOCK_K, ROPE], rope_tile.layout)
        return warpgroup_mma(k_rope, q_rope_tile.permute((1, 0)), gl.zeros([BLOCK_K, HEADS], gl.float32, layout=S), use_acc=False, is_async=True)


@gluon.jit
def _scores(tile, rope_tile, q_tile, q_rope_tile, key_scales, scale, rope_scale, BLOCK_K: gl.constexpr, HEADS: gl.constexpr, ROPE: gl.constexpr,
            CACHE: gl.constexpr, Q_FP8: gl.constexpr, KEYS: gl.constexpr, S: gl.constexpr):
    """S^T [BLOCK_K, HEADS] in log2 units, with no more than two groups' sums in registers at a time."""
    if CACHE == PACKED_CACHE or (Q_FP8 and CACHE == FP8_CACHE):
        total = gl.zeros([BLOCK_K, HEADS], gl.float32, layout=S)
        now = total
        for g in gl.static_range(RANK // GROUP):
            if Q_FP8:
                then = _group_scores(tile, q_tile, g, BLOCK_K, HEADS, Q_FP8, KEYS, S)
            else:
                then = _widened_scores(tile, q_tile, gl.zeros([BLOCK_K, HEADS], gl.float32, layout=S), g * GROUP, False, BLOCK_K, KEYS, S)
            if g > 0:
                now = warpgroup_mma_wait(1, deps=[now])
                if CACHE == PACKED_CACHE:
                    total += now * key_scales[g - 1][:, None]
                else:
                    total += now
            if not Q_FP8:
                then = warpgroup_mma_wait(1, deps=[_widened_scores(tile, q_tile, then, g * GROUP + CHUNK, True, BLOCK_K, KEYS, S)])
            now = then
        if ROPE > 0:
            rope = _rope_scores(rope_tile, q_rope_tile, BLOCK_K, HEADS, ROPE, CACHE, S)
            now = warpgroup_mma_wait(1, deps=[now])
        else:
            now = warpgroup_mma_wait(0, deps=[now])
        if CACHE == PACKED_CACHE:
            total += now * key_scales[3][:, None]
        else:
            total += now
        if ROPE > 0:
            rope = warpgroup_mma_wait(0, deps=[rope])
            if CACHE == PACKED_CACHE:
                return total * scale[None, :] + gl.convert_layout(rope, S, assert_trivial=True) * rope_scale[None, :]
            else:
                return (total + rope) * scale[None, :]
        else:
            return total * scale[None, :]
    else:
        s = _start_scores(tile, rope_tile, q_tile, q_rope_tile, BLOCK_K, HEADS, ROPE, CACHE, Q_FP8, KEYS, S)
        return _join_scores(_wait(0, s), key_scales, scale, rope_scale, ROPE, CACHE, Q_FP8, S)


@gluon.jit
def _start_scores(tile, rope_tile, q_tile, q_rope_tile, BLOCK_K: gl.constexpr, HEADS: gl.constexpr, ROPE: gl.constexpr,
                  CACHE: gl.constexpr, Q_FP8: gl.constexpr, KEYS: gl.constexpr, S: gl.constexpr):
    """Starts K . Q^T. What _join_scores makes the scores of, once it is there: one sum, or one per group of columns and the rope's."""
    none = gl.zeros([BLOCK_K, HEADS], gl.float32, layout=S)
    if CACHE == BF16_CACHE:
        s = warpgroup_mma(tile, q_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        if ROPE > 0:
            s = warpgroup_mma(rope_tile, q_rope_tile.permute((1, 0)), s, is_async=True)
        return (s,)
    elif Q_FP8 or CACHE == PACKED_CACHE:
        sums = ()
        for g in gl.static_range(RANK // GROUP):
            sums = sums + (_group_scores(tile, q_tile, g, BLOCK_K, HEADS, Q_FP8, KEYS, S),)
        if ROPE > 0:
            sums = sums + (_rope_scores(rope_tile, q_rope_tile, BLOCK_K, HEADS, ROPE, CACHE, S),)
        return sums
    else:
        s = none
        for c in gl.static_range(RANK // CHUNK):
            s = _widened_scores(tile, q_tile, s, c * CHUNK, c > 0, BLOCK_K, KEYS, S)
            if c > 0:
                s = warpgroup_mma_wait(1, deps=[s])
        if ROPE > 0:
            s = warpgroup_mma(_keys_operand(rope_tile, BLOCK_K, ROPE, KEYS, S), q_rope_tile.permute((1, 0)), s, is_async=True)
        return (s,)


@gluon.jit
def _join_scores(s, key_scales, scale, rope_scale, ROPE: gl.constexpr, CACHE: gl.constexpr, Q_FP8: gl.constexpr, S: gl.constexpr):
    """S^T [BLOCK_K, HEADS] in log2 units. key_scales: the packed cache's, one per key and group."""
    if CACHE == PACKED_CACHE:
        total = s[0] * key_scales[0][:, None] + s[1] * key_scales[1][:, None] + s[2] * key_scales[2][:, None] + s[3] * key_scales[3][:, None]
        return total * scale[None, :] + gl.convert_layout(s[4], S, assert_trivial=True) * rope_scale[None, :]
    elif Q_FP8:
        total = (s[0] + s[1]) + (s[2] + s[3])
        if ROPE > 0:
            total += s[4]
        return total * scale[None, :]
    else:
        return s[0] * scale[None, :]


@gluon.jit
def _wait(number: gl.constexpr, s):
    """Waits until no more than `number` products are under way; s, a tuple of what they make, is there then."""
    if len(s) == 1:
        return (warpgroup_mma_wait(number, deps=[s[0]]),)
    elif len(s) == 4:
        s0, s1, s2, s3 = warpgroup_mma_wait(number, deps=[s[0], s[1], s[2], s[3]])
        return (s0, s1, s2, s3)
    else:
        s0, s1, s2, s3, s4 = warpgroup_mma_wait(number, deps=[s[0], s[1], s[2], s[3], s[4]])
        return (s0, s1, s2, s3, s4)


@gluon.jit
def _values(acc, tile, p_tile, BLOCK_K: gl.constexpr, LATENTS: gl.constexpr, WARPS: gl.constexpr, CACHE: gl.constexpr, VALUES: gl.constexpr, O: gl.constexpr):
    """Starts acc += V^T . P^T. All but its last part are done on return."""
    BLOCK: gl.constexpr = 16
    if CACHE == BF16_CACHE:
        acc = warpgroup_mma(tile.permute((1, 0)), p_tile, acc, is_async=True)
    else:
        for k in gl.static_range(BLOCK_K // BLOCK):
            v = _values_operand(tile.slice(k * BLOCK, BLOCK), BLOCK, LATENTS, WARPS, VALUES, O)
            acc = warpgroup_mma(v, p_tile.slice(k * BLOCK, BLOCK), acc, is_async=True)
            if k > 0:  # so that no more than two operands hold registers
                acc = warpgroup_mma_wait(1, deps=[acc])
    return acc


@gluon.jit
def _softmax(scores, valid, wrong, row_max, p_sum):
    """Masks a tile's scores and moves the online softmax on: p, what the accumulator shrinks by, maximum, sums of p per row of the tile."""
    scores = gl.where(valid[:, None], scores, float("-inf"))
    scores = gl.where(wrong[:, None], float("nan"), scores)
    new_max = gl.maximum(row_max, gl.max(scores, 0))
    safe_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    alpha = gl.exp2(row_max - safe_max)
    p = gl.exp2(scores - safe_max[None, :])
    return p, alpha, new_max, p_sum * alpha[None, :] + p


@gluon.jit
def _keys_of_tile(scales, indices, start, lo, last, slots, stride_block, stride_row, KV_BLOCK: gl.constexpr, BLOCK_K: gl.constexpr, CACHE: gl.constexpr, HAS_INVALID: gl.constexpr, KEY: gl.constexpr):
    """Of a tile's keys: which are there, which are out of range, and the packed cache's scales."""
    slot = _lookup(indices, start, lo, last, BLOCK_K, KEY)
    valid = (slot >= 0) & (slot < slots)
    listed = lo + gl.arange(0, BLOCK_K, layout=KEY) < last
    if HAS_INVALID:
        wrong = listed & ((slot < -1) | (slot >= slots))
    else:
        wrong = listed & ~valid
    if CACHE == PACKED_CACHE:
        wide = slot.to(gl.int64)
        at = scales + ((wide // KV_BLOCK) * stride_block + (wide % KV_BLOCK) * stride_row) // 4 + RANK // 4
        return valid, wrong, (gl.load(at, mask=valid, other=0.0), gl.load(at + 1, mask=valid, other=0.0), gl.load(at + 2, mask=valid, other=0.0), gl.load(at + 3, mask=valid, other=0.0))
    else:
        return valid, wrong, ()


@gluon.jit
def _store_p(p_tiles, place, p, key_scales, units, alpha, p_scale, P_FP8: gl.constexpr, CACHE: gl.constexpr):
    """P to shared memory. Returns what each accumulator shrinks by, and the units that they are in from now on.

    The packed cache's group scale multiplies p, over the tile's largest, which is the unit of that group's accumulator.
    """
    if CACHE == PACKED_CACHE:
        shrink = ()
        after = ()
        for g in gl.static_range(4):
            largest = gl.max(gl.abs(key_scales[g]), 0)
            largest = gl.where(largest == 0.0, units[g], largest)
            share = gl.div_rn(key_scales[g], gl.zeros_like(key_scales[g]) + largest)
            p_tiles.index(place + g).store(_p_operand(p * share[:, None], p_scale, P_FP8, CACHE))
            shrink = shrink + (alpha * (units[g] / largest),)
            after = after + (largest,)
        return shrink, after
    else:
        p_tiles.index(place).store(_p_operand(p, p_scale, P_FP8, CACHE))
        return (alpha,), units


@gluon.jit(repr=kernel_name)
def attend_hopper(q, kv, scales, ropes, indptr, indices, q_scale, kv_scale, sink, out, lse, part_acc, part_max, part_sum,
                  score_scale, p_scale, slots, heads, splits,
                  stride_q_token, stride_q_head, stride_kv_block, stride_kv_row, stride_out_token, stride_out_head,
                  ROPE: gl.constexpr, KV_BLOCK: gl.constexpr, BLOCK_K: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, OVERLAP: gl.constexpr, P_BUFFERS: gl.constexpr,
                  FP8_MAX: gl.constexpr, CACHE: gl.constexpr, Q_FP8: gl.constexpr, Q_PER_HEAD: gl.constexpr, Q_GIVEN: gl.constexpr, P_FP8: gl.constexpr,
                  HAS_INVALID: gl.constexpr, HAS_SINK: gl.constexpr, WRITE_LSE: gl.constexpr, WRITE_PARTS: gl.constexpr,
                  S: gl.constexpr, O: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr, OUT: gl.constexpr):
    """Grid: (tokens, blocks of HEADS heads, splits). Writes what sparse_mla.attend writes.

    S, O: results' layouts of the two products. KEYS, VALUES: of an fp8 tile as it is read for the one and the other. OUT:
    of the output [RANK, HEADS] as it is stored.
    """
    token = gl.program_id(0).to(gl.int64)
    block = gl.program_id(1) * HEADS
    split = gl.program_id(2)
    WIDE_CACHE: gl.constexpr = CACHE == BF16_CACHE
    ELEMENT: gl.constexpr = gl.bfloat16 if WIDE_CACHE else gl.uint8
    VECTOR: gl.constexpr = 8 if WIDE_CACHE else 16
    LOAD: gl.constexpr = gl.BlockedLayout([1, VECTOR], [4, 8], [WARPS, 1], [1, 0])
    ROPE_ELEMENT: gl.constexpr = gl.uint8 if CACHE == FP8_CACHE else gl.bfloat16
    ROPE_LOAD: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [WARPS, 1], [1, 0]) if CACHE == FP8_CACHE else gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16 if WIDE_CACHE else 8, 2)
    ROPE_TILE: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2) if CACHE == FP8_CACHE else gl.NVMMASharedLayout(128, 16, 2)
    Q_TYPE: gl.constexpr = gl.bfloat16 if WIDE_CACHE else (gl.float8e4nv if Q_FP8 else gl.float16)
    Q_TILE: gl.constexpr = gl.NVMMASharedLayout(128, 8 if Q_FP8 else 16, 2)
    Q_ROPE_TYPE: gl.constexpr = gl.bfloat16 if CACHE == PACKED_CACHE else Q_TYPE
    Q_ROPE_TILE: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2) if Q_FP8 and CACHE != PACKED_CACHE else gl.NVMMASharedLayout(128, 16, 2)
    P_TYPE: gl.constexpr = gl.bfloat16 if WIDE_CACHE else gl.float16
    P_TILE: gl.constexpr = gl.NVMMASharedLayout(HEADS * 2 if HEADS < 64 else 128, 16, 2)
    P_TILES: gl.constexpr = 4 if CACHE == PACKED_CACHE else 1
    KEY: gl.constexpr = gl.SliceLayout(1, S)
    HEAD: gl.constexpr = gl.SliceLayout(0, S)
    O_HEAD: gl.constexpr = gl.SliceLayout(0, O)

    start = gl.load(indptr + token).to(gl.int64)
    keys = (gl.load(indptr + token + 1).to(gl.int64) - start).to(gl.int32)
    per_split = gl.cdiv(gl.cdiv(keys, BLOCK_K), splits) * BLOCK_K
    first = split * per_split
    last = gl.minimum(first + per_split, keys)
    tiles = gl.maximum(gl.cdiv(last - first, BLOCK_K), 0)

    ring = gl.allocate_shared_memory(ELEMENT, [STAGES, BLOCK_K, RANK], TILE)
    if ROPE > 0:
        rope_ring = gl.allocate_shared_memory(ROPE_ELEMENT, [STAGES, BLOCK_K, ROPE], ROPE_TILE)
    else:
        rope_ring = ring
    GATHER: gl.constexpr = gl.SliceLayout(1, LOAD)
    ROPE_GATHER: gl.constexpr = gl.SliceLayout(1, ROPE_LOAD)
    # Overlapped, a tile is read over two rounds, and its place is free one round later.
    AHEAD: gl.constexpr = STAGES if OVERLAP else STAGES - 1
    for i in gl.static_range(AHEAD):
        if first + i * BLOCK_K < last:
            slot = _lookup(indices, start, first + i * BLOCK_K, last, BLOCK_K, GATHER)
            rope_slot = slot
            if ROPE > 0:
                rope_slot = _lookup(indices, start, first + i * BLOCK_K, last, BLOCK_K, ROPE_GATHER)
            _fetch(ring, rope_ring, i, kv, ropes, slot, rope_slot, slots, stride_kv_block, stride_kv_row, KV_BLOCK, ROPE, CACHE, LOAD, ROPE_LOAD)
        async_copy.commit_group()
    ahead_at = first + AHEAD * BLOCK_K
    ahead = _lookup(indices, start, ahead_at, last, BLOCK_K, GATHER)
    rope_ahead = ahead
    if ROPE > 0:
        rope_ahead = _lookup(indices, start, ahead_at, last, BLOCK_K, ROPE_GATHER)

    # Q, once per program, while the first tiles are on their way.
    Q_LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    Q_ROPE_LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    Q_ROW: gl.constexpr = gl.SliceLayout(1, Q_LOAD)
    q_head = block + gl.arange(0, HEADS, layout=Q_ROW)
    q_at = q + token * stride_q_token + q_head.to(gl.int64)[:, None] * stride_q_head + gl.arange(0, RANK, layout=gl.SliceLayout(0, Q_LOAD))[None, :]
    q_tile = gl.allocate_shared_memory(Q_TYPE, [HEADS, RANK], Q_TILE)
    q_latent = gl.load(q_at, mask=(q_head < heads)[:, None], other=0)
    if ROPE > 0:
        q_rope_head = block + gl.arange(0, HEADS, layout=gl.SliceLayout(1, Q_ROPE_LOAD))
        q_rope_at = q + token * stride_q_token + q_rope_head.to(gl.int64)[:, None] * stride_q_head + RANK + gl.arange(0, ROPE, layout=gl.SliceLayout(0, Q_ROPE_LOAD))[None, :]
        q_rope_tile = gl.allocate_shared_memory(Q_ROPE_TYPE, [HEADS, ROPE], Q_ROPE_TILE)
        q_rope = gl.load(q_rope_at, mask=(q_rope_head < heads)[:, None], other=0)
    else:
        q_rope_tile = q_tile
    scale = gl.zeros([HEADS], gl.float32, layout=HEAD) + score_scale
    rope_scale = scale
    if Q_GIVEN:
        scale = scale * gl.load(q_scale)
        rope_scale = scale
    if WIDE_CACHE:
        q_tile.store(q_latent)
        if ROPE > 0:
            q_rope_tile.store(q_rope)
    elif Q_GIVEN and Q_FP8:
        q_tile.store(q_latent.to(gl.float8e4nv, bitcast=True))
        if ROPE > 0:
            if CACHE == PACKED_CACHE:
                q_rope_tile.store(_to_f16(q_rope).to(gl.bfloat16))
            else:
                q_rope_tile.store(q_rope.to(gl.float8e4nv, bitcast=True))
    else:
        if Q_GIVEN:
            wide = _to_f16(q_latent).to(gl.float32)
        else:
            wide = q_latent.to(gl.float32)
        largest = gl.max(gl.abs(wide), 1)
        if ROPE > 0:
            if Q_GIVEN:
                wide_rope = _to_f16(q_rope).to(gl.float32)
            else:
                wide_rope = q_rope.to(gl.float32)
            if CACHE != PACKED_CACHE:
                largest = gl.maximum(largest, gl.convert_layout(gl.max(gl.abs(wide_rope), 1), Q_ROW))
        if Q_FP8 and not Q_PER_HEAD:
            shared = gl.max(largest.reshape([HEADS // QUANTUM, QUANTUM]), 1)
            largest = gl.convert_layout((gl.zeros_like(largest).reshape([HEADS // QUANTUM, QUANTUM]) + shared[:, None]).reshape([HEADS]), Q_ROW)
        largest = gl.maximum(largest, SMALLEST_AMAX)
        up, down = _quantize_q(wide, largest, FP8_MAX, Q_FP8)
        scale = scale * gl.convert_layout(down, HEAD)
        wide = wide * up[:, None]
        if Q_FP8:
            q_tile.store(wide.to(gl.float8e4nv))
        else:
            q_tile.store(_permuted_columns(wide.to(gl.float16), HEADS, RANK))
        if ROPE > 0:
            if CACHE == PACKED_CACHE:
                q_rope_tile.store(wide_rope.to(gl.bfloat16))
            else:
                wide_rope = wide_rope * gl.convert_layout(up, gl.SliceLayout(1, Q_ROPE_LOAD))[:, None]
                if Q_FP8:
                    q_rope_tile.store(wide_rope.to(gl.float8e4nv))
                else:
                    q_rope_tile.store(_permuted_columns(wide_rope.to(gl.float16), HEADS, ROPE))
    value_scale = score_scale * 0.0 + 1.0
    if CACHE == FP8_CACHE:
        value_scale = gl.load(kv_scale)
        scale = scale * value_scale
        rope_scale = scale
    if P_FP8:
        value_scale = gl.div_rn(value_scale, p_scale)
    elif CACHE != BF16_CACHE:
        value_scale = value_scale * (1.0 / P_FACTOR)

    p_tiles = gl.allocate_shared_memory(P_TYPE, [P_BUFFERS * P_TILES, BLOCK_K, HEADS], P_TILE)
    row_max = gl.full([HEADS], float("-inf"), gl.float32, layout=HEAD)
    p_sum = gl.zeros([BLOCK_K, HEADS], gl.float32, layout=S)
    one = score_scale * 0.0 + 1.0
    if CACHE == PACKED_CACHE:
        acc = (gl.zeros([GROUP, HEADS], gl.float32, layout=O), gl.zeros([GROUP, HEADS], gl.float32, layout=O),
               gl.zeros([GROUP, HEADS], gl.float32, layout=O), gl.zeros([GROUP, HEADS], gl.float32, layout=O))
        units = (one, one, one, one)
    else:
        acc = (gl.zeros([RANK, HEADS], gl.float32, layout=O),)
        units = (one,)

    if OVERLAP:
        # Round i: QK of tile i + 1 and PV of tile i are under way while the softmax of tile i + 1 is computed.
        valid, wrong, key_scales = _keys_of_tile(scales, indices, start, first, last, slots, stride_kv_block, stride_kv_row, KV_BLOCK, BLOCK_K, CACHE, HAS_INVALID, KEY)
        async_copy.wait_group(STAGES - 1)
        fence_async_shared()
        _barrier()
        s = _wait(0, _start_scores(ring.index(0), rope_ring.index(0), q_tile, q_rope_tile, BLOCK_K, HEADS, ROPE, CACHE, Q_FP8, KEYS, S))
        p, alpha, row_max, p_sum = _softmax(_join_scores(s, key_scales, scale, rope_scale, ROPE, CACHE, Q_FP8, S), valid, wrong, row_max, p_sum)
        _, units = _store_p(p_tiles, 0, p, key_scales, units, gl.convert_layout(alpha, O_HEAD), p_scale, P_FP8, CACHE)
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        _barrier()
        for i in range(tiles - 1):
            valid, wrong, key_scales = _keys_of_tile(scales, indices, start, first + (i + 1) * BLOCK_K, last, slots, stride_kv_block, stride_kv_row, KV_BLOCK, BLOCK_K, CACHE, HAS_INVALID, KEY)
            s = _start_scores(ring.index((i + 1) % STAGES), rope_ring.index((i + 1) % STAGES), q_tile, q_rope_tile, BLOCK_K, HEADS, ROPE, CACHE, Q_FP8, KEYS, S)
            tile = ring.index(i % STAGES)
            this = (i % P_BUFFERS) * P_TILES
            if CACHE == PACKED_CACHE:
                parts = ()
                for g in gl.static_range(4):
                    parts = parts + (_values(acc[g], tile.slice(g * GROUP, GROUP, 1), p_tiles.index(this + g), BLOCK_K, GROUP, WARPS, CACHE, VALUES, O),)
                s = _wait(1, s)
            else:
                parts = (_values(acc[0], tile, p_tiles.index(this), BLOCK_K, RANK, WARPS, CACHE, VALUES, O),)
                s = _wait(1, s)
            p, alpha, row_max, p_sum = _softmax(_join_scores(s, key_scales, scale, rope_scale, ROPE, CACHE, Q_FP8, S), valid, wrong, row_max, p_sum)
            o_alpha = gl.convert_layout(alpha, O_HEAD)
            parts = _wait(0, parts)
            if P_BUFFERS == 1:
                _barrier()
            shrink, units = _store_p(p_tiles, ((i + 1) % P_BUFFERS) * P_TILES, p, key_scales, units, o_alpha, p_scale, P_FP8, CACHE)
            after = ()
            for g in gl.static_range(len(parts)):
                after = after + (parts[g] * shrink[g][None, :],)
            acc = after
            async_copy.wait_group(STAGES - 3)
            fence_async_shared()
            _barrier()
            if ahead_at < last:
                _fetch(ring, rope_ring, i % STAGES, kv, ropes, ahead, rope_ahead, slots, stride_kv_block, stride_kv_row, KV_BLOCK, ROPE, CACHE, LOAD, ROPE_LOAD)
            async_copy.commit_group()
            ahead_at += BLOCK_K
            ahead = _lookup(indices, start, ahead_at, last, BLOCK_K, GATHER)
            if ROPE > 0:
                rope_ahead = _lookup(indices, start, ahead_at, last, BLOCK_K, ROPE_GATHER)
        final = gl.maximum(tiles - 1, 0)
        tile = ring.index(final % STAGES)
        this = (final % P_BUFFERS) * P_TILES
        parts = ()
        for g in gl.static_range(len(acc)):
            if CACHE == PACKED_CACHE:
                parts = parts + (_values(acc[g], tile.slice(g * GROUP, GROUP, 1), p_tiles.index(this + g), BLOCK_K, GROUP, WARPS, CACHE, VALUES, O),)
            else:
                parts = parts + (_values(acc[g], tile, p_tiles.index(this), BLOCK_K, RANK, WARPS, CACHE, VALUES, O),)
        acc = _wait(0, parts)
    else:
        for i in range(tiles):
            valid, wrong, key_scales = _keys_of_tile(scales, indices, start, first + i * BLOCK_K, last, slots, stride_kv_block, stride_kv_row, KV_BLOCK, BLOCK_K, CACHE, HAS_INVALID, KEY)
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            _barrier()
            # Into the place that the previous round has left.
            if ahead_at < last:
                _fetch(ring, rope_ring, (i + STAGES - 1) % STAGES, kv, ropes, ahead, rope_ahead, slots, stride_kv_block, stride_kv_row, KV_BLOCK, ROPE, CACHE, LOAD, ROPE_LOAD)
            async_copy.commit_group()
            ahead_at += BLOCK_K
            ahead = _lookup(indices, start, ahead_at, last, BLOCK_K, GATHER)
            if ROPE > 0:
                rope_ahead = _lookup(indices, start, ahead_at, last, BLOCK_K, ROPE_GATHER)
            tile = ring.index(i % STAGES)
            scores = _scores(tile, rope_ring.index(i % STAGES), q_tile, q_rope_tile, key_scales, scale, rope_scale, BLOCK_K, HEADS, ROPE, CACHE, Q_FP8, KEYS, S)
            p, alpha, row_max, p_sum = _softmax(scores, valid, wrong, row_max, p_sum)
            shrink, units = _store_p(p_tiles, 0, p, key_scales, units, gl.convert_layout(alpha, O_HEAD), p_scale, P_FP8, CACHE)
            fence_async_shared()
            _barrier()
            parts = ()
            for g in gl.static_range(len(acc)):
                if CACHE == PACKED_CACHE:
                    parts = parts + (_values(acc[g] * shrink[g][None, :], tile.slice(g * GROUP, GROUP, 1), p_tiles.index(g), BLOCK_K, GROUP, WARPS, CACHE, VALUES, O),)
                else:
                    parts = parts + (_values(acc[g] * shrink[g][None, :], tile, p_tiles.index(0), BLOCK_K, RANK, WARPS, CACHE, VALUES, O),)
            acc = _wait(0, parts)

    if WRITE_PARTS:  # lets the merge be launched, once every program is here; it waits for what is written below
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    async_copy.wait_group(0)
    row_sum = gl.sum(p_sum, 0)
    head = block + gl.arange(0, HEADS, layout=HEAD)
    factor = gl.zeros([HEADS], gl.float32, layout=HEAD) + value_scale
    sink_row = row_max
    if WRITE_PARTS:
        part = (token * splits + split) * heads
        gl.store(part_max + part + head, row_max, mask=head < heads)
        gl.store(part_sum + part + head, row_sum, mask=head < heads)
    else:
        # As _finish of sparse_mla.py, heads along the columns.
        if HAS_SINK:
            sink_row = gl.load(sink + head, mask=head < heads, other=0.0)
        empty = row_sum == 0.0
        factor = factor / gl.where(empty, 1.0, row_sum)
        lse2 = gl.where(empty, float("-inf"), row_max + gl.log2(row_sum))
        if HAS_SINK:
            sink2 = sink_row * LOG2_E
            top = gl.maximum(lse2, sink2)
            base = gl.where(gl.abs(top) == float("inf"), 0.0, top)
            total2 = base + gl.log2(gl.exp2(lse2 - base) + gl.exp2(sink2 - base))
            factor = factor * gl.where(empty | (sink2 == float("inf")), 0.0, gl.exp2(lse2 - total2))
            lse2 = gl.where(gl.abs(top) == float("inf"), top, total2)
        if WRITE_LSE:
            gl.store(lse + token * heads + head, lse2 * LN_2, mask=head < heads)
    factor = gl.convert_layout(factor, O_HEAD)
    COLUMNS: gl.constexpr = GROUP if CACHE == PACKED_CACHE else RANK
    out_head = block + gl.arange(0, HEADS, layout=gl.SliceLayout(0, OUT))
    latent = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, OUT))
    for g in gl.static_range(RANK // COLUMNS):
        rows = acc[g] * factor[None, :]
        if CACHE == PACKED_CACHE:
            rows = rows * units[g]
        if CACHE != BF16_CACHE:
            rows = _rows_to_latents(rows, COLUMNS, HEADS, WARPS)
        rows = gl.convert_layout(rows, OUT)
        inside = (out_head < heads)[None, :]
        if WRITE_PARTS:
            part_row = part_acc + ((token * splits + split) * heads + out_head.to(gl.int64)) * RANK
            gl.store(part_row[None, :] + g * COLUMNS + latent[:, None], rows, mask=inside)
        else:
            out_row = out + token * stride_out_token + out_head.to(gl.int64) * stride_out_head
            gl.store(out_row[None, :] + g * COLUMNS + latent[:, None], rows.to(gl.bfloat16), mask=inside)
