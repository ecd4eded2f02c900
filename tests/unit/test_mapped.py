"""Rows moved within mapped memory: through the I/O engine, by the batch, and summed on the way."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from xxhash import xxh3_64_digest

from kvtier.io.base import IoRequest, IoResult, Operation
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls, FaultyMover
from kvtier.io.threads import ThreadsEngine
from kvtier.shelves import open_dram_shelf
from kvtier.tiers.mapped import BATCH_BYTES, MappedMover
from kvtier.tiers.slab import Slab, make_dram_slab
from tests.rows import IO, LAYOUT, NAMESPACE, Bell, Taken, aligned, block_hashes, filled, payload

HEADER_BYTES = 4096
SLOT_BYTES = HEADER_BYTES + LAYOUT.row_bytes
HASHES = block_hashes(6)


class CountingMover(MappedMover):
    """One that tells how many requests it was given together."""

    def __init__(self, slab: Slab, slice_bytes: int) -> None:
        super().__init__(slab, slice_bytes)
        self.counts: list[int] = []

    def move(self, requests: Sequence[IoRequest]) -> list[IoResult]:
        self.counts.append(len(requests))
        return super().move(requests)


class Bench:
    """A slab of six rows with a page of their number in front, and an engine with one worker on it."""

    def __init__(self) -> None:
        self.slab = make_dram_slab(SLOT_BYTES, len(HASHES))
        for slot, block_hash in enumerate(HASHES):
            assert self.slab.mapping is not None
            start = self.slab.offset(slot)
            self.slab.mapping[start : start + SLOT_BYTES] = bytes([slot]) * HEADER_BYTES + payload(block_hash)
        self.bell = Bell()
        self.mover = CountingMover(self.slab, LAYOUT.slice_bytes)
        self.engine = ThreadsEngine(1, 1, 8, self.bell, mover=self.mover)

    def results(self, count: int) -> list[IoResult]:
        found: list[IoResult] = []
        end = time.monotonic() + 60
        while len(found) < count:
            assert time.monotonic() < end, "no result"
            found += self.engine.poll()
            if len(found) < count:
                self.bell.wait(0.05)
        return found


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    assert made.engine.close(60.0) == 0
    made.slab.close()


def sums_of(row: bytes | memoryview) -> bytes:
    slices = range(0, len(row), LAYOUT.slice_bytes)
    return b"".join(xxh3_64_digest(row[start : start + LAYOUT.slice_bytes]) for start in slices)


def request(operation: Operation, slab: Slab, slot: int, *buffers: memoryview, skip: int = 0) -> IoRequest:
    return IoRequest(operation, -1, slab.offset(slot) + skip, buffers, slot, sums=Taken())


def test_rows_and_slices_of_them_are_read_with_their_sums(bench: Bench) -> None:
    page, row, part = aligned(HEADER_BYTES), aligned(LAYOUT.row_bytes), aligned(2 * LAYOUT.slice_bytes)
    whole = request(Operation.READ, bench.slab, 4, page, row)
    slices = request(Operation.READ, bench.slab, 2, part, skip=HEADER_BYTES + LAYOUT.slice_bytes)
    assert bench.engine.submit([whole, slices]) == 2
    first, second = bench.results(2)
    assert (first.tag, first.moved_bytes, first.error_number) == (4, SLOT_BYTES, None)
    assert (second.tag, second.moved_bytes, second.error_number) == (2, part.nbytes, None)
    assert 0 < first.duration_ns <= time.monotonic_ns() and first.ended_ns <= time.monotonic_ns()
    assert (page, row, part) == (b"\4" * HEADER_BYTES, payload(HASHES[4]), payload(HASHES[2])[LAYOUT.slice_bytes :])
    assert whole.sums is not None and whole.sums.taken == sums_of(row)
    assert slices.sums is not None and slices.sums.taken == sums_of(part)


def test_a_row_is_written_before_the_page_that_tells_its_sums(bench: Bench) -> None:
    page, row = aligned(HEADER_BYTES), filled(HASHES[0])
    asked = request(Operation.WRITE, bench.slab, 3, page, row)
    assert asked.sums is not None

    def pack() -> None:
        assert bench.slab.view(3) == row
        page[: len(asked.sums.taken)] = asked.sums.taken

    bench.engine.submit([asked._replace(prepare=pack)])
    (result,) = bench.results(1)
    assert result.moved_bytes == SLOT_BYTES and asked.sums.taken == sums_of(row)
    assert bench.slab.mapping is not None
    start = bench.slab.offset(3)
    assert bench.slab.mapping[start : start + len(asked.sums.taken)] == sums_of(row)
    assert [bench.slab.view(slot) == payload(HASHES[slot]) for slot in (2, 3, 4)] == [True, False, True]


def test_what_waits_is_taken_together_and_what_one_raises_comes_out_of_poll(bench: Bench) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(60)

    rows = [aligned(LAYOUT.row_bytes) for _ in HASHES]
    asked = [request(Operation.READ, bench.slab, slot, row, skip=HEADER_BYTES) for slot, row in enumerate(rows)]
    bench.engine.submit([asked[0]._replace(then=wait)])
    assert begun.wait(60)
    bench.engine.submit(asked[1:])
    go_on.set()
    assert [result.tag for result in bench.results(6)] == [0, 1, 2, 3, 4, 5]
    assert bench.mover.counts == [1, 5]
    assert rows == [payload(block_hash) for block_hash in HASHES]

    def fail() -> None:
        raise ZeroDivisionError

    bench.engine.submit([asked[0]._replace(then=fail)])
    with pytest.raises(ZeroDivisionError):
        bench.results(1)
    assert bench.engine.in_flight == 0


def test_a_batch_is_bounded_by_its_bytes() -> None:
    for slot_bytes, count in ((SLOT_BYTES, BATCH_BYTES // SLOT_BYTES), (BATCH_BYTES, 1), (2 * BATCH_BYTES, 1)):
        slab = make_dram_slab(slot_bytes, 1)
        assert MappedMover(slab, LAYOUT.slice_bytes).batch_max == count
        slab.close()


def test_a_dram_shelf_copies_within_memory_and_only_what_a_fault_strikes_is_made_of_calls(bench: Bench) -> None:
    disk = FaultyCalls()
    calls = FaultyCalls([Fault(Call.READ, nth, Effect.ERROR, errno.EIO) for nth in (3, 5)], inner=disk)
    for given, kind in ((None, MappedMover), (calls, FaultyMover)):
        shelf = open_dram_shelf(LAYOUT, NAMESPACE, SLOT_BYTES, IO, lambda: None, calls=given)
        engine = shelf._transfers._engine
        assert isinstance(engine, ThreadsEngine) and type(engine._reads._mover) is kind
        shelf.close(60.0)
    mover = FaultyMover(calls, bench.mover)
    rows = [aligned(LAYOUT.row_bytes) for _ in HASHES]
    asked = [request(Operation.READ, bench.slab, slot, row, skip=HEADER_BYTES) for slot, row in enumerate(rows)]
    asked = [one._replace(descriptor=bench.slab.descriptor) for one in asked]
    results = mover.move(asked)
    assert [result.tag for result in results] == [one.tag for one in asked]
    assert [result.error_number for result in results] == [None, None, errno.EIO, None, errno.EIO, None]
    right = [payload(block_hash) for block_hash in HASHES]
    assert [row == right[place] for place, row in enumerate(rows)] == [True, True, False, True, False, True]
    assert bench.mover.counts == [4] and (calls.count(Call.READ), disk.count(Call.READ)) == (6, 0)
    calls.inject([Fault(Call.READ, 7, Effect.SHORT, 4096)])
    assert mover.move(asked[2:3])[0].moved_bytes == LAYOUT.row_bytes and rows[2] == right[2]
    assert disk.count(Call.READ) == 2, "in two pieces"


def test_without_sums_any_buffers_move_as_they_are(bench: Bench) -> None:
    page, odd = aligned(HEADER_BYTES), aligned(HEADER_BYTES)[:100]
    seen: list[bytes] = []
    asked = IoRequest(Operation.READ, -1, bench.slab.offset(5), (page, odd), 1, then=lambda: seen.append(bytes(odd)))
    bench.engine.submit([asked])
    (result,) = bench.results(1)
    assert (result.moved_bytes, page, seen) == (HEADER_BYTES + 100, b"\5" * HEADER_BYTES, [payload(HASHES[5])[:100]])
