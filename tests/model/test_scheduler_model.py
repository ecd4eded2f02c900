"""Random loads on the scheduler over a real store with tiny tiers and a fake model that knows every byte to find.

The model's K, V and next tokens are digests of all tokens so far, checked by address in every pass: a wrong slot, a
stale block or a wrong order fails at once. No torch, no threads, no clock: thousands of steps a second, seeded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes import LAYOUT, SteppedEngine, SteppedTiers, make_sequence

from kvtier.block import Tier
from kvtier.io.base import Operation
from kvtier.io.faulty import FaultyCalls, seeded_faults
from kvtier.request import FinishReason
from kvtier.scheduler import Scheduler, SchedulerLimits
from kvtier.sequence import Sequence, SequenceState

BLOCK = LAYOUT.block_tokens
STEP_S = 0.01


@dataclass
class Load:
    """A run of arrivals and what became of them."""

    engine: SteppedEngine
    limits: SchedulerLimits
    chance: random.Random
    hbm_tokens: int

    def __post_init__(self) -> None:
        self.now = 1000.0
        self.live: dict[int, Sequence] = {}
        self.finished: list[Sequence] = []
        self.cancelled = 0
        self.prefixes = [self.tokens(self.chance.randrange(1, 4) * BLOCK) for _ in range(3)]
        self.numbers = iter(range(1 << 30))

    def tokens(self, count: int) -> list[int]:
        return [self.chance.randrange(50) for _ in range(count)]

    def arrive(self) -> None:
        """A new request: often a known prefix, lengths around block bounds, sometimes as long as HBM allows."""
        length = self.chance.randrange(1, 4) * BLOCK + self.chance.choice([-1, 0, 1])
        prompt = (self.chance.choice(self.prefixes) + self.tokens(length))[: self.hbm_tokens]
        if self.chance.random() < 0.3:
            prompt = self.tokens(length)
        room = self.hbm_tokens + 1 - len(prompt)
        output_max = room if self.chance.random() < 0.05 else self.chance.randrange(1, min(room, 30) + 1)
        stop_ids = frozenset({self.chance.randrange(50)}) if self.chance.random() < 0.2 else frozenset[int]()
        sequence = make_sequence(next(self.numbers), prompt, output_max, self.chance.choice([0, 0, 0, 1, -1]), stop_ids)
        self.live[sequence.number] = sequence
        self.engine.scheduler.add(sequence)

    def cancel(self) -> None:
        if self.live:
            sequence = self.chance.choice(list(self.live.values()))
            self.engine.scheduler.finish(sequence, FinishReason.CANCELLED, self.now)
            self.engine.model.forget(sequence.number)
            del self.live[sequence.number]
            self.cancelled += 1

    def ended(self, sequence: Sequence) -> None:
        del self.live[sequence.number]
        self.finished.append(sequence)

    def step(self) -> None:
        """One step of the engine, with the bounds of a pass checked, then all books."""
        before = len(self.finished)
        plan = self.engine.step(self.now, self.ended)
        assert sum(part.count for part in plan) <= self.limits.step_tokens
        assert all(part.count > 0 for part in plan)
        assert len({part.sequence.number for part in plan}) == len(plan) <= self.limits.sequences_max
        assert self.engine.scheduler.running_count <= self.limits.sequences_max
        self.engine.scheduler.check()
        assert {sequence.number for sequence in self.engine.scheduler.sequences} == set(self.live)
        for sequence in self.finished[before:]:
            self.judge(sequence)
        self.now += STEP_S

    def judge(self, sequence: Sequence) -> None:
        """A finished sequence has exactly the tokens it must have, and an origin for each prompt token."""
        if sequence.finish_reason is FinishReason.ERROR:
            return
        outputs = sequence.tokens[sequence.prompt_count :]
        assert outputs == self.engine.model.expected(sequence.tokens[: sequence.prompt_count], len(outputs))
        stopped = [token in sequence.stop_ids for token in outputs]
        assert not any(stopped[:-1])
        if sequence.finish_reason is FinishReason.STOP:
            assert stopped[-1]
        else:
            assert sequence.finish_reason is FinishReason.LENGTH and len(outputs) == sequence.output_max
        assert sum(sequence.origin.as_dict().values()) == sequence.prompt_count
        assert sequence.origin.hbm % BLOCK == sequence.origin.dram % BLOCK == sequence.origin.nvme % BLOCK == 0

    def oldest(self) -> Sequence | None:
        return min(self.live.values(), key=lambda sequence: sequence.rank, default=None)


def make_load(
    folder: Path, seed: int, hbm: int, limits: SchedulerLimits, dram: int = 16, nvme: int = 48, faults: int = 0
) -> Load:
    calls = FaultyCalls(seeded_faults(seed, faults, nth_max=3000)) if faults else None
    tiers = SteppedTiers(folder, hbm, dram, nvme, calls=calls, seed=seed, fetch_deadline_s=0.5, late_s=0.5)
    engine = SteppedEngine(tiers, Scheduler(tiers.store, limits))
    return Load(engine, limits, random.Random(seed), hbm * BLOCK)


def run_until_idle(load: Load, steps_max: int) -> None:
    """No more arrivals: everything must end by itself."""
    for _ in range(steps_max):
        if not load.live:
            return
        load.engine.tiers.step()
        load.step()
    raise AssertionError(f"{len(load.live)} sequences never end: {list(load.live.values())[:2]}")


def total_origin(load: Load) -> dict[str, int]:
    totals = dict.fromkeys(("hbm", "dram", "nvme", "computed"), 0)
    for sequence in load.finished:
        for name, count in sequence.origin.as_dict().items():
            totals[name] += count
    return totals


@pytest.mark.parametrize(
    ("seed", "hbm", "step_tokens", "sequences_max"),
    [(1, 9, 40, 4), (2, 12, 17, 8), (3, 8, 200, 6), (4, 30, 9, 8), (5, 8, 3, 5)],
)
def test_random_loads_end_with_the_right_tokens(
    seed: int, hbm: int, step_tokens: int, sequences_max: int, tmp_path: Path
) -> None:
    print("seed", seed)
    load = make_load(tmp_path, seed, hbm, SchedulerLimits(step_tokens, sequences_max), faults=60)
    for _ in range(1500):
        if load.chance.random() < 0.25 and len(load.live) < 12:
            load.arrive()
        if load.chance.random() < 0.02:
            load.cancel()
        load.engine.tiers.step(load.chance.randrange(0, 5))
        load.step()
    run_until_idle(load, 3000)
    load.engine.tiers.settle(load.now + 100)
    load.engine.scheduler.check()
    assert load.engine.tiers.store.available_count == hbm, "slots were lost"
    assert not load.engine.given_up and load.cancelled > 3
    assert len(load.finished) > 20
    assert min(total_origin(load).values()) > 0, total_origin(load)
    if hbm < 20:
        assert load.engine.scheduler.preemption_count > 5, "HBM was never tight"


@pytest.mark.parametrize("seed", range(3))
def test_the_oldest_sequence_goes_on_whatever_comes_after_it(seed: int, tmp_path: Path) -> None:
    print("seed", seed)
    load = make_load(tmp_path, seed, 8, SchedulerLimits(step_tokens=32, sequences_max=6))
    waited, watched = 0, -1
    for _ in range(1200):
        while len(load.live) < 8:
            load.arrive()
        oldest = load.oldest()
        assert oldest is not None
        done, preempted = oldest.computed_count, oldest.preempted_count
        load.engine.tiers.step(load.chance.randrange(0, 6))
        load.step()
        moved = oldest.computed_count > done or oldest.state is SequenceState.FINISHED
        assert oldest.preempted_count == preempted, "the oldest yields to a later one"
        waited = waited + 1 if oldest.number == watched and not moved else 0
        watched = oldest.number
        assert waited <= 100, f"sequence {oldest.number} stands still in state {oldest.state}"
    assert load.engine.scheduler.preemption_count > 20


def hang(load: Load, operation: Operation, tiers: tuple[Tier, ...] = (Tier.DRAM, Tier.NVME)) -> None:
    for tier in tiers:
        load.engine.tiers.io[tier].hanging.add(operation)


def test_reads_that_hang_for_good_cost_their_deadline_and_no_request(tmp_path: Path) -> None:
    load = make_load(tmp_path, 7, 24, SchedulerLimits(64, 4))
    load.hbm_tokens = 6 * BLOCK
    for _ in range(300):
        if load.chance.random() < 0.3:
            load.arrive()
        load.engine.tiers.step()
        load.step()
    hang(load, Operation.READ)
    stuck = 0
    for turn in range(2000):
        if load.chance.random() < 0.1 and len(load.live) < 8:
            load.arrive()
        load.engine.tiers.step()
        load.step()
        stuck = load.engine.tiers.store.transfer_count if turn == 400 else stuck
    run_until_idle(load, 1000)
    assert not load.engine.given_up and len(load.finished) > 100
    assert 0 < load.engine.tiers.store.transfer_count <= stuck, "each probe of a hung shelf costs another slot"
    load.engine.tiers.store.publish_metrics()
    assert load.engine.tiers.metrics.shelf_failures.value("nvme", "late") > 0


def test_writes_that_hang_hold_their_slots_and_the_rest_of_hbm_still_serves(tmp_path: Path) -> None:
    load = make_load(tmp_path, 8, 24, SchedulerLimits(64, 4), dram=16, nvme=0)
    hang(load, Operation.WRITE, (Tier.DRAM,))
    load.hbm_tokens = 6 * BLOCK
    for _ in range(600):
        if load.chance.random() < 0.2 and len(load.live) < 8:
            load.arrive()
        load.step()
    run_until_idle(load, 4000)
    stuck = load.engine.tiers.store.transfer_count
    assert 0 < stuck <= 16 and load.engine.tiers.store.available_count == 24 - stuck
    assert not load.engine.given_up and len(load.finished) > 50


def test_a_sequence_whose_slots_hung_writes_hold_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    load = make_load(tmp_path, 9, 20, SchedulerLimits(400, 4), dram=16, nvme=0)
    load.arrive()
    run_until_idle(load, 100)
    hang(load, Operation.WRITE, (Tier.DRAM,))
    long = make_sequence(next(load.numbers), load.tokens(16 * BLOCK), 1)
    load.live[long.number] = long
    load.engine.scheduler.add(long)
    run_until_idle(load, 100)
    load.step()
    assert load.engine.tiers.store.transfer_count == 16
    big = make_sequence(next(load.numbers), load.tokens(10 * BLOCK), 1)
    load.live[big.number] = big
    load.engine.scheduler.add(big)
    waited = steps_until(load, lambda: not load.live)
    assert load.engine.given_up == [big] and 29.0 < waited * STEP_S < 32.0
    small = make_sequence(next(load.numbers), load.tokens(2 * BLOCK), 4)
    load.live[small.number] = small
    load.engine.scheduler.add(small)
    assert steps_until(load, lambda: not load.live) < 20
    assert small.finish_reason is FinishReason.LENGTH


def steps_until(load: Load, condition: object, steps_max: int = 6000) -> int:
    assert callable(condition)
    for step in range(steps_max):
        if condition():
            return step
        load.step()
    raise AssertionError("it never comes to that")


def each_rank(load: Load) -> Iterator[tuple[int, int]]:
    return (sequence.rank for sequence in load.finished)


def test_a_sequence_of_higher_priority_overtakes_those_that_wait(tmp_path: Path) -> None:
    load = make_load(tmp_path, 11, 8, SchedulerLimits(64, 1))
    for number, priority in enumerate([1, 1, 0, 1, -1]):
        sequence = make_sequence(number, load.tokens(10), 3, priority)
        load.live[number] = sequence
        load.engine.scheduler.add(sequence)
    run_until_idle(load, 200)
    assert [number for _, number in each_rank(load)] == [4, 2, 0, 1, 3]
