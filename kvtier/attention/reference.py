"""Attention in plain torch on the CPU: obviously right, and exact in fp32 by construction.

Every product has a fixed shape: a tile is the queries at absolute positions 16 t .. 16 t + 15 (zeros where there are
none), a span is 64 absolute positions. So nothing that a query is computed with can change its bits. Knows addresses
only; serves tests, and machines without the native extension.
"""

from __future__ import annotations

import ctypes

import torch

from kvtier.attention.base import SPAN_TOKENS, AttentionBatch
from kvtier.block import KVLayout

TILE_QUERIES = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOWEST = torch.finfo(torch.float32).min


class ReferenceAttention:
    """`AttentionBackend` in torch."""

    name = "reference"

    def append(self, k: torch.Tensor, v: torch.Tensor, batch: AttentionBatch, layout: KVLayout, layer: int) -> None:
        rows, offsets = batch.append_rows.tolist(), batch.append_offsets.tolist()
        for token, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
            planes = _planes(row, layout, layer)
            planes[0, :, offset] = k[token]
            planes[1, :, offset] = v[token]

    def attend(
        self,
        q: torch.Tensor,
        batch: AttentionBatch,
        layout: KVLayout,
        layer: int,
        scale: float,
        window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2])
        starts, lengths = batch.query_starts.tolist(), batch.lengths.tolist()
        for sequence, length in enumerate(lengths):
            shift = length - starts[sequence + 1]  # a token's position is its number plus this
            position = starts[sequence] + shift
            first_key = 0 if window is None else max(0, position - window + 1)
            kv = _gather(batch.tables[sequence].tolist(), layout, layer, first_key, length)
            while position < length:
                end = min(position - position % TILE_QUERIES + TILE_QUERIES, length)
                tokens = slice(position - shift, end - shift)
                out[tokens], lse[tokens] = _attend_tile(q[tokens].float() * scale, position, kv, window)
                position = end
        return out, lse


def _planes(row: int, layout: KVLayout, layer: int) -> torch.Tensor:
    """The slice of `layer` in the row at address `row`, as a writable [kv, kv_head, token, dim]."""
    memory = (ctypes.c_char * layout.slice_payload_bytes).from_address(row + layer * layout.slice_bytes)
    flat = torch.frombuffer(memory, dtype=DTYPES[layout.dtype])
    return flat.view(2, layout.kv_heads, layout.block_tokens, layout.head_dim)


def _gather(table: list[int], layout: KVLayout, layer: int, first: int, end: int) -> torch.Tensor:
    """fp32 [kv, kv_head, position, dim] of whole spans from 0 on: zeros but for positions first .. end - 1."""
    spans = -(-end // SPAN_TOKENS)
    kv = torch.zeros(2, layout.kv_heads, spans * SPAN_TOKENS, layout.head_dim)
    while first < end:
        block, offset = divmod(first, layout.block_tokens)
        count = min(layout.block_tokens - offset, end - first)
        kv[:, :, first : first + count] = _planes(table[block], layout, layer)[:, :, offset : offset + count]
        first += count
    return kv


def _attend_tile(
    q: torch.Tensor, position: int, kv: torch.Tensor, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled q [query, head, dim] at `position` .. within one tile -> out [query, head, dim], lse [query, head]."""
    count, heads, dim = q.shape
    kv_heads = kv.shape[1]
    tile = position - position % TILE_QUERIES
    own = slice(position - tile, position - tile + count)
    padded = torch.zeros(kv_heads, TILE_QUERIES, heads // kv_heads, dim)
    padded[:, own] = q.view(count, kv_heads, -1, dim).transpose(0, 1)
    places = torch.arange(tile, tile + TILE_QUERIES)[:, None]  # [query, 1]

    top = torch.full(padded.shape[:3], -torch.inf)  # running maximum, [kv_head, query, group]
    total, acc = torch.zeros(padded.shape[:3]), torch.zeros_like(padded)
    first_key = 0 if window is None else max(0, position - window + 1)
    for start in range(first_key - first_key % SPAN_TOKENS, position + count, SPAN_TOKENS):
        k, v = kv[:, :, start : start + SPAN_TOKENS].contiguous()
        gap = places - torch.arange(start, start + SPAN_TOKENS)
        visible = (gap >= 0) if window is None else (gap >= 0) & (gap < window)  # [query, key]
        scores = (padded.view(kv_heads, -1, dim) @ k.transpose(1, 2)).view(*padded.shape[:3], SPAN_TOKENS)
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        span_top = scores.amax(-1)
        weights = torch.exp(scores - span_top.clamp_min(LOWEST)[..., None])
        if bool(visible.all()):  # a matter of absolute positions: the same for a query in any batch
            span_acc = (weights.view(kv_heads, -1, SPAN_TOKENS) @ v).view_as(acc)
        else:  # what a query does not see may be inf or NaN, and 0 times that is not 0: each query gets its own V
            span_acc = weights @ v[:, None].masked_fill(~visible[:, :, None], 0.0)
        new_top = torch.maximum(top, span_top)
        old_scale, span_scale = (
            torch.exp(top - new_top.clamp_min(LOWEST)),
            torch.exp(span_top - new_top.clamp_min(LOWEST)),
        )
        total = total * old_scale + weights.sum(-1) * span_scale
        acc = acc * old_scale[..., None] + span_acc * span_scale[..., None]
        top = new_top
    out, lse = acc / total[..., None], top + total.log()
    return out[:, own].transpose(0, 1).reshape(count, heads, dim), lse[:, own].transpose(0, 1).reshape(count, heads)
