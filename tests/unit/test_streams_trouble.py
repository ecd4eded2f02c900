"""Streamed sequences whose blocks hang on their way: they go on, or end within a bound, and no shelf owes an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import LAYOUT, SteppedTiers, chain_hashes
from test_streams import Turns

from kvtier.block import Tier
from kvtier.books import LocalBooks
from kvtier.homes import MoveStage
from kvtier.io.base import Operation
from kvtier.record import NO_TENANT, Record
from kvtier.request import FinishReason
from kvtier.retention import PLAIN, Retention
from kvtier.sequence import Sequence
from kvtier.streams import STALL_S, TRIED_S
from kvtier.ticket import Reply

BLOCK, STEP_S = LAYOUT.block_tokens, 0.01


class LateBooks(LocalBooks):
    """Books whose answers to questions come when they are let."""

    held_back = hold_rows_back = False

    def ask_rows(self, count: int, tenant: bytes, least: int) -> int:
        self.held_back |= self.hold_rows_back
        return super().ask_rows(count, tenant, least)

    def replies(self) -> list[Reply]:
        return [] if self.held_back else super().replies()


def test_a_preempted_one_takes_blocks_that_are_still_written_from_where_they_are(tmp_path: Path) -> None:
    turns = Turns(tmp_path, hbm=12, slots_max=5)
    io, scheduler = turns.tiers.io[Tier.DRAM], turns.engine.scheduler
    streamed = turns.add(5, 20)
    while streamed.computed_count < 6 * BLOCK:
        turns.step()
    io.hanging.add(Operation.WRITE)
    while turns.homes(streamed).writing < 2:
        turns.step()
    scheduler._preempt(streamed, {}, turns.now)
    since, computed = turns.now, streamed.computed_count
    while not turns.engine.given_up:
        turns.step()
        turns.now += 10 * STEP_S
        assert turns.now - since < 2 * STALL_S, f"it waits for ever for writes that hang, {streamed.state}"
    assert turns.engine.given_up == [streamed] and streamed.computed_count == computed + 5 * BLOCK
    assert turns.engine.passes[5] == computed + 5 * BLOCK, "what lay in HBM was computed again"
    io.hanging.clear()
    turns.check_all_given_back()


def test_a_shelf_that_is_lost_stays_until_it_has_answered(tmp_path: Path) -> None:
    turns = Turns(tmp_path)
    shelf, store = turns.dram, turns.tiers.store
    books = shelf._books = shelf.holdings._books = LateBooks(shelf._books._directory)
    books.held_back = True
    store._reopening.know(Tier.DRAM, lambda: None)
    sequence = turns.add(0, 20)
    turns.step()
    shelf._files_lost = lambda: True
    turns.step()
    books.held_back = False
    while not turns.engine.given_up:
        turns.step()
        turns.now += 10 * STEP_S
        assert turns.now < 100 + 2 * STALL_S, "it waits for ever for an answer of a shelf that is gone"
    assert turns.engine.given_up == [sequence] and sequence.finish_reason is FinishReason.ERROR
    assert "dram_held" not in store.stats() and not store.hand_down._homes


def test_no_more_blocks_find_their_homes_on_nvme_than_a_pass_can_stage(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, 8, 2, 40)
    hashes = chain_hashes([place % 50 for place in range(6 * BLOCK)])
    slots = tiers.compute(hashes)
    tiers.settle(1.0)
    nvme, dram, hand_down = tiers.shelves[Tier.NVME], tiers.shelves[Tier.DRAM], tiers.store.hand_down
    dram.drop([record for one in hashes for record in dram.find([one])], "evicted")
    assert len(nvme.find(hashes)) == 6
    hand_down.allow_nvme(2)
    homes = hand_down.open(6, NO_TENANT, private=False)
    homes.begun = True  # as after the loss of what it had in DRAM
    for index, slot in enumerate(slots):
        hand_down.hand_down(homes, index, hashes[index], slot, PLAIN, 2.0)
    for turn in range(40):
        tiers.step()
        tiers.store.poll(2.0 + turn)
        assert homes.count_of(Tier.NVME) <= 2, "more lie on NVMe than could ever be staged"
    assert sum(home.tier is Tier.NVME for home in homes.found.values()) == 2


def test_a_row_of_somebody_elses_is_kept_for_as_long_as_the_one_that_it_is_used_for_asks(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, 8, 10, 0)
    hashes = chain_hashes([place % 50 for place in range(2 * BLOCK)])
    slots = tiers.compute(hashes)
    tiers.settle(1.0)
    dram, hand_down = tiers.shelves[Tier.DRAM], tiers.store.hand_down
    homes, asked = hand_down.open(2, NO_TENANT, private=False), Retention(priority=5, pinned=True)
    homes.begun = True
    hand_down.hand_down(homes, 0, hashes[0], slots[0], asked, 2.0)
    hand_down.hand_down(homes, 1, hashes[1], slots[1], PLAIN, 2.0)
    for turn in range(4):
        tiers.step()
        tiers.store.poll(2.0 + turn)
    assert homes.found.keys() == {0, 1}
    assert [(record.priority, record.pinned) for record in dram.find(hashes)] == [(5, True), (0, False)]


def test_rows_that_nobody_will_give_back_are_waited_for_as_long_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(tmp_path)
    pinned = turns.dram.holdings.ask_rows(30, bytes(16))
    [reply] = turns.dram.holdings.replies()
    assert reply.number == pinned and reply.grants is not None
    monkeypatch.setattr(turns.engine.scheduler._streams._store.hand_down, "check", lambda: None)
    sequence = turns.add(0, 20)
    begun_at = turns.now
    while not turns.engine.given_up:
        turns.step()
        turns.now += 10 * STEP_S
    assert turns.engine.given_up == [sequence] and STALL_S < turns.now - begun_at < STALL_S + 2
    assert "needs 72.0 KiB of DRAM and NVMe" in turns.engine.reasons[0]
    assert "there are 160 KiB for one request, other requests hold 0 B" in turns.engine.reasons[0]
    turns.dram.holdings.give_rows(reply.grants)
    turns.check_all_given_back()


def test_many_that_wait_for_rows_that_never_come_have_waited_no_longer_each_than_the_first_and_some_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(tmp_path)
    turns.dram.holdings.ask_rows(30, bytes(16))
    [reply] = turns.dram.holdings.replies()
    assert reply.grants is not None
    monkeypatch.setattr(turns.engine.scheduler._streams._store.hand_down, "check", lambda: None)
    sequences = [turns.add(number, 20, seed=number) for number in range(4)]
    small, begun_at = turns.add(4, 10, seed=4), turns.now
    while small.finish_reason is None:
        turns.step()
        turns.now += 10 * STEP_S
        assert turns.now - begun_at < STALL_S + 4 * (TRIED_S + 2), "each waits as long as the first, after it"
    assert turns.engine.given_up == sequences and turns.now - begun_at > STALL_S
    assert not turns.engine.scheduler._streams._behind_since
    turns.dram.holdings.give_rows(reply.grants)
    turns.check_tokens(small)


def test_one_that_shelves_have_become_too_small_for_holds_the_others_up_no_longer_than_it_says(tmp_path: Path) -> None:
    turns = Turns(tmp_path, dram=40)
    first = turns.add(0, 5, output_max=140)
    while first.output_count == 0:
        turns.step()
    too_long, third = turns.add(1, 50, seed=1), turns.add(2, 17, seed=2)
    begun_at = turns.now
    while third.finish_reason is None:
        turns.step()
        turns.now += 0.5
        assert turns.now - begun_at < 2 * STALL_S, "nobody gets past one that can never have its rows"
    assert turns.engine.given_up == [too_long] and turns.now - begun_at > STALL_S and first.finish_reason is None
    assert (
        "needs 192 KiB of DRAM and NVMe" in turns.engine.reasons[0] and "there are 160 KiB" in turns.engine.reasons[0]
    )
    turns.engine.cancel(first, turns.now)
    turns.check_tokens(third)


def corrupt_staged_rows(turns: Turns, sequence: Sequence, count: int, corrupted: set[Record]) -> None:
    """Rows on NVMe that a sequence has, and that are not `corrupted` yet, are other bytes from now on."""
    records = [home.lease.record for home in turns.homes(sequence).found.values() if home.tier is Tier.NVME]
    for record in [record for record in records if record not in corrupted][:count]:
        turns.tiers.corrupt(Tier.NVME, record.slot, 4096 + 5)
        corrupted.add(record)


def test_rows_that_were_lost_on_full_shelves_are_found_again_where_they_were(tmp_path: Path) -> None:
    turns = Turns(tmp_path, dram=8, nvme=12)
    sequence, corrupted = turns.add(0, 20, output_max=20), set[Record]()
    for output_count in (1, 6, 12):
        for _ in range(1000):
            if sequence.table.staged_count and sequence.output_count >= output_count:
                break
            turns.step()
        corrupt_staged_rows(turns, sequence, 1, corrupted)
    turns.until(sequence)
    assert turns.tiers.shelves[Tier.NVME].stats()["bad_row"] == 3
    turns.check_tokens(sequence)


def test_one_that_keeps_losing_rows_is_given_up_and_says_so(tmp_path: Path) -> None:
    turns = Turns(tmp_path, dram=8, nvme=30)
    sequence, corrupted = turns.add(0, 20, output_max=20), set[Record]()
    while not turns.engine.given_up:
        if sequence.output_count > 0:
            corrupt_staged_rows(turns, sequence, 30, corrupted)
            turns.now += 1.0
        turns.step()
        assert turns.now < 100 + 3 * STALL_S, "it loses rows for ever"
    assert turns.engine.given_up == [sequence] and "keeps losing rows" in turns.engine.reasons[0]
    turns.check_all_given_back()


def test_a_try_that_is_refused_judges_nothing_and_the_one_that_is_not_judges_all_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(tmp_path)
    first = turns.add(0, 20)
    turns.until(first)
    turns.tiers.settle(turns.now)
    hand_down, dram = turns.tiers.store.hand_down, turns.dram
    dram.holdings.ask_rows(18, NO_TENANT)
    [reply] = dram.holdings.replies()  # somebody else has all that the prefix leaves
    assert reply.grants is not None and len(dram.find(first.hashes)) == 20
    tries, open_homes = list[int](), hand_down.open
    monkeypatch.setattr(hand_down, "check", lambda: None)
    monkeypatch.setattr(hand_down, "open", lambda *given: tries.append(1) or open_homes(*given))
    second = turns.add(1, 20, output_max=60)
    for _ in range(100):
        turns.step()
    assert len(tries) > 3 and dram.stats()["verifies"] == 0, "a try that was refused has judged its prefix"
    dram.holdings.give_rows(reply.grants)
    turns.until(second)
    assert dram.stats()["verifies"] == second.origin.dram // BLOCK == 20
    turns.check_tokens(second)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_prefix_may_be_lost_or_left_before_it_is_judged(cancelled: bool, tmp_path: Path) -> None:
    turns = Turns(tmp_path)
    first = turns.add(0, 20)
    turns.until(first)
    turns.tiers.settle(turns.now)
    turns.tiers.drain(Tier.HBM, turns.now)
    shelf = turns.dram
    books = shelf._books = shelf.holdings._books = LateBooks(shelf._books._directory)
    books.hold_rows_back = True
    second = turns.add(1, 20, output_max=60)
    turns.step()
    moves = turns.homes(second).moves
    assert {move.stage for move in moves.values()} == {MoveStage.LEASED} and len(moves) == 20
    books.hold_rows_back = books.held_back = False
    if cancelled:
        turns.engine.cancel(second, turns.now)
        turns.check_all_given_back()
        return
    lease = moves[7].lease
    assert lease is not None
    shelf.view(lease)[:] = bytes(LAYOUT.row_bytes)
    shelf.holdings._lost.append(lease)
    turns.until(second)
    assert second.origin.dram == 19 * BLOCK and shelf.stats()["verifies"] == 19
    turns.check_tokens(second)
