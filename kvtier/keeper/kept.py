"""The shelves of one row layout in the keeper: made, or taken over from a keeper that is gone.

Owns slabs, slot tables and journal of the layout and the order in which they come about. What survivors hand over is
checked and then believed; what is not there is rebuilt from journal or headers. Called by the server.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.cache_directory import CacheDirectory
from kvtier.directory import SlotState
from kvtier.errors import KvtierError, ShelfError
from kvtier.eviction import PolicyMaker
from kvtier.io.base import KernelCalls
from kvtier.io.threads import ThreadsEngine
from kvtier.journal import Journal
from kvtier.keeper.ledger import Ledger
from kvtier.keeper.owners import is_locked
from kvtier.keeper.slot_table import SlotEntry, SlotTable
from kvtier.keeper.wire import OWNERS_MAX
from kvtier.record import Record
from kvtier.replay import JournalShape, Replay, ReplayState
from kvtier.shelves import GENERATION_GAP, nvme_slot_count, recover
from kvtier.tiers.header import HEADER_BYTES, RowFormat, parse_header
from kvtier.tiers.memory import AlignedPages
from kvtier.tiers.slab import (
    KEEPER_BYTE,
    SLAB_NAME,
    Slab,
    join_dram_slab,
    make_dram_slab,
    open_nvme_slab,
)

log = logging.getLogger(__name__)

DRAM, NVME = 0, 1
SCANS_IN_FLIGHT = 64
ORPHAN_WAIT_S = 1.0


@dataclass(slots=True)
class Handover:
    """What a survivor has brought of one shelf. The descriptors are taken over by whoever uses it."""

    epoch: bytes
    slot_count: int
    table: int
    slab: int | None = None


@dataclass(eq=False, slots=True)
class KeptLayout:
    """Ledgers of one layout by tier index, and why one is missing."""

    name: str
    form: RowFormat
    folder: int
    policy: PolicyMaker
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    journal: Journal | None = None

    @property
    def epochs(self) -> list[tuple[int, bytes, int]]:
        """(tier, epoch, slots) of what is there."""
        return [(tier, ledger.slab.epoch, ledger.slab.slot_count) for tier, ledger in self.ledgers.items()]

    def descriptors(self) -> list[int]:
        """Those that go with `epochs`: DRAM slab and slot table, the slot table of NVMe."""
        found: list[int] = []
        for tier, ledger in self.ledgers.items():
            found += [ledger.slab.descriptor] if tier == DRAM else []
            found.append(ledger.table.descriptor)
        return found

    def has_io(self, owner: int) -> bool:
        """Whether I/O of an owner through any slab may be under way."""
        return any(is_locked(ledger.slab.descriptor, owner) for ledger in self.ledgers.values())

    def is_current(self, cache: CacheDirectory) -> bool:
        """Whether its files are still those of their names."""
        nvme = self.ledgers.get(NVME)
        return nvme is None or cache.is_current(SLAB_NAME, nvme.slab.descriptor, self.folder)

    def close(self, deadline_s: float) -> None:
        """Bring the journal to disk."""
        if self.journal is not None:
            self.journal.close(deadline_s)


def fill(
    kept: KeptLayout,
    cache: CacheDirectory,
    budgets: Sequence[int],
    handed: dict[int, Handover],
    fresh: bool,
    now: float,
) -> None:
    """Open those tiers that are handed over and, if `fresh`, those that have a budget. Takes what it uses of `handed`.

    A tier that cannot be had leaves a note. Nothing fresh is made while survivors may still bring what was there.
    """
    kept.notes = []
    for tier, name in ((DRAM, "DRAM"), (NVME, "NVMe")):
        if tier in kept.ledgers or (tier not in handed and not (fresh and budgets[tier])):
            continue
        try:
            brought = handed.pop(tier, None)
            if tier == NVME:
                ledger = _open_nvme(cache, kept, budgets[NVME], brought, now)
            else:
                ledger = _take_dram(kept, brought, now) if brought else _make_dram(kept, budgets[DRAM])
        except (KvtierError, OSError) as error:
            kept.notes.append(f"{name}: {error}")
            log.warning("layout %s without %s: %s", kept.name, name, error)
        else:
            kept.ledgers[tier] = ledger
            slot_count = ledger.slab.slot_count
            log.info("layout %s: %s with %d blocks in %d slots", kept.name, name, len(ledger), slot_count)


def _make_dram(kept: KeptLayout, budget_bytes: int) -> Ledger:
    form = kept.form
    slot_count = budget_bytes // form.slot_bytes
    if slot_count == 0:
        raise ShelfError(f"tiers.dram.bytes: {budget_bytes} bytes are left, one block takes {form.slot_bytes}")
    slab = make_dram_slab(form.slot_bytes, slot_count)
    ledger = Ledger(DRAM, slab, form.slice_count, SlotTable.make(slot_count), None, 0, kept.policy)
    ledger.restore([], [], 0.0)
    return ledger


def _take_dram(kept: KeptLayout, handed: Handover, now: float) -> Ledger:
    """Rows from the headers of those slots that the table calls ready."""
    assert handed.slab is not None
    form = kept.form
    table = SlotTable(handed.table, handed.slot_count, writable=True)
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
    ledger = Ledger(DRAM, slab, form.slice_count, table, None, floor, kept.policy)
    ledger.restore(records, entries, now)
    return ledger


def _open_nvme(
    cache: CacheDirectory, kept: KeptLayout, budget_bytes: int, handed: Handover | None, now: float
) -> Ledger:
    form = kept.form
    slot_count = handed.slot_count if handed else nvme_slot_count(form, budget_bytes, cache.bytes_beside(kept.name))
    end = time.monotonic() + ORPHAN_WAIT_S
    slab, fresh = open_nvme_slab(kept.folder, form.slot_bytes, slot_count, KernelCalls(), end, (KEEPER_BYTE, 1))
    cache.hold(slab.descriptor)
    shape = JournalShape(slab.epoch, slot_count, form.slice_count)
    found = Replay(ReplayState.MISSING, [], 0) if fresh else _recover(kept.folder, shape, slab, form)
    if handed is not None and handed.epoch == slab.epoch:
        table = SlotTable(handed.table, slot_count, writable=True)
        entries = list(table.entries())
        records = _agreed(slab, form, entries, found.records)
    else:
        if handed is not None:
            os.close(handed.table)
        table, entries, records = SlotTable.make(slot_count), [], found.records
    seen = [record.generation for record in found.records] + [entry.generation for entry in entries]
    floor = max([found.generation, *seen]) + GENERATION_GAP
    kept.journal = Journal(kept.folder, shape, slab.descriptor, records, floor)
    ledger = Ledger(NVME, slab, form.slice_count, table, kept.journal, floor, kept.policy)
    ledger.restore(records, entries, now)
    ledger.frozen = not entries and any(is_locked(slab.descriptor, owner) for owner in range(OWNERS_MAX))
    return ledger


def _recover(folder: int, shape: JournalShape, slab: Slab, form: RowFormat) -> Replay:
    engine = ThreadsEngine(4, 1, SCANS_IN_FLIGHT, lambda: None)
    try:
        return recover(folder, shape, slab, form, engine, SCANS_IN_FLIGHT)
    finally:
        engine.close(0.0)


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
