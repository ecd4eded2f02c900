"""The slot table: the state of each slot of one shelf in shared memory, so that it outlives the keeper.

Written by the keeper alone, before it tells anyone; engines map it read-only and compare generations. A memfd that
cannot shrink; every field of one that comes from elsewhere is bounded before use. Used by ledger and shared books.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvtier.byte_text import needed_text
from kvtier.directory import SlotState
from kvtier.errors import ShelfError
from kvtier.io.files import check_sealed, seal
from kvtier.keeper.fields import OWNERS_MAX
from kvtier.record import GENERATION_END, Grant, Record
from kvtier.retention import is_possible

NOBODY = 255
_ENTRY = struct.Struct("<QQQBBbB4x16s")
ENTRY_BYTES = _ENTRY.size
_STAMP = struct.Struct("<QQQB")


class SlotEntry(NamedTuple):
    """What the table says of a slot."""

    generation: int
    leases: int
    """One bit an owner."""
    state: SlotState
    writer: int
    """Owner that has it reserved, else NOBODY."""
    tenant: bytes
    priority: int
    expiry_s: int
    """Like priority and pin of a row that can be read, else 0."""
    pinned: bool


class SlotTable:
    """See the module. `descriptor` is the memfd."""

    def __init__(self, descriptor: int, slot_count: int, writable: bool) -> None:
        """Take `descriptor` over, whatever happens. ShelfError unless it is a sealed memfd of exactly this table."""
        self.descriptor = descriptor
        self.slot_count = slot_count
        try:
            check_sealed(descriptor, slot_count * ENTRY_BYTES)
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._map = mmap.mmap(descriptor, slot_count * ENTRY_BYTES, mmap.MAP_SHARED, protection)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def make(cls, slot_count: int) -> SlotTable:
        """A fresh one: every slot is free."""
        return cls(make_sealed("kvtier-slots", slot_count * ENTRY_BYTES), slot_count, writable=True)

    def put(
        self,
        slot: int,
        generation: int,
        leases: int,
        state: int,
        writer: int,
        tenant: bytes,
        priority: int = 0,
        expiry_s: int = 0,
        pinned: bool = False,
    ) -> None:
        """Keeper: set a slot's entry; see `SlotEntry`."""
        place = slot * ENTRY_BYTES
        _ENTRY.pack_into(self._map, place, generation, leases, expiry_s, state, writer, priority, pinned, tenant)

    def put_writing(self, grants: Sequence[Grant], writer: int, tenant: bytes) -> None:
        """Keeper: these slots are an owner's to write to."""
        pack, entries, state = _ENTRY.pack_into, self._map, int(SlotState.WRITING)
        for slot, generation in grants:
            pack(entries, slot * ENTRY_BYTES, generation, 0, 0, state, writer, 0, False, tenant)

    def put_ready(self, records: Sequence[Record]) -> None:
        """Keeper: these rows can be read, and nobody leases them."""
        pack, entries, state = _ENTRY.pack_into, self._map, int(SlotState.READY)
        for _, slot, generation, _, _, priority, expiry_s, tenant, pinned in records:
            pack(entries, slot * ENTRY_BYTES, generation, 0, expiry_s, state, NOBODY, priority, pinned, tenant)

    def entries(self) -> Iterator[SlotEntry]:
        """All entries in order. ShelfError at one that cannot be."""
        fields = _ENTRY.iter_unpack(self._map[:])
        for generation, leases, expiry_s, state, writer, priority, pinned, tenant in fields:
            known = state <= SlotState.DROPPED and (writer < OWNERS_MAX or writer == NOBODY) and pinned <= 1
            if not known or generation >= GENERATION_END or not is_possible(priority, expiry_s):
                raise ShelfError("a slot table is damaged")
            yield SlotEntry(generation, leases, SlotState(state), writer, tenant, priority, expiry_s, bool(pinned))

    def is_ready(self, slot: int, generation: int) -> bool:
        """Whether the row of this generation is in its slot. Once False it stays so."""
        if not 0 <= slot < self.slot_count:
            return False
        found, _, _, state = _STAMP.unpack_from(self._map, slot * ENTRY_BYTES)
        return bool(found == generation and state == SlotState.READY)

    def is_leased(self, slot: int, generation: int, owner: int) -> bool:
        """Whether an owner has a lease on the row of this generation."""
        found, leases, _, _ = _STAMP.unpack_from(self._map, slot * ENTRY_BYTES)
        return bool(found == generation and leases >> owner & 1)

    def close(self) -> None:
        """Let go of the map; the descriptor is its holder's to close."""
        self._map.close()


def make_sealed(name: str, total_bytes: int) -> int:
    """A memfd of zeros, all of it allocated, whose length is for ever."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, total_bytes)
        seal(descriptor)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise ShelfError(f"{needed_text(total_bytes)} of memory refused ({error.strerror})") from None
        raise
    return descriptor
