"""Expiries: what is due comes out once, whatever was put, moved and taken out before."""

from __future__ import annotations

import random

from kvtier.expiry import Expiries


def test_slots_come_out_once_when_their_second_has_come() -> None:
    expiries = Expiries()
    expiries.put(1, 20)
    expiries.put(2, 10)
    expiries.put(3, 0)
    assert expiries.take(9.9) == []
    assert expiries.take(10.0) == [2]
    assert expiries.take(30.0) == [1] and expiries.take(99.0) == []


def test_a_slot_that_expires_later_or_never_does_not_come_out_at_its_old_time() -> None:
    expiries = Expiries()
    for slot, then in ((4, 30), (3, 0), (5, 5)):
        expiries.put(slot, 10)
        expiries.put(slot, then)
    expiries.put(6, 10)
    expiries.put(6, 0)
    assert expiries.take(10.0) == [5]
    assert len(expiries) == 1 and expiries.take(30.0) == [4]


def test_random_changes_agree_with_a_walk_over_all() -> None:
    chance = random.Random(3)
    expiries, known, now, due_count = Expiries(), dict[int, int](), 0, 0
    for _ in range(3000):
        slot = chance.randrange(60)
        expiry_s = chance.choice([0, now + chance.randrange(1, 200)])
        expiries.put(slot, expiry_s)
        known = {**known, slot: expiry_s} if expiry_s else {k: v for k, v in known.items() if k != slot}
        if chance.random() < 0.1:
            now += chance.randrange(20)
            due = expiries.take(now)
            assert sorted(due) == sorted(k for k, v in known.items() if v <= now)
            known = {k: v for k, v in known.items() if v > now}
            due_count += len(due)
        assert len(expiries) == len(known)
        expiries.check()
    assert due_count > 100
