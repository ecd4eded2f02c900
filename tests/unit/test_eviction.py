"""Eviction: one suite for every policy, then what each is for. Oracle: tests/model/test_eviction_model.py."""

from __future__ import annotations

import random
import typing
from dataclasses import replace
from typing import ClassVar

import pytest

from kvtier.config import EngineConfig
from kvtier.eviction import (
    POLICIES,
    EvictionQueue,
    LeastRecentlyUsed,
    SmallQueueFirst,
)
from tests.rows import block_hashes

EVERY = pytest.mark.parametrize("name", sorted(POLICIES))


def grown(name: str, capacity: int, seed: int = 0, requests: int = 3000) -> EvictionQueue:
    """A full queue that has seen conversations grow, so that a policy that learns has learned."""
    chance = random.Random(seed)
    queue = EvictionQueue(POLICIES[name], capacity)
    conversations = [0] * 40
    now = 0.0
    for _ in range(requests):
        now += chance.expovariate(1.0)
        number = chance.randrange(len(conversations))
        again = conversations[number] and chance.random() < 0.7
        conversations[number] = conversations[number] if again else chance.randrange(1 << 40)
        request(queue, block_hashes(2 + chance.randrange(8), conversations[number]), now)
    return queue


def request(queue: EvictionQueue, chain: list[bytes], now: float, priority: int = 0) -> int:
    """One prompt as a shelf sees it; returns its leading hits."""
    here = [is_here(queue, block_hash) for block_hash in chain]
    queue.touch(chain, now)
    missing = here.count(False)
    queue.pop(missing - (queue._capacity - len(queue._uses)))
    for depth, block_hash in enumerate(chain):
        if not here[depth]:
            queue.insert(block_hash, depth, now, priority)
            queue.set_idle([block_hash])
    queue.stamp(chain, now)
    return (*here, False).index(False)


def is_here(queue: EvictionQueue, block_hash: bytes) -> bool:
    return block_hash in queue  # nothing is held in these runs


@EVERY
def test_of_a_chain_used_at_once_no_block_goes_before_one_behind_it(name: str) -> None:
    for seed in range(3):
        queue = grown(name, 60, seed)
        uses = {block_hash: replace(queue.use_of(block_hash)) for block_hash in queue.coldest(len(queue))}
        order = queue.pop(len(queue))
        for chain_at in {use.last_use for use in uses.values()}:
            depths = [uses[block_hash].depth for block_hash in order if uses[block_hash].last_use == chain_at]
            assert depths == sorted(depths, reverse=True)
        assert len(order) == 60 and (len({use.group for use in uses.values()}) > 1) == (name != "lru")


@EVERY
def test_a_higher_priority_stays_longer_whatever_its_age(name: str) -> None:
    queue = grown(name, 60)
    kept = block_hashes(3, 99)
    queue.pop(3)
    for depth, block_hash in enumerate(kept):
        queue.insert(block_hash, depth, 0.0, priority=1)
        queue.set_idle([block_hash])
    assert queue.pop(60)[57:] == kept[::-1]


@EVERY
def test_what_is_held_is_never_evicted_and_comes_back_in_its_place(name: str) -> None:
    queue = grown(name, 60)
    order = queue.coldest(60)
    queue.set_busy(order[:20])
    held = queue.coldest(60)
    assert set(held) == set(order[20:])
    queue.set_idle(order[:20])
    assert queue.coldest(60) == order
    queue.set_busy(order)
    assert queue.pop(60) == [] and len(queue) == 0


@EVERY
def test_memory_is_bounded_however_long_it_runs(name: str) -> None:
    capacity = 50
    queue = grown(name, capacity, requests=200)
    oldest, *others = queue.coldest(capacity)
    for number in range(400):  # hits that nobody asks about
        queue.touch(others, 1e4 + number)
        assert len(queue._notes) <= capacity and queue._noted_count <= capacity
    for number in range(400):  # hits that are applied at once, all ranked behind one that is never used
        queue.touch(others, 2e4 + number)
        assert queue.use_of(oldest).last_use < 1e4
        queue.check()
    assert entry_count(queue) <= 2 * capacity + 64 * 5
    for number in range(400):
        request(queue, block_hashes(6, number % 300), 3e4 + number)
        queue.check()
    assert len(queue._uses) == capacity
    assert len(queue._ghosts) <= queue._policy.ghost_share * capacity


def entry_count(queue: EvictionQueue) -> int:
    return sum(len(group.entries) for groups in queue._order._ranks.values() for group in groups.values())


@EVERY
def test_the_same_uses_give_the_same_order(name: str) -> None:
    assert grown(name, 40).pop(40) == grown(name, 40).pop(40)


@EVERY
def test_a_use_is_noted_and_changes_nothing_until_somebody_asks(name: str) -> None:
    queue = grown(name, 60)
    first = queue.coldest(60)[0]
    stamp = queue._stamp
    queue.touch([first], 1e6)
    assert queue._stamp == stamp
    assert queue.use_of(first).last_use == 1e6 and queue.coldest(1) != [first]


def test_lru_evicts_the_longest_unused_first() -> None:
    queue = EvictionQueue(LeastRecentlyUsed, 3)
    old, new, newer = block_hashes(3)
    for now, block_hash in enumerate((old, new, newer)):
        queue.insert(block_hash, 0, float(now))
        queue.set_idle([block_hash])
    queue.touch([old], 3.0)
    assert queue.pop(5) == [new, newer, old]


def test_a_scan_passes_through_a_tenth_of_s3fifo_and_leaves_the_rest() -> None:
    for name, survivors in (("s3fifo", 40), ("lru", 0)):
        queue = EvictionQueue(POLICIES[name], 50)
        kept = block_hashes(40)
        request(queue, kept, 0.0)
        request(queue, kept, 1.0)
        for number in range(100):
            request(queue, block_hashes(5, 1000 + number), 2.0 + number)
        assert sum(is_here(queue, block_hash) for block_hash in kept) == survivors, name


def test_a_block_that_had_gone_and_comes_back_counts_its_earlier_uses() -> None:
    for name, uses in (("lru", 1), ("s3fifo", 2), ("reuse", 2)):
        queue = EvictionQueue(POLICIES[name], 4)
        (block_hash,) = block_hashes(1)
        for now in (0.0, 9.0):
            queue.insert(block_hash, 0, now)
            assert queue.use_of(block_hash).last_use == now
            if now == 0.0:
                queue.remove(block_hash)
        assert queue.use_of(block_hash).uses == uses, name


def test_a_block_counts_as_used_at_least_as_often_as_those_behind_it() -> None:
    queue = EvictionQueue(POLICIES["reuse"], 4)
    chain = block_hashes(3)
    for depth in (1, 2):
        queue.insert(chain[depth], depth, 0.0)
    queue.touch(chain, 1.0)
    queue.touch(chain, 2.0)
    queue.insert(chain[0], 0, 3.0)  # forgotten meanwhile
    queue.stamp(chain, 4.0)
    assert [queue.use_of(block_hash).uses for block_hash in chain] == [3, 3, 3]


class Recorder(SmallQueueFirst):
    """S3-FIFO that writes down what it is told."""

    lessons: ClassVar[list[tuple[int | None, float, int]]] = []

    def learn(self, left: int | None, idle_s: float, entered: int) -> None:
        self.lessons.append((left, idle_s, entered))


@EVERY
def test_a_prefix_of_low_priority_goes_after_what_others_have_built_on_it(name: str) -> None:
    queue = EvictionQueue(POLICIES[name], 8)
    chain, other = block_hashes(4), block_hashes(4, 1)
    request(queue, chain[:2], 1.0, priority=-5)
    request(queue, other[:2], 2.0, priority=-5)
    request(queue, chain, 3.0)
    assert queue.pop(6) == [other[1], other[0], chain[3], chain[2], chain[1], chain[0]]
    assert len(queue) == 0


def test_a_policy_is_told_of_each_use_once_with_the_time_since_the_last_one() -> None:
    queue = EvictionQueue(Recorder, 8)
    chain = block_hashes(2)
    Recorder.lessons.clear()

    def told(*lessons: tuple[int | None, float, int]) -> None:
        queue.use_of(chain[1])
        assert Recorder.lessons == list(lessons)
        Recorder.lessons.clear()

    for depth, block_hash in enumerate(chain):
        queue.insert(block_hash, depth, 1.0)
    told((None, 0.0, 0), (None, 0.0, 0))
    queue.stamp(chain, 3.0)  # no use
    told()
    queue.touch(chain, 10.0)
    told((0, 7.0, 1), (0, 7.0, 1))
    queue.stamp(chain, 12.0)
    queue.remove(chain[1])
    queue.insert(chain[1], 1, 32.0)  # it came back, which tells how long it had gone unused
    told((1, 20.0, 1))
    queue.stamp(chain, 33.0)  # the first is raised to the uses of the second: no time has passed for that
    told((1, 0.0, 1))


def test_the_configuration_offers_every_policy() -> None:
    field_type = EngineConfig.model_fields["eviction"].annotation
    assert set(typing.get_args(field_type)) == set(POLICIES)
    assert {policy(8).name for policy in POLICIES.values()} == set(POLICIES)
