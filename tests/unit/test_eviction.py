"""Eviction: LRU order with leaves before parents, and the queue against a plain sort."""

from __future__ import annotations

import random

from kvtier.eviction import BlockUse, EvictionQueue, LeastRecentlyUsed


def test_of_a_chain_used_at_once_the_deepest_block_goes_first() -> None:
    queue: EvictionQueue[str] = EvictionQueue(LeastRecentlyUsed())
    for depth, name in enumerate("abc"):
        queue.add(name, BlockUse(depth, last_use=1.0))
    assert [queue.pop() for _ in range(4)] == ["c", "b", "a", None]


def test_the_longest_unused_block_goes_first() -> None:
    queue: EvictionQueue[str] = EvictionQueue(LeastRecentlyUsed())
    queue.add("old", BlockUse(0, 1.0))
    queue.add("new", BlockUse(5, 2.0))
    queue.add("old", BlockUse(0, 3.0))
    assert queue.coldest(2) == ["new", "old"]
    assert queue.pop() == "new"


def test_a_higher_priority_stays_longer() -> None:
    queue: EvictionQueue[str] = EvictionQueue(LeastRecentlyUsed())
    queue.add("kept", BlockUse(0, 1.0, priority=1))
    queue.add("plain", BlockUse(0, 9.0))
    assert queue.pop() == "plain"


def test_random_operations_agree_with_a_sorted_dictionary() -> None:
    rng = random.Random(7)
    policy = LeastRecentlyUsed()
    queue: EvictionQueue[int] = EvictionQueue(policy)
    oracle: dict[int, tuple[float, ...]] = {}
    for step in range(4000):
        item = rng.randrange(60)
        match rng.randrange(4):
            case 0 | 1:
                use = BlockUse(rng.randrange(5), float(step))
                queue.add(item, use)
                oracle[item] = policy.key(use)
            case 2:
                queue.discard(item)
                oracle.pop(item, None)
            case 3:
                expected = min(oracle, key=lambda i: oracle[i], default=None)
                assert queue.pop() == expected
                oracle.pop(expected, None)  # type: ignore[arg-type]
        assert len(queue) == len(oracle)
        assert queue.coldest(5) == sorted(oracle, key=lambda i: oracle[i])[:5]
