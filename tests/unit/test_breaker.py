"""The breaker: opens after failures in a row, lets one probe through, closes on its success."""

from __future__ import annotations

from kvtier.breaker import Breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(failures_max=3, pause_s=5.0)
    for _ in range(5):
        breaker.failed(0.0)
        breaker.failed(0.0)
        breaker.succeeded()
    assert not breaker.is_open and breaker.allow(7, 0.0) == 7
    for _ in range(3):
        breaker.failed(0.0)
    assert breaker.is_open and breaker.allow(7, 1.0) == 0 and breaker.openings == 1


def test_one_probe_at_a_time_and_its_success_closes() -> None:
    breaker = Breaker(failures_max=1, pause_s=5.0)
    breaker.failed(0.0)
    assert breaker.allow(7, 4.9) == 0 and breaker.allow(0, 5.0) == 0
    assert breaker.allow(7, 5.0) == 1 and breaker.allow(7, 5.0) == 0
    breaker.failed(6.0)
    assert breaker.allow(7, 10.9) == 0 and breaker.allow(7, 11.0) == 1
    breaker.succeeded()
    assert breaker.allow(7, 11.0) == 7 and breaker.openings == 1


def test_a_probe_that_was_not_made_does_not_put_off_the_next() -> None:
    breaker = Breaker(failures_max=1, pause_s=5.0)
    breaker.failed(0.0)
    assert breaker.allow(7, 5.0) == 1
    breaker.spare(5.0)
    assert breaker.is_open and breaker.allow(7, 5.1) == 1 and breaker.allow(7, 5.2) == 0
    breaker.succeeded()
    breaker.spare(6.0)
    assert breaker.allow(7, 6.0) == 7


def test_a_trip_opens_at_once() -> None:
    breaker = Breaker(failures_max=100)
    breaker.trip(0.0)
    assert breaker.is_open and breaker.allow(1, 1.0) == 0
