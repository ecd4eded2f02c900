"""Operators at the keeper: who is let in, and one answer for each question.

One question at a time: whoever asks on without waiting loses his line, so that engines wait for one answer at most.
Knows no books, those are operations.py's. Owned by the server, on its thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from kvtier import __version__
from kvtier.keeper.connection import Connection, close_all
from kvtier.keeper.fields import OWNERS_MAX
from kvtier.keeper.frames import WireError
from kvtier.keeper.house import House
from kvtier.keeper.operations import Operations
from kvtier.keeper.operator_wire import QUESTIONS, Admitted, KeeperView, Leave, OwnerView, Question
from kvtier.keeper.wire import PROTOCOL_VERSION, Operate, Refused, ToKeeper

OPERATORS_MAX = 8
IDLE_S = 30.0
"""Who has asked nothing for so long gives its place up when another wants it."""


class Operators:
    """See the module."""

    def __init__(self, house: House, linger_s: Callable[[], float], end: Callable[[Connection], None]) -> None:
        """`end` ends a connection."""
        self._house = house
        self._end = end
        self._linger_s = linger_s
        self._started = time.monotonic()
        self._operations = Operations(house.layouts, self._describe)

    def admit(self, connection: Connection, operate: Operate) -> None:
        """Let a connection ask questions from now on, or refuse it with the reason."""
        if connection.owner is not None:
            raise WireError("a second greeting")
        reason = ""
        if operate.version != PROTOCOL_VERSION:
            reason = f"protocol {operate.version}, the keeper speaks {PROTOCOL_VERSION}"
        elif not self._make_room(time.monotonic()):
            reason = f"{OPERATORS_MAX} operators are here already"
        connection.send(Refused(reason) if reason else Admitted(os.getpid()))
        connection.closing = bool(reason)
        connection.admit_operator()

    def _make_room(self, now: float) -> bool:
        """Whether there is a place, perhaps that of the one who has idled longest."""
        operators = [other for other in self._house.connections.values() if other.operates and not other.closing]
        if len(operators) < OPERATORS_MAX:
            return True
        idlest = min(operators, key=lambda other: other.heard_at)
        if now - idlest.heard_at < IDLE_S:
            return False
        self._end(idlest)
        return True

    def answer(self, connection: Connection, question: ToKeeper | Question) -> str:
        """Answer a question; why the keeper shall leave, if it shall. WireError: it was none, or came too early."""
        if connection.wants_to_write or not isinstance(question, QUESTIONS):
            raise WireError("an operator that does not wait for its answers")
        connection.heard_at = time.monotonic()
        if isinstance(question, Leave):
            return "an operator asked for it"
        answer, descriptors = self._operations.answer(question, time.monotonic())
        try:
            if descriptors:
                connection.send_with(answer, descriptors)
            else:
                connection.send(answer)
        finally:
            close_all(descriptors)
        return ""

    def _describe(self) -> tuple[KeeperView, list[OwnerView]]:
        uptime_s = time.monotonic() - self._started
        keeper = KeeperView(os.getpid(), __version__, PROTOCOL_VERSION, uptime_s, self._linger_s())
        return keeper, _owner_views(self._house)


def _owner_views(house: House) -> list[OwnerView]:
    """Everyone with a line, a lock or a claim."""
    lines = {connection.owner: connection for connection in house.connections.values() if connection.owner is not None}
    ledgers = [ledger for kept in house.layouts.values() for ledger in kept.ledgers.values()]
    views: list[OwnerView] = []
    for owner in range(OWNERS_MAX):
        line = lines.get(owner)
        reserved, leased = (
            sum(counts) for counts in zip((0, 0), *(one.claims_of(owner) for one in ledgers), strict=True)
        )
        alive = house.lives(owner)
        if line is not None or alive or reserved or leased:
            pid, layout, joined = (line.pid, line.layout, line.joined) if line is not None else (0, "", False)
            asked = line.budgets if line is not None else []
            views.append(OwnerView(owner, pid, layout, joined, alive, reserved, leased, asked))
    return views
