"""Rows that an engine has written and the keeper has yet to say whether they count.

Each question is asked again of the next keeper, until its deadline; what nobody has answered by then is given back,
and void if it was published after all. Owned by shared.py, on the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.directory import PublishOutcome
from kvtier.keeper.fields import as_rows, row_pieces
from kvtier.keeper.link import ANSWER_S, Link
from kvtier.keeper.wire import Publish, Published
from kvtier.record import Record

_OUTCOMES = (PublishOutcome.PUBLISHED, PublishOutcome.DUPLICATE, PublishOutcome.STALE)


class Publication(NamedTuple):
    """Rows of one question. With `lease` those that are published are leased in the same step."""

    records: Sequence[Record]
    lease: bool
    deadline: float


class Publications:
    """See the module."""

    def __init__(self, tier_index: int, link: Link) -> None:
        self._tier_index = tier_index
        self._link = link
        self._questions: dict[int, Publication] = {}

    def ask(self, records: Sequence[Record], lease: bool, now: float) -> None:
        """Whether these count."""
        for piece in row_pieces(records):
            self._ask(Publication(piece, lease, now + ANSWER_S))

    def ask_again(self) -> None:
        """There is a keeper, who has not heard of them."""
        unanswered, self._questions = self._questions, {}
        for publication in unanswered.values():
            self._ask(publication)

    def answered(self, message: Published) -> tuple[Publication, list[PublishOutcome]] | None:
        """An answer, if the question was ours. One that does not fit is none: the question ends with its deadline."""
        publication = self._questions.get(message.number)
        if publication is None or len(publication.records) != len(message.outcomes):
            return None
        del self._questions[message.number]
        return publication, list(map(_OUTCOMES.__getitem__, message.outcomes))

    def expired(self, now: float) -> list[Publication]:
        """Take out those that nobody has answered in time."""
        late = [number for number, publication in self._questions.items() if publication.deadline <= now]
        return [self._questions.pop(number) for number in late]

    def _ask(self, publication: Publication) -> None:
        number = self._link.number()
        self._questions[number] = publication
        deadline_ns = time.monotonic_ns() + int(ANSWER_S * 1e9)
        rows = as_rows(publication.records)
        self._link.send(Publish(number, self._tier_index, rows, deadline_ns, publication.lease))
