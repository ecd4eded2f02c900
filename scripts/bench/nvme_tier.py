"""The NVMe tier alone, without directory and scheduler: a slab, an I/O engine and the transfers that verify rows.

Owns a slab in a folder, buffers in huge pages as HBM has them, and passes over all rows in random order. Knows neither
fio nor how numbers are shown. Used by bench_io.py.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier.config import IoConfig
from kvtier.io.base import IoEngine, IoRequest, IoResult, KernelCalls, Operation
from kvtier.record import Record
from kvtier.shelves import nvme_engine
from kvtier.ticket import ShelfLimits, ShelfOperation
from kvtier.tiers.checksum import slice_sums
from kvtier.tiers.header import RowFormat, Verdict
from kvtier.tiers.memory import advise_huge, populate
from kvtier.tiers.slab import make_dram_slab, open_nvme_slab
from kvtier.transfers import RowTransfers, Transfer

SLICES = 32
BUFFERS_BYTES = 256 << 20
"""Rows that lie ready to be written or read into; more than the caches hold."""
DISTINCT = 16
"""Contents of rows."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the rows of a tier."""

    moved_bytes: int
    """Of rows, their headers left out."""
    wall_s: float
    cpu_s: float
    """Of the process, the kernel's work for it included."""

    @property
    def bytes_s(self) -> float:
        """Rate by the clock."""
        return self.moved_bytes / self.wall_s

    @property
    def cpu_ms_gb(self) -> float:
        """CPU milliseconds for 10^9 bytes."""
        return self.cpu_s * 1e12 / self.moved_bytes


class PlainEngine:
    """An `IoEngine` that reads the same bytes and leaves out what verifies them."""

    def __init__(self, inner: IoEngine) -> None:
        self._inner = inner

    def submit(self, requests: Sequence[IoRequest]) -> int:
        """See `IoEngine`."""
        return self._inner.submit([IoRequest(*request[:5]) for request in requests])

    def register_memory(self, memory: memoryview) -> None:
        """See `IoEngine`."""
        self._inner.register_memory(memory)

    def room(self, operation: Operation) -> int:
        """See `IoEngine`."""
        return self._inner.room(operation)

    def poll(self) -> list[IoResult]:
        """See `IoEngine`."""
        return self._inner.poll()

    def cancel(self, operation: Operation) -> None:
        """See `IoEngine`."""
        self._inner.cancel(operation)

    @property
    def in_flight(self) -> int:
        """See `IoEngine`."""
        return self._inner.in_flight

    def close(self, deadline_s: float) -> int:
        """See `IoEngine`."""
        return self._inner.close(deadline_s)


class NvmeTier:
    """A slab of rows of one size in a folder of its own, each row written once when it is made."""

    def __init__(self, folder: Path, row_bytes: int, total_bytes: int) -> None:
        """OSError or ShelfError where the folder's disk has no room for it."""
        self.row_bytes = row_bytes
        self.row_count = max(1, total_bytes // row_bytes)
        self._form = RowFormat(bytes(32), row_bytes, row_bytes // SLICES)
        self._folder = folder / f"rows-{row_bytes}"
        self._folder.mkdir()
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._slab, _ = open_nvme_slab(descriptor, self._form.slot_bytes, self.row_count, KernelCalls())
        finally:
            os.close(descriptor)
        self.direct = self._slab.direct
        self._buffers = _buffers(row_bytes, DISTINCT + max(1, min(self.row_count, BUFFERS_BYTES // row_bytes)))
        chance = random.Random(row_bytes)
        for buffer in self._buffers[:DISTINCT]:
            buffer[:] = chance.randbytes(row_bytes)
        self._dram = make_dram_slab(self._form.slot_bytes, DISTINCT)
        for slot, buffer in enumerate(self._buffers[:DISTINCT]):
            self._dram.view(slot)[:] = buffer
        self._sums = [slice_sums(buffer, row_bytes // SLICES) for buffer in self._buffers[:DISTINCT]]
        self.store(IoConfig(depth=16), 0)

    def close(self) -> None:
        """Close the slab and take its bytes from the disk."""
        self._slab.close()
        self._dram.close()
        shutil.rmtree(self._folder)

    def load(self, io: IoConfig, seed: int, verified: bool = True) -> Pass:
        """Read every row once; RuntimeError if one is not what it should be."""
        targets = self._buffers[DISTINCT:]
        rows = [(self._record(slot), None) for slot in self._order(seed)]
        return self._move(io, ShelfOperation.READ, rows, targets, verified)

    def store(self, io: IoConfig, seed: int, summed: bool = True) -> Pass:
        """Write every row once; not `summed`: with sums that are known, as those of a DRAM row are."""
        rows = []
        for slot in self._order(seed):
            record = self._record(slot)
            rows.append((record if not summed else record._replace(sums=b""), self._buffers[slot % DISTINCT]))
        return self._move(io, ShelfOperation.WRITE, rows, [])

    def store_from_dram(self, io: IoConfig, seed: int, registered: bool) -> Pass:
        """Write every row once, with known sums, out of a DRAM shelf's memory, `registered` as it is in an engine."""
        rows = [(self._record(slot), self._dram.view(slot % DISTINCT)) for slot in self._order(seed)]
        return self._move(io, ShelfOperation.WRITE, rows, [], memory=self._dram.memory if registered else None)

    def read_memory(self, seed: int) -> Pass:
        """Read the memory that rows are read into once, row by row in random order: the least that any check costs."""
        rows = [np.frombuffer(buffer, np.uint64) for buffer in self._buffers[DISTINCT:]]
        random.Random(seed).shuffle(rows)
        started, cpu_started = time.perf_counter(), time.process_time()
        for row in rows:
            np.add.reduce(row)
        cpu_s, wall_s = time.process_time() - cpu_started, time.perf_counter() - started
        return Pass(len(rows) * self.row_bytes, wall_s, cpu_s)

    def _record(self, slot: int) -> Record:
        return Record(slot.to_bytes(32, "big"), slot, slot + 1, 0, self._sums[slot % DISTINCT])

    def _order(self, seed: int) -> list[int]:
        slots = list(range(self.row_count))
        random.Random(seed).shuffle(slots)
        return slots

    def _move(
        self,
        io: IoConfig,
        operation: ShelfOperation,
        rows: Sequence[tuple[Record, memoryview | None]],
        targets: list[memoryview],
        verified: bool = True,
        memory: memoryview | None = None,
    ) -> Pass:
        """One pass. A row without a buffer of its own takes one of `targets` while it is under way.

        `memory` is registered before.
        """
        rung = threading.Event()
        in_flight_max = min(io.in_flight_max, len(targets) or len(self._buffers))
        limits = ShelfLimits(in_flight_max)
        engine = nvme_engine(self._slab, self._form, io, limits, rung.set, None)
        moves = RowTransfers(self._form, self._slab, engine if verified else PlainEngine(engine), in_flight_max)
        if memory is not None:
            moves.register_memory(memory)
        started, cpu_started = time.perf_counter(), time.process_time()
        try:
            self._run(operation, rows, list(targets), moves, in_flight_max, rung)
            cpu_s, wall_s = time.process_time() - cpu_started, time.perf_counter() - started
        finally:
            moves.close(10.0)
        return Pass(len(rows) * self.row_bytes, wall_s, cpu_s)

    def _run(
        self,
        operation: ShelfOperation,
        rows: Sequence[tuple[Record, memoryview | None]],
        free: list[memoryview],
        moves: RowTransfers,
        in_flight_max: int,
        rung: threading.Event,
    ) -> None:
        lends, slot_bytes, good = bool(free), self._form.slot_bytes, (None, Verdict.GOOD)
        following = ended_count = 0
        while ended_count < len(rows):
            count = min(moves.room(operation), len(rows) - following, len(free) if lends else in_flight_max)
            batch = rows[following : following + count]
            following += count
            if batch:
                starting = [Transfer(moves.ticket(), record, buffer or free.pop()) for record, buffer in batch]
                moves.start(operation, starting)
            rung.wait()
            rung.clear()
            ended = moves.poll()
            ended_count += len(ended)
            for flight, result in ended:
                _, moved_bytes, _, value, *_ = result
                if moved_bytes != slot_bytes or value not in good:
                    raise RuntimeError(f"slot {flight.record.slot}: {result}")
                if lends:
                    free.append(flight.row)


@contextmanager
def busy_thread() -> Iterator[None]:
    """Meanwhile a thread of this process runs Python and nothing else."""
    stop = threading.Event()

    def work() -> None:
        count = 0
        while not stop.is_set():
            for _ in range(1000):
                count += 1

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _buffers(row_bytes: int, count: int) -> list[memoryview]:
    mapping = mmap.mmap(-1, row_bytes * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge(mapping)
    populate(mapping)
    view = memoryview(mapping)
    return [view[start : start + row_bytes] for start in range(0, row_bytes * count, row_bytes)]
