"""Assembly: from a configuration to the parts of an engine, sized for this machine.

Owns the resolving of sizes (bytes, or shares of what is free) and the sums that must fit. Called once by the engine,
before its thread starts; raises ConfigError and CheckpointError with a way out, and leaves nothing behind then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtier.assembly_log import log_parts, warn_of_other_bytes
from kvtier.block import KVLayout, Tier
from kvtier.byte_text import free_text, needed_text
from kvtier.cache_directory import free_disk_bytes
from kvtier.capacity import Capacity
from kvtier.config import EngineConfig
from kvtier.cost import CostModel, LoadPolicy
from kvtier.demotion import NvmePolicy
from kvtier.device import Device
from kvtier.device.near import HALVES, NearSlices
from kvtier.digest_memory import DigestFile
from kvtier.errors import ConfigError, ShelfError
from kvtier.eviction import POLICIES
from kvtier.keeper.opening import SharedShelves
from kvtier.metrics import Metrics
from kvtier.models.config import ModelConfig
from kvtier.models.decoder import Decoder, load_decoder
from kvtier.namespace import namespace_digest
from kvtier.process_limits import what_is_short
from kvtier.shelf import Shelf
from kvtier.shelves import dram_slot_count, open_dram_shelf, open_nvme_shelf, row_format
from kvtier.sizing import (
    TierSizes,
    context_max,
    nvme_slots_planned,
    resolve,
    spare_count,
    tier_sizes,
    working_set_count,
)
from kvtier.store import Store
from kvtier.streams import StreamLimits
from kvtier.terms import Terms
from kvtier.tiers.arena import Arena
from kvtier.tiers.header import HEADER_BYTES
from kvtier.tiers.staging import StagingMemory
from kvtier.tokens import Tokenizer

_log = logging.getLogger(__name__)

OPEN_S = 30.0
"""What opening an NVMe shelf of one's own may take before the engine starts without it, besides the wait for others."""
UNDO_S = 5.0
"""What giving a part back may take when another cannot be made: it has done nothing yet."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of."""

    decoder: Decoder
    tokenizer: Tokenizer | None
    store: Store
    namespace: bytes
    context: int
    """Longest prompt + answer in tokens, by model and configuration."""
    streams: StreamLimits
    capacity: Capacity
    near: NearSlices | None
    """For slices of far rows, on a device to which host memory is far."""


def assemble(
    config: EngineConfig,
    metrics: Metrics,
    wake: Callable[[], None],
    progress: Callable[[int, int], None] | None,
    device: Device,
) -> Parts:
    """Load the model, allocate HBM, open the shelves. `wake` is called from workers when a transfer has ended."""
    threads = config.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    tokenizer = Tokenizer.load(config.model)
    device.enter()
    backend, ops = device.kernels(config.attention, threads, ModelConfig.from_folder(config.model).head_dim)
    decoder = load_decoder(
        config.model,
        config.dtype,
        config.block_tokens,
        backend,
        ops,
        progress,
        tokenizer.vocab_limit if tokenizer else None,
        DigestFile(config.tiers.nvme.path) if config.tiers.nvme.path is not None else None,
        device.place,
    )
    layout = decoder.layout
    context = context_max(config, decoder.config.context)
    namespace = namespace_digest(decoder.weights_digest, decoder.config.architecture(), layout)
    sizes = tier_sizes(config, layout, context, device)
    with contextlib.ExitStack() as undo:
        arena = device.arena(layout, sizes.slot_count, sizes.landing_count, wake)
        undo.callback(arena.close)
        near = None
        if device.launcher is not None and (slices_max := sizes.near_rows * layout.layers // HALVES):
            near = NearSlices(arena, decoder.config.windows, slices_max, device.place, device.launcher)
        staging = StagingMemory(sizes.staging_bytes, layout.slice_bytes) if sizes.staging_bytes else None
        store = _store(config, layout, arena, metrics, staging)
        undo.pop_all()  # the store closes the arena
        undo.callback(store.close, UNDO_S)
        _add_shelves(store, config, layout, namespace, wake, sizes.dram_bytes)
        streams = StreamLimits(config.scheduler.streamed_max, working_set_count(config, store.usable_count))
        log_parts(config, decoder, store, context, streams, sizes.near_rows)
        capacity = _capacity(config, store, streams, sizes)
        warn_of_other_bytes(config, store, capacity.configured)
        undo.pop_all()
    return Parts(decoder, tokenizer, store, namespace, context, streams, capacity, near)


def _store(
    config: EngineConfig, layout: KVLayout, arena: Arena, metrics: Metrics, staging: StagingMemory | None
) -> Store:
    """A store over HBM alone."""
    costs = CostModel(
        layout, config.tiers.fetch_deadline_s, LoadPolicy(config.tiers.load), config.scheduler.step_tokens
    )
    policy, spare = NvmePolicy(config.tiers.nvme.policy), spare_count(config, arena.slot_count)
    return Store(layout, arena, POLICIES[config.eviction], metrics, policy, costs, spare, staging)


def _capacity(config: EngineConfig, store: Store, streams: StreamLimits, sizes: TierSizes) -> Capacity:
    """What one sequence could hold, shelves that are yet to be opened included."""
    slot_bytes = HEADER_BYTES + store.layout.row_bytes
    dram, nvme = config.tiers.dram, config.tiers.nvme
    configured = {Tier.DRAM: sizes.dram_bytes // slot_bytes, Tier.NVME: nvme_slots_planned(config, store.layout)}
    tenant_max = {Tier.DRAM: dram.tenant_bytes // slot_bytes, Tier.NVME: nvme.tenant_bytes // slot_bytes}
    return Capacity(config, store, streams.slots_max, configured, tenant_max, nvme.write_bytes_day // slot_bytes)


def _add_shelves(
    store: Store,
    config: EngineConfig,
    layout: KVLayout,
    namespace: bytes,
    wake: Callable[[], None],
    dram_bytes: int,
) -> None:
    """`dram_bytes`: what the DRAM shelf may take."""
    policy = POLICIES[config.eviction]
    dram_terms, nvme_terms = _terms(config, layout)
    io = config.io.within(store.slot_count)
    if config.sharing and config.tiers.nvme.path is not None:
        _add_shared_shelves(store, config, layout, namespace, wake, dram_bytes)
        return
    if dram_bytes:
        dram = open_dram_shelf(layout, namespace, dram_bytes, io, wake, policy=policy, terms=dram_terms)
        store.add_shelf(dram)
    nvme = config.tiers.nvme
    if not nvme.bytes:
        return
    assert nvme.path is not None
    path: Path = nvme.path

    row_format(layout, namespace)  # ConfigError
    said = ""
    waits_s = [nvme.wait_s]

    def opener() -> Shelf | None:
        """Waits for another engine to leave the first time."""
        nonlocal said
        wait_s = waits_s.pop() if waits_s else 0.0
        try:
            return open_nvme_shelf(
                layout, namespace, path, nvme_bytes, io, wake, wait_s, policy=policy, terms=nvme_terms
            )
        except (ShelfError, OSError) as error:
            if (text := what_is_short(error) or str(error)) != said:
                said = text
                _log.warning("serving without the NVMe shelf, trying again: %s", text)
            return None

    nvme_bytes = resolve(nvme.bytes, free_disk_bytes(path))
    store.open_shelf(Tier.NVME, opener, nvme.wait_s + OPEN_S)
    if Tier.NVME.value not in store.capacities() and not said:
        _log.warning("serving without the NVMe shelf: it has not been opened yet; it is used once it has")


def _add_shared_shelves(
    store: Store, config: EngineConfig, layout: KVLayout, namespace: bytes, wake: Callable[[], None], dram_bytes: int
) -> None:
    """Shelves that a keeper keeps for all engines of the cache directory, now or once there is one."""
    nvme, path = config.tiers.nvme, config.tiers.nvme.path
    assert path is not None
    if dram_bytes:
        dram_slot_count(row_format(layout, namespace), dram_bytes)
    budgets = (dram_bytes, resolve(nvme.bytes, free_disk_bytes(path)) if nvme.bytes else 0)
    try:
        shared = SharedShelves(
            layout,
            namespace,
            path,
            budgets,
            config.io.within(store.slot_count),
            wake,
            config.tiers.linger_s,
            config.eviction,
            terms=_terms(config, layout),
        )
    except ShelfError as error:
        if what_is_short(error):
            raise
        _log.warning("serving without shelves: %s", error)
        return
    store.on_close(shared.close)
    store.watch(shared)
    opened = shared.try_open(nvme.wait_s)
    if shared.seat.unfit:
        raise ConfigError(shared.seat.unfit)
    if not opened or shared.seat.notes:
        _log.warning("serving without a shelf, trying again: %s", shared.refusal)
    for shelf in shared.poll(time.monotonic()):
        store.add_shelf(shelf)


def _terms(config: EngineConfig, layout: KVLayout) -> tuple[Terms, Terms]:
    """What DRAM and NVMe allow. ConfigError if a limit is so low that nothing could ever be written."""
    dram, nvme, pin_share = config.tiers.dram, config.tiers.nvme, config.tiers.pin_share
    limits = {
        "tiers.dram.tenant_bytes": dram.tenant_bytes,
        "tiers.nvme.tenant_bytes": nvme.tenant_bytes,
        "tiers.nvme.write_bytes_day": nvme.write_bytes_day,
    }
    for key, limit_bytes in limits.items():
        if 0 < limit_bytes < HEADER_BYTES + layout.row_bytes:
            raise ConfigError(
                f"{key}: {free_text(limit_bytes)} hold no block, one takes "
                f"{needed_text(HEADER_BYTES + layout.row_bytes)}; raise it, or 0 for no limit"
            )
    return Terms(pin_share, dram.tenant_bytes), Terms(pin_share, nvme.tenant_bytes, nvme.write_bytes_day)
