"""Answers operators from the books: what is there, page by page, and a few rows dropped or pinned at a time.

Each answer is bounded work, since a keeper gives it between two messages of engines. The same for a cache directory
that nobody keeps, whose books offline.py opens. No socket, no clock. Called by the server, or by the desk's process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Protocol

from kvtier.keeper.fields import as_rows
from kvtier.keeper.ledger import Ledger
from kvtier.keeper.operator_wire import (
    PAGE_SLOTS,
    PAGE_TENANTS,
    Answer,
    Borrow,
    Counted,
    Hide,
    KeeperView,
    LayoutView,
    Leave,
    Lent,
    ListRows,
    ListTenants,
    Missing,
    Overview,
    OwnerView,
    Pin,
    Question,
    RowPage,
    Survey,
    TenantPage,
    TierView,
    Unpin,
)
from kvtier.keeper.wire import DRAM
from kvtier.retention import PRIORITY_MIN, Retention
from kvtier.tiers.header import RowFormat


class Layout(Protocol):
    """What the books of a row layout are to an operator."""

    name: str
    form: RowFormat

    @property
    def ledgers(self) -> Mapping[int, Ledger]:
        """By tier index."""

    @property
    def notes(self) -> Mapping[int, str]:
        """Why a tier is not there, by its index."""


Describe = Callable[[], tuple[KeeperView | None, list[OwnerView]]]


class Operations:
    """See the module. `layouts` may change between two questions."""

    def __init__(self, layouts: Mapping[str, Layout], describe: Describe) -> None:
        self._layouts = layouts
        self._describe = describe

    def answer(self, question: Question, now: float) -> tuple[Answer, list[int]]:
        """The answer, and descriptors that go with it, which are the caller's to close. Not for `Leave`."""
        if isinstance(question, Survey):
            keeper, owners = self._describe()
            return Overview(keeper, [_layout_view(kept) for kept in self._layouts.values()], owners), []
        if isinstance(question, Borrow):
            return self._lend(question)
        assert not isinstance(question, Leave), question
        kept = self._layouts.get(question.layout)
        ledger = kept.ledgers.get(question.tier) if kept is not None else None
        if ledger is None:
            return Missing(self._why_missing(question.layout)), []
        if isinstance(question, ListRows):
            return _row_page(ledger, question.first, now), []
        if isinstance(question, ListTenants):
            return TenantPage(ledger.directory.tenants(question.first, PAGE_TENANTS)), []
        return _changed(ledger, question), []

    def _lend(self, question: Borrow) -> tuple[Answer, list[int]]:
        kept = self._layouts.get(question.layout)
        ledger = kept.ledgers.get(DRAM) if kept is not None else None
        if ledger is None:
            return Missing(self._why_missing(question.layout)), []
        memory = os.open(f"/proc/self/fd/{ledger.slab.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        return Lent(ledger.slab.epoch, ledger.slab.slot_count), [memory]

    def _why_missing(self, layout: str) -> str:
        if layout in self._layouts:
            return f"layout {layout[:8]} has no such tier here"
        return f"layout {layout[:8]} is not open: no engine that uses it has come since the keeper started"


def _layout_view(kept: Layout) -> LayoutView:
    tiers = [_tier_view(ledger) for _, ledger in sorted(kept.ledgers.items())]
    return LayoutView(kept.name, kept.form.row_bytes, kept.form.slice_bytes, tiers, list(kept.notes.values()))


def _tier_view(ledger: Ledger) -> TierView:
    slab = ledger.slab
    return TierView(
        ledger.tier_index,
        slab.epoch,
        slab.slot_count,
        ledger.used_slots,
        len(ledger),
        ledger.directory.pinned,
        ledger.evictions,
        ledger.directory.expired,
        *ledger.written,
        ledger.frozen,
    )


def _row_page(ledger: Ledger, first: int, now: float) -> RowPage:
    directory, slot_count = ledger.directory, ledger.slab.slot_count
    end = min(first + PAGE_SLOTS, slot_count)
    found = [record for slot in range(first, end) if (record := directory.record_at(slot)) is not None]
    uses = [directory.use_of(record.block_hash) for record in found]
    counts, idle_s = [use.uses for use in uses], [max(0.0, now - use.last_use) for use in uses]
    return RowPage(as_rows(found), counts, idle_s, min(end, slot_count), end >= slot_count)


def _changed(ledger: Ledger, question: Hide | Pin | Unpin) -> Counted:
    """Drop or pin; pins that are over the budget are refused."""
    directory = ledger.directory
    if isinstance(question, Hide):
        before = len(ledger)
        ledger.drop(question.claims)
        return Counted(before - len(ledger))
    pinned, refused = directory.pinned, directory.pins_refused
    if isinstance(question, Pin):
        ledger.retain(question.hashes, Retention(PRIORITY_MIN, pinned=True))
    else:
        ledger.unpin(question.hashes)
    return Counted(abs(directory.pinned - pinned), directory.pins_refused - refused)
