"""ResidentBlocks: holds, sealing, duplicates and eviction of HBM slots."""

from __future__ import annotations

import random
from collections import Counter

from kvtier.eviction import LeastRecentlyUsed
from kvtier.resident import ResidentBlocks
from kvtier.retention import PLAIN, Retention


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
        match rng.randrange(7):
            case 0:
                got = blocks.allocate(rng.randrange(1, 4))
                held.update(got or [])
            case 1 if slots:
                slot = rng.choice(slots)
                if blocks.hash_of(slot) is None and held[slot] == 1:
                    held[slot] -= 1
                    asked = random_retention(rng, step)
                    held[blocks.seal(slot, bytes([rng.randrange(12)]), 0, float(step), asked)] += 1
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
            case 5:
                blocks.retain([bytes([rng.randrange(12)])], random_retention(rng, step))
            case 6:
                blocks.expire(float(step))
        blocks.check(dict(+held))
    assert blocks.expired_count > 20 and blocks.evicted_count > 50


def random_retention(rng: random.Random, step: int) -> Retention:
    expiry_s = rng.choice([0, step + rng.randrange(1, 40)])
    return Retention(rng.randrange(-2, 3), expiry_s, rng.random() < 0.2) if rng.random() < 0.5 else PLAIN


def sealed(blocks: ResidentBlocks, names: bytes, **asked: Retention) -> None:
    """Blocks `a`, `b`, ... at depths 0, 1, ..., idle; keyword arguments say what is asked for some."""
    for depth, name in enumerate(names.decode()):
        slot = one(blocks)
        blocks.seal(slot, name.encode(), depth, float(depth), asked.get(name, PLAIN))
        blocks.release([slot])


def eviction_order(blocks: ResidentBlocks) -> str:
    return b"".join(blocks.hash_of(slot) or b"?" for slot in blocks.coldest(blocks.slot_count)).decode()


def test_lower_priorities_go_first_and_pins_after_everything_else() -> None:
    blocks = resident(5)
    pinned_low, high, low = Retention(-100, pinned=True), Retention(100), Retention(-1)
    sealed(blocks, b"abcde", a=pinned_low, b=high, d=low, e=Retention(100, pinned=True))
    assert eviction_order(blocks) == "dcbae"
    blocks.check({})
    assert blocks.allocate(5) is not None, "a pin in HBM is soft"
    blocks.check()


def test_a_reuse_raises_what_is_asked_and_a_plain_one_changes_nothing() -> None:
    blocks = resident(3)
    sealed(blocks, b"abc", c=Retention(-5, tenant=b"first" * 4))
    blocks.retain([b"a", b"gone", b"c"], Retention(7, tenant=b"other" * 4))
    assert eviction_order(blocks) == "bac"
    blocks.retain([b"a", b"b", b"c"], PLAIN)
    slots = [blocks.find(name) for name in (b"a", b"b", b"c")]
    assert [blocks.retention_of(slot) for slot in slots if slot is not None] == [
        Retention(7),
        PLAIN,
        Retention(7, tenant=b"first" * 4),
    ]
    blocks.check({})


def test_sealing_what_is_there_raises_what_is_asked_for_it() -> None:
    blocks = resident(2)
    sealed(blocks, b"a")
    slot = one(blocks)
    kept = blocks.seal(slot, b"a", 0, 1.0, Retention(3))
    assert kept != slot and blocks.retention_of(kept) == Retention(3)
    blocks.check({kept: 1})


def test_an_expired_block_is_not_found_and_its_slot_is_free_once_nobody_holds_it() -> None:
    blocks = resident(4)
    sealed(blocks, b"abcd", a=Retention(expiry_s=10), b=Retention(expiry_s=10), c=Retention(expiry_s=20))
    held = blocks.find(b"b")
    assert held is not None
    blocks.hold([held])
    blocks.expire(9.0)
    assert blocks.expired_count == 0 and blocks.find(b"a") is not None
    blocks.expire(10.0)
    assert (blocks.find(b"a"), blocks.find(b"b"), blocks.expired_count) == (None, None, 2)
    assert blocks.used_count == 3 and blocks.hash_of(held) is None
    blocks.check({held: 1})
    blocks.release([held])
    assert blocks.used_count == 2 and blocks.find(b"c") is not None
    blocks.retain([b"c"], Retention(1))
    blocks.expire(1000.0)
    assert blocks.find(b"c") is not None, "a request without a time to live has asked for it"
    blocks.check({})


def test_a_block_may_rank_higher_than_it_asks_since_what_stands_on_it_does() -> None:
    blocks = ResidentBlocks(4, LeastRecentlyUsed)
    slots = blocks.allocate(2)
    assert slots is not None
    for depth, (slot, asked) in enumerate(zip(slots, (Retention(1), Retention(5)), strict=True)):
        blocks.seal(slot, bytes([depth]), depth, 1.0, asked)
    blocks.touch(slots, 2.0)
    blocks.check(dict.fromkeys(slots, 1))
    blocks.release(slots)
    blocks.check({})
