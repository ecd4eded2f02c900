"""Opens one tier of a layout in the keeper: made, taken over from a keeper that is gone, or found again on its disk.

What survivors hand over is checked and then believed; what is not there is rebuilt from journal or headers. Whatever
fails gives back all that it has taken, since it is tried again. Knows no engine. Called by openings, on their threads.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier.boot_clock import boot_s
from kvtier.byte_text import needed_text
from kvtier.cache_directory import CacheDirectory
from kvtier.directory import SlotState
from kvtier.errors import ShelfError
from kvtier.eviction import PolicyMaker
from kvtier.io.base import KernelCalls
from kvtier.journal import Journal
from kvtier.keeper.fields import OWNERS_MAX
from kvtier.keeper.ledger import Ledger
from kvtier.keeper.owners import is_locked
from kvtier.keeper.slot_table import SlotEntry, SlotTable
from kvtier.keeper.wire import DRAM, NVME
from kvtier.record import Record
from kvtier.replay import JournalShape, Replay, ReplayState, replay
from kvtier.shelves import GENERATION_GAP, nvme_slot_count, recover_alone
from kvtier.terms import Terms
from kvtier.tiers.header import HEADER_BYTES, RowFormat, parse_header
from kvtier.tiers.memory import AlignedPages
from kvtier.tiers.slab import KEEPER_BYTE, Slab, join_dram_slab, make_dram_slab, nvme_identity, open_nvme_slab
from kvtier.write_budget import WriteBudget

ORPHAN_WAIT_S = 1.0
CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Handover:
    """What a survivor has brought of one shelf. The descriptors are whoever's that opens the tier with it."""

    epoch: bytes
    slot_count: int
    table: int
    slab: int | None = None

    def close(self) -> None:
        """Nobody needs it."""
        os.close(self.table)
        if self.slab is not None:
            os.close(self.slab)


@dataclass(frozen=True, slots=True)
class Opened:
    """A tier that is there: its books, for NVMe also their journal."""

    ledger: Ledger
    journal: Journal | None = None
    folder: int = -1
    """Descriptor of NVMe's folder."""

    def close(self, cache: CacheDirectory) -> bool:
        """Bring the journal to disk and let everything go; False, with all as it was: the disk takes too long."""
        ledger = self.ledger
        if self.journal is not None and not self.journal.close(CLOSE_S):
            return False  # its thread may still write through these descriptors
        if self.journal is not None:
            cache.drop(ledger.slab.descriptor)
            cache.drop(self.folder)
        else:
            ledger.slab.close()
        ledger.table.close()
        os.close(ledger.table.descriptor)
        return True


def make_dram(form: RowFormat, policy: PolicyMaker, terms: Terms, budget_bytes: int) -> Opened:
    """A fresh DRAM tier of at most so many bytes. KvtierError if they cannot be had."""
    slot_count = budget_bytes // form.slot_bytes
    if slot_count <= 0:
        raise ShelfError(
            f"other row layouts leave too little of tiers.dram.bytes: one block takes {needed_text(form.slot_bytes)}; "
            "raise it for the first engine on the directory, or choose another tiers.nvme.path"
        )
    with contextlib.ExitStack() as undo:
        slab = make_dram_slab(form.slot_bytes, slot_count)
        undo.callback(slab.close)
        table = _make_table(slot_count, undo)
        limits = terms.limits(slot_count, form.slot_bytes)
        ledger = Ledger(DRAM, slab, form.slice_count, table, None, 0, policy, limits)
        ledger.restore([], [], 0.0)
        undo.pop_all()
    return Opened(ledger)


def take_dram(form: RowFormat, policy: PolicyMaker, terms: Terms, handed: Handover, now: float) -> Opened:
    """The DRAM tier that a survivor hands over: rows from the headers of those slots that the table calls ready."""
    assert handed.slab is not None
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, handed.slab)
        table = _take_table(handed, undo)
        slab = join_dram_slab(handed.slab, form.slot_bytes, handed.slot_count, handed.epoch)
        entries = list(table.entries())
        records: list[Record] = []
        assert slab.mapping is not None
        with memoryview(slab.mapping) as rows:
            for slot, entry in enumerate(entries):
                if entry.state is SlotState.READY:
                    offset = slab.offset(slot)
                    with rows[offset : offset + HEADER_BYTES] as header:
                        records += _sound(parse_header(header), slot, entry, form)
        floor = max(entry.generation for entry in entries) + GENERATION_GAP
        limits = terms.limits(handed.slot_count, form.slot_bytes)
        ledger = Ledger(DRAM, slab, form.slice_count, table, None, floor, policy, limits)
        ledger.restore(records, entries, now)
        ledger.expire(time.time(), boot_s())
        undo.pop_all()
    return Opened(ledger)


def open_nvme(
    cache: CacheDirectory,
    name: str,
    form: RowFormat,
    policy: PolicyMaker,
    terms: Terms,
    budget_bytes: int,
    handed: Handover | None,
    now: float,
) -> Opened:
    """The NVMe tier of a layout's folder, with the slot table of a survivor if one hands it over."""
    with contextlib.ExitStack() as undo:
        table = _take_table(handed, undo) if handed is not None else None
        folder = cache.folder(name)
        undo.callback(cache.drop, folder)
        if handed is None:
            slot_count = nvme_slot_count(form, budget_bytes, cache.bytes_beside(name))
        elif nvme_identity(folder, form.slot_bytes) == (handed.epoch, handed.slot_count):
            slot_count = handed.slot_count
        else:
            raise ShelfError("the slab is not the one that an engine hands over")
        end = time.monotonic() + ORPHAN_WAIT_S
        slab, fresh = open_nvme_slab(folder, form.slot_bytes, slot_count, KernelCalls(), end, (KEEPER_BYTE, 1))
        undo.callback(cache.drop, cache.hold(slab.descriptor))
        shape = JournalShape(slab.epoch, slot_count, form.slice_count)
        if fresh:
            found = Replay(ReplayState.MISSING, [], 0, replay(folder, shape).spent)
        else:
            found = recover_alone(folder, shape, slab, form)
        records, entries = found.records, list[SlotEntry]()
        if table is not None:
            entries = list(table.entries())
            records = _agreed(slab, form, entries, found.records)
        else:
            table = _make_table(slot_count, undo)
        seen = [record.generation for record in found.records] + [entry.generation for entry in entries]
        floor = max([found.generation, *seen]) + GENERATION_GAP
        journal = Journal(folder, shape, slab.descriptor, records, floor, spent=found.spent)
        undo.callback(journal.close, CLOSE_S)  # before its descriptors are somebody else's
        budget = WriteBudget(terms.write_bytes_day, form.slot_bytes, time.time(), boot_s(), found.spent, journal)
        limits = terms.limits(slot_count, form.slot_bytes)
        ledger = Ledger(NVME, slab, form.slice_count, table, journal, floor, policy, limits, budget)
        ledger.restore(records, entries, now)
        ledger.expire(time.time(), boot_s())
        ledger.frozen = not entries and any(is_locked(slab.descriptor, owner) for owner in range(OWNERS_MAX))
        undo.pop_all()
    return Opened(ledger, journal, folder)


def _make_table(slot_count: int, undo: contextlib.ExitStack) -> SlotTable:
    return _undone(SlotTable.make(slot_count), undo)


def _take_table(handed: Handover, undo: contextlib.ExitStack) -> SlotTable:
    return _undone(SlotTable(handed.table, handed.slot_count, writable=True), undo)


def _undone(table: SlotTable, undo: contextlib.ExitStack) -> SlotTable:
    """Close it with what it belongs to, if that fails."""
    undo.callback(os.close, table.descriptor)
    undo.callback(table.close)
    return table


def _agreed(slab: Slab, form: RowFormat, entries: Sequence[SlotEntry], replayed: Iterable[Record]) -> list[Record]:
    """Rows that the table calls ready: from the journal, or what it has missed from their headers."""
    by_slot = {record.slot: record for record in replayed}
    records: list[Record] = []
    page = AlignedPages(1).take()
    for slot, entry in enumerate(entries):
        if entry.state is not SlotState.READY:
            continue
        record = by_slot.get(slot)
        if record is not None and record.generation == entry.generation:
            records.append(record)
            continue
        try:
            os.preadv(slab.descriptor, [page], slab.offset(slot))
        except OSError:
            continue
        records += _sound(parse_header(page), slot, entry, form)
    return records


def _sound(parsed: tuple[Record, RowFormat] | None, slot: int, entry: SlotEntry, form: RowFormat) -> list[Record]:
    """The record of a header, if it is that of this slot and generation."""
    if parsed is None:
        return []
    record, written = parsed
    lengths = (written.row_bytes, written.slice_bytes) == (form.row_bytes, form.slice_bytes)
    return [record] if lengths and (record.slot, record.generation) == (slot, entry.generation) else []
