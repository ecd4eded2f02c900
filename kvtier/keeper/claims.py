"""What the owners of one shared shelf have claims on: slots that they write to, and rows that they lease.

Says who holds what, not whether it may: the ledger judges. Knows no directory and no table. Owned by ledger.py.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView

from kvtier.keeper.slot_table import NOBODY, SlotEntry
from kvtier.record import Record

Claims = Iterable[tuple[int, int]]
"""(slot, generation) pairs."""


class OwnerClaims:
    """See the module. A slot has one writer at most, a row any number of leases, one an owner."""

    def __init__(self) -> None:
        self.writers: dict[int, tuple[int, bytes]] = {}
        """slot -> (owner, tenant) of every reservation."""
        self._grants: dict[int, dict[int, int]] = {}
        self._leases: dict[int, dict[int, int]] = {}
        self._leased: dict[int, tuple[int, Record | None]] = {}
        """slot -> (bits of owners, record); None: a row that was dropped before this keeper came."""

    def owners(self) -> set[int]:
        """Owners with a claim on any slot."""
        return {owner for claims in (self._grants, self._leases) for owner, slots in claims.items() if slots}

    def counts_of(self, owner: int) -> tuple[int, int]:
        """How many slots an owner has reserved and how many leased."""
        return len(self._grants.get(owner, ())), len(self._leases.get(owner, ()))

    def grants_of(self, owner: int) -> dict[int, int]:
        """slot -> generation of an owner's reservations, to be changed together with `writers`."""
        return self._grants.setdefault(owner, {})

    def leases_of(self, owner: int) -> dict[int, int]:
        """slot -> generation of an owner's leases, to look only."""
        return self._leases.setdefault(owner, {})

    def writer(self, slot: int) -> int:
        """Who writes to a slot; NOBODY if nobody does."""
        return self.writers[slot][0] if slot in self.writers else NOBODY

    def lease_bits(self, slot: int) -> int:
        """The bits of all who lease the row in a slot; 0: none."""
        return self._leased[slot][0] if slot in self._leased else 0

    def leased_slots(self) -> KeysView[int]:
        """Slots whose rows anybody leases."""
        return self._leased.keys()

    def lease(self, owner: int, record: Record) -> None:
        """Set the owner's bit on a row."""
        self.leases_of(owner)[record.slot] = record.generation
        self._leased[record.slot] = (self.lease_bits(record.slot) | 1 << owner, record)

    def end_lease(self, owner: int, slot: int) -> tuple[int, Record | None]:
        """Clear the owner's bit; returns the bits that are left, and the row if it was there when leased."""
        del self._leases[owner][slot]
        bits, record = self._leased.pop(slot)
        bits &= ~(1 << owner)
        if bits:
            self._leased[slot] = (bits, record)
        return bits, record

    def restore_grant(self, slot: int, entry: SlotEntry) -> None:
        """Take the reservation of a slot from its entry in a slot table."""
        self.grants_of(entry.writer)[slot] = entry.generation
        self.writers[slot] = entry.writer, entry.tenant

    def restore_leases(self, slot: int, entry: SlotEntry, record: Record | None) -> list[int]:
        """Take the leases on a slot from its entry in a slot table; returns their owners."""
        bits = entry.leases
        owners = [owner for owner in range(bits.bit_length()) if bits >> owner & 1]
        for owner in owners:
            self.leases_of(owner)[slot] = entry.generation
        self._leased[slot] = (bits, record)
        return owners

    def forget(self, owner: int) -> None:
        """An owner that has no claims any more is gone."""
        self._grants.pop(owner, None)
        self._leases.pop(owner, None)

    def check(self) -> None:
        """Assert that every reservation is its writer's."""
        for owner, grants in self._grants.items():
            assert all(self.writers[slot][0] == owner for slot in grants)
