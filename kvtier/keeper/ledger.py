"""The books of one shared shelf as the keeper keeps them: directory, slot table, owners' claims, and what to tell.

Each change is in the slot table, in the DRAM slot's header and in the journal before its caller gets an answer. Checks
everything that owners say; what does not fit is stale, never an error. No socket, no clock. Called by the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.block import BlockHash
from kvtier.directory import ChangeLog, Directory, PublishOutcome, SlotState
from kvtier.eviction import PolicyMaker
from kvtier.keeper.slot_table import NOBODY, SlotEntry, SlotTable
from kvtier.keeper.wire import Gone, Here, as_rows, pieces
from kvtier.record import NO_TENANT, Grant, Lease, Record
from kvtier.tiers.header import MAGIC, SUM_BYTES
from kvtier.tiers.slab import Slab

_NO_MAGIC = bytes(len(MAGIC))
Claims = Iterable[tuple[int, int]]
"""(slot, generation) pairs."""


class Ledger:
    """See the module."""

    def __init__(
        self,
        tier_index: int,
        slab: Slab,
        slice_count: int,
        table: SlotTable,
        journal: ChangeLog | None,
        generation_floor: int,
        policy: PolicyMaker,
    ) -> None:
        self.tier_index = tier_index
        self.slab = slab
        self.table = table
        self.frozen = False
        """Nothing is granted: I/O of somebody whose slots are unknown may still be under way."""
        self._sums_bytes = slice_count * SUM_BYTES
        self._journal = journal
        self._directory = Directory(slab.slot_count, policy, self, generation_floor)
        self._writer, self._tenant = NOBODY, NO_TENANT
        self._grants: dict[int, dict[int, int]] = {}
        self._leases: dict[int, dict[int, int]] = {}
        self._leased: dict[int, tuple[int, Record | None]] = {}
        """slot -> (bits of owners, record); None: a row that was dropped before this keeper came."""
        self._writers: dict[int, tuple[int, bytes]] = {}
        """slot -> (owner, tenant) of every reservation."""
        self._changes: list[Gone | Here] = []

    def __len__(self) -> int:
        return len(self._directory)

    @property
    def used_slots(self) -> int:
        """Slots that are not free."""
        return self._directory.used_slots

    @property
    def evictions(self) -> int:
        """Rows evicted so far."""
        return self._directory.evictions

    def owners(self) -> set[int]:
        """Owners with a claim on any slot."""
        return {owner for claims in (self._grants, self._leases) for owner, slots in claims.items() if slots}

    def restore(self, records: Sequence[Record], entries: Iterable[SlotEntry], now: float) -> None:
        """Begin with rows that were found, and with what a slot table says of claims."""
        ready = {record.slot: record for record in records}
        reserved: list[tuple[Grant, bytes]] = []
        leased: list[tuple[int, int, int]] = []
        for slot, entry in enumerate(entries):
            writing = entry.state is SlotState.WRITING and entry.writer != NOBODY
            if writing:
                self._grants.setdefault(entry.writer, {})[slot] = entry.generation
                self._writers[slot] = entry.writer, entry.tenant
            if entry.leases:
                leased.append((slot, entry.generation, entry.leases))
            if writing or (entry.leases and slot not in ready):
                ready.pop(slot, None)
                reserved.append((Grant(slot, entry.generation), entry.tenant))
        self._directory.restore(list(ready.values()), now, reserved)
        for slot, generation, bits in leased:
            record = self._directory.record_at(slot)
            owners = [owner for owner in range(bits.bit_length()) if bits >> owner & 1]
            for owner in owners:
                self._leases.setdefault(owner, {})[slot] = generation
            if record is not None:
                self._directory.acquire([record] * len(owners))
            self._leased[slot] = (bits, record)
        self._put(range(self.slab.slot_count))

    def reserve(self, owner: int, count: int, tenant: bytes) -> list[Grant]:
        """Slots for an owner to write into, as many as there are."""
        if self.frozen:
            return []
        self._writer, self._tenant = owner, tenant
        grants = self._directory.reserve(count, tenant)
        self._grants.setdefault(owner, {}).update(grants)
        return grants

    def publish(self, owner: int, rows: Sequence[Record], lease: bool, now: float) -> list[PublishOutcome]:
        """Bind an owner's reservations to hashes; asked again for what it has published, the answer is the same."""
        outcomes = [PublishOutcome.STALE] * len(rows)
        places: list[int] = []
        fitting: list[Record] = []
        granted, writers = self._grants.setdefault(owner, {}), self._writers
        for place, row in enumerate(rows):
            slot = row.slot
            if granted.get(slot) == row.generation and len(row.sums) == self._sums_bytes:
                tenant = writers[slot][1]
                fitting.append(row if row.tenant == tenant else row._replace(tenant=tenant))
                places.append(place)
            elif self._is_here(row):
                outcomes[place] = PublishOutcome.PUBLISHED
        freed: list[int] = []
        answers = self._directory.publish(fitting, now)
        for place, record, (outcome, _) in zip(places, fitting, answers, strict=True):
            outcomes[place] = outcome
            granted.pop(record.slot, None)
            if outcome is PublishOutcome.DUPLICATE:
                del self._writers[record.slot]
                freed.append(record.slot)
        self._sync(freed)
        if lease:
            self.acquire(owner, [(record.slot, record.generation) for record in fitting])
        return outcomes

    def abandon(self, owner: int, claims: Claims) -> None:
        """Take reservations back."""
        granted = self._grants.get(owner, {})
        given = [Grant(*claim) for claim in claims if granted.get(claim[0]) == claim[1]]
        for grant in given:
            granted.pop(grant.slot, None)
            self._writers.pop(grant.slot, None)
        self._directory.abandon(given)
        self._sync(grant.slot for grant in given)

    def drop(self, claims: Claims) -> None:
        """Hide rows."""
        records = [self._record(*claim) for claim in claims]
        self._directory.drop([record for record in records if record is not None])

    def touch(self, hashes: Sequence[BlockHash], at: float, counts: bool) -> None:
        """Note a use of a chain's blocks, or only its time."""
        if counts:
            self._directory.touch(hashes, at)
        else:
            self._directory.stamp(hashes, at)

    def acquire(self, owner: int, claims: Claims) -> list[bool]:
        """Set the owner's bit on rows that are still there; it has one, however often it asks."""
        answers: list[bool] = []
        for slot, generation in claims:
            record = self._record(slot, generation)
            held = self._leases.setdefault(owner, {})
            if record is not None and slot not in held:
                self._directory.acquire([record])
                held[slot] = generation
                self._leased[slot] = (self._leased.get(slot, (0, None))[0] | 1 << owner, record)
                self._sync([slot])
            answers.append(record is not None)
        return answers

    def release(self, owner: int, claims: Claims) -> None:
        """Clear the owner's bit; a dropped row's slot is free with the last one."""
        held = self._leases.get(owner, {})
        for slot, generation in claims:
            if held.get(slot) != generation:
                continue
            del held[slot]
            bits, record = self._leased.pop(slot)
            bits &= ~(1 << owner)
            if bits:
                self._leased[slot] = (bits, record)
            if record is not None:
                self._directory.release([Lease(record)])
            elif not bits:
                self._directory.abandon([Grant(slot, generation)])
            self._sync([slot])

    def reconcile(self, owner: int, grants: Iterable[tuple[int, int]], leases: Iterable[tuple[int, int]]) -> None:
        """An owner says all that it holds: what else it had is taken back."""
        grants, leases = set(grants), set(leases)
        self.abandon(owner, [claim for claim in self._grants.get(owner, {}).items() if claim not in grants])
        self.release(owner, [claim for claim in self._leases.get(owner, {}).items() if claim not in leases])

    def forget(self, owner: int) -> None:
        """An owner is gone and its I/O has landed."""
        self.reconcile(owner, (), ())
        self._grants.pop(owner, None)
        self._leases.pop(owner, None)

    def rows_of(self, hashes: Sequence[BlockHash]) -> list[Record]:
        """The rows of those blocks that are here."""
        return [record for block_hash in hashes for record in self._directory.find([block_hash])]

    def take_changes(self) -> list[Gone | Here]:
        """What mirrors must be told, in order, since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def records(self) -> list[Record]:
        """All rows that can be read."""
        return self._directory.records()

    # ---- as the directory's log: before anybody has an answer ------------------------------------------------------

    def reserved(self, grants: Sequence[Grant]) -> None:
        """See `ChangeLog`."""
        writer, tenant, writers, put = self._writer, self._tenant, self._writers, self.table.put
        claim = writer, tenant
        for slot, generation in grants:
            writers[slot] = claim
            put(slot, generation, 0, SlotState.WRITING, writer, tenant)
        self._tell_gone([grant.slot for grant in grants])
        if self._journal is not None:
            self._journal.reserved(grants)

    def published(self, records: Sequence[Record]) -> None:
        """See `ChangeLog`."""
        writers, put = self._writers, self.table.put
        for record in records:
            del writers[record.slot]
            put(record.slot, record.generation, 0, SlotState.READY, NOBODY, record.tenant)
        for piece in pieces(records):
            self._changes.append(Here(self.tier_index, as_rows(piece)))
        if self._journal is not None:
            self._journal.published(records)

    def dropped(self, records: Sequence[Record]) -> None:
        """See `ChangeLog`."""
        slots = [record.slot for record in records]
        self._put(slots)
        self._tell_gone(slots)
        if self._journal is not None:
            self._journal.dropped(records)

    def check(self) -> None:
        """Assert that directory, table and claims agree."""
        self._directory.check()
        for slot, entry in enumerate(self.table.entries()):
            state, generation, _ = self._directory.state_of(slot)
            assert (entry.state, entry.generation) == (state, generation), slot
            assert entry.leases == self._leased.get(slot, (0, None))[0], slot
            assert (entry.writer != NOBODY) == (slot in self._writers), slot
        for owner, grants in self._grants.items():
            assert all(self._writers[slot][0] == owner for slot in grants)

    def _tell_gone(self, slots: Sequence[int]) -> None:
        """Nobody may take these for rows any more: neither mirrors nor, from its headers, a keeper to come."""
        self._zero(slots)
        for piece in pieces(slots):
            self._changes.append(Gone(self.tier_index, piece))

    def _record(self, slot: int, generation: int) -> Record | None:
        record = self._directory.record_at(slot) if 0 <= slot < self.slab.slot_count else None
        return record if record is not None and record.generation == generation else None

    def _is_here(self, record: Record) -> bool:
        found = self._record(record.slot, record.generation)
        return found is not None and found.block_hash == record.block_hash

    def _sync(self, slots: Iterable[int]) -> None:
        """Bring the table, and for DRAM the header, to what the directory says; for slots that nobody writes to."""
        slots = list(slots)
        self._put(slots)
        self._zero([slot for slot in slots if self._directory.state_of(slot)[0] is not SlotState.READY])

    def _zero(self, slots: Sequence[int]) -> None:
        mapping, base, slot_bytes, leased = self.slab.mapping, self.slab.base_bytes, self.slab.slot_bytes, self._leased
        if mapping is None:
            return
        for slot in slots:
            if slot not in leased:
                offset = base + slot * slot_bytes
                mapping[offset : offset + len(MAGIC)] = _NO_MAGIC

    def _put(self, slots: Iterable[int]) -> None:
        for slot in slots:
            state, generation, tenant = self._directory.state_of(slot)
            bits = self._leased.get(slot, (0, None))[0]
            writer = self._writers[slot][0] if slot in self._writers else NOBODY
            self.table.put(slot, generation, bits, state, writer, tenant)
