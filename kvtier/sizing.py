"""From a configuration's sizes to slots: how many rows each tier holds.

Arithmetic on budgets, raising ConfigError where they hold too little; allocates nothing. Used by the assembly of an
engine, and by plans of engines that are not there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from kvtier.block import KVLayout
from kvtier.byte_text import free_text, needed_text
from kvtier.cache_directory import claimed_beside, free_disk_bytes
from kvtier.config import EngineConfig
from kvtier.errors import ConfigError
from kvtier.shelves import nvme_room, row_format
from kvtier.tiers.memory import free_memory_bytes

_log = logging.getLogger(__name__)

STAGING_SHARE_MAX = 0.5
"""Of DRAM's bytes, whatever is asked for staging."""
LANDING_BYTES_MAX = 64 << 20
LANDING_SHARE_MAX = 0.125
"""Of landing places of one shelf, and of those of all as a share of DRAM's bytes, unless that is less than two rows."""
NEAR_SHARE_MAX = 0.25
"""Of HBM's bytes, those for slices of far rows."""
WORKING_SET_MIN = 2
"""Blocks of HBM without which a sequence cannot be streamed: one that grows, one that is on its way down."""


class Place(Protocol):
    """What of a device bounds the tiers."""

    @property
    def lands_rows(self) -> bool:
        """See `Device`."""

    @property
    def launcher(self) -> object | None:
        """See `Device`."""

    def free_bytes(self) -> int:
        """See `Device`."""


@dataclass(frozen=True, slots=True)
class TierSizes:
    """What the budgets of a configuration come to on a device."""

    slot_count: int
    """Slots of HBM, without `near_rows`."""
    near_rows: int
    """Rows of HBM whose memory is for slices of far rows."""
    landing_count: int
    """Landing places of each shelf."""
    staging_bytes: int
    dram_bytes: int
    """What is left of DRAM's for its shelf."""


def tier_sizes(config: EngineConfig, layout: KVLayout, context: int, place: Place) -> TierSizes:
    """Sizes for contexts of up to `context` tokens, by what is free now. ConfigError if HBM is too small to serve."""
    hbm_share = isinstance(config.tiers.hbm.bytes, float)
    slot_count = hbm_slot_count(config, layout, place.free_bytes() if hbm_share else 0)
    near_rows = near_row_count(config, layout, slot_count, context) if place.launcher is not None else 0
    dram_bytes = resolve(config.tiers.dram.bytes, free_memory_bytes())
    landings = landing_count(config, layout, dram_bytes) if place.lands_rows else 0
    dram_bytes = max(0, dram_bytes - landings * shelf_count(config) * layout.row_bytes)
    staged_bytes = staging_bytes(config, layout, dram_bytes)
    return TierSizes(slot_count - near_rows, near_rows, landings, staged_bytes, dram_bytes - staged_bytes)


def hbm_slot_count(config: EngineConfig, layout: KVLayout, free_bytes: int) -> int:
    """Slots of HBM, of whose memory so much is free. ConfigError if they are too few to serve."""
    budget = resolve(config.tiers.hbm.bytes, free_bytes)
    slot_count = budget // layout.row_bytes
    if slot_count < 2:
        raise ConfigError(
            f"tiers.hbm.bytes: {free_text(budget)} hold {slot_count} blocks of {config.block_tokens} tokens, at least "
            f"2 are needed; set it to {needed_text(2 * layout.row_bytes)} or more, or lower block_tokens"
        )
    return slot_count


def spare_count(config: EngineConfig, slot_count: int) -> int:
    """Slots that I/O hung in a disk would keep: one a read, and one a write where HBM is the source.

    It is without DRAM, and for contexts that are streamed from NVMe.
    """
    if not config.tiers.nvme.bytes:
        return 0
    io = config.io.within(slot_count)
    streams = config.tiers.dram.staging_bytes and config.scheduler.streamed_max
    spare = io.reads_at_once + (0 if config.tiers.dram.bytes and not streams else io.writes_at_once)
    if slot_count - spare < 2:
        raise ConfigError(
            f"tiers.hbm.bytes: {slot_count} blocks, of which a hung disk could keep {spare} (io.readers, io.writers); "
            "at least 2 more are needed: raise it, or lower io.readers and io.writers"
        )
    return spare


def near_row_count(config: EngineConfig, layout: KVLayout, slot_count: int, context: int) -> int:
    """Rows of HBM whose memory is for slices of far rows: two layers' of the longest context, as far as there is room.

    None where no context is larger than HBM.
    """
    needed, usable = layout.block_count(context), slot_count - spare_count(config, slot_count)
    if needed <= usable or not (config.scheduler.streamed_max and config.tiers.dram.bytes):
        return 0
    return min(-(-2 * needed // layout.layers), int(usable * NEAR_SHARE_MAX))


def context_max(config: EngineConfig, made_for: int) -> int:
    """Tokens of the longest context of a model that was made for so many. Raises ConfigError if asked for more."""
    if config.context is not None and config.context > made_for:
        raise ConfigError(
            f"context: the model was made for {made_for} tokens, got {config.context}; lower or remove it"
        )
    return config.context or made_for


def shelf_count(config: EngineConfig) -> int:
    """Shelves that an engine has."""
    return bool(config.tiers.dram.bytes) + bool(config.tiers.nvme.bytes)


def landing_count(config: EngineConfig, layout: KVLayout, dram_bytes: int) -> int:
    """Rows of host memory, for each shelf, by way of which it moves rows of a device; they come out of DRAM's bytes."""
    budget = min(LANDING_BYTES_MAX, int(dram_bytes * LANDING_SHARE_MAX) // max(1, shelf_count(config)))
    return 2 * max(1, min(config.io.in_flight_max, budget // (2 * layout.row_bytes)))


def staging_bytes(config: EngineConfig, layout: KVLayout, dram_bytes: int) -> int:
    """Of DRAM's bytes, those for whole slices of NVMe rows; 0 without NVMe, or where not even two fit."""
    budget = min(config.tiers.dram.staging_bytes, int(dram_bytes * STAGING_SHARE_MAX))
    slices = budget // layout.slice_bytes
    return slices * layout.slice_bytes if config.tiers.nvme.bytes and slices >= 2 else 0


def nvme_slots_planned(config: EngineConfig, layout: KVLayout) -> int:
    """Slots of the NVMe shelf, as far as budget, disk and other layouts in the cache directory leave room for them."""
    nvme = config.tiers.nvme
    if not nvme.bytes or nvme.path is None:
        return 0
    budget_bytes = resolve(nvme.bytes, free_disk_bytes(nvme.path)) - claimed_beside(nvme.path, layout)
    return nvme_room(row_format(layout, bytes(32)), budget_bytes)


def working_set_count(config: EngineConfig, usable_count: int) -> int:
    """Slots of HBM that a streamed sequence may hold, of those that one sequence can count on; 0: none is streamed."""
    limits, dram_bytes = config.scheduler, config.tiers.dram.bytes
    if not limits.streamed_max or not dram_bytes:
        return 0
    slot_count = int(limits.streamed_hbm * usable_count / limits.streamed_max)
    if slot_count >= WORKING_SET_MIN:
        return slot_count
    _log.warning(
        "contexts larger than HBM are off: scheduler.streamed_hbm of %d blocks leaves each of %d requests %d, %d are "
        "needed; raise tiers.hbm.bytes or scheduler.streamed_hbm, or lower scheduler.streamed_max",
        usable_count,
        limits.streamed_max,
        slot_count,
        WORKING_SET_MIN,
    )
    return 0


def resolve(size: int | float, free: int) -> int:
    """Bytes of a configured size: itself, or that share of what is free."""
    return int(size * free) if isinstance(size, float) else size
