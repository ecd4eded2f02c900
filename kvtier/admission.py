"""Sequences that fit HBM, on their way in: waiting in their rank, then fetching what is known of their prefix.

Owns that queue and those fetches; the scheduler says who else wants slots, and runs what has arrived. No torch, no
clock, no I/O of its own.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from kvtier.cost import Work
from kvtier.fetch import Fetch
from kvtier.sealing import Sealer
from kvtier.sequence import Sequence, SequenceState, rank_of
from kvtier.store import Store


class Admission:
    """See the module. Its length is that of the queue."""

    def __init__(self, store: Store, sealer: Sealer) -> None:
        self._store = store
        self._sealer = sealer
        self._block_tokens = store.layout.block_tokens
        self._waiting: list[Sequence] = []
        self._fetches: dict[int, tuple[Sequence, Fetch]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def fetching_count(self) -> int:
        """How many are `fetching`."""
        return len(self._fetches)

    @property
    def waiting(self) -> list[Sequence]:
        """The queue, first in rank first."""
        return self._waiting

    @property
    def fetching(self) -> list[Sequence]:
        """Those that have slots and wait for what is read into them."""
        return [sequence for sequence, _ in list(self._fetches.values())]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that is new, or has been preempted."""
        sequence.state = SequenceState.WAITING
        insort(self._waiting, sequence, key=rank_of)

    def admit(self, running: Iterable[Sequence], others: int, now: float) -> Sequence | None:
        """Let the first in the queue claim its prefix; None if HBM has not the slots that all of it wants.

        A slot for each of the `others` is left to them. It is computed after what is `running`.
        """
        sequence = self._waiting[0]
        sequence.chain.extend(sequence.hashes, sequence.tokens)
        known = sequence.hashes[: (len(sequence.tokens) - 1) // self._block_tokens if sequence.cache_read else 0]
        total = self._store.layout.block_count(len(sequence.tokens))
        backlog = Work.of((s.computed_count, s.remaining_count) for s in running if s.remaining_count > 1)
        fetch = self._store.fetch(known, min(total + others, self._store.slot_count), now, backlog)
        if fetch is None:
            return None
        self._waiting.pop(0)
        sequence.stalled_since, sequence.state = None, SequenceState.FETCHING
        self._fetches[sequence.number] = (sequence, fetch)
        return sequence

    def arrived(self, now: float) -> list[Sequence]:
        """Sequences whose prefix is there, as far as it goes: they take part in passes from now on."""
        ready = [sequence for sequence, fetch in self._fetches.values() if fetch.is_ready(now)]
        for sequence in ready:
            slots, origins = self._store.settle(self._fetches.pop(sequence.number)[1])
            sequence.table.extend(slots, [self._store.address(slot) for slot in slots])
            for origin in origins:
                sequence.attribute(self._block_tokens, origin)
            sequence.sealed_count = len(slots)
            sequence.reused_blocks += len(slots)
            self._sealer.retain(sequence, 0, len(slots))
            sequence.state = SequenceState.RUNNING
        return ready

    def leave(self, sequence: Sequence) -> None:
        """A sequence that waits or fetches does so no longer; its slots go back."""
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        else:
            self._store.abandon(self._fetches.pop(sequence.number)[1])

    def deadlines(self) -> list[float]:
        """When to look for what has `arrived` though nothing has happened."""
        return [fetch.deadline for _, fetch in self._fetches.values()]

    def held(self) -> list[int]:
        """One entry for each hold on a slot of HBM."""
        return [slot for _, fetch in self._fetches.values() for slot in fetch.slots]

    def check(self) -> None:
        """Assert that states and tables agree with where the sequences are."""
        assert all(sequence.state is SequenceState.WAITING for sequence in self._waiting)
        assert all(sequence.state is SequenceState.FETCHING for sequence in self.fetching)
        assert not any(sequence.table.slots for sequence in (*self._waiting, *self.fetching))
