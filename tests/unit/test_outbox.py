"""Outbox: events in order, merged while they wait, a failing sink on its own, and everything delivered at close."""

from __future__ import annotations

import logging
import queue
import threading

import pytest

from kvtier.outbox import Mailbox, Outbox, merge
from kvtier.request import FinishReason, TokenEvent


def event(token: int, final: bool = False) -> TokenEvent:
    return TokenEvent(f"<{token}>", (token,), FinishReason.STOP if final else None)


def test_events_of_each_request_arrive_in_order_whatever_the_senders_do() -> None:
    outbox = Outbox(3)
    seen: dict[int, list[TokenEvent]] = {number: [] for number in range(7)}
    boxes = {number: Mailbox(seen[number].append, lambda: None) for number in seen}
    for token in range(200):
        for number, box in boxes.items():
            outbox.post(number, box, event(token, final=token == 199))
    outbox.close(60.0)
    for events in seen.values():
        assert [token for item in events for token in item.token_ids] == list(range(200))
        assert "".join(item.text for item in events) == "".join(f"<{token}>" for token in range(200))
        assert [item.finish_reason for item in events][-1] is FinishReason.STOP
        assert all(item.finish_reason is None for item in events[:-1])


def test_what_waits_for_a_slow_sink_comes_as_one_event() -> None:
    outbox = Outbox(1)
    gate, entered = threading.Event(), threading.Event()
    seen: list[TokenEvent] = []

    def sink(item: TokenEvent) -> None:
        entered.set()
        assert gate.wait(60)
        seen.append(item)

    box = Mailbox(sink, lambda: None)
    outbox.post(0, box, event(0))
    assert entered.wait(60)
    for token in range(1, 50):
        outbox.post(0, box, event(token, final=token == 49))
    gate.set()
    outbox.close(60.0)
    assert [item.token_ids for item in seen] == [(0,), tuple(range(1, 50))]
    assert seen[-1].finish_reason is FinishReason.STOP


def test_a_merged_event_keeps_the_last_one_s_ending() -> None:
    error = RuntimeError("boom")
    last = TokenEvent("", (), FinishReason.ERROR, None, error)
    merged = merge([event(1), event(2), last])
    assert (merged.text, merged.token_ids) == ("<1><2>", (1, 2))
    assert merged.finish_reason is FinishReason.ERROR and merged.error is error
    assert merge([last]) is last


def test_a_sink_that_raises_is_reported_once_and_others_of_its_sender_go_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    outbox = Outbox(1)
    broken: queue.SimpleQueue[str] = queue.SimpleQueue()
    seen: list[TokenEvent] = []

    def sink(_: TokenEvent) -> None:
        raise ValueError("mine")

    bad, good = Mailbox(sink, lambda: broken.put("broken")), Mailbox(seen.append, lambda: None)
    for token in range(5):
        outbox.post(0, bad, event(token))
        outbox.post(1, good, event(token))
    assert broken.get(timeout=60) == "broken"
    outbox.close(60.0)
    assert broken.empty() and [token for item in seen for token in item.token_ids] == list(range(5))


def test_close_leaves_a_sink_that_hangs_behind_after_the_deadline() -> None:
    outbox = Outbox(1)
    gate = threading.Event()
    outbox.post(0, Mailbox(lambda _: assert_set(gate), lambda: None), event(0))
    outbox.close(0.05)
    assert any(thread.name == "kvtier-sender-0" for thread in threading.enumerate())
    gate.set()


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(60)
