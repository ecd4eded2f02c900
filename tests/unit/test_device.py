"""What a device needs around its kernels, on the CPU with real bytes; `mapped` with a runtime that keeps the rules."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from late import LateArena

from kvtier.block import DeviceRow, KVLayout
from kvtier.config import IoConfig
from kvtier.device import make_device
from kvtier.device.arena import DeviceArena
from kvtier.device.copies import Copies, Fence, HostLane, make_lane
from kvtier.device.cuda import CudaDevice
from kvtier.device.launcher import Work
from kvtier.device.mapped import MappedHost, MappingError, cuda_runtime
from kvtier.device.ops import DeviceOps
from kvtier.errors import ConfigError
from kvtier.models.ops import TorchOps
from kvtier.record import Lease, Record
from kvtier.shelves import open_dram_shelf, row_format
from kvtier.tiers.hbm import HbmArena

CPU = torch.device("cpu")
LAYOUT = KVLayout(2, 1, 32, 16, "float32")


class LateFence:
    """A fence that is passed when a test says so; only then is its work done, as with a real device."""

    def __init__(self, work: Work) -> None:
        self._works = [work]
        self.waited = False

    def pass_by(self) -> None:
        while self._works:
            self._works.pop()()

    def query(self) -> bool:
        return not self._works

    def synchronize(self) -> None:
        self.waited = True
        self.pass_by()


class LateLane(HostLane):
    def __init__(self) -> None:
        self.fences: list[LateFence] = []

    def run(self, work: Work, after: Fence | None) -> Fence:
        assert after is not None and after.query()
        self.fences.append(LateFence(work))
        return self.fences[-1]


def test_slots_of_an_arena_are_aligned_and_apart() -> None:
    arena = DeviceArena(LAYOUT, 3, CPU)
    for slot in range(3):
        assert arena.address(slot) % 4096 == 0
        arena.row(slot).fill_(slot + 1)
    for slot in range(3):
        assert ctypes.string_at(arena.address(slot), LAYOUT.row_bytes) == bytes([slot + 1]) * LAYOUT.row_bytes


def test_an_arena_that_does_not_fit_names_its_key() -> None:
    with pytest.raises(ConfigError, match=r"tiers\.hbm\.bytes: [\d.]+ .iB of memory of cpu refused"):
        DeviceArena(LAYOUT, 1 << 45, CPU)


def test_copies_end_when_their_bytes_are_there_oldest_first() -> None:
    arena, lane = DeviceArena(LAYOUT, 3, CPU), LateLane()
    copies = Copies(lane, 2)
    source = torch.arange(LAYOUT.row_bytes, dtype=torch.int64).to(torch.uint8)
    first, second = (copies.start([(arena.row(slot), source)]) for slot in range(2))
    assert copies.room == 0 and copies.poll() == []
    lane.fences[1].pass_by()
    assert copies.poll() == [], "the first is still under way"
    lane.fences[0].pass_by()
    assert copies.poll() == [first, second] and copies.room == 2
    assert torch.equal(arena.row(0), source) and torch.equal(arena.row(1), source)
    copies.start([(arena.row(2), source)])
    copies.close()
    assert lane.fences[2].waited and copies.room == 2 and torch.equal(arena.row(2), source)


def test_a_ferry_names_a_place_once_its_bytes_are_there_and_rings() -> None:
    rung: list[str] = []
    bell = threading.Event()

    def ring() -> None:
        rung.append(threading.current_thread().name)
        bell.set()

    arena = DeviceArena(LAYOUT, 3, CPU, landing_count=4, wake=ring)
    ferry, late = arena.ferry(), LateLane()
    row_bytes = LAYOUT.row_bytes
    assert ferry.memory.nbytes == 4 * row_bytes and arena.view(2) == DeviceRow(2, row_bytes)
    ferry.memory[row_bytes : 2 * row_bytes] = bytes([5]) * row_bytes
    ferry.start(1, 2, upward=True)
    assert ferry.ended() == [1] and bool((arena.row(2) == 5).all()) and rung == ["MainThread"]
    bell.clear()
    ferry._copies[False] = Copies(late, 4, ferry._watch.watch)
    ferry.start(3, 2, upward=False)
    assert bell.wait(60) and rung[-1] == "kvtier-copies", "the watch waits for what is under way"
    assert ferry.ended() == [3] and ferry.memory[3 * row_bytes] == 5
    assert ferry.close(0.0)


def test_copies_on_the_cpu_go_both_ways_at_once() -> None:
    arena, copies = DeviceArena(LAYOUT, 2, CPU), Copies(make_lane(CPU), 4)
    up, down = torch.full((LAYOUT.row_bytes,), 7, dtype=torch.uint8), torch.zeros(LAYOUT.row_bytes, dtype=torch.uint8)
    tickets = [copies.start([(arena.row(1), up)]), copies.start([(down, arena.row(1))])]
    assert copies.poll() == tickets and torch.equal(down, up)


class Runtime:
    """Registers memory as CUDA does: once each, and with another address for the device."""

    def __init__(self, gives_address: bool = True) -> None:
        self.registered: dict[int, int] = {}
        self._gives_address = gives_address

    def cudaHostRegister(self, address: ctypes.c_void_p, count: ctypes.c_size_t, flags: int) -> int:  # noqa: N802
        assert address.value is not None and flags == 3
        if address.value in self.registered:
            return 712
        self.registered[address.value] = count.value
        return 0

    def cudaHostUnregister(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        assert address.value is not None
        return 0 if self.registered.pop(address.value, None) else 713

    def cudaHostGetDevicePointer(self, pointer: object, address: ctypes.c_void_p, flags: int) -> int:  # noqa: N802
        if not self._gives_address:
            return 1
        assert address.value in self.registered and flags == 0
        pointer._obj.value = address.value + (1 << 40)  # type: ignore[attr-defined]
        return 0


def test_mapped_memory_has_the_addresses_of_the_device_until_it_is_closed() -> None:
    runtime = Runtime()
    mapped = MappedHost(runtime, 8192, 4096)
    assert mapped.device_address(100) == (1 << 40) + 8292
    with pytest.raises(AssertionError):
        mapped.device_address(4096)
    with pytest.raises(MappingError, match="cudaHostRegister: CUDA error 712"):
        MappedHost(runtime, 8192, 4096)
    mapped.close()
    mapped.close()
    assert not runtime.registered
    with pytest.raises(AssertionError):
        mapped.device_address(0)


def test_memory_without_an_address_for_the_device_is_not_left_registered() -> None:
    runtime = Runtime(gives_address=False)
    with pytest.raises(MappingError, match="cudaHostGetDevicePointer"):
        MappedHost(runtime, 8192, 4096)
    assert not runtime.registered


@pytest.mark.parametrize(
    ("version", "count", "name", "parts"),
    [
        (None, 0, "cuda", ["build of torch for CUDA", torch.__version__, "kvtier[gpu]"]),
        ("12.8", 0, "cuda", ["CUDA 12.8", "driver", "CUDA_VISIBLE_DEVICES"]),
        ("12.8", 1, "cuda:1", ["cuda:0 is the only GPU"]),
        ("12.8", 4, "cuda:4", ["4 GPUs", "cuda:3"]),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_what_is(
    version: str | None, count: int, name: str, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError) as caught:
        make_device(name)
    for part in [f'device: "{name}"', "or set device: cpu", *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_silu_in_one_launch_is_silu_in_stretches(dtype: torch.dtype) -> None:
    gate_up = torch.randn(5, 2 * 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.testing.assert_close(DeviceOps().silu_mul(gate_up), TorchOps().silu_mul(gate_up))
    assert isinstance(CudaDevice(CPU).kernels("auto", 1, 64)[1], DeviceOps)


def test_attention_of_the_cpu_is_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match='attention: "native" runs on the CPU alone'):
        CudaDevice(CPU).kernels("native", 1, 64)
    with pytest.raises(ConfigError, match="heads in steps of 8, not 20"):
        CudaDevice(CPU).kernels("auto", 1, 20)


def test_leased_rows_have_the_addresses_of_whose_hbm_the_shelf_serves() -> None:
    runtime = Runtime()

    class Mapping(LateArena):
        def window(self, address: int, length: int) -> MappedHost:  # type: ignore[override]
            return MappedHost(runtime, address, length)

    form = row_format(LAYOUT, bytes(32))
    shelf = open_dram_shelf(LAYOUT, bytes(32), 3 * form.slot_bytes, IoConfig(), lambda: None)
    shelf.serve(Mapping(HbmArena(LAYOUT, 2), 0))
    [registered] = runtime.registered
    lease = Lease(Record(bytes(32), 2, 7, 0, b"", 0, 0, bytes(16), False))
    at = shelf.address(lease)
    assert registered == shelf._slab.address(0) and at == shelf._slab.address(2) + (1 << 40)
    assert at - (1 << 40) + form.row_bytes == registered + runtime.registered[registered]
    shelf.close(1.0)
    assert not runtime.registered, "still registered when its memory goes"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_there_is_no_runtime() -> None:
    with pytest.raises(MappingError, match="no CUDA device"):
        cuda_runtime()
