"""The rows of a shelf that can be read: by hash and by slot, in the order of eviction, with their pins and their time.

Decides nothing about slots, whose lease counts it only looks at, and keeps no log: the directory does both. No I/O, no
clock. Called by the directory alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.block import BlockHash
from kvtier.eviction import EvictionQueue, PolicyMaker
from kvtier.expiry import Expiries
from kvtier.record import NO_TENANT, Record
from kvtier.retention import Retention
from kvtier.slots import Slots, SlotState
from kvtier.terms import SlotLimits


class ReadyRows:
    """See the module. `queue` is for looking and noting uses."""

    def __init__(self, slots: Slots, policy: PolicyMaker, limits: SlotLimits) -> None:
        self.pinned = 0
        """Rows that are pinned now."""
        self.pins_refused = 0
        self._slots = slots
        self._limits = limits
        self.by_hash: dict[BlockHash, Record] = {}
        """For looking alone, like `at` and `queue`."""
        self.at: list[Record | None] = [None] * slots.count
        self.queue = EvictionQueue(policy, slots.count, limits.tenant_max or slots.count)
        self._expiries = Expiries()

    def __len__(self) -> int:
        return len(self.by_hash)

    def insert(self, record: Record, now: float) -> Record:
        """A row can be read from now on; returns its record, without a pin if that is over the budget.

        It is not evicted before it has been let go of.
        """
        if record.pinned and not self._grant_pin():
            record = record._replace(pinned=False)
        block_hash, tenant = record.block_hash, record.tenant
        self.by_hash[block_hash] = self.at[record.slot] = record
        owner = tenant if tenant != NO_TENANT and self._limits.tenant_max is not None else None
        self.queue.insert(block_hash, record.depth, now, record.priority, owner)
        if record.expiry_s:
            self._expiries.put(record.slot, record.expiry_s)
        return record

    def find(self, hashes: Sequence[BlockHash]) -> list[Record]:
        """Records of the leading run of `hashes` that is here."""
        found: list[Record] = []
        get = self.by_hash.get
        for block_hash in hashes:
            record = get(block_hash)
            if record is None:
                break
            found.append(record)
        return found

    def remove(self, record: Record) -> Record:
        """A row is hidden; returns its record as it was last."""
        self.queue.remove(record.block_hash)
        return self._forget(record.block_hash)

    def pop(self, count: int, tenant: bytes | None = None) -> list[Record]:
        """Remove up to `count` rows, of all or of a tenant, that nothing keeps: the coldest first."""
        return [self._forget(block_hash) for block_hash in self.queue.pop(count, tenant)]

    def due(self, unix_s: float) -> list[Record]:
        """Rows whose time has come; to be removed now."""
        return [record for slot in self._expiries.take(unix_s) if (record := self.at[slot]) is not None]

    def let_go(self, records: Sequence[Record]) -> None:
        """Nobody has a lease on these rows: they may be evicted, unless they are pinned."""
        self.queue.set_idle([record.block_hash for record in records if not record.pinned])

    def retain(self, hashes: Sequence[BlockHash], asked: Retention) -> list[Record]:
        """Raise what the blocks that are here have to what is asked; returns the records that have changed."""
        changed: list[Record] = []
        for block_hash in hashes:
            record = self.by_hash.get(block_hash)
            if record is None:
                continue
            has = Retention(record.priority, record.expiry_s, record.pinned)
            priority, expiry_s, pinned, _ = has.raised(asked)
            if pinned and not record.pinned:
                pinned = self._grant_pin()
            if (priority, expiry_s, pinned) != has[:3]:
                changed.append(record._replace(priority=priority, expiry_s=expiry_s, pinned=pinned))
                self._change(record, changed[-1])
        return changed

    def unpin(self, hashes: Sequence[BlockHash]) -> list[Record]:
        """Take the pins of blocks back; returns the records that have changed."""
        changed: list[Record] = []
        for block_hash in hashes:
            record = self.by_hash.get(block_hash)
            if record is not None and record.pinned:
                self.pinned -= 1
                changed.append(record._replace(pinned=False))
                self._change(record, changed[-1])
        return changed

    def check(self) -> None:
        """Assert every invariant; costs a walk over all slots."""
        for slot, record in enumerate(self.at):
            state, generation, tenant = self._slots.of(slot)
            assert (record is not None) == (state is SlotState.READY), (slot, state)
            if record is not None:
                assert (record.slot, record.generation, record.tenant) == (slot, generation, tenant), record
        ready = [record for record in self.at if record is not None]
        assert len(self.by_hash) == len(ready)
        for record in ready:
            assert self.by_hash.get(record.block_hash) is record, record
            is_idle = self._slots.lease_counts[record.slot] == 0 and not record.pinned
            assert (record.block_hash in self.queue) == is_idle, record
            assert self._expiries.at(record.slot) == record.expiry_s, record
        assert len(self._expiries) == sum(record.expiry_s > 0 for record in ready)
        assert self.pinned == sum(record.pinned for record in ready) <= self._limits.pins_max
        self.queue.check()
        self._expiries.check()

    def _forget(self, block_hash: BlockHash) -> Record:
        record = self.by_hash.pop(block_hash)
        self.at[record.slot] = None
        self.pinned -= record.pinned
        if record.expiry_s:
            self._expiries.put(record.slot, 0)
        return record

    def _change(self, before: Record, record: Record) -> None:
        block_hash = record.block_hash
        self.by_hash[block_hash] = self.at[record.slot] = record
        if record.priority != before.priority:
            self.queue.prioritize(block_hash, record.priority)
        if record.expiry_s != before.expiry_s:
            self._expiries.put(record.slot, record.expiry_s)
        if record.pinned:
            self.queue.set_busy([block_hash])
        elif self._slots.lease_counts[record.slot] == 0:
            self.queue.set_idle([block_hash])

    def _grant_pin(self) -> bool:
        granted = self.pinned < self._limits.pins_max
        self.pinned += granted
        self.pins_refused += not granted
        return granted
