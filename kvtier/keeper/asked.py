"""Rows that an engine asks a shared shelf for, to hold them and write to them later.

A long question goes to the keeper piece by piece, the next once the last was granted in full. Each says how many there
must be room for in all, so that nothing has to go for a question that is refused. One that is refused is asked once
more without this engine's stock, which may be all that it lacked. What was granted for one that comes to nothing goes
back. Owned by shared.py, on the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.keeper.fields import ROWS_MAX, as_claims, pieces
from kvtier.keeper.link import ANSWER_S, Link
from kvtier.keeper.stock import Stock
from kvtier.keeper.wire import Abandon, Granted, Reserve
from kvtier.record import Grant
from kvtier.ticket import Reply


@dataclass(eq=False, slots=True)
class _Question:
    number: int
    tenant: bytes
    count: int
    least: int
    deadline: float
    grants: list[Grant] = field(default_factory=list)
    last: bool = False
    """Nothing of this engine's own is in its way any more."""


class AskedRows:
    """See the module."""

    def __init__(self, tier_index: int, link: Link, out: dict[int, Grant], replies: list[Reply], stock: Stock) -> None:
        """`out`: by slot all that this engine has been granted and not in its `stock`; `replies` gets the answers."""
        self._tier_index = tier_index
        self._link = link
        self._out = out
        self._replies = replies
        self._stock = stock
        self._questions: dict[int, _Question] = {}
        """By the number of the piece that is under way."""

    def ask(self, count: int, tenant: bytes, least: int) -> int:
        """See `Books.ask_rows`."""
        number = self._link.number()
        self._go_on(_Question(number, tenant, count, least, time.monotonic() + ANSWER_S))
        return number

    def answered(self, message: Granted) -> bool:
        """An answer; whether the question was ours."""
        question = self._questions.pop(message.number, None)
        if question is None:
            return False
        self._out.update((grant.slot, grant) for grant in message.grants)
        question.grants += message.grants
        more = len(message.grants) == ROWS_MAX and len(question.grants) < question.count
        if not more and len(question.grants) < question.least and not question.last:
            more = question.last = self._empty_stock()
        if more:
            self._go_on(question)
        else:
            self._end(question)
        return True

    def give(self, grants: Sequence[Grant]) -> None:
        """Rows back that nothing was written to. A keeper that is away learns of it when it greets."""
        for grant in grants:
            self._out.pop(grant.slot, None)
        for piece in pieces(grants):
            self._link.send(Abandon(self._tier_index, as_claims(piece), unused=True))

    def expire(self, now: float) -> None:
        """End questions that nobody has answered in time; what is granted late goes back."""
        self._refuse([number for number, question in self._questions.items() if question.deadline <= now])

    def refuse(self) -> None:
        """Nobody will answer what was asked."""
        self._refuse(list(self._questions))

    def _empty_stock(self) -> bool:
        """Give back what lies idle here; whether there was any."""
        idle = self._stock.part_with()
        self.give(idle)
        return len(idle) > 0

    def _refuse(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._end(self._questions.pop(number))

    def _go_on(self, question: _Question) -> None:
        number, got = self._link.number(), len(question.grants)
        count, least = min(question.count - got, ROWS_MAX), max(question.least - got, 0)
        deadline_ns = time.monotonic_ns() + int(ANSWER_S * 1e9)
        if self._link.send(Reserve(number, self._tier_index, count, question.tenant, deadline_ns, least)):
            self._questions[number] = question
        else:
            self._end(question)

    def _end(self, question: _Question) -> None:
        grants: list[Grant] | None = question.grants
        if len(question.grants) < question.least:
            self.give(question.grants)
            grants = None
        self._replies.append(Reply(question.number, grants, None))
