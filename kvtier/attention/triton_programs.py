"""The programs of `TritonKernelAttention`, in the Triton language: addresses in, results or parts of results out.

Positions are folded in tiles of `TILE` keys, tiles in segments of `SEGMENT` positions, all at absolute multiples and
from left to right, whether one program folds every segment or each has a program of its own (`SPLIT`). So splitting
changes no bits. Started by triton_kernel.py, which vouches for shapes and alignment. mypy does not look inside.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = tl.constexpr(64)
"""Keys that are multiplied at once."""
SEGMENT = tl.constexpr(512)
"""Positions whose partial result is folded on its own."""
ALIGNMENT = tl.constexpr(16)
"""Bytes that the address of every K and V vector is a multiple of."""
PIECE_BYTES = tl.constexpr(4096)
"""What a program copies at once."""
NOTHING = tl.constexpr(float("-inf"))
COUNTS = ("tokens", "sequences", "segments", "window", "table_stride", "pieces")
"""Arguments that change from pass to pass: a program is not compiled anew for those that are 1 or multiples of 16."""


@triton.jit(do_not_specialize=COUNTS)
def append(
    k,
    k_token_stride,
    k_head_stride,
    v,
    v_token_stride,
    v_head_stride,
    rows,
    offsets,
    tokens,
    layer_bytes,
    TOKENS: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    VECTOR_BYTES: tl.constexpr,
):
    """Program (TOKENS tokens, KV head): their K and V into their rows."""
    token, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    there, dim = token < tokens, tl.arange(0, DIM_PADDED)
    wanted = there[:, None] & (dim < DIM)[None, :]
    address = tl.load(rows + token, mask=there, other=0) + layer_bytes + head * HEAD_BYTES
    address += tl.load(offsets + token, mask=there, other=0) * VECTOR_BYTES
    wide = token.to(tl.int64)
    source = k + head * k_head_stride + (wide * k_token_stride)[:, None] + dim[None, :]
    target = tl.multiple_of(address.to(k.dtype), ALIGNMENT)
    tl.store(target[:, None] + dim[None, :], tl.load(source, mask=wanted), mask=wanted)
    source = v + head * v_head_stride + (wide * v_token_stride)[:, None] + dim[None, :]
    target = tl.multiple_of((address + VALUE_BYTES).to(v.dtype), ALIGNMENT)
    tl.store(target[:, None] + dim[None, :], tl.load(source, mask=wanted), mask=wanted)


@triton.jit(do_not_specialize=COUNTS)
def gather(rows, offset, target, pieces, ROW_BYTES: tl.constexpr):
    """Every so many-th piece of the bytes at `rows` + offset, ROW_BYTES from each, side by side into int32 `target`."""
    word = tl.arange(0, PIECE_BYTES // 4)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        byte = tl.cast(piece, tl.int64) * PIECE_BYTES
        address = tl.load(rows + byte // ROW_BYTES) + offset + byte % ROW_BYTES
        source = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), ALIGNMENT)
        tl.store(target + byte // 4 + word, tl.load(source + word))


@triton.jit(do_not_specialize=COUNTS)
def attend(
    q,
    q_token_stride,
    q_head_stride,
    tables,
    table_stride,
    query_starts,
    lengths,
    sequences,
    out,
    sums,
    layer_bytes,
    scale,
    window,
    segments,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    VECTOR_BYTES: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Program (tile of QUERIES queries of one sequence, KV head, segment): the queries of all heads of the KV head.

    With SPLIT, `out` fp32 [token, head, segment, dim] and `sums` fp32 [token, head, segment, 2] (top, total) get the
    segment's part, to be joined by `join`; else `out` [token, head, dim] and `sums` [token, head] the result and lse.
    DECODE: each sequence has one query, and its number is the tile's.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    if DECODE:
        sequence, first_query = tile, 0
    else:
        sequence = _find(query_starts, sequences, tile, QUERIES)
        first_query = (tile - tl.load(query_starts + sequence) // QUERIES - sequence) * QUERIES
    first_token, length = tl.load(query_starts + sequence), tl.load(lengths + sequence)
    count = tl.load(query_starts + sequence + 1) - first_token
    if first_query >= count:
        return
    first_position = length - count + first_query
    end_key = tl.minimum(first_position + QUERIES, length)
    first_key = tl.maximum(first_position - window + 1, 0)

    row = tl.arange(0, QUERIES * GROUP_PADDED)
    query, member = first_query + row // GROUP_PADDED, row % GROUP_PADDED
    used = (query < count) & (member < GROUP)
    head = (first_token + query).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + member  # of all tokens' heads
    dim = tl.arange(0, DIM_PADDED)
    kept = used[:, None] & (dim < DIM)[None, :]
    q_at = (first_token + query).to(tl.int64) * q_token_stride + (kv_head * GROUP + member) * q_head_stride
    asked = tl.load(q + q_at[:, None] + dim[None, :], mask=kept, other=0.0).to(DOT)
    position = first_position + row // GROUP_PADDED

    HEAD_BYTES: tl.constexpr = BLOCK_TOKENS * VECTOR_BYTES
    table = tables + sequence.to(tl.int64) * table_stride
    plane_bytes = layer_bytes + kv_head * HEAD_BYTES
    if SPLIT:
        segment = tl.program_id(2)
        if (segment < first_key // SEGMENT) | (segment * SEGMENT >= end_key):
            return
        acc, top, total = _fold(
            asked, position, table, plane_bytes, segment, first_key, end_key, scale, window, dim,
            KV_HEADS * HEAD_BYTES, QUERIES, DIM, BLOCK_TOKENS, VECTOR_BYTES, DTYPE, DOT,
        )  # fmt: skip
        part = head * segments + segment
        tl.store(out + part[:, None] * DIM + dim[None, :], acc, mask=kept)
        tl.store(sums + part * 2, top, mask=used)
        tl.store(sums + part * 2 + 1, total, mask=used)
    else:
        acc = tl.zeros([QUERIES * GROUP_PADDED, DIM_PADDED], tl.float32)
        top, total = (
            tl.full([QUERIES * GROUP_PADDED], NOTHING, tl.float32),
            tl.zeros([QUERIES * GROUP_PADDED], tl.float32),
        )
        for segment in range(first_key // SEGMENT, (end_key + SEGMENT - 1) // SEGMENT):
            part_acc, part_top, part_total = _fold(
                asked, position, table, plane_bytes, segment, first_key, end_key, scale, window, dim,
                KV_HEADS * HEAD_BYTES, QUERIES, DIM, BLOCK_TOKENS, VECTOR_BYTES, DTYPE, DOT,
            )  # fmt: skip
            acc, top, total = _merge(acc, top, total, part_acc, part_top, part_total)
        tl.store(out + head[:, None] * DIM + dim[None, :], acc / total[:, None], mask=kept)
        tl.store(sums + head, top + tl.log(total), mask=used)


@triton.jit(do_not_specialize=COUNTS)
def join(
    parts,
    part_sums,
    query_starts,
    lengths,
    sequences,
    out,
    lse,
    window,
    segments,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DECODE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Program (token, KV head): the parts that `attend` has left of its heads' segments, merged from left to right."""
    token = tl.program_id(0)
    sequence = token if DECODE else _find(query_starts, sequences, token, 0)
    position = tl.load(lengths + sequence) - tl.load(query_starts + sequence + 1) + token
    member, dim = tl.arange(0, GROUP_PADDED), tl.arange(0, DIM_PADDED)
    head = (token.to(tl.int64) * KV_HEADS + tl.program_id(1)) * GROUP + member
    used = member < GROUP
    kept = used[:, None] & (dim < DIM)[None, :]
    acc = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
    top, total = tl.full([GROUP_PADDED], NOTHING, tl.float32), tl.zeros([GROUP_PADDED], tl.float32)
    for segment in tl.range(tl.maximum(position - window + 1, 0) // SEGMENT, position // SEGMENT + 1, num_stages=4):
        part = head * segments + segment
        part_acc = tl.load(parts + part[:, None] * DIM + dim[None, :], mask=kept, other=0.0)
        part_top = tl.load(part_sums + part * 2, mask=used, other=0.0)
        part_total = tl.load(part_sums + part * 2 + 1, mask=used, other=1.0)
        acc, top, total = _merge(acc, top, total, part_acc, part_top, part_total)
    tl.store(out + head[:, None] * DIM + dim[None, :], acc / total[:, None], mask=kept)
    tl.store(lse + head, top + tl.log(total), mask=used)


@triton.jit
def _find(query_starts, sequences, number, QUERIES: tl.constexpr):
    """The last sequence whose first tile is at most `number`: tiles begin at start // QUERIES + sequence.

    So each sequence has a tile of its own for each QUERIES tokens begun. With QUERIES 0, tiles are tokens.
    """
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(query_starts + middle)
        if QUERIES > 0:
            start = start // QUERIES + middle
        if start <= number:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _merge(acc, top, total, part_acc, part_top, part_total):
    """Two results over positions side by side as one; rows that have seen nothing have top -inf."""
    new_top = tl.maximum(top, part_top)
    base = tl.where(new_top == NOTHING, 0.0, new_top)
    old, new = tl.exp(top - base), tl.exp(part_top - base)
    return acc * old[:, None] + part_acc * new[:, None], new_top, total * old + part_total * new


@triton.jit
def _fold(
    q,
    position,
    table,
    plane_bytes,
    segment,
    first_key,
    end_key,
    scale,
    window,
    dim,
    VALUE_BYTES: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    VECTOR_BYTES: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT: tl.constexpr,
):
    """acc, top and total of q [row, dim] over the keys first_key .. end_key - 1 of one segment."""
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    top, total = tl.full([q.shape[0]], NOTHING, tl.float32), tl.zeros([q.shape[0]], tl.float32)
    begin = tl.maximum(segment * SEGMENT, first_key // TILE * TILE)
    for start in range(begin, tl.minimum(segment * SEGMENT + SEGMENT, end_key), TILE):
        key = start + tl.arange(0, TILE)
        near = (key >= first_key) & (key < end_key)  # nothing else is read
        address = tl.load(table + key // BLOCK_TOKENS, mask=near, other=0)
        address += plane_bytes + key % BLOCK_TOKENS * VECTOR_BYTES
        wanted = near[:, None] & (dim < DIM)[None, :]
        k_at = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), ALIGNMENT)
        v_at = tl.multiple_of((address + VALUE_BYTES).to(tl.pointer_type(DTYPE)), ALIGNMENT)
        k = tl.load(k_at[:, None] + dim[None, :], mask=wanted, other=0.0).to(DOT)
        v = tl.load(v_at[:, None] + dim[None, :], mask=wanted, other=0.0).to(DOT)

        gap = position[:, None] - key[None, :]
        visible = (gap >= 0) & (gap < window) & near[None, :]
        scores = tl.where(visible, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, NOTHING)
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == NOTHING, 0.0, new_top)
        old, weights = tl.exp(top - base), tl.exp(scores - base[:, None])
        if QUERIES > 1:  # what some query does not see may be inf or NaN, and 0 times that is not 0
            finite = v.to(tl.float32) - v.to(tl.float32) == 0
            wild = tl.where(finite, 0.0, 1.0).to(DOT)
            poisoned = tl.dot(tl.where(visible, 1.0, 0.0).to(DOT), wild, input_precision="ieee") > 0
            acc = tl.where(poisoned, float("nan"), acc)
            v = tl.where(finite, v, 0.0).to(DOT)
        acc = acc * old[:, None] + tl.dot(weights.to(DTYPE).to(DOT), v, input_precision="ieee")
        total = total * old + tl.sum(weights, 1)
        top = new_top
    return acc, top, total
