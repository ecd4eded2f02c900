"""The books of one shelf: which slot holds which block, who may write it, who must not lose it, who goes next.

Pure data structures: no I/O, no clock (time is an argument), one thread, batches only. Knows neither bytes nor files;
what it decides is made durable by the journal and true by the shelf. Called by the shelf.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from typing import Protocol

from kvtier.block import BlockHash
from kvtier.eviction import EvictionQueue, LeastRecentlyUsed, PolicyMaker
from kvtier.record import NO_TENANT, Grant, Lease, Record


class SlotState(enum.IntEnum):
    """Life of a slot: FREE, reserved for WRITING, READY to read, DROPPED but still leased."""

    FREE = 0
    WRITING = 1
    READY = 2
    DROPPED = 3


class PublishOutcome(enum.Enum):
    """What became of a written row."""

    PUBLISHED = "published"
    DUPLICATE = "duplicate"
    """The block was there already: the first row stays, the second slot is free again."""
    STALE = "stale"
    """The slot was not (or no longer) reserved under that generation."""


class ChangeLog(Protocol):
    """Told of each change that a restart must know, before the caller is; MUST NOT wait for a disk."""

    def reserved(self, grants: Sequence[Grant]) -> None:
        """The slots' old rows are gone."""

    def published(self, records: Sequence[Record]) -> None:
        """The rows can be read."""

    def dropped(self, records: Sequence[Record]) -> None:
        """The rows are hidden."""


class Directory:
    """Slots, records, leases and the order of eviction of one shelf. See the module."""

    def __init__(
        self,
        slot_count: int,
        policy: PolicyMaker = LeastRecentlyUsed,
        log: ChangeLog | None = None,
        generation_floor: int = 0,
    ) -> None:
        """Generations start above `generation_floor`. Without a `log` nothing outlives the process."""
        assert slot_count > 0 and generation_floor >= 0
        self.slot_count = slot_count
        self.evictions = 0
        self._log = log
        self._generation = generation_floor
        self._states = bytearray(slot_count)
        self._generations = array("Q", bytes(8 * slot_count))
        self._lease_counts = array("L", bytes(array("L").itemsize * slot_count))
        self._tenants: list[bytes] = [NO_TENANT] * slot_count
        self._tenant_slots: dict[bytes, int] = {}
        self._records: dict[BlockHash, Record] = {}
        self._at: list[Record | None] = [None] * slot_count
        self._free = list(range(slot_count - 1, -1, -1))
        self._queue = EvictionQueue(policy, slot_count)

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"Directory(ready={len(self._records)}, free={len(self._free)}, slots={self.slot_count})"

    @property
    def generation(self) -> int:
        """The highest generation given out."""
        return self._generation

    @property
    def used_slots(self) -> int:
        """Slots that are not free."""
        return self.slot_count - len(self._free)

    def tenant_slots(self, tenant: bytes) -> int:
        """Slots charged to a tenant: whoever reserved them."""
        return self._tenant_slots.get(tenant, 0)

    def restore(self, records: Sequence[Record], now: float, reserved: Sequence[tuple[Grant, bytes]] = ()) -> None:
        """Fill a fresh directory with what a journal or a scan found; of two rows for one block the later one wins.

        `reserved`: (grant, tenant) of slots that are being written to.
        """
        assert self.used_slots == 0 and self._generation >= max((record.generation for record in records), default=0)
        newest: dict[BlockHash, Record] = {}
        for record in sorted(records, key=lambda record: record.generation):
            newest[record.block_hash] = record
        for record in newest.values():
            assert self._at[record.slot] is None, record
            self._take(record.slot, record.generation, record.tenant)
            self._make_ready(record, now)
        for grant, tenant in reserved:
            assert self._states[grant.slot] == SlotState.FREE, grant
            self._take(grant.slot, grant.generation, tenant)
        self._free = [slot for slot in reversed(range(self.slot_count)) if self._states[slot] == SlotState.FREE]

    def reserve(self, count: int, tenant: bytes = NO_TENANT) -> list[Grant]:
        """Up to `count` slots to write into, evicting the coldest rows as needed; fewer if all is leased or written.

        A granted slot shows nothing until it is published; the old row's hash is gone at once.
        """
        grants: list[Grant] = []
        self._evict(count - len(self._free))
        while self._free and len(grants) < count:
            slot = self._free.pop()
            self._generation += 1
            self._take(slot, self._generation, tenant)
            grants.append(Grant(slot, self._generation))
        if self._log is not None and grants:
            self._log.reserved(grants)
        return grants

    def publish(self, records: Sequence[Record], now: float) -> list[tuple[PublishOutcome, Record | None]]:
        """Bind written slots to their hashes. With DUPLICATE comes the record that stays, with STALE None."""
        answers: list[tuple[PublishOutcome, Record | None]] = []
        published: list[Record] = []
        for record in records:
            slot = record.slot
            if not self._is(slot, record.generation, SlotState.WRITING):
                answers.append((PublishOutcome.STALE, None))
                continue
            existing = self._records.get(record.block_hash)
            if existing is not None:
                self._release_slot(slot)
                answers.append((PublishOutcome.DUPLICATE, existing))
                continue
            self._make_ready(record, now)
            answers.append((PublishOutcome.PUBLISHED, record))
            published.append(record)
        if self._log is not None and published:
            self._log.published(published)
        return answers

    def abandon(self, grants: Sequence[Grant]) -> None:
        """Give reservations back; their I/O must have completed. A stale grant is ignored."""
        for slot, generation in grants:
            if self._is(slot, generation, SlotState.WRITING):
                self._release_slot(slot)

    def find(self, hashes: Sequence[BlockHash]) -> list[Record]:
        """Records of the leading run of `hashes` that is here."""
        found: list[Record] = []
        get = self._records.get
        for block_hash in hashes:
            record = get(block_hash)
            if record is None:
                break
            found.append(record)
        return found

    def holds(self, block_hash: BlockHash) -> bool:
        """Whether a READY row has this hash."""
        return block_hash in self._records

    def touch(self, hashes: Sequence[BlockHash], now: float) -> None:
        """Note a use of each block that is here. Callers touch whole chains, so that parents never look colder."""
        self._queue.touch(hashes, now)

    def stamp(self, hashes: Sequence[BlockHash], now: float) -> None:
        """Note when the blocks of a chain were last used, without counting that as a further use."""
        self._queue.stamp(hashes, now)

    def acquire(self, records: Sequence[Record]) -> list[Lease | None]:
        """One more lease on each row that is still the one its record names, else None."""
        leases: list[Lease | None] = []
        for record in records:
            slot = record.slot
            if not self._is(slot, record.generation, SlotState.READY):
                leases.append(None)
                continue
            self._lease_counts[slot] += 1
            self._queue.set_busy([record.block_hash])
            leases.append(Lease(record))
        return leases

    def release(self, leases: Sequence[Lease]) -> None:
        """End leases, each as often as it was acquired; the last one frees a dropped slot."""
        for lease in leases:
            slot = lease.record.slot
            assert self._generations[slot] == lease.record.generation and self._lease_counts[slot] > 0, lease
            self._lease_counts[slot] -= 1
            if self._lease_counts[slot] == 0:
                if self._states[slot] == SlotState.DROPPED:
                    self._release_slot(slot)
                else:
                    self._queue.set_idle([lease.record.block_hash])

    def drop(self, records: Sequence[Record]) -> list[Record]:
        """Hide rows at once, freeing each slot when its last lease ends; returns those that were still there."""
        dropped: list[Record] = []
        for record in records:
            if self._is(record.slot, record.generation, SlotState.READY):
                self._queue.remove(record.block_hash)
                self._hide(record.slot)
                if self._lease_counts[record.slot] == 0:
                    self._release_slot(record.slot)
                dropped.append(record)
        if self._log is not None and dropped:
            self._log.dropped(dropped)
        return dropped

    def coldest(self, count: int) -> list[Record]:
        """The `count` rows that would be evicted next, in that order, left in place."""
        return [self._records[block_hash] for block_hash in self._queue.coldest(count)]

    def records(self) -> list[Record]:
        """All READY rows."""
        return list(self._records.values())

    def record_at(self, slot: int) -> Record | None:
        """The READY row in a slot."""
        return self._at[slot]

    def state_of(self, slot: int) -> tuple[SlotState, int, bytes]:
        """State, generation and tenant of a slot."""
        return SlotState(self._states[slot]), self._generations[slot], self._tenants[slot]

    def check(self) -> None:
        """Assert every invariant of the books; costs a walk over all slots."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is twice in the free list"
        tenants: dict[bytes, int] = {}
        for slot in range(self.slot_count):
            state, leases, record = self._states[slot], self._lease_counts[slot], self._at[slot]
            assert (slot in free) == (state == SlotState.FREE), (slot, state)
            assert (record is not None) == (state == SlotState.READY), (slot, state)
            assert leases == 0 or state in (SlotState.READY, SlotState.DROPPED), (slot, state, leases)
            assert leases > 0 or state != SlotState.DROPPED, slot
            assert self._generations[slot] <= self._generation, slot
            if record is not None:
                assert record.slot == slot and record.generation == self._generations[slot], (slot, record)
                assert self._records.get(record.block_hash) is record, record
                assert record.tenant == self._tenants[slot], record
                assert (record.block_hash in self._queue) == (leases == 0), (slot, leases)
            if state != SlotState.FREE:
                tenants[self._tenants[slot]] = tenants.get(self._tenants[slot], 0) + 1
        assert len(self._records) == sum(record is not None for record in self._at)
        assert tenants == self._tenant_slots, (tenants, self._tenant_slots)
        self._queue.check()

    def _is(self, slot: int, generation: int, state: SlotState) -> bool:
        return 0 <= slot < self.slot_count and self._generations[slot] == generation and self._states[slot] == state

    def _take(self, slot: int, generation: int, tenant: bytes) -> None:
        self._states[slot] = SlotState.WRITING
        self._generations[slot] = generation
        self._tenants[slot] = tenant
        self._tenant_slots[tenant] = self._tenant_slots.get(tenant, 0) + 1

    def _make_ready(self, record: Record, now: float) -> None:
        slot = record.slot
        assert record.tenant == self._tenants[slot], record
        self._states[slot] = SlotState.READY
        self._records[record.block_hash] = record
        self._at[slot] = record
        self._queue.insert(record.block_hash, record.depth, now, record.priority)
        self._queue.set_idle([record.block_hash])

    def _hide(self, slot: int) -> None:
        record = self._at[slot]
        assert record is not None, slot
        del self._records[record.block_hash]
        self._at[slot] = None
        self._states[slot] = SlotState.DROPPED

    def _release_slot(self, slot: int) -> None:
        self._states[slot] = SlotState.FREE
        self._free.append(slot)
        tenant = self._tenants[slot]
        self._tenant_slots[tenant] -= 1
        if self._tenant_slots[tenant] == 0:
            del self._tenant_slots[tenant]

    def _evict(self, count: int) -> None:
        for block_hash in self._queue.pop(count):
            slot = self._records[block_hash].slot
            self._hide(slot)
            self._release_slot(slot)
            self.evictions += 1
