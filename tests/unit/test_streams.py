"""Streamed sequences: working set, rows before the start, prefixes in place, preemption, loss, and all given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes import LAYOUT, SteppedEngine, SteppedTiers, make_sequence
from loose import share

from kvtier.block import Tier
from kvtier.io.base import Operation
from kvtier.request import FinishReason
from kvtier.scheduler import Scheduler, SchedulerLimits
from kvtier.sequence import Sequence, SequenceState
from kvtier.streams import StreamLimits
from tests.rows import directory_of

BLOCK = LAYOUT.block_tokens
STEP_S = 0.01


class Turns:
    """An engine turned step by step, its books checked after each."""

    def __init__(
        self, folder: Path, hbm: int = 8, dram: int = 40, nvme: int = 0, streams_max: int = 2, slots_max: int = 3
    ) -> None:
        self.tiers = SteppedTiers(folder, hbm, dram, nvme, queue_max=64, staged_blocks=nvme)
        limits = SchedulerLimits(step_tokens=64, sequences_max=4)
        self.engine = SteppedEngine(
            self.tiers, Scheduler(self.tiers.store, limits, StreamLimits(streams_max, slots_max))
        )
        self.now = 100.0

    @property
    def dram(self) -> Any:
        return self.tiers.shelves[Tier.DRAM]

    def add(self, number: int, blocks: int, output_max: int = 4, seed: int = 0, **cache: Any) -> Sequence:
        """A sequence whose prompt is that many blocks and 3 tokens; those of one seed begin alike."""
        prompt = [(seed * 31 + position * position) % 50 for position in range(blocks * BLOCK + 3)]
        sequence = make_sequence(number, prompt, output_max, **cache)
        self.engine.scheduler.add(sequence)
        return sequence

    def step(self, move: bool = True) -> None:
        if move:
            self.tiers.step()
        self.engine.step(self.now, lambda _: None)
        self.engine.scheduler.check()
        self.now += STEP_S

    def until(self, sequence: Sequence, state: SequenceState = SequenceState.FINISHED) -> None:
        for _ in range(2000):
            if sequence.state is state:
                return
            self.step()
        raise AssertionError(f"{sequence} never comes to {state}")

    def check_tokens(self, *sequences: Sequence) -> None:
        """They have ended with the right tokens, and nothing is held any more."""
        for sequence in sequences:
            assert sequence.finish_reason is FinishReason.LENGTH
            prompt, answer = sequence.tokens[: sequence.prompt_count], sequence.tokens[sequence.prompt_count :]
            assert answer == self.engine.model.expected(prompt, sequence.output_max)
        self.check_all_given_back()

    def check_all_given_back(self) -> None:
        self.tiers.settle(self.now)
        self.engine.scheduler.check()
        assert self.tiers.store.available_count == self.tiers.store.slot_count and len(self.dram.holdings) == 0

    def homes(self, sequence: Sequence) -> Any:
        return self.engine.scheduler._streams.stream(sequence).homes


@pytest.fixture
def turns(tmp_path: Path) -> Turns:
    return Turns(tmp_path)


def test_a_sequence_longer_than_hbm_runs_within_its_working_set(turns: Turns) -> None:
    sequence = turns.add(0, 20, output_max=2 * BLOCK)
    most = 0
    while sequence.state is not SequenceState.FINISHED:
        turns.step()
        most = max(most, sequence.table.held_count)
    assert most == 3 and turns.engine.passes[0] == len(sequence.tokens) - 1, "some token was computed twice"
    assert turns.tiers.metrics.streamed_bytes.value("dram") > 0
    turns.check_tokens(sequence)


def test_blocks_go_down_oldest_first_and_stay_in_hbm_until_their_rows_are_written(turns: Turns) -> None:
    sequence = turns.add(0, 12)
    turns.tiers.io[Tier.DRAM].hanging.add(Operation.WRITE)
    other = turns.add(1, 1, output_max=2, seed=1)
    for _ in range(20):
        turns.step()
    assert sequence.computed_count == 3 * BLOCK and sequence.table.held_count == 3, "a slot was let go of too early"
    assert other.finish_reason is FinishReason.LENGTH, "others wait for its writes"
    turns.tiers.io[Tier.DRAM].hanging.clear()
    turns.step()
    turns.step()
    assert sequence.table.slots[0] is None and sequence.table.slots[-1] is not None
    turns.until(sequence)
    turns.check_tokens(sequence)


def test_it_starts_with_rows_for_all_its_length_and_the_next_one_waits_for_them(tmp_path: Path) -> None:
    turns = Turns(tmp_path, dram=26)
    first, second = turns.add(0, 20), turns.add(1, 20, seed=1)
    turns.step()
    assert turns.homes(first).begun and len(turns.dram.holdings) == 21 - 3
    turns.until(first)
    assert second.computed_count == 0, "it began without its rows"
    turns.until(second)
    turns.check_tokens(first, second)
    assert not turns.engine.given_up


def test_of_two_that_wait_for_rows_of_each_other_the_later_one_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(tmp_path, dram=38)
    first, second = turns.add(0, 20, output_max=12), turns.add(1, 20, output_max=12, seed=1)
    while min(first.output_count, second.output_count) < 3:
        turns.step()
    monkeypatch.setattr(turns.engine.scheduler._streams._store.hand_down, "check", lambda: None)
    homes = [turns.homes(sequence).found[2] for sequence in (first, second)]
    turns.dram.holdings.ask_leases([home.lease.record for home in homes])
    [reply] = turns.dram.holdings.replies()  # somebody else has these rows, so they do not come free
    for home in homes:
        turns.dram.view(home.lease)[:] = bytes(LAYOUT.row_bytes)
        turns.dram.holdings._lost.append(home.lease)
    while not turns.engine.given_up:
        turns.step()
        turns.now += 10 * STEP_S
    assert turns.engine.given_up == [second] and first.output_count < 12
    turns.until(first)
    turns.dram.holdings.end_leases(reply.leases)
    turns.check_tokens(first)


def test_a_prefix_in_dram_is_judged_once_and_attended_in_place(turns: Turns) -> None:
    first = turns.add(0, 20)
    turns.until(first)
    turns.tiers.settle(turns.now)
    turns.tiers.drain(Tier.HBM, turns.now)
    second = turns.add(1, 20)
    turns.until(second)
    assert second.origin.dram == 20 * BLOCK and second.origin.computed == 3
    assert turns.dram.stats()["verifies"] == 20
    assert turns.tiers.metrics.promoted_blocks.value("dram", "hbm") == 0, "rows were copied up"
    turns.check_tokens(first, second)


def test_blocks_that_only_hbm_has_are_taken_in_where_the_sequence_comes_to_them(tmp_path: Path) -> None:
    turns = Turns(tmp_path, hbm=12)
    turns.tiers.io[Tier.DRAM].hanging.add(Operation.WRITE)
    resident = turns.add(0, 5, output_max=1)
    turns.until(resident)
    turns.tiers.io[Tier.DRAM].hanging.clear()
    turns.tiers.io[Tier.DRAM].cancel(Operation.WRITE)
    streamed = turns.add(1, 20)
    turns.until(streamed)
    assert 3 * BLOCK <= streamed.origin.hbm <= 5 * BLOCK
    turns.check_tokens(streamed)


def test_a_bad_row_of_the_prefix_is_computed_and_what_lies_behind_it_is_used(turns: Turns) -> None:
    first = turns.add(0, 20)
    turns.until(first)
    turns.tiers.settle(turns.now)
    turns.tiers.drain(Tier.HBM, turns.now)
    [record] = turns.dram.find([first.hashes[7]])
    turns.tiers.corrupt(Tier.DRAM, record.slot, 4096 + 5)
    second = turns.add(1, 20)
    turns.until(second)
    assert second.origin.dram == 19 * BLOCK and second.origin.computed == BLOCK + 3
    assert turns.dram.stats()["bad_row"] == 1
    turns.check_tokens(first, second)


def test_a_preempted_one_keeps_its_rows_and_computes_little_again(tmp_path: Path) -> None:
    turns = Turns(tmp_path, hbm=8, slots_max=4)
    streamed = turns.add(5, 20, output_max=3 * BLOCK)
    turns.until(streamed, SequenceState.RUNNING)
    for _ in range(12):
        turns.step()
    older = [turns.add(number, 1, output_max=5 * BLOCK - 4, seed=1 + number) for number in (0, 1)]
    for _ in range(400):
        turns.step()
        if streamed.state is SequenceState.WAITING:
            assert len(streamed.table) > 4 and streamed.table.held_count == 0
    assert streamed.preempted_count >= 1
    assert turns.engine.passes[5] < len(streamed.tokens) + 4 * BLOCK * streamed.preempted_count
    turns.check_tokens(streamed, *older)


def test_a_lost_row_is_computed_again_and_no_token_comes_twice(turns: Turns) -> None:
    sequence = turns.add(0, 20, output_max=12)
    while sequence.output_count < 6:
        turns.step()
    answer, passes = sequence.tokens[sequence.prompt_count :], turns.engine.passes[0]
    home = turns.homes(sequence).found[3]
    turns.dram.view(home.lease)[:] = bytes(LAYOUT.row_bytes)
    turns.dram.holdings._lost.append(home.lease)
    turns.until(sequence)
    assert sequence.tokens[sequence.prompt_count :][:6] == answer
    again = turns.engine.passes[0] - passes
    assert BLOCK < again < 6 * BLOCK, f"{again} tokens were computed after the loss of one block"
    turns.check_tokens(sequence)


def test_a_row_of_dram_that_is_lost_while_a_pass_rests_ends_that_pass(tmp_path: Path) -> None:
    turns = Turns(tmp_path, dram=8, nvme=30)
    sequence = turns.add(0, 20, output_max=12)
    while sequence.output_count < 4 or not sequence.pinned:
        turns.step()
    homes = turns.homes(sequence).found
    assert {home.tier for home in homes.values()} == {Tier.DRAM, Tier.NVME}
    index, home = next((index, home) for index, home in homes.items() if home.tier is Tier.DRAM)
    turns.dram.view(home.lease)[:] = bytes(LAYOUT.row_bytes)
    turns.dram.holdings._lost.append(home.lease)
    turns.step()
    assert not sequence.pinned and sequence.computed_count > index * BLOCK
    turns.step()
    assert sequence.computed_count <= (index + 1) * BLOCK
    turns.until(sequence)
    turns.check_tokens(sequence)


def test_a_row_that_cannot_be_written_is_replaced_by_another(tmp_path: Path) -> None:
    turns = Turns(tmp_path)
    sequence = turns.add(0, 20)
    io = turns.tiers.io[Tier.DRAM]
    for turn in range(60):
        if turn == 8:
            io.hanging.add(Operation.WRITE)
        if turn == 12:
            io.hanging.clear()
            io.cancel(Operation.WRITE)
        turns.step()
    turns.until(sequence)
    assert turns.dram.stats()["refused"] > 0
    turns.check_tokens(sequence)


@pytest.mark.parametrize("wish", ["cache_read", "cache_write"])
def test_one_that_reads_or_writes_no_cache_uses_no_rows_of_others(wish: str, tmp_path: Path) -> None:
    turns = Turns(tmp_path, dram=60)
    if wish == "cache_read":
        turns.until(turns.add(0, 20))
    sequence = turns.add(1, 20, output_max=2, **{wish: False})
    while sequence.output_count < 1:
        turns.step()
    private = {home.lease.record.block_hash for home in turns.homes(sequence).found.values()}
    sequence.chain.extend(sequence.hashes, sequence.tokens)
    assert len(private) > 10 and not private & set(sequence.hashes)
    turns.until(sequence)
    assert sequence.reused_blocks == 0
    turns.check_tokens(sequence)
    left = {row.block_hash for row in directory_of(turns.dram).records()}
    assert not private & left, "they were left behind"
    assert bool(left & set(sequence.hashes)) == sequence.cache_write


@pytest.mark.parametrize("count", [1, 2])
def test_what_one_that_reads_no_cache_has_computed_is_found_by_the_next(count: int, tmp_path: Path) -> None:
    turns = Turns(tmp_path, dram=8, nvme=60)
    before = [turns.add(number, 20, output_max=1, cache_read=False) for number in range(count)]
    for sequence in before:
        turns.until(sequence)
    for _ in range(50):  # its last blocks are on their way down
        turns.step()
    turns.until(again := turns.add(count, 20, output_max=1))
    assert again.reused_blocks == 20 and again.origin.computed == 3
    turns.check_tokens(again)


def test_a_block_whose_home_is_on_nvme_takes_no_place_in_dram_as_well(tmp_path: Path) -> None:
    turns = Turns(tmp_path, hbm=16, dram=8, nvme=60)
    sequence = turns.add(0, 20, output_max=1)
    turns.until(sequence)
    turns.check_tokens(sequence)
    copies = turns.tiers.metrics.demoted_blocks.value
    assert copies("hbm", "nvme") == 10 and copies("hbm", "dram") == 8 + 2, "8 homes, and 2 blocks that needed none"


def test_rows_of_one_that_is_over_are_kept_until_nvme_has_them(tmp_path: Path) -> None:
    turns = Turns(tmp_path, hbm=8, dram=10, nvme=60)
    share(turns.dram)
    turns.tiers.io[Tier.NVME].hanging.add(Operation.WRITE)
    sequence = turns.add(0, 11, output_max=1)
    turns.until(sequence)
    assert len(turns.dram.holdings) == 5, "half of DRAM's rows"
    turns.step()
    turns.step()
    kept = [turns.dram.holds(one) for one in sequence.hashes[:9]]
    assert kept == [True] * 9, "a block that needed no home has taken the place of one that NVMe lacks"
    turns.tiers.io[Tier.NVME].hanging.clear()
    turns.check_tokens(sequence)
    assert all(turns.tiers.shelves[Tier.NVME].holds(one) for one in sequence.hashes)


def test_the_next_one_does_not_evict_from_nvme_what_it_is_about_to_use(tmp_path: Path) -> None:
    turns = Turns(tmp_path, hbm=8, dram=6, nvme=24)
    turns.until(other := turns.add(0, 2, output_max=1, seed=1))
    turns.tiers.settle(turns.now)
    turns.until(first := turns.add(1, 20, output_max=1))
    turns.tiers.settle(turns.now)
    nvme = turns.tiers.shelves[Tier.NVME]
    assert all(nvme.holds(one) for one in (*other.hashes, *first.hashes)) and nvme.used_count == 22
    second = turns.add(2, 20, output_max=1)
    turns.until(second)
    assert second.reused_blocks == 20 and second.origin.computed == 3
    turns.check_tokens(first, second)
    assert all(nvme.holds(one) for one in (*other.hashes, *first.hashes)), "rows went for others that nobody needed"


def test_rows_of_dram_behind_one_that_it_lacks_are_attended_in_place(tmp_path: Path) -> None:
    turns = Turns(tmp_path, hbm=8, dram=24, nvme=24)
    first = turns.add(0, 20)
    turns.until(first)
    turns.tiers.settle(turns.now)
    turns.tiers.drain(Tier.HBM, turns.now)
    turns.dram.drop(turns.dram.find(first.hashes[1:2]), "evicted")
    evicted = turns.dram.stats()["evictions"]
    second = turns.add(1, 20, output_max=1)
    turns.until(second)
    assert (second.origin.dram, second.origin.nvme, second.origin.computed) == (19 * BLOCK, BLOCK, 3)
    assert turns.dram.stats()["evictions"] == evicted, "rows of the prompt itself went for rows that it did not need"
    turns.check_tokens(first, second)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 9, 30, 60])
def test_one_that_is_cancelled_in_any_state_gives_everything_back(count: int, turns: Turns) -> None:
    first = turns.add(0, 20)
    turns.until(first)
    sequence, waiting = turns.add(1, 20, output_max=30), turns.add(2, 20, seed=1)
    for turn in range(count):
        turns.step(move=turn % 3 > 0)
    for one in (waiting, sequence):
        turns.engine.scheduler.finish(one, FinishReason.CANCELLED, turns.now)
        turns.engine.scheduler.finish(one, FinishReason.CANCELLED, turns.now)
    turns.check_all_given_back()


def test_the_length_of_any_context_works_around_the_bounds_of_blocks(tmp_path: Path) -> None:
    turns = Turns(tmp_path, hbm=8, slots_max=2)
    for number, (length, output_max) in enumerate([(65, 1), (64, 2), (63, 9), (71, 2), (72, 1), (73, 8), (1, 90)]):
        sequence = make_sequence(number, [(number + place * 7) % 50 for place in range(length)], output_max)
        turns.engine.scheduler.add(sequence)
        assert sequence.streamed
        turns.until(sequence)
        turns.check_tokens(sequence)
