"""Opens shelves: DRAM fresh for this process, NVMe from its cache directory, warm if rows were left there.

Owns the order in which lock, slab, journal and directory are opened and closed, and what fits the byte budgets. Called
at start, and by the store again while a shelf is not to be had. Rule 19 of the protocol: one engine, no keeper.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.block import KVLayout, Tier
from kvtier.books import LocalBooks
from kvtier.boot_clock import boot_s
from kvtier.byte_text import bytes_text, free_text, needed_text
from kvtier.cache_directory import CacheDirectory, layout_name
from kvtier.config import IoConfig
from kvtier.directory import Directory
from kvtier.errors import ConfigError, ShelfError
from kvtier.eviction import LeastRecentlyUsed, PolicyMaker
from kvtier.file_watch import FileWatch
from kvtier.io.base import IoEngine, KernelCalls, Mover, SystemCalls
from kvtier.io.threads import ThreadsEngine
from kvtier.io.uring import UringEngine
from kvtier.journal import Journal
from kvtier.process_limits import what_is_short, why_no_ring
from kvtier.rebuild import scan_headers
from kvtier.replay import JournalShape, Replay, ReplayState, replay
from kvtier.shelf import Shelf
from kvtier.terms import STANDARD, Terms
from kvtier.ticket import ShelfLimits
from kvtier.tiers.header import SLICES_MAX, RowFormat
from kvtier.tiers.mapped import MappedMover
from kvtier.tiers.slab import SLAB_NAME, Slab, make_dram_slab, open_nvme_slab
from kvtier.tiers.superblock import SUPERBLOCK_BYTES
from kvtier.write_budget import HOUR_S, WriteBudget

log = logging.getLogger(__name__)

GENERATION_GAP = 1 << 20
"""Generations skipped at each opening: more than an unsynced second of the last process can have used."""
WATCH_END_S = 1.0
JOURNAL_END_S = 10.0
SCANS_IN_FLIGHT = 64


def open_dram_shelf(
    layout: KVLayout,
    namespace: bytes,
    budget_bytes: int,
    io: IoConfig,
    wake: Callable[[], None],
    *,
    policy: PolicyMaker = LeastRecentlyUsed,
    terms: Terms = STANDARD,
    limits: ShelfLimits | None = None,
    calls: SystemCalls | None = None,
) -> Shelf:
    """A DRAM shelf of at most `budget_bytes`, header pages of its I/O left out.

    Raises ConfigError, naming tiers.dram.bytes, if that much memory is not free or holds no block.
    """
    form = row_format(layout, namespace)
    slot_count = dram_slot_count(form, budget_bytes)
    limits = limits if limits is not None else ShelfLimits(io.in_flight_max)
    with contextlib.ExitStack() as undo:
        slab = make_dram_slab(form.slot_bytes, slot_count)
        undo.callback(slab.close)
        engine = dram_engine(slab, form, io, limits, wake, calls)
        undo.callback(engine.close, 0.0)
        directory = Directory(slot_count, policy, limits=terms.limits(slot_count, form.slot_bytes))

        def close_files(_: float, stuck: int) -> None:
            if not stuck:
                slab.close()

        shelf = Shelf(Tier.DRAM, form, slab, LocalBooks(directory), engine, limits, close_files)
        undo.pop_all()
    return shelf


def open_nvme_shelf(
    layout: KVLayout,
    namespace: bytes,
    path: Path,
    budget_bytes: int,
    io: IoConfig,
    wake: Callable[[], None],
    wait_s: float = 0.0,
    *,
    policy: PolicyMaker = LeastRecentlyUsed,
    terms: Terms = STANDARD,
    limits: ShelfLimits | None = None,
    calls: SystemCalls | None = None,
    journal_calls: SystemCalls | None = None,
) -> Shelf:
    """The NVMe shelf of the cache directory at `path`, locked for this engine; its files never pass `budget_bytes`.

    Waits up to `wait_s` for another engine to leave, and as long as a damaged journal takes to rebuild. Raises
    ShelfError with what is needed and what is there; the engine serves without it and may try again.
    """
    end = time.monotonic() + wait_s
    form = row_format(layout, namespace)
    limits = limits if limits is not None else ShelfLimits(io.in_flight_max)
    calls = calls if calls is not None else KernelCalls()
    with contextlib.ExitStack() as undo:
        cache = CacheDirectory(path, wait_s)
        undo.callback(cache.close)
        folder = cache.layout_folder(layout)
        slot_count = nvme_slot_count(form, budget_bytes, cache.other_bytes(layout))
        slab, fresh = open_nvme_slab(folder, form.slot_bytes, slot_count, calls, end)
        cache.hold(slab.descriptor)
        engine = nvme_engine(slab, form, io, limits, wake, calls)
        undo.callback(engine.close, 0.0)
        shape = JournalShape(slab.epoch, slot_count, form.slice_count)
        found = (
            Replay(ReplayState.MISSING, [], 0, replay(folder, shape).spent)
            if fresh
            else recover(folder, shape, slab, form, engine, limits.in_flight_max)
        )

        def is_well() -> bool:
            place = cache.is_current(layout_name(layout), folder)
            named = place and cache.is_current(SLAB_NAME, slab.descriptor, folder)
            return cache.is_there() and cache.holds_lock() and named and slab.is_whole()

        floor = max([found.generation, *(record.generation for record in found.records)]) + GENERATION_GAP
        try:
            watch = FileWatch(is_well, wake)
            undo.callback(watch.close, WATCH_END_S)
            journal = Journal(folder, shape, slab.descriptor, found.records, floor, journal_calls, spent=found.spent)
        except RuntimeError as error:
            raise ShelfError(f"NVMe shelf: there is no thread for it now ({error})") from None
        undo.callback(journal.close, JOURNAL_END_S)  # before its descriptors are somebody else's
        directory = Directory(slot_count, policy, journal, floor, terms.limits(slot_count, form.slot_bytes))
        directory.restore(found.records, time.monotonic())
        directory.trim()
        budget = WriteBudget(terms.write_bytes_day, form.slot_bytes, time.time(), boot_s(), found.spent, journal)
        books = LocalBooks(directory, budget)
        books.expire(time.time(), boot_s())

        def close_files(deadline_s: float, stuck: int) -> None:
            end = time.monotonic() + deadline_s
            watched = watch.close(deadline_s)
            if journal.close(max(0.0, end - time.monotonic())) and watched and not stuck:
                cache.close()

        shelf = Shelf(Tier.NVME, form, slab, books, engine, limits, close_files, lambda: watch.gone)
        undo.pop_all()
    log.info("NVMe shelf opened: %d slots, %d blocks there", slot_count, len(directory))
    return shelf


def dram_engine(
    slab: Slab,
    form: RowFormat,
    io: IoConfig,
    limits: ShelfLimits,
    wake: Callable[[], None],
    calls: SystemCalls | None,
) -> ThreadsEngine:
    """What moves rows of a DRAM slab: copies within memory. `calls` may stand before them, with faults."""
    mover: Mover = MappedMover(slab, form.slice_bytes)
    mover = mover if calls is None else calls.mover(mover)
    return ThreadsEngine(io.readers, io.writers, limits.in_flight_max, wake, mover=mover)


def nvme_engine(
    slab: Slab,
    form: RowFormat,
    io: IoConfig,
    limits: ShelfLimits,
    wake: Callable[[], None],
    calls: SystemCalls | None,
) -> IoEngine:
    """What moves rows of an NVMe slab: io_uring where it can be had, else threads, after one line that says why."""
    calls = calls if calls is not None else KernelCalls()
    if io.engine == "uring" or (io.engine == "auto" and slab.direct):
        try:
            depths = io.reads_at_once, io.writes_at_once
            return UringEngine(calls, *depths, limits.in_flight_max, wake, form.slice_bytes)
        except OSError as error:
            short = what_is_short(error)
            lasting = ", until the shelf is opened anew, whatever is free by then" if short else ""
            text = "io.engine: no io_uring here (%s), NVMe is read and written by threads%s"
            log.warning(text, short or why_no_ring(error), lasting)
    return ThreadsEngine(io.readers, io.writers, limits.in_flight_max, wake, calls)


def row_format(layout: KVLayout, namespace: bytes) -> RowFormat:
    """The format of a model's rows; ConfigError if a shelf cannot hold them."""
    if layout.layers > SLICES_MAX:
        raise ConfigError(f"model: {layout.layers} layers, a shelf holds rows of at most {SLICES_MAX}")
    return RowFormat.of(layout, namespace)


def dram_slot_count(form: RowFormat, budget_bytes: int) -> int:
    """Slots in so many bytes of DRAM; ConfigError if there is none."""
    slot_count = budget_bytes // form.slot_bytes
    if slot_count == 0:
        raise ConfigError(
            f"tiers.dram.bytes: {free_text(budget_bytes)} hold no block, one takes {needed_text(form.slot_bytes)}; "
            "raise it, or 0 for off"
        )
    return slot_count


def nvme_slot_count(form: RowFormat, budget_bytes: int, other_bytes: int) -> int:
    """Slots for which slab and journal, its rewrite included, fit what other layouts leave of the budget.

    ShelfError, with the sums, if there is no room for one.
    """
    slot_count = nvme_room(form, budget_bytes - other_bytes)
    if slot_count < 1:
        slot_bytes, fixed_bytes = _nvme_bytes(form)
        needed_bytes = other_bytes + fixed_bytes + slot_bytes
        there, needed = free_text(budget_bytes), needed_text(needed_bytes)
        raise ShelfError(
            f"tiers.nvme.bytes: {there}, one block needs a budget of {needed}, since other row layouts in the cache "
            f"directory hold {needed_text(other_bytes)}, their journals at full length; raise it for the first engine "
            "on the directory, choose another tiers.nvme.path, or remove folders that no engine uses"
            if other_bytes
            else f"tiers.nvme.bytes: {there} hold no block, with its journal one needs {needed}; raise it, or 0 for off"
        )
    if other_bytes:
        log.info(
            "other row layouts hold %s of tiers.nvme.bytes, their journals at full length", bytes_text(other_bytes)
        )
    return slot_count


def nvme_room(form: RowFormat, budget_bytes: int) -> int:
    """Slots for which slab and journal fit so many bytes; 0 if there is no room for one."""
    slot_bytes, fixed_bytes = _nvme_bytes(form)
    return max(0, (budget_bytes - fixed_bytes) // slot_bytes)


def _nvme_bytes(form: RowFormat) -> tuple[int, int]:
    """Bytes of one slot, and of what is there besides, both with the journal and its rewrite."""
    empty, one = (JournalShape(b"", slots, form.slice_count).total_bytes_max for slots in (0, 1))
    return form.slot_bytes + one - empty, SUPERBLOCK_BYTES + empty


def recover_alone(folder: int, shape: JournalShape, slab: Slab, form: RowFormat) -> Replay:
    """`recover` for somebody who moves no rows, with an I/O engine for that moment."""
    engine = ThreadsEngine(4, 1, SCANS_IN_FLIGHT, lambda: None)
    try:
        return recover(folder, shape, slab, form, engine, SCANS_IN_FLIGHT)
    finally:
        engine.close(0.0)


def recover(
    folder: int, shape: JournalShape, slab: Slab, form: RowFormat, engine: IoEngine, in_flight_max: int
) -> Replay:
    """What the journal says, or if it cannot be believed, the headers of the slab.

    Then the day's spending is not known in full: all rows that are found count as written now.
    """
    found = replay(folder, shape)
    if found.state is ReplayState.WHOLE:
        return found
    records = scan_headers(slab, form, engine, in_flight_max)
    log.warning("NVMe journal is %s: %d blocks found again from row headers", found.state.value, len(records))
    hour = int(time.time()) // HOUR_S
    unknown_bytes = max(0, len(records) * form.slot_bytes - sum(found.spent.values()))
    spent = found.spent | {hour: found.spent.get(hour, 0) + unknown_bytes}
    return Replay(found.state, records, found.generation, spent)
