"""The books of a cache directory that no keeper keeps, opened by an operator's process: to look, or to change.

To look takes no lock and changes nothing: superblock, journal and headers are plain reads, and what an engine changes
meanwhile is seen or not. To change takes the lock as an engine would, for as long as that takes. Called by desk.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from kvtier.boot_clock import boot_s
from kvtier.cache_directory import CacheDirectory
from kvtier.errors import ShelfError
from kvtier.eviction import LeastRecentlyUsed
from kvtier.io.base import KernelCalls
from kvtier.journal import Journal
from kvtier.keeper.ledger import Ledger
from kvtier.keeper.operations import Operations
from kvtier.keeper.operator_wire import LAYOUTS_MAX, Answer, LayoutView, Missing, Overview, Question
from kvtier.keeper.slot_table import SlotTable
from kvtier.keeper.wire import NVME
from kvtier.replay import JournalShape, ReplayState, journal_slices
from kvtier.shelves import GENERATION_GAP, recover_alone
from kvtier.terms import STANDARD, SlotLimits
from kvtier.tiers.header import HEADER_BYTES, SLICES_MAX, RowFormat, parse_header
from kvtier.tiers.slab import KEEPER_BYTE, Slab, find_nvme_slab, open_nvme_slab
from kvtier.write_budget import spent_bytes

CLOSE_S = 10.0
"""What the journal gets to be written."""
ORPHAN_WAIT_S = 1.0
_LAYOUT_NAME = re.compile("[0-9a-f]{32}")


@dataclass(eq=False, slots=True)
class FoundLayout:
    """A layout whose NVMe books were opened from files."""

    name: str
    form: RowFormat
    ledgers: dict[int, Ledger]
    written_bytes: int
    """Of the last day, as far as a write budget had them counted; what it allows the files do not know."""
    journal: Journal | None = None
    """There if it was opened to change."""
    notes: dict[int, str] = field(default_factory=dict)

    def close(self) -> bool:
        """Let everything go; False: the disk has not taken the journal in time."""
        if self.journal is not None and not self.journal.close(CLOSE_S):
            return False
        for ledger in self.ledgers.values():
            ledger.table.close()
            os.close(ledger.table.descriptor)
            ledger.slab.close()
        return True


class Offline:
    """Answers questions as a keeper would. Has no DRAM: that exists only with a keeper."""

    def __init__(self, cache: CacheDirectory, names: Sequence[str], changing: bool) -> None:
        """Open the layouts of these names; with `changing`, `cache` holds its lock. One that is no good has a note."""
        self._layouts: dict[str, FoundLayout] = {}
        self._unreadable: list[LayoutView] = []
        self._operations = Operations(self._layouts, lambda: (None, []))
        for name in names:
            try:
                self._layouts[name] = _open(name, cache.folder(name), changing)
            except (ShelfError, OSError) as error:
                self._unreadable.append(LayoutView(name, 0, 0, [], [f"NVMe: {error}"]))

    def ask(self, question: Question) -> Answer:
        """The answer. ShelfError for what is not there."""
        answer, _ = self._operations.answer(question, time.monotonic())
        if isinstance(answer, Overview):
            for view in answer.layouts:
                written_bytes = self._layouts[view.name].written_bytes
                view.tiers = [structs.replace(tier, written_bytes=written_bytes) for tier in view.tiers]
            answer.layouts.extend(self._unreadable)
        if isinstance(answer, Missing):
            unreadable = [note for view in self._unreadable for note in view.notes if view.name == question.layout]  # type: ignore[union-attr]
            raise ShelfError("; ".join(unreadable) or answer.reason)
        return answer

    def close(self) -> None:
        """Let go of everything but the cache directory. ShelfError: what was changed may not be on disk."""
        closed = [layout.close() for layout in self._layouts.values()]
        self._layouts.clear()
        if not all(closed):
            raise ShelfError(f"the disk has not taken the journal within {CLOSE_S:g} s: what was changed may come back")


def layout_names(top: int) -> list[str]:
    """Names of the layouts' folders in a cache directory (a descriptor)."""
    return sorted(name for name in os.listdir(top) if _LAYOUT_NAME.fullmatch(name))[:LAYOUTS_MAX]


def _open(name: str, folder: int, changing: bool) -> FoundLayout:
    with contextlib.ExitStack() as undo:
        slab = find_nvme_slab(folder)
        undo.callback(slab.close)
        form = _form(folder, slab)
        if changing:
            seen, end = undo.pop_all(), time.monotonic() + ORPHAN_WAIT_S
            with seen:
                lock = (KEEPER_BYTE, 1)
                slab, _ = open_nvme_slab(folder, form.slot_bytes, slab.slot_count, KernelCalls(), end, lock)
            undo.callback(slab.close)
        shape = JournalShape(slab.epoch, slab.slot_count, form.slice_count)
        found = recover_alone(folder, shape, slab, form)
        floor = max([found.generation, *(record.generation for record in found.records)]) + GENERATION_GAP
        table = SlotTable.make(slab.slot_count)
        undo.callback(os.close, table.descriptor)
        undo.callback(table.close)
        journal = Journal(folder, shape, slab.descriptor, found.records, floor, spent=found.spent) if changing else None
        if journal is not None:
            undo.callback(journal.close, CLOSE_S)
        pins_max = STANDARD.limits(slab.slot_count, form.slot_bytes).pins_max
        limits = SlotLimits(max(pins_max, sum(row.pinned for row in found.records)), None)
        ledger = Ledger(NVME, slab, form.slice_count, table, journal, floor, LeastRecentlyUsed, limits)
        ledger.restore(found.records, [], time.monotonic())
        ledger.expire(time.time(), boot_s())
        undo.pop_all()
    spent = found.spent if found.state is ReplayState.WHOLE else {}
    return FoundLayout(name, form, {NVME: ledger}, spent_bytes(spent, time.time()), journal)


def _form(folder: int, slab: Slab) -> RowFormat:
    """Geometry of rows: the slab knows a slot's bytes, the journal or else a row's header into how many slices."""
    row_bytes = slab.slot_bytes - HEADER_BYTES
    for slice_count in itertools.chain([journal_slices(folder)], _claimed_slices(slab)):
        if 0 < slice_count <= SLICES_MAX and row_bytes % slice_count == 0:
            slice_bytes = row_bytes // slice_count
            if slice_bytes % HEADER_BYTES == 0:
                return RowFormat(bytes(32), row_bytes, slice_bytes)
    raise ShelfError("neither the journal nor any row tells the geometry: there is nothing to be found in it")


def _claimed_slices(slab: Slab) -> Iterator[int]:
    """What the sound headers say, one after the other."""
    for slot in range(slab.slot_count):
        parsed = parse_header(memoryview(os.pread(slab.descriptor, HEADER_BYTES, slab.offset(slot))))
        if parsed is not None and parsed[1].row_bytes == slab.slot_bytes - HEADER_BYTES:
            yield parsed[1].slice_count
