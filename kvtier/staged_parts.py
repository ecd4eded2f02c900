"""Parts for suspended passes: of running sequences that have rows on NVMe, in turns.

Decides whose turn it is and how long a chunk is worth its reads; pins what a pass is about to use. No torch, no clock,
no I/O. Made by the scheduler, which plans the parts; asked by whoever runs suspended passes, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.block import Tier
from kvtier.sequence import ScheduledSequence, Sequence, SequenceState, StagedPart
from kvtier.store import Store
from kvtier.streams import Streams

Plan = Callable[[Sequence, int, float], "ScheduledSequence | None"]


class StagedParts:
    """See the module."""

    def __init__(self, store: Store, streams: Streams, running: list[Sequence], plan: Plan) -> None:
        """`running`: the scheduler's own list; `plan(sequence, tokens, now)` gives it slots and a part."""
        self._store = store
        self._streams = streams
        self._running = running
        self._plan = plan
        self._last = -1
        """Number of the sequence that had the last turn."""

    def schedule_staged(self, now: float) -> StagedPart | None:
        """The next part, of a sequence that is pinned from then on: its blocks do not move, and neither does it.

        Until it is committed, abandoned or lost.
        """
        turn = sorted(
            (s for s in self._running if s.table.staged_count), key=lambda s: (s.number <= self._last, s.number)
        )
        for place, sequence in enumerate(turn):
            part = None
            if sequence.state is SequenceState.RUNNING and self.is_sound(sequence):
                part = self._plan(sequence, self._covering_tokens(sequence), now)
            if part is not None and sequence.table.staged_count:
                sequence.pinned = True
                self._last = sequence.number
                following = [*turn[place + 1 :], *turn][0]
                records, expected = (self._streams.stream(s).staged() for s in (sequence, following))
                return StagedPart(part, records, expected)
        return None

    def abandon_staged(self, sequence: Sequence) -> None:
        """The pass over a sequence has been abandoned; its rows are as they were."""
        sequence.pinned = False

    def lost(self, sequence: Sequence, block_index: int, now: float) -> None:
        """The pass over a sequence has been abandoned, since this block of it cannot be staged."""
        sequence.pinned = False
        self._streams.lose(sequence, block_index, now)

    def is_sound(self, sequence: Sequence) -> bool:
        """Whether the pass over a sequence may go on: none of its leases has been lost."""
        return not self._streams.stream(sequence).homes.lost

    def _covering_tokens(self, sequence: Sequence) -> int:
        """Tokens that take as long to compute as reading the rows that are staged for them."""
        costs, staged_bytes = self._store.costs, sequence.table.staged_count * self._store.layout.row_bytes
        read_s = staged_bytes / costs.read_bytes_per_second(Tier.NVME)
        return int(read_s * costs.prefill_tokens_per_second())
