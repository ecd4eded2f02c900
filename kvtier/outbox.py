"""The outbox: hands events to callers from sender threads, in order, off the engine thread.

Events of one request that wait together are merged into one, so a slow receiver gets fewer, larger events. Each
request belongs to one sender; a receiver that blocks holds up the requests of its sender, never the engine. Knows no
engine; the engine posts, the sinks are the callers' own.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from kvtier.request import TokenEvent

Sink = Callable[[TokenEvent], None]

_log = logging.getLogger(__name__)

END_S = 1.0
"""For senders that have nothing to send."""


class Mailbox:
    """Events of one request on their way to its sink."""

    def __init__(self, sink: Sink, on_broken: Callable[[], None]) -> None:
        """`on_broken` is called (on the sender thread) if the sink raises; later events are then dropped."""
        self._sink = sink
        self._on_broken = on_broken
        self._events: deque[TokenEvent] = deque()
        self._broken = False

    def put(self, event: TokenEvent) -> bool:
        """Append an event; True if the mailbox was empty before, so that a sender must be told."""
        self._events.append(event)
        return len(self._events) == 1

    def deliver(self) -> None:
        """Pass what waits to the sink, merged. Sender thread only."""
        waiting = len(self._events)
        while waiting:
            events = [self._events[index] for index in range(waiting)]
            if not self._broken:
                self._pass_on(merge(events))
            for _ in range(waiting):
                self._events.popleft()
            waiting = len(self._events)

    def _pass_on(self, event: TokenEvent) -> None:
        try:
            self._sink(event)
        except Exception:  # the caller's own code: its failure must not stop the other requests of this sender
            _log.exception("the sink of a request failed; the request is cancelled")
            self._broken = True
            self._on_broken()


class Outbox:
    """`sender_count` threads, each with a queue of mailboxes that have news."""

    def __init__(self, sender_count: int) -> None:
        """RuntimeError if there can be no more threads; none is left behind then."""
        self._queues: list[queue.SimpleQueue[Mailbox | None]] = [queue.SimpleQueue() for _ in range(sender_count)]
        self._threads = [
            threading.Thread(target=_send, args=(inbox,), name=f"kvtier-sender-{index}", daemon=True)
            for index, inbox in enumerate(self._queues)
        ]
        for started, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError:
                del self._threads[started:]
                self.close(END_S)
                raise

    def post(self, number: int, mailbox: Mailbox, event: TokenEvent) -> None:
        """Queue an event of request `number`; returns at once. Any thread, but one at a time per request."""
        if mailbox.put(event):
            self._queues[number % len(self._queues)].put(mailbox)

    def close(self, deadline_s: float) -> None:
        """Deliver what was posted, then end the senders; a sink that hangs is left behind after the deadline."""
        for inbox in self._queues:
            inbox.put(None)
        end = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


def merge(events: list[TokenEvent]) -> TokenEvent:
    """Several consecutive events of one request as one; only the last may be final."""
    last = events[-1]
    if len(events) == 1:
        return last
    return TokenEvent(
        text="".join(event.text for event in events),
        token_ids=tuple(token for event in events for token in event.token_ids),
        finish_reason=last.finish_reason,
        usage=last.usage,
        error=last.error,
    )


def _send(inbox: queue.SimpleQueue[Mailbox | None]) -> None:
    while (mailbox := inbox.get()) is not None:
        mailbox.deliver()
