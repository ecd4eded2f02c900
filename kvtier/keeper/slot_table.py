"""The slot table: the state of each slot of one shelf in shared memory, so that it outlives the keeper.

Written by the keeper alone, before it tells anyone; engines map it read-only and compare generations. A memfd that
cannot shrink; every field of one that comes from elsewhere is bounded before use. Used by ledger and shared books.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

from kvtier.directory import SlotState
from kvtier.errors import ShelfError
from kvtier.io.files import check_sealed, seal
from kvtier.keeper.wire import OWNERS_MAX

NOBODY = 255
_ENTRY = struct.Struct("<QQBB6x16s")
ENTRY_BYTES = _ENTRY.size
_STAMP = struct.Struct("<QQB")


class SlotEntry(NamedTuple):
    """What the table says of a slot."""

    generation: int
    leases: int
    """One bit an owner."""
    state: SlotState
    writer: int
    """Owner that has it reserved, else NOBODY."""
    tenant: bytes


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

    def put(self, slot: int, generation: int, leases: int, state: int, writer: int, tenant: bytes) -> None:
        """Keeper: set a slot's entry; see `SlotEntry`."""
        _ENTRY.pack_into(self._map, slot * ENTRY_BYTES, generation, leases, state, writer, tenant)

    def entries(self) -> Iterator[SlotEntry]:
        """All entries in order. ShelfError at one that cannot be."""
        for generation, leases, state, writer, tenant in _ENTRY.iter_unpack(self._map[:]):
            if state > SlotState.DROPPED or generation >= 1 << 62 or (writer >= OWNERS_MAX and writer != NOBODY):
                raise ShelfError("a slot table is damaged")
            yield SlotEntry(generation, leases, SlotState(state), writer, tenant)

    def is_ready(self, slot: int, generation: int) -> bool:
        """Whether the row of this generation is in its slot. Once False it stays so."""
        if not 0 <= slot < self.slot_count:
            return False
        found, _, state = _STAMP.unpack_from(self._map, slot * ENTRY_BYTES)
        return bool(found == generation and state == SlotState.READY)

    def close(self) -> None:
        """Let go of the map; the descriptor is its holder's to close."""
        self._map.close()


def make_sealed(name: str, total_bytes: int) -> int:
    """A memfd of zeros, all of it allocated, whose length is for ever."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, total_bytes)
        seal(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise ShelfError(f"{total_bytes} bytes of memory refused ({error.strerror})") from None
    return descriptor
