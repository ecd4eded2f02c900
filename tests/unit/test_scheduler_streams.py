"""Streamed sequences in a plan beside resident ones: who is admitted, and that a plan comes to its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_streams import Turns

from kvtier.sequence import Sequence


def test_one_that_yields_as_soon_as_it_is_admitted_is_not_admitted_again_in_the_same_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(tmp_path, hbm=8)
    before = turns.add(0, 10)
    turns.until(before)
    turns.tiers.settle(turns.now)
    resident = turns.tiers.store._resident
    last = [resident.find(block_hash) for block_hash in before.hashes[8:10]]
    assert None not in last and turns.dram.find(before.hashes[8:9])
    turns.dram.drop([record for one in before.hashes[8:] for record in turns.dram.find([one])], "evicted")
    resident.stamp(last, turns.now)  # the idle slots that are evicted last: all that an older sequence leaves
    turns.add(1, 5, output_max=4, seed=1)
    turns.step()
    streamed, streams, starts = turns.add(2, 10), turns.engine.scheduler._streams, list[int]()
    assert turns.tiers.store.available_count == 2
    start = streams.start

    def start_counted(sequence: Sequence, now: float) -> None:
        starts.append(sequence.number)
        assert len(starts) < 10, "a plan that never ends: it is admitted and yields for ever"
        start(sequence, now)

    monkeypatch.setattr(streams, "start", start_counted)
    while not starts:
        turns.step()
    turns.until(streamed)
    turns.check_tokens(streamed)
