"""One streamed sequence: its working set in HBM and the homes of its older blocks on the shelves.

Decides which blocks lie where: what may grow, which older blocks give their slots up, which known blocks are taken in
and how far a pass may go. Owns no queue. No torch, no clock, no I/O. Made and asked by `Streams`.
"""

from __future__ import annotations

import numpy as np

from kvtier.block import BlockHash, Tier
from kvtier.fetch import Fetch
from kvtier.homes import Homes
from kvtier.record import Record
from kvtier.sealing import Sealer
from kvtier.sequence import Sequence, SequenceState
from kvtier.store import Store


class Stream:
    """See the module."""

    def __init__(self, sequence: Sequence, store: Store, slots_max: int, homes: Homes) -> None:
        """`slots_max`: slots of HBM that it may hold, its working set."""
        self.sequence = sequence
        self.homes = homes
        self.fetch: Fetch | None = None
        """Known blocks under way to HBM."""
        self._store = store
        self._slots_max = slots_max
        self._block_tokens = store.layout.block_tokens
        self._sealer = Sealer(store)
        self._held_from = 0
        """Blocks before this one have no slots, so that nobody looks through them for each block that goes down."""
        self._furthest = 0
        """Tokens that have been computed at most."""
        self._losing_since: float | None = None
        """When it first lost a row that was staged; None once it has come further than before."""
        self._look_from = 0
        """Blocks before this one are computed though they may be known: taking them in has failed."""
        self._chain, self._hashes = sequence.chain, sequence.hashes
        if homes.private:
            self._chain, self._hashes = sequence.chain.private(), list[BlockHash]()

    def __repr__(self) -> str:
        return f"Stream({self.sequence.number}, {self.sequence.state.value}, homes={len(self.homes.found)})"

    def find_prefix(self) -> None:
        """Lease what DRAM has of the prompt, and for want of other rows what NVMe has."""
        sequence = self.sequence
        sequence.chain.extend(sequence.hashes, sequence.tokens)
        if sequence.cache_read:
            known = sequence.hashes[: (len(sequence.tokens) - 1) // self._block_tokens]
            self._store.hand_down.lease_prefix(self.homes, known)

    def begin(self, now: float) -> None:
        """It has rows for all that it may need."""
        sequence = self.sequence
        self.homes.begun, sequence.stalled_since = True, None
        if sequence.cache_read:
            self._store.note_use(sequence.hashes, now)

    @property
    def may_start(self) -> bool:
        """Whether its working set has a slot besides those of the next blocks, which are still on their way down."""
        homes, index, taken = self.homes, len(self.sequence.table), 0
        while index in homes.found or (index in homes.moves and homes.moves[index].slot is not None):
            taken += index in homes.moves
            index += 1
        return taken < self._slots_max

    def advance(self, now: float) -> None:
        """Cut back to what was lost; if it waits for blocks, go on once they are there."""
        sequence = self.sequence
        if sequence.pinned:
            return
        if self.homes.lost:
            self._give_up_lost(now)
        if not self.homes.begun or sequence.state is SequenceState.WAITING:
            return
        if self.fetch is not None:
            if not self.fetch.is_ready(now):
                return
            self._settle(self.fetch, now)
        sequence.state = SequenceState.RUNNING
        if sequence.remaining_count > 1:
            self._look_ahead(now)

    def chunk(self, count: int) -> int:
        """How many of the next `count` tokens to compute in one pass.

        No more than half of the working set, so that one half is written while the other is computed. Nothing of a
        block that has a home, or that is known and comes after one that is not: it is to be taken in.
        """
        sequence, size = self.sequence, self._block_tokens
        first = sequence.computed_count // size
        end = first + max(1, self._slots_max // 2)
        known_before = True
        for index in range(first, min(end, (len(sequence.tokens) - 1) // size)):
            has_home = index in self.homes.found or index in self.homes.moves
            known = has_home or (sequence.cache_read and self._store.hand_down.knows(sequence.hashes[index]))
            if index > first and (has_home or (known and not known_before)):
                end = index
                break
            known_before = known
        return min(count, end * size - sequence.computed_count)

    def window(self, wanted: int) -> int:
        """How many slots it may have now, of `wanted`; older blocks that have homes let go of theirs for it."""
        free = self._slots_max - self.sequence.table.held_count
        if free < wanted:
            free += self.lower(wanted - free)
        return min(free, wanted)

    def lower(self, count: int) -> int:
        """Let go of up to `count` slots, of the oldest blocks that have homes; returns how many."""
        table, lowered = self.sequence.table, list[int]()
        if count > 0 and table.held_count > 0 and not self.sequence.pinned:
            sealed_count = self.sequence.sealed_count  # the others are still written to
            while self._held_from < sealed_count and table.slots[self._held_from] is None:
                self._held_from += 1
            for index in range(self._held_from, sealed_count):
                home = self.homes.found.get(index)
                if table.slots[index] is not None and home is not None:
                    lowered.append(table.lower(index, home.address))
                    if len(lowered) == count:
                        break
        self._store.release(lowered)
        return len(lowered)

    def seal(self, now: float) -> None:
        """A pass is over: full blocks are indexed and set out for their homes."""
        begin = self.sequence.sealed_count
        if self.sequence.computed_count > self._furthest:
            self._furthest, self._losing_since = self.sequence.computed_count, None
        self._sealer.seal(self.sequence, now, self.homes.needed)
        self._hand_down(begin, self.sequence.sealed_count, now)

    def staged(self) -> list[Record]:
        """The rows of the blocks that must be staged for a pass, in order."""
        blocks = np.flatnonzero(self.sequence.table.addresses == 0).tolist()
        return [self.homes.found[index].lease.record for index in blocks]

    def lose(self, index: int, now: float) -> None:
        """A row cannot be staged. Nobody shall try it again: the block is computed anew, or found elsewhere."""
        if self._losing_since is None:
            self._losing_since = now
        self._store.hand_down.disown(self.homes, index)

    def loses_for_s(self, now: float) -> float:
        """How long it has been losing rows without coming any further."""
        return 0.0 if self._losing_since is None else now - self._losing_since

    def rest(self) -> None:
        """Give up all slots of HBM; blocks that have homes stay, up to the first that has none."""
        assert not self.sequence.pinned
        self._leave_fetch()
        blocks = range(self.sequence.sealed_count)
        kept = next((index for index in blocks if index not in self.homes.found), len(blocks))
        self._cut(kept)
        self.lower(kept)
        self._look_from = kept

    def end(self, now: float) -> None:
        """The sequence is over, in whatever state: everything goes back, what is under way once it has ended."""
        self._leave_fetch()
        self._store.release(self.sequence.table.clear())
        self._store.hand_down.close(self.homes, now)

    def check(self) -> None:
        """Assert that table, homes and working set agree."""
        sequence, homes, table = self.sequence, self.homes, self.sequence.table
        fetching = len(self.fetch.slots) if self.fetch else 0
        assert table.held_count == len(table.held) and table.held_count + fetching <= self._slots_max
        for index, slot in enumerate(table.slots):
            assert slot is not None or table.addresses[index] == homes.found[index].address
            assert slot is not None or index < sequence.sealed_count
        assert all(slot is None for slot in table.slots[: self._held_from])
        assert self.fetch is None or sequence.state is SequenceState.FETCHING
        if sequence.state is SequenceState.WAITING:
            assert table.held_count == 0 and sequence.computed_count == len(table) * self._block_tokens
        else:
            handed = min(sequence.sealed_count, homes.needed)
            assert all(index in homes.found or index in homes.moves for index in range(handed))

    def _look_ahead(self, now: float) -> None:
        """Where the sequence comes to blocks that are known: take them in, or wait for those on their way."""
        sequence, homes, hand_down = self.sequence, self.homes, self._store.hand_down
        table, size = sequence.table, self._block_tokens
        sequence.chain.extend(sequence.hashes, sequence.tokens)
        end = (len(sequence.tokens) - 1) // size
        while (index := len(table)) < end and index * size == sequence.computed_count:
            if index in homes.found:
                home = homes.found[index]
                table.append_row(home.address)
                self._reuse(index, [home.tier])
                sequence.reused_blocks -= home.private or not sequence.cache_read  # its own, before a preemption
            elif (move := homes.moves.get(index)) is not None:
                if move.slot is None:
                    sequence.state = SequenceState.FETCHING
                    return
                if not self.window(1):
                    return
                self._store.hold([move.slot])  # it is still on its way down, for as long as that takes
                table.extend([move.slot], [self._store.address(move.slot)])
                self._reuse(index, [Tier.HBM])
                sequence.reused_blocks -= 1
            elif not sequence.cache_read or index < self._look_from:
                return
            elif records := hand_down.find(sequence.hashes[index:end]):
                self._look_from = index + 1
                hand_down.lease(homes, index, records[: homes.next_known(index) - index])
            elif not self._fetch(index, end, now):
                return

    def _fetch(self, index: int, end: int, now: float) -> bool:
        """Bring known blocks into HBM, as many as the working set has room for; False if none are there yet.

        One slot is left to compute in, should nobody else give one.
        """
        free = self.window(end - index)
        if free == 0:  # older blocks are on their way to their homes; nothing can be computed before, either
            return False
        self._look_from = index + 1
        room = min(free, self._store.available_count - 1)
        hashes = self.sequence.hashes[index : index + max(room, 0)]
        fetch = self._store.fetch(hashes, room + 1, now, first=index) if hashes else None
        if fetch is None or not fetch.slots:
            return False
        self._look_from = index + len(fetch.slots)
        if fetch.is_ready(now):
            self._settle(fetch, now)
            return True
        self.fetch = fetch
        self.sequence.state = SequenceState.FETCHING
        return False

    def _settle(self, fetch: Fetch, now: float) -> None:
        """Blocks that were fetched are in HBM, as far as they came."""
        self.fetch = None
        table, begin = self.sequence.table, len(self.sequence.table)
        slots, origins = self._store.settle(fetch)
        table.extend(slots, [self._store.address(slot) for slot in slots])
        self._reuse(begin, origins)
        self._hand_down(begin, len(table), now)

    def _reuse(self, begin: int, origins: list[Tier]) -> None:
        """Blocks have come from somewhere: no need to compute them."""
        sequence = self.sequence
        for origin in origins:
            sequence.attribute(self._block_tokens, origin)
        sequence.sealed_count = begin + len(origins)
        sequence.reused_blocks += len(origins)
        self._sealer.retain(sequence, begin, sequence.sealed_count)

    def _hand_down(self, begin: int, end: int, now: float) -> None:
        """Full blocks in HBM that must have homes set out for them."""
        sequence, slots = self.sequence, self.sequence.table.slots
        self._chain.extend(self._hashes, sequence.tokens)
        found_later = self.homes.private and sequence.cache_write
        for index in range(begin, min(end, self.homes.needed)):
            slot, retention = slots[index], self._sealer.retention(sequence, index)
            names = (sequence.hashes[index], self._hashes[index]) if found_later else (self._hashes[index], None)
            if slot is not None:
                self._store.hand_down.hand_down(self.homes, index, names[0], slot, retention, now, names[1])

    def _cut(self, count: int) -> None:
        """Forget what was computed or taken in from block `count` on; its homes stay."""
        sequence = self.sequence
        self._store.release(sequence.table.cut(count))
        self._held_from = min(self._held_from, count)
        sequence.computed_count = min(sequence.computed_count, count * self._block_tokens)
        sequence.sealed_count = min(sequence.sealed_count, count)

    def _give_up_lost(self, now: float) -> None:
        """Go back to the first block that lies on a lost row; those after it are taken in again once it is computed."""
        sequence, homes = self.sequence, self.homes
        table, lost = sequence.table, sorted(homes.lost)
        first = next((index for index in lost if index < len(table) and table.slots[index] is None), None)
        if first is not None:
            self._leave_fetch()
            self._cut(first)
            self._look_from = min(self._look_from, first)
        for index in lost:
            self._store.hand_down.give_up(homes, index)
            if index < sequence.sealed_count:
                self._hand_down(index, index + 1, now)

    def _leave_fetch(self) -> None:
        if self.fetch is not None:
            self._store.abandon(self.fetch)
            self.fetch = None
