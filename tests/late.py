"""A device that takes its time, on the CPU: rows are reached by copies that come late, passes done when it likes.

Bytes of a row move polls after a copy was started, in any order. Until then its target holds 0xFF (NaN), so whoever
uses a row or a landing place too early is seen by its bytes; and whoever lets go of a source too early has others'
bytes copied. The rows themselves lie in an `HbmArena`. What a launcher is given is done in its order, but as late as
somebody waits for it, or earlier by chance: so a wait that is missing is seen by bytes as well.
"""

from __future__ import annotations

import ctypes
import mmap
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtier.attention import AttentionBackend, AttentionBatch
from kvtier.block import DeviceRow, KVLayout
from kvtier.device.copies import Fence
from kvtier.device.host import HostDevice
from kvtier.device.launcher import Work
from kvtier.models.ops import Ops
from kvtier.tiers.hbm import HbmArena, HostWindow


class LateFerry:
    """`Ferry` with real bytes, moved within `ended`."""

    def __init__(self, rows: HbmArena, place_count: int, chance: random.Random, wake: Callable[[], None]) -> None:
        self.memory = memoryview(mmap.mmap(-1, place_count * rows.layout.row_bytes))
        self.waiting: list[tuple[int, int, bool]] = []
        self.late_count = 0
        """Copies that were still under way when they were asked for."""
        self._rows = rows
        self._chance = chance
        self._wake = wake

    def start(self, place: int, slot: int, upward: bool) -> None:
        assert all(place != other for other, _, _ in self.waiting), "two copies have one landing place"
        self.waiting.append((place, slot, upward))
        target = self._rows.view(slot) if upward else self._place(place)
        target[:] = b"\xff" * target.nbytes
        self._wake()

    def ended(self) -> list[int]:
        self._chance.shuffle(self.waiting)
        count = self._chance.randrange(len(self.waiting) + 1)
        moving, self.waiting = self.waiting[:count], self.waiting[count:]
        self.late_count += len(self.waiting)
        self._move(moving)
        if self.waiting:
            self._wake()
        return [place for place, _, _ in moving]

    def close(self, deadline_s: float) -> bool:  # noqa: ARG002
        self._move(self.waiting)
        self.waiting = []
        return True

    def _move(self, copies: list[tuple[int, int, bool]]) -> None:
        for place, slot, upward in copies:
            near, far = self._rows.view(slot), self._place(place)
            if upward:
                near[:] = far
            else:
                far[:] = near

    def _place(self, place: int) -> memoryview:
        row_bytes = self._rows.layout.row_bytes
        return self.memory[place * row_bytes : (place + 1) * row_bytes]


class LateQueue:
    """Work in its order, done up to a number when somebody waits for that."""

    def __init__(self) -> None:
        self.given = self.done = 0
        self.busy = False
        self._works: deque[Work] = deque()

    def give(self, work: Work) -> int:
        self._works.append(work)
        self.given += 1
        return self.given

    def run_to(self, number: int) -> None:
        while self.done < number and not self.busy:
            self.busy = True
            self._works.popleft()()
            self.busy = False
            self.done += 1


@dataclass(frozen=True)
class LateFence:
    queue: LateQueue
    number: int

    def query(self) -> bool:
        return self.queue.done >= self.number

    def synchronize(self) -> None:
        self.queue.run_to(self.number)
        assert self.query(), "work waits for what comes after it"


class LateLauncher:
    """`Launcher` and its `Lane`: two queues."""

    def __init__(self, seed: int) -> None:
        self.passes, self.beside = LateQueue(), LateQueue()
        self.late_count = 0
        """Work that was not done yet when the next was given."""
        self.recorded_count = self.replayed_count = self.gathered_count = 0
        self._chance = random.Random(f"launcher {seed}")

    @property
    def lane(self) -> LateLauncher:
        return self

    def here(self) -> LateFence:
        return LateFence(self.passes, self.passes.given)

    def run(self, work: Work, after: Fence | None) -> LateFence:
        def begin() -> None:
            if after is not None:
                after.synchronize()
            work()

        fence = LateFence(self.beside, self.beside.give(begin))
        self._stir()
        return fence

    def join(self, fence: Fence) -> None:
        self.passes.give(fence.synchronize)

    def record(self, work: Work) -> Work:
        self.recorded_count += 1
        self.give(work)

        def replay() -> None:
            self.replayed_count += 1
            self.give(work)

        return replay

    def give(self, work: Work) -> None:
        """To the current stream."""
        self.passes.give(work)
        self._stir()

    def gather(self, rows: torch.Tensor, offset: int, target: torch.Tensor) -> None:
        assert self.beside.busy, "it would hold up the passes"
        for place, row in zip(target, rows.tolist(), strict=True):
            ctypes.memmove(place.data_ptr(), row + offset, place.nbytes)
        self.gathered_count += len(rows)

    def catch_up(self) -> None:
        """Whatever the current stream is given now comes behind all that it has been given before."""
        self.passes.run_to(self.passes.given)

    def _stir(self) -> None:
        """By chance one of the queues gets on."""
        self.late_count += self.passes.given - self.passes.done + self.beside.given - self.beside.done
        queue = self._chance.choice([self.passes, self.beside, None])
        if queue is not None and queue.done < queue.given:
            queue.run_to(queue.done + 1)


class LateAttention:
    """Attention that is given to the current stream: on the CPU it comes at once, so all before it has to."""

    def __init__(self, inner: AttentionBackend, launcher: LateLauncher) -> None:
        self.name = inner.name
        self._inner = inner
        self._launcher = launcher

    def append(self, k: torch.Tensor, v: torch.Tensor, batch: AttentionBatch, layout: KVLayout, layer: int) -> None:
        self._launcher.catch_up()
        self._inner.append(k, v, batch, layout, layer)

    def attend(
        self, q: torch.Tensor, batch: AttentionBatch, layout: KVLayout, layer: int, scale: float, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._launcher.catch_up()
        return self._inner.attend(q, batch, layout, layer, scale, window)


class LateDevice(HostDevice):
    """The CPU with such an arena as its HBM, and such a launcher."""

    lands_rows = True

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.launcher = LateLauncher(seed)

    def kernels(self, attention: str, threads: int, head_dim: int) -> tuple[AttentionBackend, Ops]:
        backend, ops = super().kernels(attention, threads, head_dim)
        return LateAttention(backend, self.launcher), ops

    def finish(self) -> None:
        self.launcher.catch_up()

    def arena(self, layout: KVLayout, slot_count: int, landing_count: int, wake: Callable[[], None]) -> LateArena:
        self.made = LateArena(HbmArena(layout, slot_count), self.seed, landing_count, wake)
        return self.made


class LateArena:
    """`Arena` over the rows of another, which nobody but its ferries reaches."""

    def __init__(
        self, rows: HbmArena, seed: int, landing_count: int = 12, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._landing_count = landing_count
        self.rows = rows
        self.layout, self.slot_count, self.bytes_total = rows.layout, rows.slot_count, rows.bytes_total
        self.ferries: list[LateFerry] = []
        self._chance = random.Random(f"late {seed}")
        self._wake = wake

    @property
    def late_count(self) -> int:
        """Copies that were asked for before they had ended, each as often as it was."""
        return sum(ferry.late_count for ferry in self.ferries)

    @property
    def waiting_count(self) -> int:
        """Copies under way."""
        return sum(len(ferry.waiting) for ferry in self.ferries)

    def address(self, slot: int) -> int:
        return self.rows.address(slot)

    def view(self, slot: int) -> DeviceRow:
        return DeviceRow(slot, self.layout.row_bytes)

    def window(self, address: int, length: int) -> HostWindow:
        return self.rows.window(address, length)

    def ferry(self) -> LateFerry:
        self.ferries.append(LateFerry(self.rows, self._landing_count, self._chance, self._wake))
        return self.ferries[-1]

    def close(self) -> None:
        assert self.waiting_count == 0, "copies are under way"
        self.rows.close()
