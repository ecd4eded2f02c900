"""What the assembly of an engine says in the log: what was made, and what was less than asked for.

Decides nothing. Called by assembly.py.
"""

from __future__ import annotations

import logging

from kvtier.block import Tier
from kvtier.byte_text import bytes_text
from kvtier.config import EngineConfig
from kvtier.models.decoder import Decoder
from kvtier.store import Store
from kvtier.streams import StreamLimits
from kvtier.tiers.header import HEADER_BYTES

_log = logging.getLogger("kvtier.assembly")


def warn_of_other_layouts(config: EngineConfig, store: Store) -> None:
    """Say so if NVMe got less than half of its bytes: blocks of other layouts are never evicted for this one's."""
    slots, nvme_bytes = store.capacities().get(Tier.NVME.value), config.tiers.nvme.bytes
    if slots is None or isinstance(nvme_bytes, float):  # a share, of what was free
        return
    slot_bytes = HEADER_BYTES + store.layout.row_bytes
    if slots * slot_bytes < nvme_bytes // 2:
        _log.warning(
            "NVMe has room for %d blocks, %s of tiers.nvme.bytes (%s): the rest is held by files of other row layouts "
            "(another model, dtype or block_tokens) in tiers.nvme.path, or its first engine was given less; `kvtier "
            "shelf ls` shows them: raise tiers.nvme.bytes, take another path, or remove folders that nobody needs",
            slots,
            bytes_text(slots * slot_bytes),
            bytes_text(nvme_bytes),
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
