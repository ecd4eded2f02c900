"""Reads of a shelf: loads and reads for streamed contexts share a disk evenly, whichever were there first."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from kvtier.block import KVLayout, Tier
from kvtier.io.base import IoResult
from kvtier.reads import ShelfReads
from kvtier.record import Record
from kvtier.ticket import ReadItem, ShelfLimits, ShelfOperation
from kvtier.tiers.header import RowFormat, Verdict
from kvtier.transfers import Flight, Transfer
from kvtier.watch import TransferWatch

LAYOUT = KVLayout(layers=8, kv_heads=1, head_dim=2, block_tokens=8, dtype="float32")
RECORD = Record(bytes(32), 0, 1, 0, b"")
IN_FLIGHT_MAX = 16


class Disk:
    """`RowTransfers` of a disk that moves what it was given, in that order, at so many bytes a turn."""

    def __init__(self) -> None:
        self.flying: deque[Flight] = deque()
        self.moved_bytes = {"load": 0, "streamed": 0}
        self.most = {"load": 0, "streamed": 0}
        self._tickets = 0

    def room(self, _: ShelfOperation) -> int:
        return IN_FLIGHT_MAX - len(self.flying)

    def ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def flights(self) -> list[Flight]:
        return []

    def start(self, operation: ShelfOperation, transfers: list[Transfer]) -> None:
        form = RowFormat.of(LAYOUT, bytes(32))
        for ticket, record, row, layers, in_place in transfers:
            assert isinstance(row, memoryview)
            self.flying.append(Flight(ticket, operation, record, memoryview(b""), row, layers, in_place, form, None))
        kinds = [kind_of(flight) for flight in self.flying]
        self.most = {kind: max(most, kinds.count(kind)) for kind, most in self.most.items()}

    def turn(self, left: int) -> list[tuple[Flight, IoResult]]:
        ended = []
        while self.flying and left > 0:
            flight = self.flying.popleft()
            left -= flight.row.nbytes
            self.moved_bytes[kind_of(flight)] += flight.row.nbytes
            ended.append((flight, IoResult(flight.ticket, flight.row.nbytes, None, Verdict.GOOD, 1)))
        return ended


def kind_of(flight: Flight) -> str:
    return "load" if flight.layers is None and not flight.in_place else "streamed"


def make(waiting_max: int = 1000) -> tuple[Disk, ShelfReads]:
    disk: Any = Disk()
    limits = ShelfLimits(IN_FLIGHT_MAX, waiting_max)
    return disk, ShelfReads(None, disk, TransferWatch(Tier.NVME, disk, limits), limits)  # type: ignore[arg-type]


def loads(count: int) -> list[ReadItem]:
    return [ReadItem(RECORD, memoryview(bytearray(LAYOUT.row_bytes)))] * count


def staged(count: int) -> list[ReadItem]:
    return [ReadItem(RECORD, memoryview(bytearray(LAYOUT.slice_bytes)), range(1))] * count


@pytest.mark.parametrize("first", ["load", "streamed"])
def test_whoever_comes_second_has_half_of_the_disk_at_once(first: str) -> None:
    disk, reads = make()
    waiting = {"load": loads(400), "streamed": staged(400)}
    reads.add(waiting.pop(first), 0.0)
    [(second, items)] = waiting.items()
    reads.add(items, 0.0)
    before = sum(flight.row.nbytes for flight in disk.flying if kind_of(flight) == first)
    while disk.moved_bytes[second] == 0:
        reads.end(disk.turn(1), 0.0)
        reads.start()
    assert disk.moved_bytes[first] <= before
    disk.moved_bytes = {"load": 0, "streamed": 0}
    for _ in range(200):
        reads.end(disk.turn(LAYOUT.slice_bytes), 0.0)
        reads.start()
    share = disk.moved_bytes["streamed"] / sum(disk.moved_bytes.values())
    assert 0.35 < share < 0.65, disk.moved_bytes


def test_reads_that_hang_hold_up_their_own_kind_alone() -> None:
    disk, reads = make()
    reads.add(staged(100), 0.0)
    hung = list(disk.flying)
    reads.add(loads(20), 0.0)
    for _ in range(20):
        disk.flying = deque(flight for flight in disk.flying if flight not in hung)
        assert len(disk.flying) == 1
        reads.end(disk.turn(1), 0.0)
        reads.start()
    assert disk.moved_bytes["load"] == 20 * LAYOUT.row_bytes


def test_one_kind_alone_leaves_room_for_the_first_of_the_other() -> None:
    for in_place, items in ((False, loads(100)), (False, staged(100)), (True, loads(100))):
        disk, reads = make()
        reads.add(items, 0.0, in_place)
        assert len(disk.flying) == IN_FLIGHT_MAX // 2 and len(reads) == 100 - IN_FLIGHT_MAX // 2


def test_each_kind_has_a_line_of_its_own_and_all_that_wait_are_refused_together() -> None:
    disk, reads = make(waiting_max=10)
    tickets = reads.add(loads(30), 0.0)
    assert tickets.count(None) == 30 - 10 and None not in reads.add(staged(5), 0.0)
    assert len(reads.refuse()) == len(tickets) - tickets.count(None) + 5 - len(disk.flying) and len(reads) == 0


def test_all_that_is_asked_for_ends_in_the_order_of_its_kind() -> None:
    chance = random.Random(3)
    disk, reads = make()
    asked: dict[str, list[int | None]] = {"load": [], "streamed": []}
    ended: dict[str, list[int | None]] = {"load": [], "streamed": []}
    for _ in range(300):
        count = chance.randrange(4)
        kind = chance.choice(["load", "streamed"])
        asked[kind] += reads.add(loads(count) if kind == "load" else staged(count), 0.0)
        for flight, result in disk.turn(chance.randrange(3 * LAYOUT.row_bytes)):
            ended[kind_of(flight)].append(flight.ticket)
            reads.end([(flight, result)], 0.0)
        reads.start()
    while disk.flying:
        over = disk.turn(LAYOUT.row_bytes)
        for flight, _ in over:
            ended[kind_of(flight)].append(flight.ticket)
        reads.end(over, 0.0)
        reads.start()
    assert ended == asked and len(reads) == 0
