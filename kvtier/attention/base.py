"""The attention contract: addresses in, `(output, logsumexp)` out.

Backends know neither tiers nor sequences: a row is an address. Owned by the runner, which calls them from the engine
thread; `AttentionBatch` is immutable for a pass and no row under it moves or is freed meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kvtier.block import KVLayout

SPAN_TOKENS = 64
"""Attention folds spans [0, 64), [64, 128), ... of absolute positions, left to right, whatever the chunk or batch."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Address tables of one pass over S sequences and T new tokens: contiguous tensors on the device of the backend.

    That is the CPU, or for `triton_kernel` the GPU; then addresses are the device's, of its own or mapped host memory.

    Sequence s owns tokens `query_starts[s] .. query_starts[s+1]`, at the last positions of its `lengths[s]` tokens:
    token i of it stands at position `lengths[s] - (query_starts[s+1] - query_starts[s]) + i`.
    """

    tables: torch.Tensor
    """int64 [sequence, block]: base address of each row, valid for the first ceil(lengths / block_tokens) entries."""
    query_starts: torch.Tensor
    """int32 [sequence + 1]."""
    lengths: torch.Tensor
    """int32 [sequence]: tokens in the KV cache once this pass's own have been appended."""
    append_rows: torch.Tensor
    """int64 [token]: base address of the row that token's K and V are written to."""
    append_offsets: torch.Tensor
    """int32 [token]: the token's place within its row."""

    def to(self, place: torch.device) -> AttentionBatch:
        """The same tensors at `place`."""
        return AttentionBatch(*(getattr(self, name).to(place) for name in AttentionBatch.__slots__))


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all positions from attention over parts of them: outs [part, token, head, dim] in any dtype, lses
    fp32 [part, token, head] -> out [token, head, dim] in that dtype, lse fp32 [token, head].

    A part of which a query sees nothing has an lse of -inf there, and its out may be anything. Exact but for rounding:
    each part weighs exp(its lse - lse). Not bit-equal to a pass over all positions, which folds spans left to right.
    """
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse)[..., None]
    return torch.where(weights > 0, outs.float() * weights, 0.0).sum(0).to(outs.dtype), lse


class AttentionBackend(Protocol):
    """One implementation of paged attention over rows of a `KVLayout`. Every method runs on the engine thread.

    MUST: a query's output depends only on its own q, its position and the K,V of its visible positions, bit for bit in
    fp32, whatever else is in the batch, however the prompt was cut into chunks, however many threads run.
    MUST NOT read K or V at positions that are not visible (they may hold anything, NaN included).
    """

    name: str

    def append(self, k: torch.Tensor, v: torch.Tensor, batch: AttentionBatch, layout: KVLayout, layer: int) -> None:
        """Write k, v `[token, kv_head, dim]` (layout's dtype, rows may be strided, dim contiguous) into the rows."""

    def attend(
        self,
        q: torch.Tensor,
        batch: AttentionBatch,
        layout: KVLayout,
        layer: int,
        scale: float,
        window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Causal attention of q `[token, head, dim]` over the rows, GQA by head // (heads / kv_heads).

        `window`: a query at position p sees p - window + 1 .. p. Returns out `[token, head, dim]` in q's dtype and
        lse `[token, head]` fp32 (natural logarithm, of the scaled scores).
        """
