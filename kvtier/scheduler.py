"""The scheduler: which sequences run in the next pass, with how many tokens each.

Owns the queues of sequences and decides admission, chunking, preemption and finishing against the store's books. No
torch, no clock (time is an argument), no I/O of its own. The engine calls `schedule`, runs the pass, then `commit`s.

Cannot deadlock: slots are given optimistically, but the oldest sequence gets what later ones hold (they are preempted
and resume from the tiers), and none is admitted whose whole length would not fit HBM.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass

from kvtier.promotion import Fetch
from kvtier.request import FinishReason
from kvtier.sequence import ScheduledSequence, Sequence, SequenceState
from kvtier.store import Store

PATIENCE_S = 1.0
"""How long a running sequence waits for slots that transfers hold before later ones are preempted for it."""
STALL_S = 30.0
"""A sequence whose slots are all held by hung transfers is given up after this long."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step."""

    step_tokens: int
    sequences_max: int


class Scheduler:
    """Continuous batching with chunked prefill under one token budget a step."""

    def __init__(self, store: Store, limits: SchedulerLimits) -> None:
        self._store = store
        self._limits = limits
        self._block_tokens = store.layout.block_tokens
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._fetches: dict[int, tuple[Sequence, Fetch]] = {}
        self._stalled: list[Sequence] = []
        self.preemption_count = 0

    @property
    def waiting_count(self) -> int:
        """Sequences without slots."""
        return len(self._waiting)

    @property
    def running_count(self) -> int:
        """Sequences with slots, those that still fetch included."""
        return len(self._running) + len(self._fetches)

    @property
    def sequences(self) -> list[Sequence]:
        """All that are not finished."""
        return [*self._running, *(sequence for sequence, _ in self._fetches.values()), *self._waiting]

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence whose whole length fits HBM."""
        longest = sequence.prompt_count + sequence.output_max - 1
        assert self._store.layout.block_count(longest) <= self._store.usable_count
        insort(self._waiting, sequence, key=_rank)

    def next_deadline(self) -> float | None:
        """When, at the latest, `schedule` should be called again though nothing has happened."""
        return min((fetch.deadline for _, fetch in self._fetches.values()), default=None)

    def schedule(self, now: float) -> list[ScheduledSequence]:
        """Plan the next pass; empty if nothing can run now. Every planned token has a slot."""
        self._settle_fetches(now)
        plan: dict[int, ScheduledSequence] = {}
        budget = self._limits.step_tokens
        decoding = [sequence for sequence in self._running if sequence.remaining_count == 1]
        prefilling = [sequence for sequence in self._running if sequence.remaining_count > 1]
        for sequence in decoding + prefilling:
            if budget > 0 and sequence.state is SequenceState.RUNNING:
                budget -= self._plan(sequence, budget, plan, now)
        while budget > 0 and (admitted := self._admit(now)) is not None:
            if admitted.state is SequenceState.RUNNING:
                budget -= self._plan(admitted, budget, plan, now)
        return list(plan.values())

    def commit(self, part: ScheduledSequence, token: int | None, now: float) -> FinishReason | None:
        """The pass is done: seal full blocks, append the sampled token. Returns why the sequence should finish now."""
        sequence = part.sequence
        assert (token is not None) == part.samples
        sequence.attribute(part.count, None)
        self._seal(sequence, now)
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

    def take_stalled(self) -> list[Sequence]:
        """Sequences to give up, because hung transfers hold what they need. Still to be finished by the caller."""
        stalled, self._stalled = self._stalled, []
        return stalled

    def held(self) -> Counter[int]:
        """Holds of all sequences and fetches by slot (for `Store.check`)."""
        held = Counter(slot for sequence in self._running for slot in sequence.table.slots)
        held.update(slot for _, fetch in self._fetches.values() for slot in fetch.slots)
        return held

    def check(self) -> None:
        """Assert that states, tables and holds agree, in the store's books too."""
        for sequence in self._waiting:
            assert sequence.state is SequenceState.WAITING and not sequence.table.slots
        for sequence, _ in self._fetches.values():
            assert sequence.state is SequenceState.FETCHING and not sequence.table.slots
        for sequence in self._running:
            assert sequence.state is SequenceState.RUNNING
            assert sequence.sealed_count == sequence.computed_count // self._block_tokens
            assert len(sequence.table.slots) >= self._store.layout.block_count(sequence.computed_count)
        self._store.check(self.held())

    def _plan(self, sequence: Sequence, budget: int, plan: dict[int, ScheduledSequence], now: float) -> int:
        """Give `sequence` slots for up to `budget` tokens and a part of the pass; returns the tokens planned."""
        count = min(sequence.remaining_count, budget)
        count = self._grow(sequence, count, plan, now)
        if count > 0:
            samples = count == sequence.remaining_count
            plan[sequence.number] = ScheduledSequence(sequence, sequence.computed_count, count, samples)
        return count

    def _grow(self, sequence: Sequence, count: int, plan: dict[int, ScheduledSequence], now: float) -> int:
        """Make room for `count` more tokens, or as many as there is room for; 0 if it must wait or was preempted."""
        layout, table, store = self._store.layout, sequence.table, self._store
        while True:
            spare_tokens = len(table.slots) * self._block_tokens - sequence.computed_count
            room = spare_tokens + store.available_count * self._block_tokens
            if room > 0:
                count = min(count, room)
                needed = layout.block_count(sequence.computed_count + count) - len(table.slots)
                slots = store.allocate(max(needed, 0))
                assert slots is not None
                table.extend(slots, [store.address(slot) for slot in slots])
                sequence.allocated_blocks += len(slots)
                sequence.stalled_since = None
                return count
            stalled_s = self._stalled_s(sequence, now)
            if stalled_s < PATIENCE_S and store.awaits_slots(now):
                return 0
            victim = max([*self._running, *(other for other, _ in self._fetches.values())], key=_rank)
            if victim is sequence and self.running_count == 1:
                if stalled_s > STALL_S:
                    self._stalled.append(sequence)
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

    def _admit(self, now: float) -> Sequence | None:
        """Take the first waiting sequence in, if there is a place and room for what it has so far."""
        if not self._waiting or self.running_count >= self._limits.sequences_max:
            return None
        sequence = self._waiting[0]
        sequence.chain.extend(sequence.hashes, sequence.tokens)
        known = sequence.hashes[: (len(sequence.tokens) - 1) // self._block_tokens]
        total = self._store.layout.block_count(len(sequence.tokens))
        fetch = self._store.fetch(known, min(total + self.running_count, self._store.slot_count), now)
        if fetch is None:
            if self.running_count > 0:
                sequence.stalled_since = None
            elif self._stalled_s(sequence, now) > STALL_S and sequence not in self._stalled:
                self._stalled.append(sequence)
            return None
        self._waiting.pop(0)
        sequence.stalled_since = None
        if fetch.pending:
            sequence.state = SequenceState.FETCHING
            self._fetches[sequence.number] = (sequence, fetch)
        else:
            self._start(sequence, fetch)
        return sequence

    def _settle_fetches(self, now: float) -> None:
        for sequence, fetch in list(self._fetches.values()):
            if fetch.is_ready(now):
                del self._fetches[sequence.number]
                self._start(sequence, fetch)

    def _start(self, sequence: Sequence, fetch: Fetch) -> None:
        """The prefix is there, as far as it goes: the sequence takes part in passes from now on."""
        slots, origins = self._store.settle(fetch)
        sequence.table.extend(slots, [self._store.address(slot) for slot in slots])
        for origin in origins:
            sequence.attribute(self._block_tokens, origin)
        sequence.sealed_count = len(slots)
        sequence.reused_blocks += len(slots)
        sequence.state = SequenceState.RUNNING
        insort(self._running, sequence, key=_rank)

    def _preempt(self, sequence: Sequence, plan: dict[int, ScheduledSequence], now: float) -> None:
        """Take all slots from a sequence; it waits in its old rank and resumes from the tiers."""
        plan.pop(sequence.number, None)
        self._withdraw(sequence, now)
        sequence.computed_count = sequence.sealed_count = 0
        sequence.state = SequenceState.WAITING
        sequence.stalled_since = None
        sequence.preempted_count += 1
        self.preemption_count += 1
        insort(self._waiting, sequence, key=_rank)

    def _withdraw(self, sequence: Sequence, now: float) -> None:
        """Take a sequence out of its queue and give its slots back."""
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        elif sequence.state is SequenceState.FETCHING:
            self._store.abandon(self._fetches.pop(sequence.number)[1])
        elif sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
            self._store.touch(sequence.hashes[: sequence.sealed_count], now)
            self._store.release(sequence.table.clear())

    def _seal(self, sequence: Sequence, now: float) -> None:
        """Index every block that has become full; its content may lie in another slot already."""
        full = sequence.computed_count // self._block_tokens
        if full == sequence.sealed_count:
            return
        sequence.chain.extend(sequence.hashes, sequence.tokens)
        for index in range(sequence.sealed_count, full):
            slot = sequence.table.slots[index]
            kept = self._store.seal(slot, sequence.hashes[index], index, now)
            if kept != slot:
                sequence.table.replace(index, kept, self._store.address(kept))
        sequence.sealed_count = full


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
