"""Bytes per second of copies and of decode attention from each place that K and V can lie in, beside their limits."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from gpu.found import Line, Speed
from gpu.machine import HostMemory, Machine
from kvtier.attention import AttentionBatch
from kvtier.batch import PassBatch
from kvtier.block import KVLayout
from kvtier.device.arena import DeviceArena
from kvtier.device.copies import Copies, make_lane
from kvtier.device.decode_graph import DecodeGraph
from kvtier.io.base import IoRequest, Operation
from kvtier.io.threads import ThreadsEngine

READERS = 16
HBM = "copy within HBM (read and written)"
PCIE = "copy pinned DRAM -> HBM"
DISK = "reads of the disk alone"


class Geometry(NamedTuple):
    """One sequence that decodes: its layout and lengths."""

    layout: KVLayout
    heads: int
    context: int
    streamed_context: int
    """Tokens of it when it is read over PCIe or from NVMe, where a step takes so much longer."""
    group_layers: int
    """Layers that are read from NVMe at once."""
    chunk: int
    """Tokens of a prefill pass."""
    copy_bytes: int

    @classmethod
    def llama(cls, context: int) -> Geometry:
        """Llama 3.1 8B in bf16: 128 KiB a token."""
        return cls(KVLayout(32, 8, 128, 32, "bfloat16"), 32, context, min(context, 8192), 4, 256, 1 << 30)

    @classmethod
    def tiny(cls) -> Geometry:
        """For the interpreter."""
        return cls(KVLayout(2, 1, 32, 16, "float32"), 2, 40, 40, 1, 2, 1 << 20)

    @property
    def says(self) -> str:
        """For a person."""
        layout = self.layout
        shape = f"{layout.layers} layers, {self.heads}/{layout.kv_heads} heads of {layout.head_dim}, {layout.dtype}"
        return f"{shape}, {self.context} tokens from HBM, {self.streamed_context} streamed"


def copies(machine: Machine, geometry: Geometry) -> list[Speed]:
    """The limits of what is read from HBM and over PCIe."""
    byte_count = geometry.copy_bytes
    host = machine.map_host(byte_count)
    one, other = (torch.empty(byte_count, dtype=torch.uint8, device=machine.device) for _ in range(2))
    lane = Copies(make_lane(machine.device), 1)

    def gb_s(target: torch.Tensor, source: torch.Tensor, moved_bytes: int) -> float:
        def copy() -> None:
            lane.start([(target, source)])
            lane.close()

        return moved_bytes / machine.seconds(copy, 5) / 1e9

    speeds = [
        Speed(HBM, gb_s(one, other, 2 * byte_count)),
        Speed(PCIE, gb_s(one, host.tensor, byte_count)),
        Speed("copy HBM -> pinned DRAM", gb_s(host.tensor, one, byte_count)),
    ]
    host.close()
    return speeds


def step(machine: Machine, geometry: Geometry, batch: AttentionBatch, layers: Iterable[int]) -> torch.Tensor:
    """Append and attend of some layers of a pass, each with the same q, k and v; returns the last one's output."""
    layout, dtype, tokens = geometry.layout, getattr(torch, geometry.layout.dtype), len(batch.append_rows)
    out = q = torch.full((tokens, geometry.heads, layout.head_dim), 0.1, dtype=dtype, device=machine.device)
    k = torch.full((tokens, layout.kv_heads, layout.head_dim), 0.1, dtype=dtype, device=machine.device)
    for layer in layers:
        machine.backend.append(k, k, batch, layout, layer)
        out, _ = machine.backend.attend(q, batch, layout, layer, layout.head_dim**-0.5, None)
    return out


def _batch(addresses: list[int], context: int, layout: KVLayout) -> AttentionBatch:
    last, offset = divmod(context - 1, layout.block_tokens)
    return AttentionBatch(
        torch.tensor([addresses]),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([context], dtype=torch.int32),
        torch.tensor([addresses[last]]),
        torch.tensor([offset], dtype=torch.int32),
    )


def _graph_gb_s(machine: Machine, geometry: Geometry, addresses: list[int], spare: int, context: int) -> float:
    """Decode passes over rows at `addresses`, in a graph."""
    layout = geometry.layout

    def work(batch: PassBatch) -> tuple[torch.Tensor, torch.Tensor]:
        out = step(machine, geometry, batch.attention, range(layout.layers))
        return out, out

    graph = DecodeGraph(work, 1, len(addresses), spare, machine.device, machine.launcher)
    zero = torch.zeros(1, dtype=torch.int64)
    batch = PassBatch(zero, zero, zero, _batch(addresses, context, layout))
    graph.start(batch)  # each of the two sides is recorded once
    seconds = machine.seconds(lambda: graph.start(batch), 5)
    return context * layout.token_bytes / seconds / 1e9


def resident(machine: Machine, geometry: Geometry) -> list[Speed]:
    """Decode attention over rows in HBM."""
    layout = geometry.layout
    blocks = layout.block_count(geometry.context)
    arena = DeviceArena(layout, blocks + 1, machine.device)
    for slot in range(blocks + 1):
        arena.row(slot).fill_(1)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()
    addresses = [arena.address(slot) for slot in order]
    speed = _graph_gb_s(machine, geometry, addresses, arena.address(blocks), geometry.context)
    return [Speed("decode attention, rows in HBM, graph", speed, HBM)]


def mapped(machine: Machine, geometry: Geometry) -> list[Speed]:
    """Decode attention over rows in DRAM, where they are."""
    layout = geometry.layout
    blocks = layout.block_count(geometry.streamed_context)
    host = machine.map_host((blocks + 1) * layout.row_bytes)
    addresses = [host.device_address(slot * layout.row_bytes) for slot in range(blocks + 1)]
    speed = _graph_gb_s(machine, geometry, addresses[:-1], addresses[-1], geometry.streamed_context)
    host.close()
    return [Speed("decode attention, rows in mapped DRAM, graph", speed, PCIE)]


class _NvmeRows:
    """Rows in a file, read a group of layers at a time into one of two pinned buffers."""

    def __init__(self, machine: Machine, geometry: Geometry, folder: Path) -> None:
        layout = geometry.layout
        self.blocks = layout.block_count(geometry.streamed_context)
        self.group_bytes = geometry.group_layers * layout.slice_bytes
        self.groups = layout.layers // geometry.group_layers
        self._row_bytes = layout.row_bytes
        self.buffers = [machine.map_host(self.blocks * self.group_bytes) for _ in range(2)]
        path = folder / "rows"
        row = memoryview(mmap.mmap(-1, layout.row_bytes))
        row[:] = b"\x01" * layout.row_bytes
        with path.open("wb") as file:
            for _ in range(self.blocks):
                file.write(row)
            file.flush()
            os.fsync(file.fileno())
        self.direct = True
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:  # a file system in memory
            self.direct = False
            self.descriptor = os.open(path, os.O_RDONLY)
        self._engine = ThreadsEngine(READERS, 1, self.blocks, lambda: None)

    def start(self, group: int) -> None:
        """Read a group of every row into the buffer whose turn it is."""
        buffer, piece = memoryview(self.buffers[group % 2].mapping), self.group_bytes
        requests = [
            IoRequest(
                Operation.READ,
                self.descriptor,
                block * self._row_bytes + group * piece,
                (buffer[block * piece : (block + 1) * piece],),
                block,
            )
            for block in range(self.blocks)
        ]
        assert self._engine.submit(requests) == self.blocks

    def wait(self) -> None:
        """Until they are there. RuntimeError if one is not."""
        while self._engine.in_flight:
            for result in self._engine.poll():
                if result.moved_bytes != self.group_bytes:
                    raise RuntimeError(f"a read gave {result.moved_bytes} bytes, error {result.error_number}")
            time.sleep(0.0001)

    def close(self) -> None:
        """Give back descriptor, threads and memory."""
        self._engine.close(10.0)
        os.close(self.descriptor)
        for buffer in self.buffers:
            buffer.close()


def from_nvme(machine: Machine, geometry: Geometry, folder: Path) -> Iterator[Line | Speed]:
    """Whether reads are direct, how fast alone, and in streamed decode: a group is read while the last is attended."""
    rows = _NvmeRows(machine, geometry, folder)
    layout, total_bytes = geometry.layout, rows.blocks * geometry.layout.row_bytes
    staged = [torch.empty(rows.blocks * rows.group_bytes, dtype=torch.uint8, device=machine.device) for _ in range(2)]
    lane = Copies(make_lane(machine.device), 2)
    yield Line("reads of the disk", True, "direct" if rows.direct else "buffered: the file system is in memory")

    def read() -> None:
        for group in range(rows.groups):
            rows.start(group)
            rows.wait()

    def decode() -> None:
        rows.start(0)
        for group in range(rows.groups):
            rows.wait()
            if group + 1 < rows.groups:
                rows.start(group + 1)
            _attend_group(machine, geometry, rows.buffers[group % 2], staged[group % 2], lane, group, rows.blocks)

    reads, decodes = [], []
    for _ in range(3):  # in turns
        reads.append(machine.seconds(read, 1))
        decodes.append(machine.seconds(decode, 1))
    rows.close()
    yield Speed(DISK, total_bytes / min(reads) / 1e9)
    payload_bytes = geometry.streamed_context * layout.token_bytes
    yield Speed("decode attention, rows on NVMe", payload_bytes / min(decodes) / 1e9, DISK)


def _attend_group(
    machine: Machine,
    geometry: Geometry,
    source: HostMemory,
    target: torch.Tensor,
    lane: Copies,
    group: int,
    blocks: int,
) -> None:
    """Copy a group's slices up and attend its layers: addresses are such that a layer's offset finds its slice."""
    layout = geometry.layout
    lane.start([(target, source.tensor)])
    lane.close()  # the buffer is read into again two groups from here
    first = group * geometry.group_layers
    begin = target.data_ptr() - first * layout.slice_bytes
    piece = geometry.group_layers * layout.slice_bytes
    batch = _batch([begin + block * piece for block in range(blocks)], geometry.streamed_context, layout)
    step(machine, geometry, batch.to(machine.device), range(first, first + geometry.group_layers))
