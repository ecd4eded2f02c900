"""The scheduler: which sequences run in the next pass, with how many tokens each.

Owns the queues of sequences and decides admission, chunking, preemption and finishing against the store's books. No
torch, no clock (time is an argument), no I/O of its own. The engine calls `schedule`, runs the pass, then `commit`s.

Cannot deadlock: slots are given optimistically, but the oldest sequence gets what later ones hold (they are preempted
and resume from the tiers). One whose whole length would not fit HBM is streamed: it runs within a working set, and only
once it has rows on the shelves for all the rest (streams.py).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass

from kvtier.admission import Admission
from kvtier.request import FinishReason
from kvtier.sealing import Sealer
from kvtier.sequence import ScheduledSequence, Sequence, SequenceState, rank_of
from kvtier.staged_parts import StagedParts
from kvtier.store import Store
from kvtier.streams import STALL_S, STALLED, StreamLimits, Streams

PATIENCE_S = 1.0
"""How long a running sequence waits for slots that transfers hold before later ones are preempted for it."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step."""

    step_tokens: int
    sequences_max: int
    beside_tokens: int | None = None
    """Token budget of a step in which some decode, so that these wait less, half of it at least for prompts; None: all.

    Of one length all told: a matrix product of a new length is prepared first, which takes as long as some of it.
    """


class Scheduler:
    """Continuous batching with chunked prefill under one token budget a step."""

    def __init__(self, store: Store, limits: SchedulerLimits, stream_limits: StreamLimits | None = None) -> None:
        """Without `stream_limits` nothing is streamed."""
        self._store = store
        self._limits = limits
        self._streams = Streams(store, stream_limits if stream_limits is not None else StreamLimits())
        self._sealer = Sealer(store)
        self._block_tokens = store.layout.block_tokens
        self._admission = Admission(store, self._sealer)
        self._running: list[Sequence] = []
        self._stalled: list[Sequence] = []
        self.staged_parts = StagedParts(store, self._streams, self._running, self._plan_alone)
        """What suspended passes are made of."""
        self.preemption_count = 0

    @property
    def waiting_count(self) -> int:
        """Sequences without slots."""
        return len(self._admission) + len(self._streams.waiting)

    @property
    def streamed_count(self) -> int:
        """Streamed sequences that have rows on the shelves."""
        return self._streams.count

    @property
    def running_count(self) -> int:
        """Sequences with slots, those that still fetch included."""
        return len(self._running) + self._admission.fetching_count

    @property
    def sequences(self) -> list[Sequence]:
        """All that are not finished."""
        admission = self._admission
        return [*self._running, *admission.fetching, *admission.waiting, *self._streams.waiting]

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence; it is streamed if its whole length does not fit HBM."""
        longest = sequence.prompt_count + sequence.output_max - 1
        if self._store.layout.block_count(longest) <= self._store.usable_count:
            self._admission.add(sequence)
        else:
            self._streams.add(sequence)

    def next_deadline(self) -> float | None:
        """When, at the latest, `schedule` should be called again though nothing has happened."""
        return min(self._admission.deadlines() + self._streams.deadlines(), default=None)

    def schedule(self, now: float) -> list[ScheduledSequence]:
        """Plan the next pass; empty if nothing can run now. Every planned token has a slot."""
        self._run_arrived(now)
        self._streams.advance(now)
        plan: dict[int, ScheduledSequence] = {}
        budget = self._limits.step_tokens
        decoding = [sequence for sequence in self._running if sequence.remaining_count == 1]
        prefilling = [sequence for sequence in self._running if sequence.remaining_count > 1]
        if decoding and (beside := self._limits.beside_tokens) is not None:
            budget = min(budget, max(beside, len(decoding) + -(-beside // 2)))
        for sequence in decoding + prefilling:
            if budget > 0 and sequence.state is SequenceState.RUNNING and not sequence.table.staged_count:
                budget -= self._plan(sequence, budget, plan, now)
        while budget > 0 and (admitted := self._admit(now)) is not None:
            if admitted.state is SequenceState.RUNNING:
                budget -= self._plan(admitted, budget, plan, now)
            if admitted.state is SequenceState.WAITING:
                break  # it has yielded at once, and would do so again
        # what has lost slots for the others' sake since it was planned waits for a suspended pass
        return [part for part in plan.values() if not part.sequence.table.staged_count]

    def commit(self, part: ScheduledSequence, token: int | None, now: float) -> FinishReason | None:
        """The pass is done: seal full blocks, append the sampled token. Returns why the sequence should finish now."""
        sequence = part.sequence
        assert (token is not None) == part.samples
        sequence.pinned = False
        sequence.attribute(part.count, None)
        if sequence.streamed:
            self._streams.note_pass(part)
            self._streams.stream(sequence).seal(now)
        else:
            self._sealer.seal(sequence, now)
        if token is None:
            return None
        sequence.tokens.append(token)
        if token in sequence.stop_ids:
            return FinishReason.STOP
        if sequence.output_count >= sequence.output_max:
            return FinishReason.LENGTH
        return None

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End a sequence in any state, between passes; its sealed blocks stay for others."""
        if sequence.state is SequenceState.FINISHED:
            return
        self._withdraw(sequence, now)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason

    def take_stalled(self) -> list[tuple[Sequence, str]]:
        """Sequences to give up and why, because what they need cannot be had. Still to be finished by the caller."""
        stalled, self._stalled = self._stalled, []
        residents = [(sequence, STALLED) for sequence in stalled if not sequence.streamed]
        return residents + self._streams.take_stalled(others=len(residents) < len(stalled))

    def held(self) -> Counter[int]:
        """Holds of all sequences and fetches by slot (for `Store.check`)."""
        held = Counter(slot for sequence in self._running for slot in sequence.table.held)
        held.update(self._admission.held())
        held.update(self._streams.fetched())
        return held

    def check(self) -> None:
        """Assert that states, tables and holds agree, in the store's books too."""
        self._admission.check()
        for sequence in self._running:
            assert sequence.state is SequenceState.RUNNING or sequence.streamed
            full = sequence.computed_count // self._block_tokens
            assert sequence.sealed_count == full or (sequence.sealed_count < full and not sequence.cache_write)
            assert len(sequence.table) >= self._store.layout.block_count(sequence.computed_count)
        self._streams.check()
        self._store.check(self.held())

    def _plan(self, sequence: Sequence, budget: int, plan: dict[int, ScheduledSequence], now: float) -> int:
        """Give `sequence` slots for up to `budget` tokens and a part of the pass; returns the tokens planned."""
        count = min(sequence.remaining_count, budget)
        if sequence.streamed:
            count = self._streams.stream(sequence).chunk(count)
        count = self._grow(sequence, count, plan, now)
        if count > 0:
            samples = count == sequence.remaining_count
            plan[sequence.number] = ScheduledSequence(sequence, sequence.computed_count, count, samples)
        return count

    def _plan_alone(self, sequence: Sequence, budget: int, now: float) -> ScheduledSequence | None:
        """A part for a pass of its own, of up to `budget` tokens, or what a step may have if that is more."""
        plan: dict[int, ScheduledSequence] = {}
        self._plan(sequence, max(budget, self._limits.step_tokens), plan, now)
        return plan.get(sequence.number)

    def _grow(self, sequence: Sequence, count: int, plan: dict[int, ScheduledSequence], now: float) -> int:
        """Make room for `count` more tokens, or as many as there is room for; 0 if it must wait or was preempted."""
        layout, table, store = self._store.layout, sequence.table, self._store
        while True:
            spare_tokens = len(table) * self._block_tokens - sequence.computed_count
            slots_max = store.available_count
            if sequence.streamed:
                wanted = layout.block_count(sequence.computed_count + count) - len(table)
                own = self._streams.stream(sequence).window(max(wanted, 0))
                if own == 0 and spare_tokens == 0:  # its older blocks are still on their way to the shelves
                    self._give_up_stalled(sequence, now)
                    return 0
                slots_max = min(own, slots_max)
            room = spare_tokens + slots_max * self._block_tokens
            if room > 0:
                count = min(count, room)
                needed = layout.block_count(sequence.computed_count + count) - len(table)
                slots = store.allocate(max(needed, 0))
                assert slots is not None
                table.extend(slots, [store.address(slot) for slot in slots])
                sequence.allocated_blocks += len(slots)
                sequence.stalled_since = None
                return count
            if self._streams.lower_all():
                continue
            stalled_s = self._stalled_s(sequence, now)
            if stalled_s < PATIENCE_S and store.awaits_slots(now):
                return 0
            victim = max([*self._running, *self._admission.fetching], key=rank_of)
            if victim.pinned:
                return 0
            if victim is sequence and self.running_count == 1:
                self._give_up_stalled(sequence, now)
                return 0
            self._preempt(victim, plan, now)
            sequence.stalled_since = None
            if victim is sequence:
                return 0

    def _stalled_s(self, sequence: Sequence, now: float) -> float:
        """How long transfers have held the slots that a sequence needs."""
        if sequence.stalled_since is None:
            sequence.stalled_since = now
        return now - sequence.stalled_since

    def _give_up_stalled(self, sequence: Sequence, now: float) -> None:
        """It waits for slots or rows that transfers hold; those that hang are not waited for for ever."""
        if self._stalled_s(sequence, now) > STALL_S and sequence not in self._stalled:
            self._stalled.append(sequence)

    def _admit(self, now: float) -> Sequence | None:
        """Take the first waiting sequence in, if there is a place and room; those that are streamed hold nobody up."""
        if self.running_count >= self._limits.sequences_max:
            return None
        streamed = self._streams.ready(now, self.running_count)
        first = self._admission.waiting[0] if len(self._admission) else None
        if first is not None and (streamed is None or first.rank < streamed.rank):
            admitted = self._admit_resident(first, now)
            if admitted is not None:
                return admitted
        if streamed is not None:
            self._streams.start(streamed, now)
            insort(self._running, streamed, key=rank_of)
        return streamed

    def _admit_resident(self, first: Sequence, now: float) -> Sequence | None:
        """The first in the queue, unless it has no room."""
        while (admitted := self._admission.admit(self._running, self.running_count, now)) is None:
            if self._streams.lower_all():
                continue
            if self.running_count > 0:
                first.stalled_since = None
            else:
                self._give_up_stalled(first, now)
            return None
        self._run_arrived(now)
        return admitted

    def _run_arrived(self, now: float) -> None:
        for sequence in self._admission.arrived(now):
            insort(self._running, sequence, key=rank_of)

    def _preempt(self, sequence: Sequence, plan: dict[int, ScheduledSequence], now: float) -> None:
        """Take all slots from a sequence; it waits in its old rank and resumes from the tiers."""
        plan.pop(sequence.number, None)
        sequence.stalled_since = None
        sequence.preempted_count += 1
        self.preemption_count += 1
        if sequence.streamed:
            self._running.remove(sequence)
            self._streams.stream(sequence).rest()
        else:
            self._withdraw(sequence, now)
            sequence.computed_count = sequence.sealed_count = 0
            self._admission.add(sequence)
        sequence.state = SequenceState.WAITING

    def _withdraw(self, sequence: Sequence, now: float) -> None:
        """Take a sequence out of its queue and give back what it holds."""
        if sequence.streamed:
            if sequence in self._running:
                self._running.remove(sequence)
            self._store.touch(sequence.hashes[: sequence.sealed_count], now)
            self._streams.end(sequence, now)
        elif sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
            self._store.touch(sequence.hashes[: sequence.sealed_count], now)
            self._store.release(sequence.table.clear())
        else:
            self._admission.leave(sequence)
