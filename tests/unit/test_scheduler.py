"""Scheduler: budget, chunks, order of service, preemption, giving up, and what finishing gives back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from fakes import LAYOUT, SteppedEngine, SteppedTiers, make_sequence

from kvtier.block import Tier
from kvtier.io.base import Operation
from kvtier.request import FinishReason, Origin
from kvtier.scheduler import STALL_S, Scheduler, SchedulerLimits
from kvtier.sequence import Sequence, SequenceState

BLOCK = LAYOUT.block_tokens


def make_engine(
    folder: Path,
    hbm: int = 16,
    step_tokens: int = 64,
    sequences_max: int = 8,
    dram: int = 16,
    nvme: int = 0,
    spare_count: int = 0,
    beside_tokens: int | None = None,
) -> SteppedEngine:
    tiers = SteppedTiers(folder, hbm, dram, nvme, queue_max=64, spare_count=spare_count)
    limits = SchedulerLimits(step_tokens, sequences_max, beside_tokens)
    return SteppedEngine(tiers, Scheduler(tiers.store, limits))


def add(engine: SteppedEngine, number: int, length: int, output_max: int = 4, priority: int = 0) -> Sequence:
    prompt = [(number * 31 + position) % 50 for position in range(length)]
    sequence = make_sequence(number, prompt, output_max, priority)
    engine.scheduler.add(sequence)
    return sequence


def step(engine: SteppedEngine, now: float = 0.0) -> dict[int, int]:
    """One step; tokens planned by sequence number."""
    plan = engine.step(now, lambda _: None)
    engine.scheduler.check()
    return {part.sequence.number: part.count for part in plan}


def test_a_long_prompt_is_prefilled_in_chunks_of_the_budget(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, step_tokens=20)
    sequence = add(engine, 0, 50, output_max=2)
    assert [step(engine) for _ in range(4)] == [{0: 20}, {0: 20}, {0: 10}, {0: 1}]
    assert sequence.finish_reason is FinishReason.LENGTH and sequence.output_count == 2
    assert sequence.tokens[50:] == engine.model.expected(sequence.tokens[:50], 2)


def test_decoding_goes_before_prefill_in_one_budget(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, step_tokens=10)
    add(engine, 0, 10)
    assert step(engine) == {0: 10}
    add(engine, 1, 30)
    assert step(engine) == {0: 1, 1: 9}


def test_prompts_have_less_of_a_pass_while_others_decode(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, step_tokens=40, beside_tokens=8)
    first, second = add(engine, 0, 10, output_max=3), add(engine, 1, 5, output_max=3)
    assert step(engine) == {0: 10, 1: 5}
    long = add(engine, 2, 70, output_max=2)
    assert step(engine) == {0: 1, 1: 1, 2: 6}
    assert step(engine) == {0: 1, 1: 1, 2: 6}
    assert first.finish_reason is second.finish_reason is FinishReason.LENGTH
    assert [step(engine) for _ in range(3)] == [{2: 40}, {2: 18}, {2: 1}]
    assert long.tokens[70:] == engine.model.expected(long.tokens[:70], 2)


def test_prompts_have_half_of_a_pass_however_many_decode(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, step_tokens=40, beside_tokens=7, hbm=32)
    for number in range(6):
        add(engine, number, 2, output_max=3)
    step(engine)
    add(engine, 6, 30)
    assert step(engine) == dict.fromkeys(range(6), 1) | {6: 4}


def test_no_more_than_the_configured_number_of_sequences_run(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, sequences_max=2)
    for number in range(4):
        add(engine, number, 5, output_max=3)
    assert set(step(engine)) == {0, 1} and engine.scheduler.waiting_count == 2


def test_the_first_token_of_a_whole_known_prompt_still_has_something_to_compute(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    add(engine, 0, 4 * BLOCK, output_max=1)
    step(engine)
    again = make_sequence(1, [position % 50 for position in range(4 * BLOCK)], 1)
    engine.scheduler.add(again)
    assert step(engine) == {1: BLOCK}
    assert again.origin == Origin(hbm=3 * BLOCK, computed=BLOCK)
    assert again.reused_blocks == 3 and again.allocated_blocks == 1


def test_generated_blocks_are_matched_by_a_prompt_that_goes_on_from_them(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    first = add(engine, 0, 6, output_max=14)
    while first.state is not SequenceState.FINISHED:
        step(engine)
    second = make_sequence(1, [*first.tokens, 7], 1)
    engine.scheduler.add(second)
    step(engine)
    assert second.origin.hbm == 2 * BLOCK


def test_the_latest_sequence_yields_its_slots_to_the_oldest_and_resumes_from_the_tiers(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, hbm=6)
    old = add(engine, 0, 2 * BLOCK, output_max=2 * BLOCK)
    young = add(engine, 1, 2 * BLOCK + 1, output_max=2 * BLOCK)
    for turn in range(200):
        step(engine, turn * 0.01)
        engine.tiers.step()
    assert engine.scheduler.preemption_count >= 1 and old.preempted_count == 0 and young.preempted_count >= 1
    for sequence in (old, young):
        assert sequence.finish_reason is FinishReason.LENGTH
        prompt = sequence.tokens[: sequence.prompt_count]
        assert sequence.tokens[sequence.prompt_count :] == engine.model.expected(prompt, 2 * BLOCK)
    assert engine.passes[1] < young.prompt_count + 3 * BLOCK, "it computed what the tiers still had"
    assert sum(young.origin.as_dict().values()) == young.prompt_count


def test_a_preempted_sequence_keeps_its_rank_before_later_arrivals(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, hbm=6, sequences_max=2)
    add(engine, 0, 2 * BLOCK, output_max=2 * BLOCK)
    young = add(engine, 1, 2 * BLOCK + 1, output_max=2 * BLOCK)
    later = add(engine, 2, 4, output_max=2)
    waited = False
    for turn in range(300):
        step(engine, turn * 0.01)
        engine.tiers.step()
        if young.preempted_count > 0 and young.state is SequenceState.WAITING:
            waited = True
            assert later.state is SequenceState.WAITING
    assert waited and not engine.scheduler.sequences


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_sequence_cancelled_in_any_state_gives_all_slots_back(turns: int, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, step_tokens=BLOCK)
    sequence = add(engine, 0, 4 * BLOCK)
    for _ in range(turns):
        step(engine)
    engine.scheduler.finish(sequence, FinishReason.CANCELLED, 0.0)
    engine.scheduler.finish(sequence, FinishReason.CANCELLED, 0.0)
    engine.tiers.settle(0.0)
    engine.scheduler.check()
    assert engine.tiers.store.available_count == 16 and not engine.scheduler.sequences
    assert engine.tiers.store.stats()["hbm_blocks_sealed"] == turns


def test_a_sequence_cancelled_while_it_fetches_gives_all_slots_back(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    add(engine, 0, 4 * BLOCK, output_max=1)
    step(engine)
    engine.tiers.drain(Tier.HBM)
    again = make_sequence(1, [position % 50 for position in range(4 * BLOCK)], 1)
    engine.scheduler.add(again)
    assert step(engine) == {} and again.state is SequenceState.FETCHING
    assert engine.scheduler.next_deadline() == 5.0
    engine.scheduler.finish(again, FinishReason.CANCELLED, 0.0)
    engine.tiers.settle(0.0)
    engine.scheduler.check()
    assert engine.tiers.store.available_count == 16


def test_others_go_on_while_one_waits_for_its_prefix(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    add(engine, 0, 4 * BLOCK, output_max=1)
    step(engine)
    engine.tiers.drain(Tier.HBM)
    engine.tiers.io[Tier.DRAM].hanging = {Operation.READ}
    engine.scheduler.add(make_sequence(1, [position % 50 for position in range(4 * BLOCK)], 1))
    add(engine, 2, 10)
    assert step(engine) == {2: 10}
    engine.tiers.io[Tier.DRAM].hanging.clear()
    engine.tiers.step()
    assert step(engine) == {1: BLOCK, 2: 1}


def test_a_running_sequence_preempts_later_ones_though_an_unrelated_write_hangs(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, hbm=7)
    add(engine, 9, BLOCK, output_max=1)
    step(engine)
    step(engine)
    engine.tiers.io[Tier.DRAM].freeze()
    assert engine.tiers.store.busy
    old, young = add(engine, 10, BLOCK, output_max=3 * BLOCK), add(engine, 11, BLOCK, output_max=4 * BLOCK)
    now = 100.0
    while old.state is not SequenceState.FINISHED:
        engine.tiers.step()
        step(engine, now)
        now += 0.1
        assert now < 110.0, "it waits for a write that never ends"
    assert young.preempted_count > 0


def test_a_running_sequence_does_not_wait_for_ever_for_transfers_that_keep_coming(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, hbm=4, dram=0)
    engine.tiers.store.awaits_slots = lambda _: True  # type: ignore[method-assign]
    old, young = add(engine, 0, BLOCK, output_max=3 * BLOCK), add(engine, 1, BLOCK, output_max=2 * BLOCK + 1)
    now = 0.0
    while old.state is not SequenceState.FINISHED:
        step(engine, now)
        now += 0.1
        assert now < 10.0
    assert young.preempted_count > 0 and old.preempted_count == 0


def test_time_spent_behind_others_does_not_count_as_a_stall(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, hbm=4, dram=4)
    engine.tiers.io[Tier.DRAM].hanging = {Operation.WRITE}
    add(engine, 0, 2 * BLOCK, output_max=1)
    step(engine)
    step(engine)  # two slots are held by writes now
    blocked = add(engine, 1, 3 * BLOCK, output_max=1)
    step(engine, 10.0)
    assert blocked.stalled_since is not None
    ahead = add(engine, 2, 4, output_max=2, priority=-1)
    step(engine, 10.1)
    assert ahead.state is SequenceState.RUNNING
    step(engine, 10.0 + 2 * STALL_S)
    assert ahead.state is SequenceState.FINISHED
    step(engine, 10.1 + 2 * STALL_S)
    assert blocked.state is SequenceState.WAITING and not engine.given_up
    step(engine, 10.2 + 3 * STALL_S + 1)
    assert engine.given_up == [blocked]


def test_growth_does_not_wait_for_writes_of_blocks_that_sequences_hold(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, hbm=7)
    old, young = add(engine, 0, 2 * BLOCK, output_max=2 * BLOCK), add(engine, 1, 2 * BLOCK + 3, output_max=2 * BLOCK)
    engine.tiers.io[Tier.DRAM].hanging = {Operation.WRITE}  # all is written, no write ends, none is overdue
    for turn in range(2 * BLOCK):
        planned = step(engine, turn * 0.001)
        assert 0 in planned, f"step {turn}: the oldest waits though no write's end would give it a slot"
    assert engine.tiers.store.busy and young.preempted_count > 0
    assert old.state is SequenceState.FINISHED and old.finish_reason is FinishReason.LENGTH


def test_growth_waits_a_little_for_a_slot_that_only_a_write_holds(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, hbm=6)
    gone = add(engine, 9, 2 * BLOCK, output_max=1, priority=-1)
    old, young = add(engine, 0, BLOCK, output_max=2 * BLOCK), add(engine, 1, BLOCK, output_max=2 * BLOCK)
    engine.tiers.io[Tier.DRAM].hanging = {Operation.WRITE}
    now = 0.0
    while len(step(engine, now)) > 0:
        now += 0.001
        assert now < 1.0
    assert gone.state is SequenceState.FINISHED and young.preempted_count == 0
    engine.tiers.io[Tier.DRAM].hanging.clear()
    engine.tiers.step()
    assert set(step(engine, now)) == {0, 1} and old.preempted_count == young.preempted_count == 0


@pytest.mark.parametrize("nvme", [0, 64])
def test_a_preempted_sequence_computes_its_partial_block_and_one_more_again_at_most(nvme: int, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, hbm=12, dram=64, nvme=nvme)
    sequences = [add(engine, number, BLOCK + 3 * number, output_max=6 * BLOCK) for number in range(5)]
    now = 0.0
    while engine.scheduler.sequences:
        step(engine, now)
        engine.tiers.step()
        now += 0.01
        assert now < 100.0
    assert sum(sequence.preempted_count for sequence in sequences) >= 3, "HBM was never tight"
    for sequence in sequences:
        needed = len(sequence.tokens) - 1
        again = engine.passes[sequence.number] - needed
        assert 0 <= again < 2 * BLOCK * sequence.preempted_count + 1, (sequence.number, again, sequence.preempted_count)
    assert sum(engine.passes.values()) > sum(len(sequence.tokens) - 1 for sequence in sequences)


def test_slots_that_hung_transfers_may_keep_are_not_counted_on(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, hbm=6, spare_count=2)
    assert engine.tiers.store.usable_count == 4
    with pytest.raises(AssertionError):
        add(engine, 0, 4 * BLOCK, output_max=2)
    add(engine, 1, 4 * BLOCK, output_max=1)
    hung = engine.tiers.store.allocate(2)
    assert hung is not None and step_with(engine, hung) == {1: 4 * BLOCK}


def step_with(engine: SteppedEngine, hung: list[int]) -> dict[int, int]:
    """One step while somebody holds slots that belong to no sequence."""
    plan = engine.step(0.0, lambda _: None)
    engine.tiers.store.check(engine.scheduler.held() + Counter(hung))
    return {part.sequence.number: part.count for part in plan}


def test_a_sequence_that_can_never_fit_is_a_bug_of_the_caller(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, hbm=4)
    with pytest.raises(AssertionError):
        add(engine, 0, 4 * BLOCK, output_max=2)
    add(engine, 1, 4 * BLOCK, output_max=1)
    assert step(engine) == {1: 4 * BLOCK}


def test_what_a_finished_sequence_leaves_behind_is_evicted_from_its_end(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, hbm=8, dram=0)
    sequence = add(engine, 0, 2 * BLOCK, output_max=3 * BLOCK)
    for turn in range(3 * BLOCK):
        step(engine, float(turn))
    assert sequence.state is SequenceState.FINISHED
    assert engine.tiers.store.allocate(6) is not None
    fetch = engine.tiers.store.fetch(sequence.hashes, 0, 99.0)
    assert fetch is not None and len(fetch.slots) == 2
