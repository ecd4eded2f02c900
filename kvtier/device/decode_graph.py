"""Decode passes with as little work for the host as can be: inputs in fixed buffers, launches in a graph.

`DecodePasses` has a graph for each shape of a pass, padded to powers of two; a shape is recorded when it first comes.
Each graph has two sets of buffers, so that the host fills one while the device works from the other. Knows neither
sequences nor tiers: rows are addresses in a table. Owned by the runner, engine thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtier.attention.base import AttentionBatch
from kvtier.batch import PassBatch
from kvtier.device.copies import Fence, Pair, copy_all
from kvtier.device.launcher import Launcher, Work
from kvtier.device.memory import aligned_bytes
from kvtier.models.decoder import Decoder

BLOCKS_MIN = 16
"""Narrower tables are filled up to so many blocks: shapes that cost the same need no graphs of their own."""

Pass = Callable[[PassBatch], tuple[torch.Tensor, torch.Tensor]]
"""The work of a pass on the current stream: bool [token], whether it is usable, and logits fp32 [token, vocab].

It waits for nothing, and reads and writes fixed memory only: the batch's, the rows in its tables, the model's.
"""


@dataclass(eq=False, slots=True)
class Side:
    """One set of buffers, and the pass that works from them."""

    host: PassBatch
    """Pinned where there is a GPU."""
    device: PassBatch
    done: Fence
    """Behind the last pass that worked from these buffers."""
    replay: Work | None = None
    result: tuple[torch.Tensor, torch.Tensor] | None = None
    """Of the last pass once it is done, padded; memory of the recording, so until the next pass of this side."""


class DecodeGraph:
    """Runs `work` over batches of up to `sequences` sequences with one new token each and up to `blocks` blocks."""

    def __init__(
        self, work: Pass, sequences: int, blocks: int, spare_row: int, place: torch.device, launcher: Launcher
    ) -> None:
        """`spare_row`: address of a row that nobody reads; sequences that are not there write to it."""
        self._work = work
        self._spare_row = spare_row
        self._launcher = launcher
        self._lane = launcher.lane
        host, pinned = torch.device("cpu"), place.type == "cuda"
        with torch.inference_mode(False):  # they are filled outside it, too
            buffers = [
                (_buffers(sequences, blocks, host, pinned), _buffers(sequences, blocks, place, False)) for _ in range(2)
            ]
        self._sides = [Side(near, far, self._lane.here()) for near, far in buffers]

    def start(self, batch: PassBatch) -> Side:
        """Start a pass over `batch` (on the CPU, one token a sequence, all sampled from); does not wait for its end.

        Waits for the last but one, whose buffers it takes.
        """
        side = self._sides[0]
        self._sides.reverse()
        side.done.synchronize()
        self._fill(side.host, batch)
        self._lane.join(self._lane.run(functools.partial(copy_all, _pairs(side)), after=None))
        if side.replay is None:
            side.replay = self._launcher.record(functools.partial(self._run, side))
        side.replay()
        side.done = self._lane.here()
        return side

    def _run(self, side: Side) -> None:
        side.result = self._work(side.device)

    def _fill(self, host: PassBatch, batch: PassBatch) -> None:
        """Sequences that are not there are one token long, in the spare row."""
        into, given = host.attention, batch.attention
        count, width = given.tables.shape
        room, blocks = into.tables.shape
        assert count == len(given.append_rows) <= room, "a decode pass has one token a sequence and fits the graph"
        assert width <= blocks, "a table is wider than the graph was made for"
        into.tables.zero_()  # no address of an earlier pass is left
        into.tables[:count, :width] = given.tables
        into.tables[count:, :1] = self._spare_row
        for target, source, absent in (
            (host.token_ids, batch.token_ids, 0),
            (host.positions, batch.positions, 0),
            (into.lengths, given.lengths, 1),
            (into.append_rows, given.append_rows, self._spare_row),
            (into.append_offsets, given.append_offsets, 0),
        ):
            target[:count], target[count:] = source, absent


class DecodePasses:
    """Passes in which each sequence has one token, each through the graph of its shape.

    There are as many graphs as powers of two below the most sequences and blocks that a pass may have.
    """

    def __init__(self, decoder: Decoder, place: torch.device, launcher: Launcher) -> None:
        self._decoder = decoder
        self._place = place
        self._launcher = launcher
        self._spare_row = aligned_bytes(decoder.layout.row_bytes, place)
        self._graphs: dict[tuple[int, int], DecodeGraph] = {}
        self.pass_count = 0

    @property
    def graph_count(self) -> int:
        """Shapes that have come."""
        return len(self._graphs)

    def logits(self, batch: PassBatch) -> torch.Tensor:
        """What `Decoder.forward` would return or raise; valid until the next pass but one. Waits for its end."""
        count, width = batch.attention.tables.shape
        shape = (_power_of_two(count), max(BLOCKS_MIN, _power_of_two(width)))
        if shape not in self._graphs:
            self._graphs[shape] = DecodeGraph(
                self._work, *shape, self._spare_row.data_ptr(), self._place, self._launcher
            )
        side = self._graphs[shape].start(batch)
        side.done.synchronize()
        self.pass_count += 1
        assert side.result is not None
        finite, logits = side.result
        self._decoder.check(finite[:count])
        return logits[:count]

    def _work(self, batch: PassBatch) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self._decoder.begin(batch.token_ids, batch.positions)
        self._decoder.run_layers(hidden, range(self._decoder.layout.layers), batch.attention)
        return self._decoder.finish(hidden, batch.logits_rows)


def _power_of_two(count: int) -> int:
    """The next one."""
    return 1 << (count - 1).bit_length()


def _buffers(sequences: int, blocks: int, place: torch.device, pinned: bool) -> PassBatch:
    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=place, pin_memory=pinned)

    each = (sequences,)
    return PassBatch(
        token_ids=zeros(each, torch.int64),
        positions=zeros(each, torch.int64),
        logits_rows=torch.arange(sequences, device=place),
        attention=AttentionBatch(
            tables=zeros((sequences, blocks), torch.int64),
            query_starts=torch.arange(sequences + 1, dtype=torch.int32, device=place),
            lengths=zeros(each, torch.int32),
            append_rows=zeros(each, torch.int64),
            append_offsets=zeros(each, torch.int32),
        ),
    )


def _pairs(side: Side) -> list[Pair]:
    """What changes from pass to pass, on its way from the host to the device."""
    there, here = side.device, side.host
    names = ("tables", "lengths", "append_rows", "append_offsets")
    rows = [(getattr(there.attention, name), getattr(here.attention, name)) for name in names]
    return [(there.token_ids, here.token_ids), (there.positions, here.positions), *rows]
