"""The write budget: what is granted within 24 hours never passes it, and no clock makes it forget early."""

from __future__ import annotations

import itertools
import random

import pytest

from kvtier.record import Grant
from kvtier.shortage import TENANTS_MAX, Shortage
from kvtier.write_budget import BUCKETS_MAX, HOUR_S, WriteBudget

SLOT_BYTES = 100
DAY_S = 24 * HOUR_S
GENERATIONS = itertools.count(1)


class Log:
    """What a journal would keep."""

    def __init__(self) -> None:
        self.by_hour: dict[int, int] = {}

    def spent(self, hour: int, spent_bytes: int) -> None:
        self.by_hour[hour] = spent_bytes

    def kept(self) -> dict[int, int]:
        return {hour: spent_bytes for hour, spent_bytes in self.by_hour.items() if spent_bytes}


def grant(budget: WriteBudget, count: int) -> list[Grant]:
    grants = [Grant(0, next(GENERATIONS)) for _ in range(budget.allow(count))]
    budget.spend(grants)
    return grants


def granted(budget: WriteBudget, count: int) -> int:
    return len(grant(budget, count))


def test_no_limit_allows_everything_and_counts_nothing() -> None:
    log = Log()
    budget = WriteBudget(0, SLOT_BYTES, 0.0, {5: 1 << 40}, log)
    assert granted(budget, 1000) == 1000 and budget.spent_bytes == 0 and log.by_hour == {} and budget.refused == 0


def test_a_day_after_it_was_spent_it_may_be_spent_again_and_not_before() -> None:
    budget = WriteBudget(10 * SLOT_BYTES, SLOT_BYTES, 0.0)
    assert granted(budget, 4) == 4
    budget.advance(HOUR_S)
    assert granted(budget, 100) == 6 and budget.refused == 94
    budget.advance(DAY_S + HOUR_S - 1)
    assert granted(budget, 1) == 0
    budget.advance(DAY_S + HOUR_S)
    assert granted(budget, 100) == 4
    budget.advance(10 * DAY_S)
    assert granted(budget, 100) == 10


def test_what_was_not_written_is_given_back_and_no_more() -> None:
    log = Log()
    budget = WriteBudget(10 * SLOT_BYTES, SLOT_BYTES, HOUR_S - 1.0, log=log)
    first = grant(budget, 6)
    budget.advance(HOUR_S)
    second = grant(budget, 4)
    budget.give_back(first[1:] + second[:2])
    assert log.kept() == {0: SLOT_BYTES, 1: 2 * SLOT_BYTES} and granted(budget, 10) == 7
    budget.give_back(first[:1])
    budget.give_back([Grant(0, 0)] * 100)
    assert log.kept() == {1: 9 * SLOT_BYTES}, "what nobody knows to have been granted counts for nothing"


def test_what_was_granted_longer_ago_than_a_day_gives_nothing_back_of_what_was_written_since() -> None:
    budget = WriteBudget(10 * SLOT_BYTES, SLOT_BYTES, 0.0)
    old = grant(budget, 5)
    budget.advance(DAY_S + 2 * HOUR_S)
    written = grant(budget, 8)
    budget.give_back(old)
    assert budget.spent_bytes == 8 * SLOT_BYTES and granted(budget, 100) == 2
    budget.give_back(written[:1])
    assert granted(budget, 100) == 1


def test_what_was_granted_before_the_clock_was_set_back_gives_no_more_back_than_it_took() -> None:
    budget = WriteBudget(10 * SLOT_BYTES, SLOT_BYTES, 5.0 * HOUR_S)
    ahead = grant(budget, 4)
    budget.advance(HOUR_S)
    later = grant(budget, 3)
    budget.advance(6.0 * HOUR_S)
    budget.give_back(ahead)
    assert budget.spent_bytes == 7 * SLOT_BYTES
    budget.give_back(later)
    assert budget.spent_bytes == 4 * SLOT_BYTES


def test_a_clock_that_was_ahead_does_not_block_for_ever() -> None:
    budget = WriteBudget(10 * SLOT_BYTES, SLOT_BYTES, 1000.0 * DAY_S)
    assert granted(budget, 10) == 10
    budget.advance(5.0 * DAY_S)
    assert granted(budget, 1) == 0, "setting the clock back frees nothing"
    budget.advance(6.0 * DAY_S + HOUR_S)
    assert granted(budget, 100) == 10


@pytest.mark.parametrize("seed", range(5))
def test_no_window_of_a_day_ever_holds_more_whatever_restarts_come_between(seed: int) -> None:
    chance = random.Random(seed)
    limit, log, now = 20 * SLOT_BYTES, Log(), float(chance.randrange(10 * DAY_S))
    budget = WriteBudget(limit, SLOT_BYTES, now, log=log)
    spent: list[tuple[float, int]] = []
    idle: list[Grant] = []
    total = refused = 0
    for _ in range(3000):
        now += chance.choice([0.0, 10.0, HOUR_S / 3, HOUR_S, 5.0 * HOUR_S])
        if chance.random() < 0.1:
            budget = WriteBudget(limit, SLOT_BYTES, now, log.kept(), log)
        budget.advance(now)
        wanted = chance.randrange(8)
        grants = grant(budget, wanted)
        refused += wanted - len(grants)
        idle += [grants.pop()] if grants and chance.random() < 0.2 else []
        while idle and chance.random() < 0.3:
            budget.give_back([idle.pop(chance.randrange(len(idle)))])
        count = len(grants)
        spent = [(at, bytes_) for at, bytes_ in spent if at > now - DAY_S] + [(now, count * SLOT_BYTES)]
        total += count
        assert sum(bytes_ for _, bytes_ in spent) <= limit, f"seed {seed}"
        assert log.kept().keys() <= set(range(int(now) // HOUR_S - 24, int(now) // HOUR_S + 1))
        assert len(log.kept()) <= BUCKETS_MAX
    assert total > 500 and refused > 0


def test_what_waits_and_asks_again_is_refused_once() -> None:
    budget = WriteBudget(10 * SLOT_BYTES, SLOT_BYTES, 0.0)
    assert granted(budget, 10) == 10
    for _ in range(10):
        assert granted(budget, 6) == 0 and budget.allow(4, b"other") == 0
    assert budget.refused == 10
    assert granted(budget, 7) == 0 and budget.refused == 11
    budget.advance(DAY_S + HOUR_S)
    assert granted(budget, 7) == 7 and granted(budget, 6) == 3 and budget.refused == 14, "it waits for others now"


def test_shortage_remembers_a_bounded_number_of_tenants() -> None:
    shortage = Shortage()
    for number in range(2 * TENANTS_MAX):
        shortage.note(number.to_bytes(16, "little"), 1)
    assert shortage.refused == 2 * TENANTS_MAX == len(shortage._waiting) + TENANTS_MAX
