"""Stager over a real NVMe shelf: rows of tiny layers, judged by their payload.

Groups in order, back-pressure, reading ahead into the next pass, lost slices, deadlines, passes abandoned with reads in
flight, and the bounds of the memory; `check` runs after every step.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes import flip_byte
from rows import IO, LAYOUT, ShelfUser, block_hashes, nvme_user, payload

from kvtier.block import Tier
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.metrics import Metrics
from kvtier.record import Record
from kvtier.shelf import ShelfLimits
from kvtier.stager import Stager
from kvtier.staging import Staged, StageState, Staging
from kvtier.tiers.staging import StagingMemory

SLICE = LAYOUT.slice_bytes
DEADLINE_S = 5.0


class Desk:
    """A stager and the shelf that it reads, polled by hand at a time of the test's own."""

    def __init__(self, user: ShelfUser, units: int) -> None:
        self.user = user
        self.memory = StagingMemory(units * SLICE, SLICE)
        self.shelves = {Tier.NVME: user.shelf}
        self.metrics = Metrics()
        self.stager = Stager(LAYOUT.layers, self.memory, self.shelves, DEADLINE_S, self.metrics)
        self.now = 100.0

    def records(self, count: int, seed: int = 0) -> list[Record]:
        hashes = block_hashes(count, seed)
        self.user.write(hashes)
        records = self.user.shelf.find(hashes)
        assert len(records) == count
        return records

    @property
    def staged_bytes(self) -> float:
        return self.metrics.streamed_bytes.value("nvme")

    def poll(self) -> None:
        for done in self.user.shelf.poll(self.user.now):
            assert self.stager.completed(done, self.now)
        self.stager.pump(self.now)
        self.stager.check()

    def wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, "it never comes to that"
            self.user._bell.wait(0.02)
            self.poll()

    def settle(self) -> None:
        """Until nothing that has been asked for is under way."""
        self.wait(lambda: self.stager.in_flight == 0)

    def stage(self, staging: Staging) -> Staged:
        """The answer for the next group once it is not PENDING."""
        self.wait(lambda: self.stager.stage(staging, self.now).state is not StageState.PENDING)
        return self.stager.stage(staging, self.now)

    def use(self, staging: Staging) -> range:
        """Wait for the next group, judge every byte of it as a kernel would read it, and use it up."""
        staged = self.stage(staging)
        assert staged.state is StageState.READY and staged.addresses is not None
        first, end = staged.layers.start * SLICE, staged.layers.stop * SLICE
        for record, address in zip(staging.records, staged.addresses.tolist(), strict=True):
            assert ctypes.string_at(address + first, end - first) == payload(record.block_hash)[first:end]
        self.stager.use_up(staging, self.now)
        self.stager.check()
        return staged.layers

    def use_all(self, staging: Staging) -> list[range]:
        used = [self.use(staging) for _ in staging.groups]
        assert staging.over
        return used


@pytest.fixture
def calls() -> Iterator[FaultyCalls]:
    faulty = FaultyCalls([])
    yield faulty
    faulty.release()


@pytest.fixture
def open_desk(tmp_path: Path, calls: FaultyCalls) -> Iterator[Callable[[int], Desk]]:
    desks: list[Desk] = []

    def opened(units: int) -> Desk:
        limits = ShelfLimits(IO.in_flight_max, failures_max=1000, late_s=1e6)
        desks.append(Desk(nvme_user(tmp_path / "cache", calls=calls, limits=limits), units))
        return desks[-1]

    yield opened
    calls.release()
    for desk in desks:
        desk.user.shelf.close(60.0)
        assert desk.memory.bytes_total == desk.memory.unit_count * SLICE


OpenDesk = Callable[[int], Desk]


@pytest.mark.parametrize(
    ("units", "rows", "groups"),
    [(6, 3, [1, 1, 1]), (11, 3, [1, 1, 1]), (12, 3, [2, 1]), (18, 3, [3]), (64, 3, [3]), (2, 1, [1, 1, 1])],
)
def test_groups_are_as_long_as_two_of_them_fit_and_come_in_order(
    open_desk: OpenDesk, units: int, rows: int, groups: list[int]
) -> None:
    desk = open_desk(units)
    staging = desk.stager.begin(desk.records(rows), desk.now)
    used = desk.use_all(staging)
    assert [len(layers) for layers in used] == groups
    assert [layer for layers in used for layer in layers] == [0, 1, 2]
    assert desk.staged_bytes == rows * LAYOUT.row_bytes
    assert desk.memory.taken_count == 0 and desk.stager.in_flight == 0


def test_a_read_is_no_longer_than_it_need_be(open_desk: OpenDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.stager.READ_BYTES_MAX", 2 * SLICE + 1)
    desk = open_desk(64)
    assert [len(layers) for layers in desk.use_all(desk.stager.begin(desk.records(3), desk.now))] == [2, 1]


def test_no_more_is_read_than_there_is_memory_for(open_desk: OpenDesk, calls: FaultyCalls) -> None:
    desk = open_desk(7)
    records = desk.records(3)
    before = calls.count(Call.READ)
    staging = desk.stager.begin(records, desk.now)
    desk.settle()
    assert calls.count(Call.READ) - before == 7 == desk.memory.taken_count  # two groups, and one row of the last
    desk.use(staging)
    desk.settle()
    assert calls.count(Call.READ) - before == 9
    desk.use(staging)
    desk.use(staging)
    assert calls.count(Call.READ) - before == 9


def test_the_first_group_of_the_next_pass_is_read_ahead(open_desk: OpenDesk, calls: FaultyCalls) -> None:
    desk = open_desk(6)
    records = desk.records(3)
    staging = desk.stager.begin(records, desk.now, records)
    desk.use(staging)
    desk.use(staging)
    desk.settle()
    before = calls.count(Call.READ)
    desk.use(staging)
    again = desk.stager.begin(records, desk.now)
    assert desk.stager.stage(again, desk.now).state is StageState.READY, "it was not read ahead"
    desk.settle()
    assert calls.count(Call.READ) - before == 3  # the second group alone
    desk.use_all(again)


def test_rows_that_join_the_next_pass_are_all_that_is_read_for_its_first_group(
    open_desk: OpenDesk, calls: FaultyCalls
) -> None:
    desk = open_desk(8)
    records = desk.records(4)
    staging = desk.stager.begin(records[:3], desk.now, records[:3])
    desk.use_all(staging)
    desk.settle()
    before = calls.count(Call.READ)
    more = desk.stager.begin(records, desk.now)
    desk.settle()
    assert calls.count(Call.READ) - before == 1 + 4  # the new row of the first group, and the second group
    desk.use_all(more)
    assert desk.staged_bytes == 7 * LAYOUT.row_bytes


@pytest.mark.parametrize("other", ["rows", "fewer", "groups"])
def test_what_was_read_ahead_in_vain_is_let_go(open_desk: OpenDesk, other: str) -> None:
    desk = open_desk(12)
    records = desk.records(5)
    staging = desk.stager.begin(records[:3], desk.now, records[:3])
    desk.use_all(staging)
    following = {"rows": records[2:5], "fewer": records[:2], "groups": records}[other]
    desk.use_all(desk.stager.begin(following, desk.now))
    desk.settle()
    assert desk.memory.taken_count == 0


def test_a_pass_of_others_may_follow_and_is_read_ahead(open_desk: OpenDesk) -> None:
    desk = open_desk(12)
    ones, others = desk.records(3, seed=1), desk.records(2, seed=2)
    staging = desk.stager.begin(ones, desk.now, others)
    for _ in range(4):
        desk.use_all(staging)
        desk.settle()
        staging = desk.stager.begin(others, desk.now, ones)
        assert desk.stager.stage(staging, desk.now).state is StageState.READY
        ones, others = others, ones
    desk.stager.abandon(staging)
    desk.settle()
    assert desk.memory.taken_count == 0


def test_a_flipped_byte_loses_its_row_and_nothing_wrong_is_handed_out(open_desk: OpenDesk) -> None:
    desk = open_desk(8)
    records = desk.records(4)
    slab = desk.user.shelf._slab
    flip_byte(slab.descriptor, slab.offset(records[2].slot) + 4096 + 2 * SLICE, 17)
    staging = desk.stager.begin(records, desk.now)
    desk.use(staging)
    desk.settle()  # the last group, for which there is memory now
    staged = desk.stager.stage(staging, desk.now)
    assert staged.state is StageState.LOST and staged.lost == 2
    assert desk.stager.stage(staging, desk.now) == staged
    desk.stager.abandon(staging)
    desk.settle()
    assert desk.memory.taken_count == 0
    assert desk.user.shelf.find([records[2].block_hash]) == [] != desk.user.shelf.find([records[1].block_hash])


def test_the_first_of_several_lost_rows_is_named(open_desk: OpenDesk) -> None:
    desk = open_desk(8)
    records = desk.records(4)
    slab = desk.user.shelf._slab
    for row, layer in ((3, 0), (1, 1)):
        flip_byte(slab.descriptor, slab.offset(records[row].slot) + 4096 + layer * SLICE, 17)
    staging = desk.stager.begin(records, desk.now)
    desk.settle()
    staged = desk.stager.stage(staging, desk.now)
    assert staged.state is StageState.LOST and staged.lost == 1
    desk.stager.abandon(staging)


def test_without_a_shelf_the_first_row_is_lost_at_once(open_desk: OpenDesk) -> None:
    desk = open_desk(8)
    records = desk.records(2)
    desk.shelves.clear()
    staging = desk.stager.begin(records, desk.now)
    assert desk.stager.stage(staging, desk.now)[::3] == (StageState.LOST, 0)
    desk.stager.abandon(staging)
    desk.stager.check()
    assert desk.memory.taken_count == 0


def test_what_the_shelf_refuses_for_now_is_offered_again_and_moves_no_deadline(
    tmp_path: Path, calls: FaultyCalls
) -> None:
    limits = ShelfLimits(IO.in_flight_max, failures_max=1, pause_s=30.0)
    desk = Desk(nvme_user(tmp_path / "cache", calls=calls, limits=limits), 6)
    records = desk.records(3)
    calls.inject([Fault(Call.READ, calls.count(Call.READ) + 1, Effect.ERROR, 5)])
    desk.stager.abandon(desk.stager.begin(records[:1], desk.now))
    desk.settle()  # the breaker is open now
    staging = desk.stager.begin(records, desk.now)
    deadline = desk.stager.deadline(staging)
    for _ in range(5):
        desk.now += 0.5
        desk.poll()
        assert desk.stager.stage(staging, desk.now).state is StageState.PENDING
    assert desk.stager.deadline(staging) == deadline
    assert desk.stager.stage(staging, deadline)[::3] == (StageState.LOST, 0)
    desk.user.now += 31.0
    desk.now += 1.0
    desk.use_all(staging)  # a probe, and then all that waits
    desk.user.shelf.close(60.0)


def test_a_read_ahead_that_failed_is_tried_again_by_the_pass_itself(open_desk: OpenDesk, calls: FaultyCalls) -> None:
    desk = open_desk(6)
    records = desk.records(3)
    staging = desk.stager.begin(records, desk.now, records)
    desk.use(staging)
    desk.settle()
    calls.inject([Fault(Call.READ, calls.count(Call.READ) + 2, Effect.ERROR, 5)])
    desk.use(staging)
    desk.settle()
    desk.use(staging)
    desk.use_all(desk.stager.begin(records, desk.now))


def test_a_hung_read_is_lost_at_the_deadline_and_keeps_its_memory_until_it_ends(
    open_desk: OpenDesk, calls: FaultyCalls
) -> None:
    desk = open_desk(6)
    records = desk.records(3)
    calls.inject([Fault(Call.READ, calls.count(Call.READ) + 2, Effect.HANG)])
    staging = desk.stager.begin(records, desk.now)
    desk.wait(lambda: desk.stager.in_flight == 1)
    assert desk.stager.stage(staging, desk.now).state is StageState.PENDING
    desk.now = desk.stager.deadline(staging)
    staged = desk.stager.stage(staging, desk.now)
    assert staged.state is StageState.LOST and staged.lost is not None
    desk.stager.abandon(staging)
    desk.poll()
    assert desk.memory.taken_count == 1 == desk.stager.in_flight
    assert desk.stager.blocks_max == 3
    rest = [record for row, record in enumerate(records) if row != staged.lost]
    desk.use_all(desk.stager.begin(rest, desk.now))  # goes round the memory that hangs
    calls.release()
    desk.settle()
    assert desk.memory.taken_count == 0


def test_what_moves_puts_the_deadline_off(open_desk: OpenDesk, calls: FaultyCalls) -> None:
    desk = open_desk(6)
    records = desk.records(3)
    calls.inject([Fault(Call.READ, calls.count(Call.READ) + 1, Effect.HANG, sticky=True)])
    staging = desk.stager.begin(records, desk.now)
    deadline = desk.stager.deadline(staging)
    assert deadline == desk.now + DEADLINE_S
    calls.release()
    desk.now += 1.0
    desk.settle()
    assert desk.stager.deadline(staging) == deadline + 1.0
    desk.use_all(staging)


def test_a_pass_for_which_no_memory_is_left_waits_and_then_loses_its_first_row(
    open_desk: OpenDesk, calls: FaultyCalls
) -> None:
    desk = open_desk(6)
    records = desk.records(3)
    calls.inject([Fault(Call.READ, calls.count(Call.READ) + 1, Effect.HANG, sticky=True)])
    desk.stager.abandon(desk.stager.begin(records, desk.now))
    assert desk.memory.taken_count == 6 == desk.stager.in_flight
    staging = desk.stager.begin(records, desk.now)
    assert desk.stager.stage(staging, desk.now).state is StageState.PENDING
    assert desk.stager.stage(staging, desk.now + DEADLINE_S)[::3] == (StageState.LOST, 0)
    desk.poll()
    calls.release()
    desk.use_all(staging)
    desk.settle()
    assert desk.memory.taken_count == 0


@pytest.mark.parametrize("seed", range(4))
def test_passes_of_any_rows_in_any_order_never_lose_memory_or_hand_out_another_row(
    open_desk: OpenDesk, calls: FaultyCalls, seed: int
) -> None:
    chance = random.Random(seed)
    desk = open_desk(13)
    records = desk.records(6, seed)
    ended = 0
    expected: list[Record] = []
    for _ in range(25):
        rows = (
            expected if expected and chance.random() < 0.7 else records[chance.randrange(4) :][: chance.randint(1, 6)]
        )
        expected = records[chance.randrange(4) :][: chance.randint(1, 6)] if chance.random() < 0.7 else []
        if chance.random() < 0.2:
            nth = calls.count(Call.READ) + chance.randint(1, 9)
            calls.inject([Fault(Call.READ, nth, Effect.ERROR, 5)])
        staging = desk.stager.begin(rows, desk.now, expected)
        while not staging.over:
            if chance.random() < 0.1 or desk.stage(staging).state is StageState.LOST:
                desk.stager.abandon(staging)
                break
            desk.use(staging) if chance.random() < 0.9 else desk.poll()
        ended += staging.group == len(staging.groups)
    assert ended > 8
    desk.stager.begin(records, desk.now)
    desk.settle()
    desk.stager.check()


def test_memory_goes_round_and_is_given_back_as_it_was_taken() -> None:
    memory = StagingMemory(10 * 4096 + 4095, 4096)
    assert memory.unit_count == 10 and memory.bytes_total == 40960
    assert [memory.take(3) for _ in range(4)] == [0, 3, 6, None]
    memory.give(0, 3)
    assert memory.take(1) == 9 and memory.take(4) is None and memory.take(2) == 0
    assert memory.taken_count == 9
    memory.view(0, 2)[:] = bytes(2 * 4096)
    assert memory.view(3, 3).nbytes == 3 * 4096
    with pytest.raises(AssertionError):
        memory.give(2, 1)


def test_while_it_is_paused_nothing_begins_and_a_deadline_waits_for_what_cannot_move(
    open_desk: OpenDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = open_desk(4)
    staging = desk.stager.begin(desk.records(2), desk.now)
    desk.settle()
    desk.stager.pause(desk.now)
    assert desk.use(staging) == range(1)
    assert desk.stager.in_flight == 0 and desk.stager.stage(staging, desk.now).state is StageState.READY
    assert desk.use(staging) == range(1, 2)
    desk.poll()
    assert desk.stager.in_flight == 0 and desk.stager.stage(staging, desk.now).state is StageState.PENDING
    desk.now += 100 * DEADLINE_S
    with monkeypatch.context() as refusing:
        refusing.setattr(desk.user.shelf, "read", lambda items: [None] * len(items))
        desk.stager.resume(desk.now)
    assert desk.stager.deadline(staging) == desk.now + DEADLINE_S
    desk.now += DEADLINE_S / 2
    desk.stager.pump(desk.now)
    assert desk.stager.in_flight == 2 and desk.use(staging) == range(2, 3)


def test_a_read_that_hangs_is_lost_in_its_time_though_others_are_paused(
    open_desk: OpenDesk, calls: FaultyCalls
) -> None:
    desk = open_desk(4)
    records = desk.records(2)
    calls.inject([Fault(Call.READ, calls.count(Call.READ) + 1, Effect.HANG, sticky=True)])
    staging = desk.stager.begin(records, desk.now)
    desk.stager.pause(desk.now)
    desk.now += DEADLINE_S
    desk.stager.resume(desk.now)
    assert desk.stager.stage(staging, desk.now).state is StageState.LOST
