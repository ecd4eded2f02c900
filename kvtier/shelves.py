"""Opens shelves: DRAM fresh for this process, NVMe from its cache directory, warm if it was left there.

Owns the order in which lock, slab, journal and directory are opened and closed, and the byte budgets. Called once per
shelf at start, and again by the store when a shelf was not to be had. Rule 19 of the protocol: one engine, no keeper.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.block import KVLayout, Tier
from kvtier.directory import Directory
from kvtier.errors import ConfigError
from kvtier.eviction import EvictionPolicy
from kvtier.io.base import SystemCalls
from kvtier.io.threads import ThreadsEngine
from kvtier.shelf import Shelf
from kvtier.ticket import ShelfLimits
from kvtier.tiers.header import RowFormat
from kvtier.tiers.slab import make_dram_slab


def open_dram_shelf(
    layout: KVLayout,
    namespace: bytes,
    budget_bytes: int,
    wake: Callable[[], None],
    *,
    policy: EvictionPolicy | None = None,
    readers: int = 4,
    writers: int = 2,
    limits: ShelfLimits = ShelfLimits(),  # noqa: B008 (frozen)
    calls: SystemCalls | None = None,
) -> Shelf:
    """A DRAM shelf of at most `budget_bytes`. ConfigError, naming tiers.dram.bytes, if it does not fit."""
    form = RowFormat.of(layout, namespace)
    slot_count = budget_bytes // form.slot_bytes
    if slot_count == 0:
        raise ConfigError(
            f"tiers.dram.bytes: {budget_bytes} bytes hold no block, one takes {form.slot_bytes}; raise it, or 0 for off"
        )
    slab = make_dram_slab(form.slot_bytes, slot_count)
    engine = ThreadsEngine(readers, writers, limits.in_flight_max, wake, calls)
    return Shelf(Tier.DRAM, form, slab, Directory(slot_count, policy), engine, limits)
