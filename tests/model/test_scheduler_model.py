"""Random loads on the scheduler over a real store with tiny tiers and a fake model that knows every byte to find.

The model's K, V and next tokens are digests of all tokens so far, checked by address in every pass: a wrong slot, a
stale block or a wrong order fails at once. No torch, no threads, no clock: thousands of steps a second, seeded.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes import LAYOUT, FakeModel, SteppedEngine, SteppedTiers, make_sequence, random_retention

from kvtier.block import Tier
from kvtier.cost import LoadPolicy, Work
from kvtier.io.base import Operation
from kvtier.io.faulty import FaultyCalls, seeded_faults
from kvtier.request import FinishReason
from kvtier.retention import Retention
from kvtier.scheduler import Scheduler, SchedulerLimits
from kvtier.sequence import Sequence, SequenceState
from kvtier.streams import StreamLimits
from kvtier.terms import SlotLimits
from tests.rows import directory_of

BLOCK = LAYOUT.block_tokens
STEP_S = 0.01
PINS_MAX = 4
"""Rows that requests may pin beside streamed ones."""


@dataclass
class Load:
    """A run of arrivals and what became of them."""

    engine: SteppedEngine
    limits: SchedulerLimits
    chance: random.Random
    hbm_tokens: int
    asking: bool = False
    """Half of the requests ask for something for their blocks, read nothing or write nothing."""
    streamed_tokens: int = 0
    """Some requests are so long, in all, at most: they are streamed."""

    def __post_init__(self) -> None:
        self.now = 1000.0
        self.writers: list[Sequence] = []
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
        priority = self.chance.choice([0, 0, 0, 1, -1])
        if self.streamed_tokens and self.chance.random() < 0.4:
            total = self.chance.randrange(self.hbm_tokens + 1, self.streamed_tokens + 1)
            output_max = self.chance.randrange(1, 40)
            prompt = (prompt + self.tokens(total))[: total + 1 - output_max]
        sequence = make_sequence(next(self.numbers), prompt, output_max, priority, stop_ids, **self.wishes())
        self.writers += [sequence] if sequence.cache_write else []
        self.live[sequence.number] = sequence
        self.engine.scheduler.add(sequence)

    def wishes(self) -> dict[str, Any]:
        """What becomes of the blocks of a new request."""
        if not self.asking:
            return {}
        cache_read, cache_write = (self.chance.random() > 0.15 for _ in range(2))
        retention = random_retention(self.chance, self.now)
        if not cache_write:
            retention = Retention(tenant=retention.tenant)
        return {"retention": retention, "cache_read": cache_read, "cache_write": cache_write}

    def lose_a_row(self) -> bool:
        """Somebody else overwrites a row that a streamed sequence has: in DRAM as after a keeper's death, on NVMe
        without a word."""
        tier = self.chance.choice([Tier.DRAM, Tier.NVME])
        shelf = self.engine.tiers.shelves[tier]
        leases = list(shelf.holdings._leases)
        if leases:
            lease = self.chance.choice(leases)
            self.engine.tiers.corrupt(
                tier, lease.record.slot, 4096 + self.chance.randrange(BLOCK * FakeModel.TOKEN_BYTES)
            )
            if tier is Tier.DRAM:  # of two sequences that have it one may know it with what the other has asked for it
                shelf.holdings._lost += [other for other in leases if other.record.slot == lease.record.slot]
        return bool(leases)

    def cancel(self) -> None:
        if self.live:
            sequence = self.chance.choice(list(self.live.values()))
            self.engine.cancel(sequence, self.now)
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
        assert sequence.cache_read or sequence.origin.computed == sequence.prompt_count
        assert sequence.origin.hbm % BLOCK == sequence.origin.dram % BLOCK == sequence.origin.nvme % BLOCK == 0

    def check_that_only_writers_are_found(self) -> None:
        """No tier has a block that only sequences computed which write nothing."""
        written = {block_hash for sequence in self.writers for block_hash in sequence.hashes}
        store = self.engine.tiers.store
        found = set(store._resident._prefix._slots)
        for shelf in self.engine.tiers.shelves.values():
            found |= {record.block_hash for record in directory_of(shelf).records()}
        assert found and found <= written

    def oldest(self) -> Sequence | None:
        return min(self.live.values(), key=lambda sequence: sequence.rank, default=None)


def make_load(
    folder: Path,
    seed: int,
    hbm: int,
    limits: SchedulerLimits,
    dram: int = 16,
    nvme: int = 48,
    faults: int = 0,
    asking: bool = False,
    policy: LoadPolicy = LoadPolicy.ALWAYS,
    streams: StreamLimits | None = None,
    staged_blocks: int = 0,
) -> Load:
    calls = FaultyCalls(seeded_faults(seed, faults, nth_max=3000)) if faults else None
    pins = SlotLimits(PINS_MAX, None) if streams else None
    tiers = SteppedTiers(
        folder,
        hbm,
        dram,
        nvme,
        calls=calls,
        seed=seed,
        fetch_deadline_s=0.5,
        late_s=0.5,
        load=policy,
        limits=pins,
        staged_blocks=staged_blocks,
    )
    engine = SteppedEngine(tiers, Scheduler(tiers.store, limits, streams))
    streamed_tokens = (streams.slots_max + dram - PINS_MAX + staged_blocks) * BLOCK if streams else 0
    return Load(engine, limits, random.Random(seed), hbm * BLOCK, asking, streamed_tokens)


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
    [
        (1, 9, 40, 4),
        pytest.param(2, 12, 17, 8, marks=pytest.mark.long),
        pytest.param(3, 8, 200, 6, marks=pytest.mark.long),
        pytest.param(4, 30, 9, 8, marks=pytest.mark.long),
        (5, 8, 3, 5),
    ],
)
def test_random_loads_end_with_the_right_tokens(
    seed: int, hbm: int, step_tokens: int, sequences_max: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print("seed", seed)
    limits = SchedulerLimits(step_tokens, sequences_max, beside_tokens=step_tokens // 3)
    load = make_load(tmp_path, seed, hbm, limits, faults=60, asking=True)
    monkeypatch.setattr(time, "time", lambda: load.now)
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
    load.check_that_only_writers_are_found()
    assert load.engine.tiers.store.stats()["hbm_expired"] > 0
    assert any(not sequence.cache_read and sequence.preempted_count for sequence in load.finished) or hbm >= 20
    if hbm < 20:
        assert load.engine.scheduler.preemption_count > 5, "HBM was never tight"


STREAMED = [(31, 8, 2, 40, 0, False), (32, 9, 3, 17, 20, False), (33, 9, 4, 200, 20, True), (34, 9, 3, 40, 0, True)]
"""Seed, slots of HBM, working set, tokens of a step, blocks that may lie on NVMe, whether rows get lost."""


@pytest.mark.long
def test_streamed_and_resident_sequences_end_with_the_right_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()
    for seed, hbm, slots_max, step_tokens, staged_blocks, losing in STREAMED:
        print("seed", seed)
        limits, streams = SchedulerLimits(step_tokens, 5), StreamLimits(2, slots_max)
        folder = tmp_path / str(seed)
        folder.mkdir()
        dram = 20 if staged_blocks else 40
        load = make_load(
            folder, seed, hbm, limits, dram, faults=60, asking=True, streams=streams, staged_blocks=staged_blocks
        )
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda load=load: load.now)
            run_streamed(load, losing, seen)
        shelves = load.engine.tiers.shelves.values()
        assert load.engine.tiers.store.available_count == hbm, "slots were lost"
        assert not load.engine.given_up and all(len(shelf.holdings) == 0 for shelf in shelves), "rows were lost"
        streamed_bytes = load.engine.tiers.metrics.streamed_bytes
        assert streamed_bytes.value("dram") > 0 and (streamed_bytes.value("nvme") > 0) == (staged_blocks > 0)
        load.check_that_only_writers_are_found()
        streamed = [sequence for sequence in load.finished if sequence.streamed]
        seen["streamed"] += len(streamed)
        seen["resident"] += len(load.finished) - len(streamed)
        seen["cancelled"] += load.cancelled
        seen["private"] += sum(not (sequence.cache_read and sequence.cache_write) for sequence in streamed)
        seen["preempted"] += sum(sequence.preempted_count for sequence in streamed)
        for sequence in streamed:
            seen.update(sequence.origin.as_dict())
    wanted = {"together", "fetching", "lost", "streamed", "resident", "cancelled", "private", "preempted"}
    assert min(seen[name] for name in wanted) > 5, seen
    assert min(seen[name] for name in ("hbm", "dram", "nvme", "computed")) > 0, seen


def run_streamed(load: Load, losing: bool, seen: Counter[str]) -> None:
    """Arrivals, cancellations, failing writes and lost rows; then everything that runs comes to its end."""
    for _ in range(700):
        if load.chance.random() < 0.15 and len(load.live) < 10:
            load.arrive()
        if load.chance.random() < 0.01:
            load.cancel()
        if losing and load.chance.random() < 0.05:
            seen["lost"] += load.lose_a_row()
        load.engine.tiers.step(load.chance.randrange(0, 6))
        load.step()
        streamed = [sequence for sequence in load.live.values() if sequence.streamed]
        seen["together"] += len({sequence.streamed for sequence in load.engine.scheduler._running}) == 2
        seen["fetching"] += any(sequence.state is SequenceState.FETCHING for sequence in streamed)
    run_until_idle(load, 6000)
    load.engine.tiers.settle(load.now + 100)
    load.engine.scheduler.check()


@pytest.mark.parametrize("hung", [False, True])
def test_what_is_read_or_computed_by_its_cost_ends_with_the_right_tokens(hung: bool, tmp_path: Path) -> None:
    load = make_load(tmp_path, 24, 12, SchedulerLimits(24, 5), faults=40, policy=LoadPolicy.AUTO)
    store, chance = load.engine.tiers.store, load.chance
    load.hbm_tokens, hung_count = 9 * BLOCK, 0
    for turn in range(600):
        if chance.random() < 0.25 and len(load.live) < 10:
            load.arrive()
        if chance.random() < 0.02:
            load.cancel()
        if hung and hung_count < 2 and turn > 100:
            hung_count += load.engine.tiers.io[Tier.NVME].hang(1)
        load.engine.tiers.step(0 if turn % 80 < 10 else chance.randrange(0, 12))
        load.step()
        count = chance.randrange(2, 24)
        store.costs.learn_pass(Work.of([(0, count)]), count * 0.02 * chance.lognormvariate(0, 0.3))
    run_until_idle(load, 3000)
    load.engine.scheduler.check()
    counted = load.engine.tiers.metrics.load_decisions
    decided = {made: counted.value("dram", made) + counted.value("nvme", made) for made in ("load", "recompute")}
    assert min(decided.values()) > 10, decided
    assert sum(store._promoter.late_counts.values()) > 0 and not load.engine.given_up
    load.engine.tiers.settle_all_but_hung(load.now + 100)
    stuck = store.transfer_count
    assert store.available_count == 12 - stuck and stuck == hung_count == 2 * hung


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_the_oldest_sequence_goes_on_whatever_comes_after_it(seed: int, tmp_path: Path) -> None:
    print("seed", seed)
    load = make_load(tmp_path, seed, 8, SchedulerLimits(step_tokens=32, sequences_max=6), asking=True)
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
        stuck = load.engine.tiers.store.stats()["arriving_blocks"] if turn == 1600 else stuck  # both are silent
    run_until_idle(load, 1000)
    assert not load.engine.given_up and len(load.finished) > 100
    assert 0 < load.engine.tiers.store.stats()["arriving_blocks"] <= stuck, (
        "each probe of a hung shelf costs another slot"
    )
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
