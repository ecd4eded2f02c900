"""Assembly: from a configuration to the parts of an engine, sized for this machine.

Owns the resolving of sizes (bytes, or shares of what is free), the sums that must fit and the report of what was made.
Called once by the engine, before its thread starts; raises ConfigError and CheckpointError with a way out.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtier.attention import make_backend
from kvtier.block import KVLayout, Tier
from kvtier.cache_directory import free_disk_bytes
from kvtier.config import EngineConfig
from kvtier.demotion import NvmePolicy
from kvtier.errors import ConfigError, ShelfError
from kvtier.eviction import POLICIES
from kvtier.keeper.opening import SharedShelves
from kvtier.metrics import Metrics
from kvtier.models.decoder import Decoder, load_decoder
from kvtier.models.ops import make_ops
from kvtier.namespace import namespace_digest
from kvtier.shelf import Shelf
from kvtier.shelves import open_dram_shelf, open_nvme_shelf
from kvtier.store import Store
from kvtier.tiers.hbm import HbmArena
from kvtier.tiers.memory import free_memory_bytes
from kvtier.tokens import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of."""

    decoder: Decoder
    tokenizer: Tokenizer | None
    store: Store
    namespace: bytes
    context: int
    """Longest prompt + answer in tokens, by model and configuration."""


def assemble(
    config: EngineConfig,
    metrics: Metrics,
    wake: Callable[[], None],
    progress: Callable[[int, int], None] | None = None,
) -> Parts:
    """Load the model, allocate HBM, open the shelves. `wake` is called from workers when a transfer has ended."""
    threads = config.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    tokenizer = Tokenizer.load(config.model)
    backend = make_backend(config.attention, threads)
    decoder = load_decoder(
        config.model,
        config.dtype,
        config.block_tokens,
        backend,
        make_ops(backend),
        progress,
        tokenizer.vocab_limit if tokenizer else None,
    )
    layout = decoder.layout
    context = _context(config, decoder)
    namespace = namespace_digest(decoder.weights_digest, decoder.config.architecture(), layout)
    arena = HbmArena(layout, _hbm_slot_count(config, layout))
    store = Store(
        layout,
        arena,
        POLICIES[config.eviction],
        metrics,
        NvmePolicy(config.tiers.nvme.policy),
        config.tiers.fetch_deadline_s,
        _spare_count(config, arena.slot_count),
    )
    try:
        _add_shelves(store, config, layout, namespace, wake)
    except BaseException:
        store.close(0.0)
        raise
    _report(config, decoder, store, context)
    return Parts(decoder, tokenizer, store, namespace, context)


def _context(config: EngineConfig, decoder: Decoder) -> int:
    longest = decoder.config.context
    if config.context is not None and config.context > longest:
        raise ConfigError(f"context: the model was made for {longest} tokens, got {config.context}; lower or remove it")
    return config.context or longest


def _hbm_slot_count(config: EngineConfig, layout: KVLayout) -> int:
    budget = _resolve(config.tiers.hbm.bytes, free_memory_bytes())
    slot_count = budget // layout.row_bytes
    if slot_count < 2:
        raise ConfigError(
            f"tiers.hbm.bytes: {budget} bytes hold {slot_count} blocks of {config.block_tokens} tokens, at least 2 are "
            f"needed; set it to {2 * layout.row_bytes} or more, or lower block_tokens"
        )
    return slot_count


def _spare_count(config: EngineConfig, slot_count: int) -> int:
    """Slots that I/O workers hung in a disk would keep: one a reader, and one a writer unless DRAM is the source."""
    if not config.tiers.nvme.bytes:
        return 0
    spare = config.io.readers + (0 if config.tiers.dram.bytes else config.io.writers)
    if slot_count - spare < 2:
        raise ConfigError(
            f"tiers.hbm.bytes: {slot_count} blocks, of which a hung disk could keep {spare} (io.readers, io.writers); "
            "at least 2 more are needed: raise it, or lower io.readers and io.writers"
        )
    return spare


def _add_shelves(
    store: Store, config: EngineConfig, layout: KVLayout, namespace: bytes, wake: Callable[[], None]
) -> None:
    policy = POLICIES[config.eviction]
    dram_bytes = _resolve(config.tiers.dram.bytes, free_memory_bytes())
    if config.sharing and config.tiers.nvme.path is not None:
        _add_shared_shelves(store, config, layout, namespace, wake, dram_bytes)
        return
    if dram_bytes:
        store.add_shelf(open_dram_shelf(layout, namespace, dram_bytes, config.io, wake, policy=policy))
    nvme = config.tiers.nvme
    if not nvme.bytes:
        return
    assert nvme.path is not None
    path: Path = nvme.path

    said = ""

    def opener(wait_s: float = 0.0) -> Shelf | None:
        nonlocal said
        try:
            return open_nvme_shelf(layout, namespace, path, nvme_bytes, config.io, wake, wait_s, policy=policy)
        except (ShelfError, OSError) as error:
            if str(error) != said:
                said = str(error)
                _log.warning("serving without the NVMe shelf, trying again: %s", error)
            return None

    nvme_bytes = _resolve(nvme.bytes, free_disk_bytes(path))
    shelf = opener(nvme.wait_s)
    if shelf is None:
        store.retry_later(Tier.NVME, opener)
    else:
        store.add_shelf(shelf)


def _add_shared_shelves(
    store: Store, config: EngineConfig, layout: KVLayout, namespace: bytes, wake: Callable[[], None], dram_bytes: int
) -> None:
    """Shelves that a keeper keeps for all engines of the cache directory, now or once there is one."""
    nvme, path = config.tiers.nvme, config.tiers.nvme.path
    assert path is not None
    budgets = (dram_bytes, _resolve(nvme.bytes, free_disk_bytes(path)) if nvme.bytes else 0)
    try:
        shared = SharedShelves(
            layout, namespace, path, budgets, config.io, wake, config.tiers.linger_s, config.eviction
        )
    except ShelfError as error:
        _log.warning("serving without shelves: %s", error)
        return
    store.on_close(shared.close)
    opened = shared.try_open(nvme.wait_s)
    for note in shared.seat.notes:
        if note.startswith("DRAM"):
            raise ConfigError(note)
        _log.warning("serving without a shelf: %s", note)
    if not opened:
        _log.warning("serving without shelves, trying again: %s", shared.refusal)
        for tier in shared.wanted:
            store.retry_later(tier, functools.partial(shared.opened, tier))
    for shelf in shared.shelves.values():
        store.add_shelf(shelf)


def _resolve(size: int | float, free: int) -> int:
    """Bytes of a configured size: itself, or that share of what is free."""
    return int(size * free) if isinstance(size, float) else size


def _report(config: EngineConfig, decoder: Decoder, store: Store, context: int) -> None:
    layout = store.layout
    slots = ", ".join(f"{name} {count} blocks" for name, count in store.capacities().items())
    _log.info(
        "%s %s, %d layers, context %d, attention %s; block %d tokens = %d bytes (%d a token); %s",
        decoder.config.family,
        layout.dtype,
        layout.layers,
        context,
        config.attention,
        layout.block_tokens,
        layout.row_bytes,
        layout.token_bytes,
        slots,
    )
