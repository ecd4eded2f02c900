"""ResidentBlocks: holds, sealing, duplicates and eviction of HBM slots."""

from __future__ import annotations

import random
from collections import Counter

from kvtier.eviction import LeastRecentlyUsed
from kvtier.resident import ResidentBlocks


def resident(slot_count: int) -> ResidentBlocks:
    return ResidentBlocks(slot_count, LeastRecentlyUsed)


def one(blocks: ResidentBlocks) -> int:
    slots = blocks.allocate(1)
    assert slots is not None
    return slots[0]


def test_a_sealed_block_stays_findable_until_its_slot_is_needed() -> None:
    blocks = resident(1)
    slot = one(blocks)
    assert blocks.seal(slot, b"a", 0, 1.0) == slot
    assert blocks.allocate(1) is None
    blocks.release([slot])
    assert blocks.find(b"a") == slot
    assert one(blocks) == slot
    assert blocks.find(b"a") is None
    assert blocks.evicted_count == 1


def test_an_unsealed_block_is_freed_with_its_last_hold() -> None:
    blocks = resident(1)
    blocks.release([one(blocks)])
    assert blocks.available_count == 1 and blocks.used_count == 0


def test_sealing_a_duplicate_moves_the_hold_to_the_first_slot() -> None:
    blocks = resident(2)
    first, second = one(blocks), one(blocks)
    blocks.seal(first, b"a", 0, 1.0)
    assert blocks.seal(second, b"a", 0, 2.0) == first
    blocks.check({first: 2})
    assert blocks.available_count == 1


def test_random_operations_keep_the_books() -> None:
    rng = random.Random(11)
    blocks = resident(8)
    held: Counter[int] = Counter()
    for step in range(3000):
        slots = list(held.elements())
        match rng.randrange(5):
            case 0:
                got = blocks.allocate(rng.randrange(1, 4))
                held.update(got or [])
            case 1 if slots:
                slot = rng.choice(slots)
                if blocks.hash_of(slot) is None and held[slot] == 1:
                    held[slot] -= 1
                    held[blocks.seal(slot, bytes([rng.randrange(12)]), 0, float(step))] += 1
            case 2 if slots:
                slot = rng.choice(slots)
                blocks.release([slot])
                held[slot] -= 1
            case 3:
                found = blocks.find(bytes([rng.randrange(12)]))
                if found is not None:
                    blocks.hold([found])
                    held[found] += 1
            case 4:
                blocks.evict(blocks.coldest(1))
        blocks.check(dict(+held))
