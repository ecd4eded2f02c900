"""What can be seen of a shared shelf's slots without a question: entries of the slot table and, in DRAM, the headers.

Brings both to what directory and claims say. Decides nothing. Owned by ledger.py, which puts new rows there itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from kvtier.directory import Directory, SlotState
from kvtier.keeper.claims import OwnerClaims
from kvtier.keeper.slot_table import NOBODY, SlotTable
from kvtier.record import Record
from kvtier.tiers.header import MAGIC
from kvtier.tiers.slab import Slab

_NO_MAGIC = bytes(len(MAGIC))
_MAGIC = struct.Struct(f"{len(MAGIC)}s")


class Marks:
    """See the module."""

    def __init__(self, slab: Slab, table: SlotTable, directory: Directory, claims: OwnerClaims) -> None:
        self._slab = slab
        self._table = table
        self._directory = directory
        self._claims = claims

    def put(self, slots: Iterable[int]) -> None:
        """Bring the table to what the directory says."""
        for slot in slots:
            state, generation, tenant = self._directory.state_of(slot)
            bits, writer = self._claims.lease_bits(slot), self._claims.writer(slot)
            retention = _retention(self._directory.record_at(slot))
            self._table.put(slot, generation, bits, state, writer, tenant, *retention)

    def zero(self, slots: Sequence[int]) -> None:
        """Take the magic out of DRAM headers, but not those of rows that somebody still leases."""
        mapping, base, slot_bytes = self._slab.mapping, self._slab.base_bytes, self._slab.slot_bytes
        if mapping is None:
            return
        leased, put = self._claims.leased_slots(), _MAGIC.pack_into
        for slot in slots:
            if slot not in leased:
                put(mapping, base + slot * slot_bytes, _NO_MAGIC)

    def sync(self, slots: Iterable[int]) -> None:
        """Bring the table, and for DRAM the header, to what the directory says; for slots that nobody writes to."""
        slots = list(slots)
        self.put(slots)
        self.zero([slot for slot in slots if self._directory.state_of(slot)[0] is not SlotState.READY])

    def check(self) -> None:
        """Assert that directory, table and claims agree."""
        for slot, entry in enumerate(self._table.entries()):
            state, generation, _ = self._directory.state_of(slot)
            assert (entry.state, entry.generation) == (state, generation), slot
            assert entry.leases == self._claims.lease_bits(slot), slot
            assert entry[5:] == _retention(self._directory.record_at(slot)), slot
            assert (entry.writer != NOBODY) == (slot in self._claims.writers), slot


def _retention(record: Record | None) -> tuple[int, int, bool]:
    return (0, 0, False) if record is None else (record.priority, record.expiry_s, record.pinned)
