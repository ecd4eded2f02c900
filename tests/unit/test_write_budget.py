"""The write budget: what is granted within 24 hours never passes it, and no clock makes it forget early."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

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

    def spent(self, spent_by_hour: Mapping[int, int]) -> None:
        self.by_hour |= spent_by_hour

    def kept(self) -> dict[int, int]:
        return {hour: spent_bytes for hour, spent_bytes in self.by_hour.items() if spent_bytes}


def budget_at(now_s: float, log: Log | None = None, limit_bytes: int = 10 * SLOT_BYTES) -> WriteBudget:
    """One that goes on from what the log has, where both clocks show the same."""
    return WriteBudget(limit_bytes, SLOT_BYTES, now_s, now_s, log.kept() if log is not None else None, log)


def advance(budget: WriteBudget, now_s: float) -> None:
    """Both clocks show the same."""
    budget.advance(now_s, now_s)


def grant(budget: WriteBudget, count: int) -> list[Grant]:
    grants = [Grant(0, next(GENERATIONS)) for _ in range(budget.allow(count))]
    budget.spend(grants)
    return grants


def granted(budget: WriteBudget, count: int) -> int:
    return len(grant(budget, count))


def test_no_limit_allows_everything_and_counts_nothing() -> None:
    log = Log()
    budget = WriteBudget(0, SLOT_BYTES, 0.0, 0.0, {5: 1 << 40}, log)
    assert granted(budget, 1000) == 1000 and budget.spent_bytes == 0 and log.by_hour == {} and budget.refused == 0


def test_a_day_after_it_was_spent_it_may_be_spent_again_and_not_before() -> None:
    budget = budget_at(0.0)
    assert granted(budget, 4) == 4
    advance(budget, HOUR_S)
    assert granted(budget, 100) == 6 and budget.refused == 94
    advance(budget, DAY_S + HOUR_S - 1)
    assert granted(budget, 1) == 0
    advance(budget, DAY_S + HOUR_S)
    assert granted(budget, 100) == 4
    advance(budget, 10 * DAY_S)
    assert granted(budget, 100) == 10


def test_what_was_not_written_is_given_back_and_no_more() -> None:
    log = Log()
    budget = budget_at(HOUR_S - 1.0, log)
    first = grant(budget, 6)
    advance(budget, HOUR_S)
    second = grant(budget, 4)
    budget.give_back(first[1:] + second[:2])
    assert log.kept() == {0: SLOT_BYTES, 1: 2 * SLOT_BYTES} and granted(budget, 10) == 7
    budget.give_back(first[:1])
    budget.give_back([Grant(0, 0)] * 100)
    assert log.kept() == {1: 9 * SLOT_BYTES}, "what nobody knows to have been granted counts for nothing"


def test_what_was_granted_longer_ago_than_a_day_gives_nothing_back_of_what_was_written_since() -> None:
    budget = budget_at(0.0)
    old = grant(budget, 5)
    advance(budget, DAY_S + 2 * HOUR_S)
    written = grant(budget, 8)
    budget.give_back(old)
    assert budget.spent_bytes == 8 * SLOT_BYTES and granted(budget, 100) == 2
    budget.give_back(written[:1])
    assert granted(budget, 100) == 1


def test_what_was_granted_before_the_clock_was_set_is_given_back_all_the_same() -> None:
    budget = budget_at(5.0 * HOUR_S)
    before = grant(budget, 4)
    budget.advance(1.0 * HOUR_S, 5.0 * HOUR_S)
    later = grant(budget, 3)
    budget.advance(2.0 * HOUR_S, 6.0 * HOUR_S)
    budget.give_back(before)
    assert budget.spent_bytes == 3 * SLOT_BYTES
    budget.give_back(later)
    assert budget.spent_bytes == 0


def test_a_clock_that_was_ahead_does_not_block_for_ever() -> None:
    log = Log()
    assert granted(budget_at(1000.0 * DAY_S, log), 10) == 10
    budget = budget_at(5.0 * DAY_S, log)
    assert granted(budget, 1) == 0, "setting the clock back frees nothing"
    advance(budget, 6.0 * DAY_S + HOUR_S)
    assert granted(budget, 100) == 10


@pytest.mark.parametrize("step_s", [26 * HOUR_S, 1000 * DAY_S, 600, 59, -600, -30 * HOUR_S, -99 * DAY_S])
def test_a_clock_that_is_set_makes_no_day_shorter_nor_much_longer(step_s: float) -> None:
    log, begun = Log(), 100.0 * DAY_S
    budget = budget_at(begun, log)
    assert granted(budget, 10) == 10
    for passed_s, count in ((1.0, 0), (DAY_S - 60.0, 0), (DAY_S + 3.0 * HOUR_S, 10)):
        unix_s = begun + passed_s + step_s
        budget.advance(unix_s, begun + passed_s)
        assert granted(WriteBudget(10 * SLOT_BYTES, SLOT_BYTES, unix_s, 7.0, log.kept()), 100) == count, "a restart"
        assert granted(budget, 100) == count
        assert len(log.kept()) == 1


def test_the_log_of_a_clock_set_to_the_first_day_of_all_has_no_hours_before_it() -> None:
    log, begun = Log(), 100.0 * DAY_S
    budget = budget_at(begun, log)
    for hour in range(4):
        budget.advance(begun + hour * HOUR_S, begun + hour * HOUR_S)
        assert granted(budget, 2) == 2
    budget.advance(2.0 * HOUR_S, begun + 4.0 * HOUR_S)
    assert min(log.by_hour) >= 0 and sum(log.kept().values()) == budget.spent_bytes == 8 * SLOT_BYTES


@pytest.mark.parametrize("seed", range(8))
def test_no_window_of_a_day_ever_holds_more_whatever_restarts_and_settings_of_the_clock_come_between(seed: int) -> None:
    chance = random.Random(seed)
    limit, log, now_s = 20 * SLOT_BYTES, Log(), float(chance.randrange(2000 * DAY_S, 3000 * DAY_S))
    ahead_s = 0.0
    budget = budget_at(now_s, log, limit)
    spent: list[tuple[float, int]] = []
    idle: list[Grant] = []
    total = refused = 0
    for _ in range(3000):
        now_s += chance.choice([0.0, 10.0, HOUR_S / 3, HOUR_S, 5.0 * HOUR_S])
        if seed % 2 and chance.random() < 0.1:
            ahead_s = chance.choice([-1000.0, -1.5, -0.5, 0.0, 0.5, 1.0, 27.0, 10_000.0]) * HOUR_S
        budget.advance(now_s + ahead_s, now_s)
        if chance.random() < 0.1:
            budget = WriteBudget(limit, SLOT_BYTES, now_s + ahead_s, now_s, log.kept(), log)
        wanted = chance.randrange(8)
        grants = grant(budget, wanted)
        refused += wanted - len(grants)
        idle += [grants.pop()] if grants and chance.random() < 0.2 else []
        while idle and chance.random() < 0.3:
            budget.give_back([idle.pop(chance.randrange(len(idle)))])
        count = len(grants)
        spent = [(at, bytes_) for at, bytes_ in spent if at > now_s - DAY_S] + [(now_s, count * SLOT_BYTES)]
        total += count
        assert sum(bytes_ for _, bytes_ in spent) <= limit, f"seed {seed}"
        hour = int(now_s + ahead_s) // HOUR_S
        assert log.kept().keys() <= set(range(hour - 25, hour + 3)), "as the wall clock has them"
        assert len(log.kept()) <= BUCKETS_MAX
    assert total > 500 and refused > 0


def test_what_waits_and_asks_again_is_refused_once() -> None:
    budget = budget_at(0.0)
    assert granted(budget, 10) == 10
    for _ in range(10):
        assert granted(budget, 6) == 0 and budget.allow(4, b"other") == 0
    assert budget.refused == 10
    assert granted(budget, 7) == 0 and budget.refused == 11
    advance(budget, DAY_S + HOUR_S)
    assert granted(budget, 7) == 7 and granted(budget, 6) == 3 and budget.refused == 14, "it waits for others now"


def test_shortage_remembers_a_bounded_number_of_tenants() -> None:
    shortage = Shortage()
    for number in range(2 * TENANTS_MAX):
        shortage.note(number.to_bytes(16, "little"), 1)
    assert shortage.refused == 2 * TENANTS_MAX == len(shortage._waiting) + TENANTS_MAX
