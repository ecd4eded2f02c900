"""The books of one shared shelf as the keeper keeps them: directory, slot table, owners' claims, and what to tell.

Each change is in the slot table, in the DRAM slot's header and in the journal before its caller gets an answer. Checks
everything that owners say; what does not fit is stale, never an error. No socket, no clock. Called by the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.block import BlockHash
from kvtier.books import can_reserve, counts_of
from kvtier.directory import ChangeLog, Directory, PublishOutcome, SlotState
from kvtier.eviction import PolicyMaker
from kvtier.keeper.claims import Claims, OwnerClaims
from kvtier.keeper.fields import pieces, row_pieces
from kvtier.keeper.marks import Marks
from kvtier.keeper.slot_table import NOBODY, SlotEntry, SlotTable
from kvtier.keeper.wire import CountsSent, Gone, Here, Numbers
from kvtier.record import NO_TENANT, Grant, Lease, Record
from kvtier.retention import Retention
from kvtier.terms import SlotLimits
from kvtier.tiers.checksum import SUM_BYTES
from kvtier.tiers.slab import Slab
from kvtier.write_budget import WriteBudget


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
        limits: SlotLimits | None = None,
        budget: WriteBudget | None = None,
    ) -> None:
        """Without `limits` and `budget` nothing is bounded but the slots."""
        self.tier_index = tier_index
        self.slab = slab
        self.table = table
        self.frozen = False
        """Nothing is granted: I/O of somebody whose slots are unknown may still be under way."""
        self._sums_bytes = slice_count * SUM_BYTES
        self._journal = journal
        self._directory = Directory(slab.slot_count, policy, self, generation_floor, limits)
        self._budget = budget if budget is not None else WriteBudget(0, 0, 0.0, 0.0)
        self._writer, self._tenant = NOBODY, NO_TENANT
        self._claims = OwnerClaims()
        self._marks = Marks(slab, table, self._directory, self._claims)
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

    def numbers(self) -> Numbers:
        """What engines are told of it."""
        return Numbers(self.tier_index, self.used_slots, CountsSent(*counts_of(self._directory, self._budget)))

    @property
    def written(self) -> tuple[int, int]:
        """Bytes of the last 24 hours as far as they are counted, and how many they may be; 0: any number."""
        return self._budget.spent_bytes, self._budget.limit_bytes

    @property
    def directory(self) -> Directory:
        """To look only: all that changes it goes through the ledger."""
        return self._directory

    def claims_of(self, owner: int) -> tuple[int, int]:
        """How many slots an owner has reserved and how many leased."""
        return self._claims.counts_of(owner)

    def owners(self) -> set[int]:
        """Owners with a claim on any slot."""
        return self._claims.owners()

    def restore(self, records: Sequence[Record], entries: Iterable[SlotEntry], now: float) -> None:
        """Begin with rows that were found, and with what a slot table says of claims."""
        ready = {record.slot: record for record in records}
        entries = list(entries)
        reserved: list[tuple[Grant, bytes]] = []
        for slot, entry in enumerate(entries):
            writing = entry.state is SlotState.WRITING and entry.writer != NOBODY
            if writing:
                self._claims.restore_grant(slot, entry)
            row = ready.get(slot)
            if row is not None and row.generation == entry.generation:  # what it has been raised to counts
                ready[slot] = row._replace(priority=entry.priority, expiry_s=entry.expiry_s, pinned=entry.pinned)
            if writing or (entry.leases and slot not in ready):
                ready.pop(slot, None)
                reserved.append((Grant(slot, entry.generation), entry.tenant))
        self._directory.restore(list(ready.values()), now, reserved)
        for slot, entry in enumerate(entries):
            if entry.leases:
                record = self._directory.record_at(slot)
                owners = self._claims.restore_leases(slot, entry, record)
                if record is not None:
                    self._directory.acquire([record] * len(owners))
        self._directory.trim()
        self._marks.put(range(self.slab.slot_count))

    def reserve(self, owner: int, count: int, tenant: bytes, least: int = 0) -> list[Grant]:
        """Slots for an owner to write into, as many as there are; none unless there is room for `least`."""
        if self.frozen or not can_reserve(self._directory, self._budget, least, tenant):
            return []
        self._writer, self._tenant = owner, tenant
        grants = self._directory.reserve(self._budget.allow(count, tenant), tenant)
        self._budget.spend(grants)
        self._claims.grants_of(owner).update(grants)
        return grants

    def publish(self, owner: int, rows: Sequence[Record], lease: bool, now: float) -> list[PublishOutcome]:
        """Bind an owner's reservations to hashes; asked again for what it has published, the answer is the same."""
        outcomes = [PublishOutcome.STALE] * len(rows)
        places: list[int] = []
        fitting: list[Record] = []
        granted, writers = self._claims.grants_of(owner), self._claims.writers
        for place, row in enumerate(rows):
            if granted.get(row.slot) == row.generation and len(row.sums) == self._sums_bytes:
                tenant = writers[row.slot][1]
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
                del writers[record.slot]
                freed.append(record.slot)
        self._marks.sync(freed)
        if lease:
            ends = zip(rows, outcomes, strict=True)
            self.acquire(owner, [row[1:3] for row, end in ends if end is PublishOutcome.PUBLISHED])
        return outcomes

    def abandon(self, owner: int, claims: Claims, unused: bool = False) -> None:
        """Take reservations back; `unused`: nothing was written to them."""
        granted = self._claims.grants_of(owner)
        given: list[Grant] = []
        for slot, generation in claims:
            if granted.get(slot) == generation:
                del granted[slot]
                self._claims.writers.pop(slot, None)
                given.append(Grant(slot, generation))
        self._directory.abandon(given)
        if unused:
            self._budget.give_back(given)
        self._marks.sync(grant.slot for grant in given)

    def drop(self, claims: Claims) -> None:
        """Hide rows."""
        records = [self._record(*claim) for claim in claims]
        self._directory.drop([record for record in records if record is not None])

    def retain(self, hashes: Sequence[BlockHash], asked: Retention) -> None:
        """Raise what blocks have to what is asked."""
        self._directory.retain(hashes, asked)

    def unpin(self, hashes: Sequence[BlockHash]) -> None:
        """Take the pins of blocks back."""
        self._directory.unpin(hashes)

    def expire(self, unix_s: float, boot_s: float) -> None:
        """It is so late, by the wall and the boot clock: hide what has expired."""
        self._directory.expire(unix_s)
        self._budget.advance(unix_s, boot_s)

    def touch(self, hashes: Sequence[BlockHash], at: float, counts: bool) -> None:
        """Note a use of a chain's blocks, or only its time."""
        if counts:
            self._directory.touch(hashes, at)
        else:
            self._directory.stamp(hashes, at)

    def acquire(self, owner: int, claims: Claims) -> list[bool]:
        """Set the owner's bit on rows that are still there; it has one, however often it asks."""
        held = self._claims.leases_of(owner)
        records = [self._record(*claim) for claim in claims]
        fresh = {record.slot: record for record in records if record is not None and record.slot not in held}
        self._directory.acquire(list(fresh.values()))
        for record in fresh.values():
            self._claims.lease(owner, record)
        self._marks.sync(fresh)
        return [record is not None for record in records]

    def release(self, owner: int, claims: Claims) -> None:
        """Clear the owner's bit; a dropped row's slot is free with the last one."""
        held = self._claims.leases_of(owner)
        ended = {slot: generation for slot, generation in claims if held.get(slot) == generation}
        leases, unknown = list[Lease](), list[Grant]()
        for slot, generation in ended.items():
            bits, record = self._claims.end_lease(owner, slot)
            if record is not None:
                leases.append(Lease(record))
            elif not bits:
                unknown.append(Grant(slot, generation))
        self._directory.release(leases)
        self._directory.abandon(unknown)
        self._marks.sync(ended)

    def reconcile(self, owner: int, grants: Iterable[tuple[int, int]], leases: Iterable[tuple[int, int]]) -> None:
        """An owner says all that it holds: what else it had is taken back."""
        grants, leases = set(grants), set(leases)
        self.abandon(owner, [claim for claim in self._claims.grants_of(owner).items() if claim not in grants])
        self.release(owner, [claim for claim in self._claims.leases_of(owner).items() if claim not in leases])

    def forget(self, owner: int) -> None:
        """An owner is gone and its I/O has landed."""
        self.reconcile(owner, (), ())
        self._claims.forget(owner)

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
        slots = [slot for slot, _ in grants]
        self._claims.writers.update(dict.fromkeys(slots, (self._writer, self._tenant)))
        self.table.put_writing(grants, self._writer, self._tenant)
        self._tell_gone(slots)
        if self._journal is not None:
            self._journal.reserved(grants)

    def published(self, records: Sequence[Record]) -> None:
        """See `ChangeLog`."""
        writers = self._claims.writers
        for record in records:
            del writers[record.slot]
        self.table.put_ready(records)
        self._changes += [Here(self.tier_index, rows) for rows in row_pieces(records)]
        if self._journal is not None:
            self._journal.published(records)

    def retained(self, records: Sequence[Record]) -> None:
        """See `ChangeLog`."""
        self._marks.put(record.slot for record in records)
        self._changes += [Here(self.tier_index, rows) for rows in row_pieces(records)]
        if self._journal is not None:
            self._journal.retained(records)

    def dropped(self, records: Sequence[Record]) -> None:
        """See `ChangeLog`."""
        slots = [record.slot for record in records]
        self._marks.put(slots)
        self._tell_gone(slots)
        if self._journal is not None:
            self._journal.dropped(records)

    def check(self) -> None:
        """Assert that directory, table and claims agree."""
        self._directory.check()
        self._marks.check()
        self._claims.check()

    def _tell_gone(self, slots: Sequence[int]) -> None:
        """Nobody may take these for rows any more: neither mirrors nor, from its headers, a keeper to come."""
        self._marks.zero(slots)
        self._changes += [Gone(self.tier_index, piece) for piece in pieces(slots)]

    def _record(self, slot: int, generation: int) -> Record | None:
        record = self._directory.record_at(slot) if 0 <= slot < self.slab.slot_count else None
        return record if record is not None and record.generation == generation else None

    def _is_here(self, record: Record) -> bool:
        found = self._record(record.slot, record.generation)
        return found is not None and found.block_hash == record.block_hash
