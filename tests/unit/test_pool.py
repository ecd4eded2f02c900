"""SlotPool: counted holds and a free list."""

from __future__ import annotations

import pytest

from kvtier.pool import SlotPool


def test_a_slot_is_free_again_only_after_its_last_hold_and_free() -> None:
    pool = SlotPool(2)
    first, second = pool.allocate(2)
    pool.retain([first])
    assert pool.release([first, second]) == [second]
    assert pool.free_count == 0
    pool.free([second])
    assert pool.release([first]) == [first]
    pool.free([first])
    assert pool.free_count == 2
    pool.check()


def test_releasing_more_often_than_held_is_a_bug() -> None:
    pool = SlotPool(1)
    (slot,) = pool.allocate(1)
    pool.release([slot])
    with pytest.raises(AssertionError, match="more often"):
        pool.release([slot])


def test_allocating_more_than_free_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        SlotPool(1).allocate(2)
