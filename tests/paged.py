"""Drives a decoder over paged rows without an engine: sequences whose blocks lie scattered in one arena.

Unwritten memory is all ones bits, which is NaN in every dtype, so a read of a position that nobody wrote shows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from kvtier.attention import AttentionBatch
from kvtier.block import ALIGNMENT
from kvtier.models.decoder import Decoder


class PagedSequences:
    """Sequences named by any number, each growing by the chunks it is given."""

    def __init__(self, decoder: Decoder, blocks: int, seed: int = 0) -> None:
        self._decoder = decoder
        row_bytes = decoder.layout.row_bytes
        self._arena = torch.full((blocks * row_bytes + ALIGNMENT,), 0xFF, dtype=torch.uint8)
        base = -(-self._arena.data_ptr() // ALIGNMENT) * ALIGNMENT
        self._free = [base + block * row_bytes for block in range(blocks)]
        random.Random(seed).shuffle(self._free)
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def run(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """One pass over (sequence, its next tokens), in this order; returns logits [token, vocab] of each chunk."""
        counts = [len(tokens) for _, tokens in chunks]
        return list(torch.split(self.forward(chunks, torch.arange(sum(counts))), counts))

    def forward(self, chunks: Sequence[tuple[int, Sequence[int]]], logits_rows: torch.Tensor) -> torch.Tensor:
        """The same, for the logits [row, vocab] of `logits_rows` (indices into the pass's tokens) only."""
        size = self._decoder.layout.block_tokens
        positions: list[int] = []
        rows: list[int] = []
        for name, tokens in chunks:
            table, start = self._tables.setdefault(name, []), self._lengths.get(name, 0)
            end = start + len(tokens)
            while len(table) * size < end:
                table.append(self._free.pop())
            self._lengths[name] = end
            positions += range(start, end)
            rows += [table[position // size] for position in range(start, end)]
        counts = [len(tokens) for _, tokens in chunks]
        tables = [self._tables[name] for name, _ in chunks]
        width = max(map(len, tables))
        batch = AttentionBatch(
            tables=torch.tensor([table + [0] * (width - len(table)) for table in tables]),
            query_starts=torch.tensor([sum(counts[:index]) for index in range(len(counts) + 1)], dtype=torch.int32),
            lengths=torch.tensor([self._lengths[name] for name, _ in chunks], dtype=torch.int32),
            append_rows=torch.tensor(rows),
            append_offsets=torch.tensor([position % size for position in positions], dtype=torch.int32),
        )
        token_ids = torch.tensor([token for _, tokens in chunks for token in tokens])
        with torch.inference_mode():
            return self._decoder.forward(token_ids, torch.tensor(positions), batch, logits_rows)
