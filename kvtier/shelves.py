"""Opens shelves: DRAM fresh for this process, NVMe from its cache directory, warm if rows were left there.

Owns the order in which lock, slab, journal and directory are opened and closed, and what fits the byte budgets. Called
at start, and by the store again while a shelf is not to be had. Rule 19 of the protocol: one engine, no keeper.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.block import KVLayout, Tier
from kvtier.books import LocalBooks
from kvtier.cache_directory import CacheDirectory
from kvtier.config import IoConfig
from kvtier.directory import Directory
from kvtier.errors import ConfigError, ShelfError
from kvtier.eviction import LeastRecentlyUsed, PolicyMaker
from kvtier.io.base import KernelCalls, SystemCalls
from kvtier.io.threads import ThreadsEngine
from kvtier.journal import Journal
from kvtier.rebuild import scan_headers
from kvtier.replay import JournalShape, Replay, ReplayState, replay
from kvtier.shelf import Shelf
from kvtier.ticket import ShelfLimits
from kvtier.tiers.header import SLICES_MAX, RowFormat
from kvtier.tiers.slab import SUPERBLOCK_BYTES, Slab, make_dram_slab, open_nvme_slab

log = logging.getLogger(__name__)

GENERATION_GAP = 1 << 20
"""Generations skipped at each opening: more than an unsynced second of the last process can have used."""


def open_dram_shelf(
    layout: KVLayout,
    namespace: bytes,
    budget_bytes: int,
    io: IoConfig,
    wake: Callable[[], None],
    *,
    policy: PolicyMaker = LeastRecentlyUsed,
    limits: ShelfLimits | None = None,
    calls: SystemCalls | None = None,
) -> Shelf:
    """A DRAM shelf of at most `budget_bytes`, header pages of its I/O left out.

    Raises ConfigError, naming tiers.dram.bytes, if that much memory is not free or holds no block.
    """
    form = row_format(layout, namespace)
    slot_count = budget_bytes // form.slot_bytes
    if slot_count == 0:
        raise ConfigError(
            f"tiers.dram.bytes: {budget_bytes} bytes hold no block, one takes {form.slot_bytes}; raise it, or 0 for off"
        )
    slab = make_dram_slab(form.slot_bytes, slot_count)
    limits = limits if limits is not None else ShelfLimits(io.in_flight_max)
    engine = ThreadsEngine(io.readers, io.writers, limits.in_flight_max, wake, calls)

    def close_files(_: float, stuck: int) -> None:
        if not stuck:
            slab.close()

    return Shelf(Tier.DRAM, form, slab, LocalBooks(Directory(slot_count, policy)), engine, limits, close_files)


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
    cache = CacheDirectory(path, wait_s)
    engine: ThreadsEngine | None = None
    try:
        folder = cache.layout_folder(layout)
        slot_count = nvme_slot_count(form, budget_bytes, cache.other_bytes(layout))
        slab, fresh = open_nvme_slab(folder, form.slot_bytes, slot_count, calls, end)
        cache.hold(slab.descriptor)
        engine = ThreadsEngine(io.readers, io.writers, limits.in_flight_max, wake, calls)
        shape = JournalShape(slab.epoch, slot_count, form.slice_count)
        found = (
            Replay(ReplayState.MISSING, [], 0)
            if fresh
            else recover(folder, shape, slab, form, engine, limits.in_flight_max)
        )
    except BaseException:
        if engine is not None:
            engine.close(0.0)
        cache.close()
        raise
    floor = max([found.generation, *(record.generation for record in found.records)]) + GENERATION_GAP
    journal = Journal(folder, shape, slab.descriptor, found.records, floor, journal_calls)
    directory = Directory(slot_count, policy, journal, floor)
    directory.restore(found.records, time.monotonic())
    log.info("NVMe shelf opened: %d slots, %d blocks there", slot_count, len(directory))

    def close_files(deadline_s: float, stuck: int) -> None:
        if journal.close(deadline_s) and not stuck:
            cache.close()

    return Shelf(Tier.NVME, form, slab, LocalBooks(directory), engine, limits, close_files)


def row_format(layout: KVLayout, namespace: bytes) -> RowFormat:
    """The format of a model's rows; ConfigError if a shelf cannot hold them."""
    if layout.layers > SLICES_MAX:
        raise ConfigError(f"model: {layout.layers} layers, a shelf holds rows of at most {SLICES_MAX}")
    return RowFormat.of(layout, namespace)


def nvme_slot_count(form: RowFormat, budget_bytes: int, other_bytes: int) -> int:
    """Slots for which slab and journal, its rewrite included, fit what other layouts leave of the budget."""
    empty = JournalShape(b"", 0, form.slice_count)
    journal_slot_bytes = JournalShape(b"", 1, form.slice_count).total_bytes_max - empty.total_bytes_max
    left_bytes = budget_bytes - other_bytes - SUPERBLOCK_BYTES - empty.total_bytes_max
    slot_count = left_bytes // (form.slot_bytes + journal_slot_bytes)
    if slot_count < 1:
        needed_bytes = budget_bytes - left_bytes + form.slot_bytes + journal_slot_bytes
        raise ShelfError(
            f"tiers.nvme.bytes: {budget_bytes} bytes, of which other row layouts in the cache directory hold "
            f"{other_bytes}; one block needs a budget of {needed_bytes}. Raise it, or remove their folders"
        )
    if other_bytes:
        log.info("other row layouts hold %d bytes of tiers.nvme.bytes", other_bytes)
    return slot_count


def recover(
    folder: int, shape: JournalShape, slab: Slab, form: RowFormat, engine: ThreadsEngine, in_flight_max: int
) -> Replay:
    """What the journal says, or if it cannot be believed, the headers of the slab."""
    found = replay(folder, shape)
    if found.state is ReplayState.WHOLE:
        return found
    records = scan_headers(slab, form, engine, in_flight_max)
    log.warning("NVMe journal is %s: %d blocks found again from row headers", found.state.value, len(records))
    return Replay(found.state, records, found.generation)
