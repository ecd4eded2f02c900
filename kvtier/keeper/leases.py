"""An engine's leases on the rows of one shared shelf, which hold them in place; asked for, had, and given back.

Unlike other reads, which copy and then ask whether the row was there all the time, they cost a question to the keeper.
There an engine has one lease on a row or none, so uses are counted here, and it is given back after the last one.
Knows no mirror. Owned by shared.py, on the engine thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.keeper.fields import ROWS_MAX, as_claims, pieces
from kvtier.keeper.link import ANSWER_S, Link
from kvtier.keeper.wire import Acquire, Acquired, Release
from kvtier.record import Grant, Lease, Record
from kvtier.ticket import Reply


@dataclass(eq=False, slots=True)
class _Question:
    number: int
    records: list[Record]
    deadline: float
    leases: list[Lease | None] = field(default_factory=list)

    def piece(self) -> list[Record]:
        """Those that are asked for next, or now."""
        return self.records[len(self.leases) : len(self.leases) + ROWS_MAX]


class Leases:
    """See the module."""

    def __init__(self, tier_index: int, link: Link, replies: list[Reply]) -> None:
        """`replies` gets the answers."""
        self._tier_index = tier_index
        self._link = link
        self._replies = replies
        self._held: Counter[Grant] = Counter()
        self._asked: Counter[Grant] = Counter()
        """In questions under way: their answer decides, and until then nothing of them is given back."""
        self._questions: dict[int, _Question] = {}
        """By the number of the piece that is under way."""

    def ask(self, records: Sequence[Record]) -> int:
        """See `Books.ask_leases`."""
        number = self._link.number()
        self._go_on(_Question(number, list(records), time.monotonic() + ANSWER_S))
        return number

    def add(self, records: Iterable[Record]) -> None:
        """The keeper has leased these with their publication."""
        self._held.update(map(_claim, records))

    def end(self, leases: Sequence[Lease]) -> None:
        """See `Books.end_leases`."""
        claims = [_claim(lease.record) for lease in leases]
        self._held -= Counter(claims)
        self.release(claims)

    def release(self, claims: Iterable[Grant]) -> None:
        """Give back those that nothing here has or asks for any more."""
        over = [claim for claim in dict.fromkeys(claims) if not self._held[claim] and not self._asked[claim]]
        for piece in pieces(over):
            self._link.send(Release(self._tier_index, as_claims(piece)))

    def held(self) -> list[Grant]:
        """Every lease that this engine has."""
        return list(self._held)

    def answered(self, message: Acquired) -> bool:
        """An answer; whether the question was ours."""
        question = self._questions.pop(message.number, None)
        if question is None:
            return False
        got = set(message.grants)
        asked = question.piece()
        leases = [Lease(record) if _claim(record) in got else None for record in asked]
        self.add(lease.record for lease in leases if lease is not None)
        self._settle(asked)
        question.leases += leases
        self._go_on(question)
        return True

    def expire(self, now: float) -> None:
        """End questions that nobody has answered in time. A late answer means nothing: what it gives has gone back."""
        self._refuse([number for number, question in self._questions.items() if question.deadline <= now])

    def refuse(self) -> None:
        """Nobody will answer what was asked."""
        self._refuse(list(self._questions))

    def _refuse(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            question = self._questions.pop(number)
            self._settle(question.piece())
            self._end(question)

    def _go_on(self, question: _Question) -> None:
        piece = question.piece()
        number, claims = self._link.number(), [_claim(record) for record in piece]
        deadline_ns = time.monotonic_ns() + int(ANSWER_S * 1e9)
        if piece and self._link.send(Acquire(number, self._tier_index, as_claims(claims), deadline_ns)):
            self._questions[number] = question
            self._asked.update(claims)
        else:
            self._end(question)

    def _settle(self, asked: Sequence[Record]) -> None:
        """A question about these is over: what it has not given, and nothing else holds, the keeper must not keep."""
        claims = [_claim(record) for record in asked]
        self._asked -= Counter(claims)
        self.release(claims)

    def _end(self, question: _Question) -> None:
        missing = len(question.records) - len(question.leases)
        self._replies.append(Reply(question.number, None, [*question.leases, *[None] * missing]))


def _claim(record: Record) -> Grant:
    return Grant(record.slot, record.generation)
