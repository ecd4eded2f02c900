"""Attention of a prefill pass over a context in mapped DRAM: how often its bytes cross PCIe, by how long it takes."""

from __future__ import annotations

import torch

from gpu.found import Speed
from gpu.machine import Machine
from gpu.speed import PCIE, Geometry, step
from kvtier.attention import AttentionBatch
from kvtier.batch import PassBatch
from kvtier.device.arena import DeviceArena
from kvtier.device.near import NearSlices


def measure_prefill(machine: Machine, geometry: Geometry) -> list[Speed]:
    """A prefill pass at the end of a context in mapped DRAM, its rows read in place, and with slices brought near."""
    layout, chunk = geometry.layout, geometry.chunk
    blocks, own = layout.block_count(geometry.streamed_context), layout.block_count(chunk)
    host, arena = machine.map_host(blocks * layout.row_bytes), DeviceArena(layout, own, machine.device)
    addresses = torch.tensor(
        [host.device_address(slot * layout.row_bytes) for slot in range(blocks)]
        + [arena.address(s) for s in range(own)]
    )
    positions, none = torch.arange(chunk), torch.zeros(chunk, dtype=torch.int64)
    attention = AttentionBatch(
        addresses[None],
        torch.tensor([0, chunk], dtype=torch.int32),
        torch.tensor([blocks * layout.block_tokens + chunk], dtype=torch.int32),
        addresses[blocks + positions // layout.block_tokens],
        (positions % layout.block_tokens).int(),
    )
    built, placed = PassBatch(none, none, none, attention), attention.to(machine.device)
    near = NearSlices(arena, [None] * layout.layers, blocks, machine.device, machine.launcher)

    def in_place() -> None:
        step(machine, geometry, placed, range(layout.layers))

    def brought() -> None:
        begun = near.begin(built)
        assert begun is not None
        begun.run(range(layout.layers), placed, lambda layers, batch: step(machine, geometry, batch, layers))

    read_bytes = blocks * layout.block_tokens * layout.token_bytes
    lines = []
    for how, action in (("rows in mapped DRAM in place", in_place), ("slices brought near", brought)):
        gb_s = read_bytes / machine.seconds(action, 2) / 1e9
        lines.append(Speed(f"prefill of {chunk}, {how}", gb_s, PCIE))
    host.close()
    return lines
