"""Slices of rows that lie in host memory, brought into the device's own for the one layer that attends to them.

A prefill reads each row once for every tile of its queries, and each time it would cross PCIe. So a pass with several
queries of a sequence has the slices of a layer copied up, once, while the layer before is computed. A slice is read at
its row's address less the layers before it, so kernels see no difference, and what does not fit is attended to in
place. Knows addresses only. Owned by the runner, engine thread.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch

from kvtier.attention.base import AttentionBatch
from kvtier.batch import PassBatch
from kvtier.device.launcher import Launcher
from kvtier.device.memory import aligned_bytes
from kvtier.tiers.arena import Arena

HALVES = 2
"""One is filled while the other is attended to."""


class NearSlices:
    """Memory for the slices of two layers, which all passes use in turn."""

    def __init__(
        self,
        arena: Arena,
        windows: Sequence[int | None],
        slices_max: int,
        place: torch.device,
        launcher: Launcher,
    ) -> None:
        """Rows outside `arena` are far. `slices_max`: of a layer. `windows` of the layers: one that has a window is
        attended to in place, since the newest rows are near. ConfigError if that memory is not free.
        """
        assert slices_max > 0
        layout = arena.layout
        self.layout = layout
        self.windows = windows
        self.launcher = launcher
        self.lane = launcher.lane
        memory = aligned_bytes(HALVES * slices_max * layout.slice_bytes, place)
        self.halves = memory.view(HALVES, slices_max, layout.slice_bytes)
        first = arena.address(0)
        self._hbm = (first, first + arena.bytes_total)
        self.free = [self.lane.here()] * HALVES
        """Behind the last use of each half, and behind what its next copy reads."""
        self.half = 0
        """Whose turn it is."""
        self.brought_count = 0
        """Slices that were copied."""

    def begin(self, batch: PassBatch) -> NearPass | None:
        """What a pass over `batch` (on the CPU) brings near; None: it attends to all rows where they are."""
        tables, lengths = batch.attention.tables, batch.attention.lengths
        several = batch.attention.query_starts.diff() > 1
        if not bool(several.any()):
            return None
        begin, end = self._hbm
        used = torch.arange(tables.shape[1]) * self.layout.block_tokens < lengths[:, None]
        far = used & several[:, None] & ((tables < begin) | (tables >= end))
        places = far.nonzero()[: self.halves.shape[1]]
        return NearPass(self, places) if len(places) else None


class NearPass:
    """The far rows of one pass that are brought near, a layer at a time."""

    def __init__(self, near: NearSlices, places: torch.Tensor) -> None:
        """`places` int64 [row, 2]: sequence and block of each."""
        self._near = near
        device = near.halves.device
        self._sequences, self._blocks = places.to(device).unbind(1)
        slots = torch.arange(len(places), device=device) * near.layout.slice_bytes
        self._slots = [near.halves[half].data_ptr() + slots for half in range(HALVES)]
        self._rows: torch.Tensor | None = None

    def note_tables(self) -> None:
        """The tables that `run` is given have changed."""
        self._rows = None

    def run(self, layers: range, batch: AttentionBatch, run: Callable[[range, AttentionBatch], object]) -> None:
        """`run` each layer, with tables in which its slices are near; `batch` has those in which they are far."""
        near = self._near
        if self._rows is None:
            self._rows = batch.tables[self._sequences, self._blocks]
            near.free = [near.lane.here()] * HALVES
        for layer in layers:
            only = range(layer, layer + 1)
            if near.windows[layer] is not None:
                run(only, batch)
                continue
            half, offset = near.half, layer * near.layout.slice_bytes
            near.half = (half + 1) % HALVES
            target = near.halves[half, : len(self._rows)]
            gather = functools.partial(near.launcher.gather, self._rows, offset, target)
            near.lane.join(near.lane.run(gather, after=near.free[half]))
            tables = batch.tables.clone()
            tables[self._sequences, self._blocks] = self._slots[half] - offset
            run(only, dataclasses.replace(batch, tables=tables))
            near.free[half] = near.lane.here()
            near.brought_count += len(self._rows)
