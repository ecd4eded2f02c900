"""Decode passes of one shape with as little work for the host as can be: tables in fixed buffers, launches in a graph.

There are two sets of buffers, so that the host fills one while the device works from the other. On a CUDA device the
pass is recorded once for each set and then replayed; on the CPU it is called. Knows neither sequences nor tiers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtier.attention.base import AttentionBatch
from kvtier.device.copies import Fence, make_lane

Pass = Callable[[AttentionBatch], None]
"""The work of a pass on the current stream: reads and writes fixed memory, and waits for nothing."""


@dataclass(eq=False, slots=True)
class _Side:
    """One set of buffers: the host's copy (pinned where there is a device) and the device's."""

    host: AttentionBatch
    device: AttentionBatch
    graph: torch.cuda.CUDAGraph | None = None
    done: Fence | None = None
    """Behind the last pass that worked from these buffers."""


class DecodeGraph:
    """Runs `work` over batches of up to `sequences` sequences with one new token each and up to `blocks` blocks."""

    def __init__(self, work: Pass, sequences: int, blocks: int, spare_row: int, device: torch.device) -> None:
        """`spare_row`: address of a row that nobody reads; sequences that are not there write to it."""
        self._work = work
        self._spare_row = spare_row
        self._device = device
        self._lane = make_lane(device)
        pinned = device.type == "cuda"
        self._sides = [
            _Side(_buffers(sequences, blocks, torch.device("cpu"), pinned), _buffers(sequences, blocks, device, False))
            for _ in range(2)
        ]

    def run(self, batch: AttentionBatch) -> None:
        """Start a pass over `batch` (on the CPU, one token a sequence); does not wait for its end."""
        side = self._sides[0]
        self._sides.reverse()
        if side.done is not None:
            side.done.synchronize()
        self._fill(side.host, batch)
        copied = self._lane.copy(list(zip(_tensors(side.device), _tensors(side.host), strict=True)), after=side.done)
        self._lane.join(copied)
        if self._device.type != "cuda":
            self._work(side.device)
            return
        if side.graph is None:
            side.graph = self._record(side.device)
        side.graph.replay()
        side.done = self._lane.here()

    def _fill(self, host: AttentionBatch, batch: AttentionBatch) -> None:
        """Sequences that are not there are one token long, in the spare row."""
        count, width = batch.tables.shape
        room, blocks = host.tables.shape
        assert count == len(batch.append_rows) <= room, "a decode pass has one token a sequence and fits the graph"
        assert width <= blocks, "a table is wider than the graph was made for"
        host.tables[:count, :width] = batch.tables
        host.tables[count:, :1] = self._spare_row
        host.lengths[:count], host.lengths[count:] = batch.lengths, 1
        host.append_rows[:count], host.append_rows[count:] = batch.append_rows, self._spare_row
        host.append_offsets[:count], host.append_offsets[count:] = batch.append_offsets, 0

    def _record(self, batch: AttentionBatch) -> torch.cuda.CUDAGraph:
        self._work(batch)  # once outside, so that kernels are compiled and loaded
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._work(batch)
        return graph


def _buffers(sequences: int, blocks: int, device: torch.device, pinned: bool) -> AttentionBatch:
    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

    return AttentionBatch(
        tables=zeros((sequences, blocks), torch.int64),
        query_starts=torch.arange(sequences + 1, dtype=torch.int32, device=device),
        lengths=zeros((sequences,), torch.int32),
        append_rows=zeros((sequences,), torch.int64),
        append_offsets=zeros((sequences,), torch.int32),
    )


def _tensors(batch: AttentionBatch) -> list[torch.Tensor]:
    """What changes from pass to pass."""
    return [batch.tables, batch.lengths, batch.append_rows, batch.append_offsets]
