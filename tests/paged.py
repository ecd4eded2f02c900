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
        self._arenas = [_arena(blocks * decoder.layout.row_bytes)]
        base = self.rows.data_ptr()
        self._free = [base + block * decoder.layout.row_bytes for block in range(blocks)]
        random.Random(seed).shuffle(self._free)
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    @property
    def rows(self) -> torch.Tensor:
        """All rows as they lie, uint8 [byte]."""
        return self._arenas[-1]

    def move(self) -> int:
        """Move all rows elsewhere, and leave NaN where they were; returns by how much their addresses have grown."""
        before = self.rows
        self._arenas.append(_arena(len(before)).copy_(before))
        before.fill_(0xFF)
        distance = self.rows.data_ptr() - before.data_ptr()
        self._free = [address + distance for address in self._free]
        self._tables = {name: [address + distance for address in table] for name, table in self._tables.items()}
        return distance

    def run(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """One pass over (sequence, its next tokens), in this order; returns logits [token, vocab] of each chunk."""
        counts = [len(tokens) for _, tokens in chunks]
        return list(torch.split(self.forward(chunks, torch.arange(sum(counts))), counts))

    def forward(self, chunks: Sequence[tuple[int, Sequence[int]]], logits_rows: torch.Tensor) -> torch.Tensor:
        """The same, for the logits [row, vocab] of `logits_rows` (indices into the pass's tokens) only."""
        token_ids, positions, batch = self.prepare(chunks)
        with torch.inference_mode():
            return self._decoder.forward(token_ids, positions, batch, logits_rows)

    def prepare(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
        """Token ids, positions and tables of the pass that `run` makes, which its caller must now make."""
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
        return token_ids, torch.tensor(positions), batch


def _arena(size: int) -> torch.Tensor:
    """Aligned memory that nobody has written."""
    memory = torch.full((size + ALIGNMENT,), 0xFF, dtype=torch.uint8)
    return memory[-memory.data_ptr() % ALIGNMENT :][:size]
