"""The stock of reservations: follows need where nobody has a quota, and lends a tenant nothing for over a second."""

from __future__ import annotations

from kvtier.keeper.stock import IDLE_S, Stock
from kvtier.record import NO_TENANT, Grant, tenant_digest

TENANTS = [tenant_digest(name) for name in "abcd"]
A, B = TENANTS[:2]


def grants(count: int, first: int = 0) -> list[Grant]:
    return [Grant(first + slot, 1) for slot in range(count)]


def ask(stock: Stock, now: float = 0.0) -> dict[bytes, tuple[int, int]]:
    """Ask for all that is missing: (number, count) by tenant."""
    asked: dict[bytes, tuple[int, int]] = {}
    for tenant, count in stock.missing():
        number = 1000 + len(stock._asked) + len(stock._late)
        stock.asked(number, tenant, count, now + 5)
        asked[tenant] = number, count
    assert stock.missing() == [], "one question a tenant at a time"
    return asked


def test_without_a_tenant_the_stock_follows_what_was_taken() -> None:
    stock = Stock(256, 32)
    stock.want(0)
    number, count = ask(stock)[NO_TENANT]
    assert count == 8 and stock.answered(number, grants(8), 0.0)
    assert len(stock.take(20, NO_TENANT, 0.0)) == 8
    number, count = ask(stock)[NO_TENANT]
    assert count == 20 and stock.answered(number, grants(20), 0.0)
    assert stock.idle(IDLE_S / 2) == [] and len(stock.idle(IDLE_S)) == 12 and stock.count(NO_TENANT) == 8
    assert len(stock.take(100, NO_TENANT, 2.0)) == 8 and ask(stock)[NO_TENANT][1] == 32, "one batch at most"


def test_little_lies_idle_where_little_may_be_written_in_a_day() -> None:
    for day_slots, floor in ((None, 64), (64 * 64, 64), (165, 2), (10, 1)):
        stock = Stock(4096, 256, day_slots)
        stock.want(0)
        assert ask(stock)[NO_TENANT][1] == floor


def test_a_tenant_gets_what_it_lacked_and_nothing_ahead() -> None:
    stock = Stock(256, 32)
    assert stock.take(5, A, 0.0) == [] and not stock.supplied
    number, count = ask(stock)[A]
    assert count == 5 and stock.answered(number, grants(5), 0.1) and stock.supplied
    assert ask(stock) == {}
    assert len(stock.take(5, A, 0.2)) == 5 and not stock.supplied and ask(stock) == {}


def test_what_a_tenant_does_not_use_is_given_back() -> None:
    stock = Stock(256, 32)
    stock.take(5, A, 0.0)
    number, _ = ask(stock)[A]
    assert stock.idle(2.0) == []
    stock.answered(number, grants(5), 2.0)
    assert stock.idle(2.5) == [] and stock.idle(3.0) == grants(5)
    assert len(stock) == 0 and stock.held() == [] and stock._grants == {} and stock._used_at == {}


def test_tenants_together_hold_one_batch_at_most() -> None:
    stock = Stock(64, 32)
    for tenant in TENANTS:
        stock.take(6, tenant, 0.0)
    asked = {tenant: count for tenant, (_, count) in ask(stock).items()}
    assert asked == {A: 6, B: 6, TENANTS[2]: 4}
    assert NO_TENANT not in asked


def test_an_answer_that_comes_late_is_used_or_given_back_and_no_other_questions_wait_for_it() -> None:
    stock = Stock(256, 32)
    stock.take(5, A, 0.0)
    late, _ = ask(stock)[A]
    stock.expire(5.0)
    stock.take(5, A, 5.0)
    again, count = ask(stock)[A]
    assert count == 5 and again != late
    assert stock.answered(late, grants(5), 6.0) and len(stock.take(5, A, 6.0)) == 5
    assert stock.answered(again, grants(5, 5), 6.0) and stock.idle(7.0) == grants(5, 5)
    assert not stock.answered(late, grants(1), 7.0), "not twice"
    stock.take(1, A, 8.0)
    lost, _ = ask(stock)[A]
    stock.line_lost()
    assert not stock.answered(lost, grants(1), 8.0)
