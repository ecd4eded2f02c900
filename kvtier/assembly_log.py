"""What the assembly of an engine says in the log: what was made, and what was less than asked for.

Decides nothing. Called by assembly.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvtier.block import Tier
from kvtier.byte_text import bytes_text
from kvtier.config import EngineConfig
from kvtier.models.decoder import Decoder
from kvtier.store import Store
from kvtier.streams import TIER_NAMES, StreamLimits
from kvtier.tiers.header import HEADER_BYTES

_log = logging.getLogger("kvtier.assembly")


def warn_of_other_bytes(config: EngineConfig, store: Store, planned: Mapping[Tier, int]) -> None:
    """Say so of shelves that have other bytes than are asked for: those of a keeper that had them open already.

    Also if NVMe got less than half of its bytes: blocks of other layouts are never evicted for this one's. `planned`:
    slots that the configuration comes to. Shares of what is free come to others at each start, and are not looked at.
    """
    slot_bytes = HEADER_BYTES + store.layout.row_bytes
    for tier, asked in ((Tier.DRAM, config.tiers.dram.bytes), (Tier.NVME, config.tiers.nvme.bytes)):
        slots = store.capacities().get(tier.value)
        if slots is None or isinstance(asked, float):
            continue
        if config.sharing and slots != planned[tier]:
            _log.warning(
                "the %s shelf has %d blocks (%s), where tiers.%s.bytes comes to %d (%s): its keeper has it open with "
                "the bytes of an earlier engine. To change that, stop all engines on tiers.nvme.path, then say `kvtier "
                "shelf stop %s --now` or wait for tiers.linger_s, before the next start",
                TIER_NAMES[tier],
                slots,
                bytes_text(slots * slot_bytes),
                tier.value,
                planned[tier],
                bytes_text(planned[tier] * slot_bytes),
                config.tiers.nvme.path,
            )
        elif tier is Tier.NVME and slots * slot_bytes < asked // 2:
            _log.warning(
                "NVMe has room for %d blocks, %s of tiers.nvme.bytes (%s): the rest is held by files of other row "
                "layouts (another model, dtype or block_tokens) in tiers.nvme.path; `kvtier shelf ls` shows them: "
                "raise tiers.nvme.bytes, take another path, or remove folders that nobody needs",
                slots,
                bytes_text(slots * slot_bytes),
                bytes_text(asked),
            )


def log_parts(
    config: EngineConfig, decoder: Decoder, store: Store, context: int, streams: StreamLimits, near_rows: int
) -> None:
    """Say once what was resolved: slots of each tier, bytes of a row."""
    layout = store.layout
    slots = ", ".join(f"{name} {count} blocks" for name, count in store.capacities().items())
    if streams.slots_max:
        slots += f"; contexts larger than HBM: {streams.streams_max} at once, {streams.slots_max} blocks of HBM each"
    if near_rows:
        slots += f"; {near_rows} blocks of HBM are for slices that a prefill brings near"
    _log.info(
        "%s %s on %s, %d layers, context %d, attention %s; block %d tokens = %s (%s each); %s; a pass stages %d",
        decoder.config.family,
        layout.dtype,
        config.device,
        layout.layers,
        context,
        config.attention,
        layout.block_tokens,
        bytes_text(layout.row_bytes),
        bytes_text(layout.token_bytes),
        slots,
        store.stager.blocks_max if store.stager is not None else 0,
    )
