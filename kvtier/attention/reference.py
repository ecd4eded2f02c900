"""Attention in plain torch on the CPU: obviously right, and exact in fp32 by construction.

Every matrix product has a fixed shape: a tile is the queries at absolute positions 16 t .. 16 t + 15 (padded with
zeros), a span is 64 absolute positions; so nothing a query is computed with can change its bits. Knows only addresses.
"""

from __future__ import annotations

import ctypes

import torch

from kvtier.attention.base import SPAN_TOKENS, AttentionBatch
from kvtier.block import KVLayout

TILE_QUERIES = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ReferenceAttention:
    """`AttentionBackend` in torch. Holds nothing."""

    name = "reference"

    def append(self, k: torch.Tensor, v: torch.Tensor, batch: AttentionBatch, layout: KVLayout, layer: int) -> None:
        rows, offsets = batch.append_rows.tolist(), batch.append_offsets.tolist()
        for token, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
            planes = _slice(row, layout, layer)  # [kv, kv_head, token, dim]
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
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        starts, lengths = batch.query_starts.tolist(), batch.lengths.tolist()
        for sequence, length in enumerate(lengths):
            first, last = starts[sequence], starts[sequence + 1]
            shift = length - last  # position of a query = its token number + shift
            position = first + shift
            while position < length:
                end = min(position - position % TILE_QUERIES + TILE_QUERIES, length)
                tokens = slice(position - shift, end - shift)
                rows = _Rows(batch.tables[sequence].tolist(), layout, layer)
                out[tokens], lse[tokens] = _attend_tile(q[tokens].float() * scale, position, rows, window)
                position = end
        return out, lse


class _Rows:
    """K and V of one sequence's positions in one layer, read from the addresses of its rows."""

    def __init__(self, table: list[int], layout: KVLayout, layer: int) -> None:
        self.table, self.layout, self.layer = table, layout, layer

    def span(self, start: int, first: int, end: int) -> torch.Tensor:
        """fp32 [kv, kv_head, SPAN_TOKENS, dim] of the span at `start`; only positions first .. end - 1 are read."""
        layout = self.layout
        result = torch.zeros(2, layout.kv_heads, SPAN_TOKENS, layout.head_dim)
        position = max(start, first)
        end = min(start + SPAN_TOKENS, end)
        while position < end:
            block, offset = divmod(position, layout.block_tokens)
            count = min(layout.block_tokens - offset, end - position)
            planes = _slice(self.table[block], layout, self.layer)
            result[:, :, position - start : position - start + count] = planes[:, :, offset : offset + count]
            position += count
        return result


def _slice(row: int, layout: KVLayout, layer: int) -> torch.Tensor:
    """The slice of `layer` in the row at address `row`, as a writable [kv, kv_head, token, dim]."""
    memory = (ctypes.c_char * layout.slice_payload_bytes).from_address(row + layer * layout.slice_bytes)
    flat = torch.frombuffer(memory, dtype=DTYPES[layout.dtype])
    return flat.view(2, layout.kv_heads, layout.block_tokens, layout.head_dim)


def _attend_tile(
    q: torch.Tensor, position: int, rows: _Rows, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled q [query, head, dim] at `position` .. within one tile -> out [query, head, dim], lse [query, head]."""
    count, heads, dim = q.shape
    kv_heads = rows.layout.kv_heads
    tile = position - position % TILE_QUERIES
    place = slice(position - tile, position - tile + count)
    padded = torch.zeros(kv_heads, TILE_QUERIES, heads // kv_heads, dim)
    padded[:, place] = q.view(count, kv_heads, -1, dim).transpose(0, 1)
    places = torch.arange(tile, tile + TILE_QUERIES)[:, None]  # [query, 1]
    reach = places + 1 if window is None else places + 1 - window

    top = torch.full(padded.shape[:3], -torch.inf)  # running maximum, [kv_head, query, group]
    total = torch.zeros(padded.shape[:3])
    acc = torch.zeros_like(padded)
    first = 0 if window is None else max(0, position - window + 1)
    for start in range(first - first % SPAN_TOKENS, position + count, SPAN_TOKENS):
        k, v = rows.span(start, first, position + count)
        keys = torch.arange(start, start + SPAN_TOKENS)
        visible = keys <= places if window is None else (keys <= places) & (keys >= reach)  # [query, key]
        scores = (padded.view(kv_heads, -1, dim) @ k.transpose(1, 2)).view(kv_heads, TILE_QUERIES, -1, SPAN_TOKENS)
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        span_top = scores.amax(-1)
        weights = torch.exp(scores - span_top.clamp_min(torch.finfo(torch.float32).min)[..., None])
        if bool(visible.all()):  # depends on absolute positions alone, so it is the same for a query in any batch
            span_acc = (weights.view(kv_heads, -1, SPAN_TOKENS) @ v).view_as(acc)
        else:  # a later position may hold inf or NaN: 0 times that is not 0, so each query gets its own V
            span_acc = weights @ v[:, None].masked_fill(~visible[None, :, :, None], 0.0)
        new_top = torch.maximum(top, span_top)
        finite_top = new_top.clamp_min(torch.finfo(torch.float32).min)
        old_scale, span_scale = torch.exp(top - finite_top), torch.exp(span_top - finite_top)
        total = total * old_scale + weights.sum(-1) * span_scale
        acc = acc * old_scale[..., None] + span_acc * span_scale[..., None]
        top = new_top
    out = (acc / total[..., None])[:, place].transpose(0, 1).reshape(count, heads, dim)
    lse = (top + total.log())[:, place].transpose(0, 1).reshape(count, heads)
    return out, lse
