"""Streamed sequences in a plan beside resident ones: who is admitted, and that a plan comes to its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import LAYOUT
from test_streams import Turns

from kvtier.block import Tier
from kvtier.io.base import Operation
from kvtier.sequence import Sequence, SequenceState

BLOCK = LAYOUT.block_tokens


def with_two_known_blocks_in_the_last_slots(folder: Path) -> tuple[Turns, Sequence]:
    """A streamed sequence arrives; an older one leaves it two slots of HBM, which hold the end of its prompt."""
    turns = Turns(folder, hbm=8)
    before = turns.add(0, 10)
    turns.until(before)
    turns.tiers.settle(turns.now)
    resident = turns.tiers.store._resident
    last = [slot for one in before.hashes[8:10] if (slot := resident.find(one)) is not None]
    assert len(last) == 2
    turns.dram.drop([record for one in before.hashes[8:] for record in turns.dram.find([one])], "evicted")
    resident.stamp(last, turns.now)  # evicted last
    turns.add(1, 5, output_max=4, seed=1)
    turns.step()
    assert turns.tiers.store.available_count == 2 and resident.find(before.hashes[9]) is not None
    return turns, turns.add(2, 10)


def test_one_that_yields_as_soon_as_it_is_admitted_is_not_admitted_again_in_the_same_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(tmp_path, hbm=8)
    older = turns.add(0, 7, output_max=4, seed=1)
    turns.step()
    assert turns.tiers.store.available_count == 0
    streamed, streams = turns.add(2, 10), turns.engine.scheduler._streams
    starts = list[int]()
    start = streams.start

    def start_counted(sequence: Sequence, now: float) -> None:
        starts.append(sequence.number)
        assert len(starts) < 10, "a plan that never ends: it is admitted and yields for ever"
        start(sequence, now)

    with monkeypatch.context() as patched:
        patched.setattr(streams, "start", start_counted)
        patched.setattr(streams, "ready", lambda *_: streamed if streamed.number in streams._streams else None)
        while not starts:
            turns.step()
    assert starts == [2] and streamed.state is SequenceState.WAITING and older.preempted_count == 0
    turns.until(streamed)
    turns.check_tokens(older, streamed)


def test_known_blocks_do_not_take_the_slot_that_a_streamed_sequence_computes_in(tmp_path: Path) -> None:
    turns, streamed = with_two_known_blocks_in_the_last_slots(tmp_path)
    while streamed.state is not SequenceState.RUNNING:
        turns.step()
        assert streamed.preempted_count == 0, "it was admitted without a slot to compute in"
    assert streamed.origin.hbm == BLOCK and turns.engine.passes[2] > 0
    turns.until(streamed)
    turns.check_tokens(streamed)


def test_one_whose_working_set_is_all_on_its_way_down_leaves_its_place_to_others(tmp_path: Path) -> None:
    turns = Turns(tmp_path, hbm=12, slots_max=4)
    io, scheduler = turns.tiers.io[Tier.DRAM], turns.engine.scheduler
    streamed = turns.add(5, 20)
    while streamed.computed_count < 6 * BLOCK:
        turns.step()
    io.hanging.add(Operation.WRITE)
    while turns.homes(streamed).writing < 4:
        turns.step()
    scheduler._preempt(streamed, {}, turns.now)
    for _ in range(20):
        turns.step()
        assert streamed.state is SequenceState.WAITING and scheduler.running_count == 0, "it has no slot to compute in"
    io.hanging.clear()
    turns.until(streamed)
    assert turns.engine.passes[5] == len(streamed.tokens) - 1, "what lay in HBM was computed again"
    turns.check_tokens(streamed)
