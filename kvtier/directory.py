"""The books of one shelf: which slot holds which block, who may write it, who must not lose it, who goes next.

Pure data structures: no I/O, no clock (time is an argument), one thread, batches only. Knows neither bytes nor files;
what it decides is made durable by the journal and true by the shelf. Called by the shelf.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from kvtier.block import BlockHash
from kvtier.eviction import BlockUse, LeastRecentlyUsed, PolicyMaker
from kvtier.ready import ReadyRows
from kvtier.record import NO_TENANT, Grant, Lease, Record
from kvtier.retention import Retention
from kvtier.shortage import Shortage
from kvtier.slots import Slots, SlotState
from kvtier.terms import SlotLimits

__all__ = ["ChangeLog", "Directory", "PublishOutcome", "SlotState"]


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

    def retained(self, records: Sequence[Record]) -> None:
        """The rows have another priority, expiry or pin, and are the same otherwise."""

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
        limits: SlotLimits | None = None,
    ) -> None:
        """Generations start above `generation_floor`. Without a `log` nothing outlives the process."""
        self.slot_count = slot_count
        self.evictions = self.expired = 0
        self._log = log
        self._limits = limits if limits is not None else SlotLimits(slot_count, None)
        self._slots = Slots(slot_count, generation_floor)
        self.quota_shortage = Shortage()
        self._rows = ReadyRows(self._slots, policy, self._limits)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"Directory(ready={len(self._rows)}, free={self._slots.free_count}, slots={self.slot_count})"

    @property
    def used_slots(self) -> int:
        """Slots that are not free."""
        return self.slot_count - self._slots.free_count

    @property
    def pinned(self) -> int:
        """Rows that are pinned now."""
        return self._rows.pinned

    @property
    def pins_refused(self) -> int:
        """Pins that were over the budget so far."""
        return self._rows.pins_refused

    def tenant_slots(self, tenant: bytes) -> int:
        """Slots charged to a tenant: whoever reserved them."""
        return self._slots.used_by(tenant)

    def tenants(self, first: int, count: int) -> list[tuple[bytes, int]]:
        """Who is charged for how many slots: `count` of them, in no order, after the `first`."""
        return [(tenant, self._slots.used_by(tenant)) for tenant in self._slots.tenants()[first : first + count]]

    def restore(self, records: Sequence[Record], now: float, reserved: Sequence[tuple[Grant, bytes]] = ()) -> None:
        """Fill a fresh directory with what a journal or a scan found; of two rows for one block the later one wins.

        `reserved`: (grant, tenant) of slots that are being written to. Once leases are there again, `trim` and `expire`
        bring it to what is allowed now.
        """
        assert self.used_slots == 0
        newest: dict[BlockHash, Record] = {}
        for record in sorted(records, key=lambda record: record.generation):
            newest[record.block_hash] = record
        claims = [(Grant(record.slot, record.generation), record.tenant) for record in newest.values()]
        self._slots.restore([*claims, *reserved])
        for record in newest.values():
            self._slots.states[record.slot] = SlotState.READY
        self._rows.let_go([self._rows.insert(record, now) for record in newest.values()])

    def trim(self) -> None:
        """Let rows of tenants go that are over their quota, which was larger once."""
        evicted = [row for tenant in self._slots.tenants() for row in self._evict(self._excess(tenant, 0), tenant)]
        if self._log is not None and evicted:
            self._log.dropped(evicted)

    def reserve(self, count: int, tenant: bytes = NO_TENANT) -> list[Grant]:
        """Up to `count` slots to write into, evicting the coldest rows as needed; fewer if all is leased or written.

        A tenant at its quota pays with its own coldest rows alone. The hash of an evicted row is gone at once.
        """
        count = self._make_room(count, tenant)
        self._evict(count - self._slots.free_count)
        grants = self._slots.grant(count, tenant)
        if self._log is not None and grants:
            self._log.reserved(grants)
        return grants

    def has_room(self, count: int, tenant: bytes = NO_TENANT) -> bool:
        """Whether `reserve` would give that many now, all of them. What the quota refuses is counted."""
        own = self._excess(tenant, count) - self._rows.queue.candidate_count(tenant)
        self.quota_shortage.note(tenant, max(0, min(own, count)))
        return own <= 0 and count <= self._slots.free_count + len(self._rows.queue)

    def publish(self, records: Sequence[Record], now: float) -> list[tuple[PublishOutcome, Record | None]]:
        """Bind written slots to their hashes. With DUPLICATE comes the record that stays, with STALE None.

        A row whose pin is over the budget becomes an ordinary one.
        """
        answers: list[tuple[PublishOutcome, Record | None]] = []
        published: list[Record] = []
        fits, states, insert = self._slots.fits, self._slots.states, self._rows.insert
        tenant_of, by_hash = self._slots.tenant_of, self._rows.by_hash
        for record in records:
            if not fits(record.slot, record.generation, SlotState.WRITING):
                answers.append((PublishOutcome.STALE, None))
                continue
            existing = by_hash.get(record.block_hash)
            if existing is not None:
                self._slots.free([record.slot])
                answers.append((PublishOutcome.DUPLICATE, existing))
                continue
            assert record.tenant == tenant_of(record.slot), record
            states[record.slot] = SlotState.READY
            ready = insert(record, now)
            answers.append((PublishOutcome.PUBLISHED, ready))
            published.append(ready)
        self._rows.let_go(published)
        if self._log is not None and published:
            self._log.published(published)
        return answers

    def abandon(self, grants: Sequence[Grant]) -> None:
        """Give reservations back; their I/O must have completed. A stale grant is ignored."""
        for slot, generation in grants:
            if self._slots.fits(slot, generation, SlotState.WRITING):
                self._slots.free([slot])

    def find(self, hashes: Sequence[BlockHash]) -> list[Record]:
        """Records of the leading run of `hashes` that is here."""
        return self._rows.find(hashes)

    def holds(self, block_hash: BlockHash) -> bool:
        """Whether a READY row has this hash."""
        return block_hash in self._rows.by_hash

    def touch(self, hashes: Sequence[BlockHash], now: float) -> None:
        """Note a use of each block that is here. Callers touch whole chains, so that parents never look colder."""
        self._rows.queue.touch(hashes, now)

    def stamp(self, hashes: Sequence[BlockHash], now: float) -> None:
        """Note when the blocks of a chain were last used, without counting that as a further use."""
        self._rows.queue.stamp(hashes, now)

    def acquire(self, records: Sequence[Record]) -> list[Lease | None]:
        """One more lease on each row that is still the one its record names, else None."""
        leases: list[Lease | None] = []
        for record in records:
            slot = record.slot
            if not self._slots.fits(slot, record.generation, SlotState.READY):
                leases.append(None)
                continue
            self._slots.lease_counts[slot] += 1
            self._rows.queue.set_busy([record.block_hash])
            leases.append(Lease(record))
        return leases

    def release(self, leases: Sequence[Lease]) -> None:
        """End leases, each as often as it was acquired; the last one frees a dropped slot."""
        slots = self._slots
        for lease in leases:
            slot = lease.record.slot
            state, generation, _ = slots.of(slot)
            assert generation == lease.record.generation and slots.lease_counts[slot] > 0, lease
            slots.lease_counts[slot] -= 1
            if slots.lease_counts[slot] == 0:
                if state is SlotState.DROPPED:
                    slots.free([slot])
                else:
                    record = self._rows.at[slot]
                    assert record is not None, slot
                    self._rows.let_go([record])

    def drop(self, records: Sequence[Record]) -> list[Record]:
        """Hide rows at once, freeing each slot when its last lease ends; returns those that were still there."""
        dropped: list[Record] = []
        for record in records:
            if self._slots.fits(record.slot, record.generation, SlotState.READY):
                dropped.append(self._rows.remove(record))
                self._slots.states[record.slot] = SlotState.DROPPED
                if self._slots.lease_counts[record.slot] == 0:
                    self._slots.free([record.slot])
        if self._log is not None and dropped:
            self._log.dropped(dropped)
        return dropped

    def retain(self, hashes: Sequence[BlockHash], asked: Retention) -> None:
        """A request that asks for `asked` uses these blocks: each stays for the longer of that and what it has.

        Give whole chains from their first block on, so that no parent is colder than its child; pins are granted in
        that order while their budget lasts.
        """
        self._tell_retained(self._rows.retain(hashes, asked))

    def unpin(self, hashes: Sequence[BlockHash]) -> None:
        """These blocks can be evicted again."""
        self._tell_retained(self._rows.unpin(hashes))

    def expire(self, unix_s: float) -> list[Record]:
        """Hide the rows whose time has come; returns them."""
        due = self._rows.due(unix_s)
        self.expired += len(due)
        return self.drop(due)

    def coldest(self, count: int) -> list[Record]:
        """The `count` rows that would be evicted next, in that order, left in place."""
        return [self._rows.by_hash[block_hash] for block_hash in self._rows.queue.coldest(count)]

    def records(self) -> list[Record]:
        """All READY rows."""
        return list(self._rows.by_hash.values())

    def record_at(self, slot: int) -> Record | None:
        """The READY row in a slot."""
        return self._rows.at[slot]

    def use_of(self, block_hash: BlockHash) -> BlockUse:
        """How a block that is here was used; not to be changed."""
        return self._rows.queue.use_of(block_hash)

    def state_of(self, slot: int) -> tuple[SlotState, int, bytes]:
        """State, generation and tenant of a slot."""
        return self._slots.of(slot)

    def check(self) -> None:
        """Assert every invariant of the books; costs a walk over all slots."""
        self._slots.check()
        self._rows.check()

    def _tell_retained(self, changed: Sequence[Record]) -> None:
        if self._log is not None and changed:
            self._log.retained(changed)

    def _excess(self, tenant: bytes, count: int) -> int:
        """Slots over its quota that a tenant would have with `count` more."""
        tenant_max = self._limits.tenant_max
        return 0 if tenant_max is None or tenant == NO_TENANT else self._slots.used_by(tenant) + count - tenant_max

    def _make_room(self, count: int, tenant: bytes) -> int:
        """How many of `count` slots a tenant may have, after its own coldest rows have gone for them."""
        evicted = self._evict(self._excess(tenant, count), tenant)
        granted = max(0, count - max(0, self._excess(tenant, count)))
        self.quota_shortage.note(tenant, count - granted)
        left_over = evicted[: max(0, len(evicted) - granted)]  # slots that were freed last are granted first
        if self._log is not None and left_over:
            self._log.dropped(left_over)
        return granted

    def _evict(self, count: int, tenant: bytes | None = None) -> list[Record]:
        """Let the coldest rows go, of all or of a tenant."""
        evicted = self._rows.pop(count, tenant)
        self._slots.free([record.slot for record in evicted])
        self.evictions += len(evicted)
        return evicted
