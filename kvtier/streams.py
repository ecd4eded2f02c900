"""The streamed sequences: those whose context is larger than HBM.

Owns their waiting: for a place, for rows on the shelves, for slots after a preemption. They hold rows for all that they
may need before they start, and one of them asks at a time, so that none of them waits for another. Asked by the
scheduler, before and after passes; knows no budget of tokens.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from kvtier.block import Tier
from kvtier.byte_text import free_text, needed_text
from kvtier.sequence import ScheduledSequence, Sequence, SequenceState, rank_of
from kvtier.store import Store
from kvtier.stream import Stream

RETRY_S, RETRY_SHARE, RETRY_MAX_S = 0.05, 0.1, 1.0
"""A sequence whose rows could not be had asks again after this long, then after this share of the time it has waited.

Each time it leases what DRAM has of its prompt; that is judged once the rows are there.
"""
STALL_S = 30.0
"""A sequence is given up after waiting this long for what nobody is about to give back."""
TRIED_S = 2.0
"""The time that it has waited behind others counts, but for these last seconds: they are for tries of its own."""
STALLED = "HBM is held by transfers that do not end; try again later"
UNWRITABLE = "{} takes no blocks of a context larger than HBM, and has not for {:.0f} s; try again later"
UNREADABLE = "NVMe keeps losing rows of a context larger than HBM; try again later"
TIER_NAMES = {Tier.DRAM: "DRAM", Tier.NVME: "NVMe"}
ROUNDS_MAX = 8
"""Questions and answers before one plan, where the books answer at once."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds of streaming."""

    streams_max: int = 0
    """Sequences that are streamed at once; the others wait."""
    slots_max: int = 0
    """Slots of HBM that each of them may hold; 0: none is streamed."""


class Streams:
    """See the module."""

    def __init__(self, store: Store, limits: StreamLimits) -> None:
        self._store = store
        self._limits = limits
        self._block_bytes = store.layout.token_bytes * store.layout.block_tokens
        self._queue: list[Sequence] = []
        """Have asked for nothing yet."""
        self._streams: dict[int, Stream] = {}
        """By sequence number. At most one of them has not begun: it asks for its rows."""
        self._retry_at = 0.0
        self._now = 0.0
        self._behind_since: dict[int, float] = {}
        """By sequence number, since when it has waited behind one that could not have its rows."""
        self._stalled: list[Sequence] = []
        """Have waited for too long."""
        self._losing: list[Sequence] = []
        """Have lost rows for too long."""

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences without slots of HBM, those that were preempted included."""
        streamed = (stream.sequence for stream in self._ranked())
        return [*self._queue, *(sequence for sequence in streamed if sequence.state is SequenceState.WAITING)]

    @property
    def count(self) -> int:
        """Sequences that have their rows."""
        return sum(stream.homes.begun for stream in list(self._streams.values()))

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        assert self._limits.streams_max > 0 < self._limits.slots_max
        sequence.streamed = True
        insort(self._queue, sequence, key=rank_of)

    def advance(self, now: float) -> None:
        """Take in what has happened on the shelves, before a plan is made."""
        self._now = now
        for _ in range(ROUNDS_MAX):
            self._ask_for_next(now)
            for stream in self._ranked():
                stream.advance(now)
            if not self._streams or not self._store.hand_down.pump(now):
                break

    def ready(self, now: float, running_count: int) -> Sequence | None:
        """The first waiting sequence that has its rows and could have slots."""
        for stream in self._ranked():
            sequence = stream.sequence
            if sequence.state is SequenceState.WAITING and stream.homes.begun:
                roomy = stream.may_start
                if roomy and self._store.available_count > running_count:
                    return sequence
                if running_count == 0 or not roomy:
                    self._wait(sequence, now)
        return None

    def start(self, sequence: Sequence, now: float) -> None:
        """A sequence that was `ready` takes part from now on."""
        sequence.state, sequence.stalled_since = SequenceState.RUNNING, None
        self._streams[sequence.number].advance(now)

    def stream(self, sequence: Sequence) -> Stream:
        """What a sequence that has begun has besides its table."""
        return self._streams[sequence.number]

    def lower_all(self) -> bool:
        """Let go of every slot of HBM whose block has a home, since others want it; whether there was any."""
        return sum(stream.lower(self._limits.slots_max) for stream in self._streams.values()) > 0

    def lose(self, sequence: Sequence, index: int, now: float) -> None:
        """A row of a sequence cannot be staged. One that loses rows and comes no further is given up."""
        stream = self._streams[sequence.number]
        stream.lose(index, now)
        if stream.loses_for_s(now) > STALL_S and sequence not in self._losing:
            self._losing.append(sequence)

    def note_pass(self, part: ScheduledSequence) -> None:
        """Count what a pass has attended to in place."""
        table = part.sequence.table
        in_place = len(table) - table.held_count - table.staged_count
        self._store.metrics.streamed_bytes.add(in_place * self._block_bytes, Tier.DRAM.value)

    def end(self, sequence: Sequence, now: float) -> None:
        """A sequence is over, in whatever state."""
        self._behind_since.pop(sequence.number, None)
        if sequence in self._losing:
            self._losing.remove(sequence)
        if sequence in self._queue:
            self._queue.remove(sequence)
        else:
            self._streams.pop(sequence.number).end(now)
            self._retry_at = 0.0  # what it gives back may be what the next one lacked, or one that runs
            for stream in self._streams.values():
                stream.sequence.stalled_since = None

    def take_stalled(self, others: bool) -> list[tuple[Sequence, str]]:
        """Sequences to give up and why, because what they need cannot be had; `others` of them wait in vain, too.

        Of those that wait only the last in rank: what it gives back may be what the others lack.
        """
        waits = others or len(self._stalled) > 0
        losing, self._losing, self._stalled = self._losing, [], []
        if losing or not waits:
            return [(sequence, UNREADABLE) for sequence in losing]
        since = self._now - STALL_S / 2
        everybody = [*self._queue, *(stream.sequence for stream in self._streams.values())]
        stalled = (one for one in everybody if one.stalled_since is not None and one.stalled_since < since)
        return [(sequence, self._shortage(sequence)) for sequence in sorted(stalled, key=rank_of)[-1:]]

    def deadlines(self) -> list[float]:
        """When to `advance` though nothing has happened."""
        times = [stream.fetch.deadline for stream in self._streams.values() if stream.fetch is not None]
        if self._queue and self._retry_at > self._now:
            times.append(self._retry_at)
        if any(stream.homes.lost for stream in self._streams.values()):
            times.append(self._now)  # it goes back as soon as no pass is over it
        return times + self._store.hand_down.retries()

    def fetched(self) -> list[int]:
        """Slots of blocks that are under way to streamed sequences."""
        return [slot for stream in self._streams.values() if stream.fetch for slot in stream.fetch.slots]

    def check(self) -> None:
        """Assert that queues, tables, homes and working sets agree."""
        assert len(self._streams) <= self._limits.streams_max
        assert sum(not stream.homes.begun for stream in self._streams.values()) <= 1
        assert all(sequence.state is SequenceState.WAITING and not len(sequence.table) for sequence in self._queue)
        for stream in self._streams.values():
            stream.check()

    def _ranked(self) -> list[Stream]:
        streams = list(self._streams.values())  # in one step: another thread may ask for the counts
        return sorted(streams, key=lambda stream: stream.sequence.rank)

    def _ask_for_next(self, now: float) -> None:
        asking = next((stream for stream in self._streams.values() if not stream.homes.begun), None)
        if asking is not None:
            self._judge(asking, now)
        elif self._queue and len(self._streams) < self._limits.streams_max and now >= self._retry_at:
            self._open(self._queue.pop(0))

    def _open(self, sequence: Sequence) -> None:
        """Take what DRAM has of the prompt, then ask for the rows that are lacking."""
        private = not (sequence.cache_read and sequence.cache_write)
        homes = self._store.hand_down.open(self._needed(sequence), sequence.retention.tenant, private)
        stream = self._streams[sequence.number] = Stream(sequence, self._store, self._limits.slots_max, homes)
        stream.find_prefix()

    def _judge(self, stream: Stream, now: float) -> None:
        """Has a sequence all that it asked for? If that cannot be had, all goes back, and it asks again later."""
        sequence, homes = stream.sequence, stream.homes
        if homes.refused:
            del self._streams[sequence.number]
            stream.end(now)
            insort(self._queue, sequence, key=rank_of)
            if self._streams and homes.needed <= self._row_count():
                # What they have will come back, and `end` says when.
                sequence.stalled_since = None
                self._behind_since.clear()
                self._retry_at = now + RETRY_MAX_S
            else:
                self._wait(sequence, now)
                for one in self._queue:
                    self._behind_since.setdefault(one.number, now)
                waited_s = now - (sequence.stalled_since or now)
                self._retry_at = now + min(max(RETRY_S, RETRY_SHARE * waited_s), RETRY_MAX_S)
        elif not homes.asking and homes.lacking <= 0 and not homes.is_looking:
            stream.begin(now)
            self._behind_since.clear()

    def _needed(self, sequence: Sequence) -> int:
        """Rows on the shelves for all that it may compute, besides its working set."""
        total = self._store.layout.block_count(sequence.prompt_count + sequence.output_max - 1)
        return max(0, total - self._limits.slots_max)

    def _shortage(self, sequence: Sequence) -> str:
        """What a sequence has waited for in vain, in bytes."""
        stream, row_bytes = self._streams.get(sequence.number), self._store.layout.row_bytes
        if stream is not None and stream.homes.begun and stream.homes.lacking <= 0:
            tiers = " and ".join(TIER_NAMES[tier] for tier in stream.homes.awaited())
            return UNWRITABLE.format(tiers, STALL_S) if tiers else STALLED
        there = self._row_count()
        others = (other.homes for other in self._streams.values() if other is not stream)
        held = sum(homes.held(tier) for homes in others for tier in (Tier.DRAM, Tier.NVME))
        return (
            f"a context larger than HBM needs {needed_text(self._needed(sequence) * row_bytes)} of DRAM and NVMe, and "
            f"for {STALL_S:.0f} s could not have it: there are {free_text(there * row_bytes)} for one request, other "
            f"requests hold {free_text(held * row_bytes)}; pins, quotas and other engines take more; try again later"
        )

    def _row_count(self) -> int:
        """Rows on the shelves, as they are now, that one sequence may have."""
        rows = self._store.capacities()
        return rows.get(Tier.DRAM.value, 0) + min(rows.get(Tier.NVME.value, 0), self._store.hand_down.staged_max)

    def _wait(self, sequence: Sequence, now: float) -> None:
        if sequence.stalled_since is None:
            behind_s = now - self._behind_since.get(sequence.number, now)
            sequence.stalled_since = now - min(behind_s, STALL_S - TRIED_S)
        if now - sequence.stalled_since > STALL_S and sequence not in self._stalled:
            self._stalled.append(sequence)
