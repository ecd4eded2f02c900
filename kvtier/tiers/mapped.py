"""Rows between a mapped slab and the caller's memory: copied by the CPU in one pass that sums their slices, too.

No system call and no page cache: a read from a memfd costs about three times as much. Takes rows by the batch, since
coming back to Python may take longer than to copy one. Knows neither headers nor records. Called on I/O workers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvtier.io.base import IoRequest, IoResult, Operation
from kvtier.tiers.checksum import copy_rows
from kvtier.tiers.slab import Slab

BATCH_BYTES = 4 << 20
"""Of rows that a worker copies before it comes back: about half a millisecond."""


class MappedMover:
    """`Mover` of rows of one slab, whose mapping stands for its descriptor. What sums are wanted of is whole slices."""

    def __init__(self, slab: Slab, slice_bytes: int) -> None:
        assert slab.mapping is not None
        self.batch_max = max(1, BATCH_BYTES // slab.slot_bytes)
        self._slab = slab
        self._slice_bytes = slice_bytes

    def move(self, requests: Sequence[IoRequest]) -> list[IoResult]:
        """See `Mover`: the last buffers of all first, so that their sums are there for what goes before them."""
        started_ns = time.monotonic_ns()
        assert self._slab.mapping is not None
        mapping = memoryview(self._slab.mapping)
        summed = [request for request in requests if request.sums is not None]
        sources: list[memoryview] = []
        targets: list[memoryview] = []
        for operation, _, offset, buffers, *_ in summed:
            row = buffers[-1]
            start = offset + sum([buffer.nbytes for buffer in buffers[:-1]])
            there = mapping[start : start + row.nbytes]
            sources.append(there if operation is Operation.READ else row)
            targets.append(row if operation is Operation.READ else there)
        for request, taken in zip(summed, copy_rows(sources, targets, self._slice_bytes), strict=True):
            assert request.sums is not None
            request.sums.taken = taken
        values = [_finish(request, mapping) for request in requests]
        ended_ns = time.monotonic_ns()
        each_ns = (ended_ns - started_ns) // len(requests)
        return [
            IoResult(request.tag, request.total_bytes, None, value, each_ns, ended_ns)
            for request, value in zip(requests, values, strict=True)
        ]


def _finish(request: IoRequest, mapping: memoryview) -> object:
    """Move the buffers that have not been, and run what rides along."""
    operation, _, place, buffers, _, prepare, then, sums = request
    if prepare is not None:
        prepare()
    for buffer in buffers if sums is None else buffers[:-1]:
        there = mapping[place : place + buffer.nbytes]
        place += buffer.nbytes
        if operation is Operation.READ:
            buffer[:] = there
        else:
            there[:] = buffer
    return then() if then is not None else None
