"""An engine's shelves in a worker process: opened, joined, hung, looked at, closed, as the commands of a test say.

What is done with rows is in tests/shelf_worker.py, which builds on this. Tiers are named by their value.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.block import Tier
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.keeper import published, seat
from kvtier.keeper.opening import TIERS, SharedShelves
from kvtier.keeper.shared import SharedBooks
from kvtier.keeper.wire import PROTOCOL_VERSION
from kvtier.record import Grant, Lease, tenant_digest
from kvtier.retention import PLAIN, Retention
from kvtier.shelf import ShelfLimits
from kvtier.terms import Terms
from tests.rows import IO, LAYOUT, NAMESPACE, SLOT_BYTES, Bell, ShelfUser
from tests.soak.steps import ENGINE_STEPS, Steps


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a worker's shelves are, and how large."""

    path: str
    dram_slots: int
    nvme_bytes: int
    linger_s: float
    policy: str = "lru"
    layers: int = LAYOUT.layers
    in_flight_max: int = IO.in_flight_max
    kill_at: int = 0
    """The step of its books at which it kills itself; 0: none."""
    tenant: str = ""
    """Who is charged for what it writes while it lives."""
    tenant_bytes: int = 0
    """Quota of every tenant in either tier; 0: none."""
    protocol: int = PROTOCOL_VERSION
    """What it says that it speaks."""
    threads: bool = False
    """Its NVMe rows move by calls of threads, each of which a tracer sees, and not by io_uring."""
    faulty: bool = False
    """Its rows move through the seam for faults, so that they can hang; else as in production."""
    answer_s: float = published.ANSWER_S
    """How long a row that it has written waits for a keeper to take it."""


class EngineCommands:
    """See the module."""

    def __init__(self, setting: Setting) -> None:
        vars(seat)["PROTOCOL_VERSION"] = setting.protocol
        vars(published)["ANSWER_S"] = setting.answer_s
        self._steps = Steps(setting.kill_at)
        self._steps.watch(ENGINE_STEPS)
        self._bell = Bell()
        self._faults = FaultyCalls() if setting.faulty else None
        budgets = (setting.dram_slots * SLOT_BYTES, setting.nvme_bytes)
        self._shared = SharedShelves(
            dataclasses.replace(LAYOUT, layers=setting.layers),
            NAMESPACE,
            Path(setting.path),
            budgets,
            IO.model_copy(update={"engine": "threads"}) if setting.threads else IO,
            self._bell,
            setting.linger_s,
            setting.policy,
            terms=(Terms(tenant_bytes=setting.tenant_bytes), Terms(tenant_bytes=setting.tenant_bytes)),
            limits=ShelfLimits(setting.in_flight_max),
            calls=self._faults,
        )
        self._retention = Retention(tenant=tenant_digest(setting.tenant)) if setting.tenant else PLAIN
        self._users: dict[str, ShelfUser] = {}
        self._leases: dict[str, list[Lease]] = {}
        self._asked: dict[str, list[Grant]] = {}

    def open(self, wait_s: float, least: int = 0) -> list[str]:
        """Open the shelves, and wait for those that come later until there are so many; the tiers that are there."""

        def complete() -> bool:
            self._shared.poll(time.monotonic())
            for tier, shelf in self._shared.shelves.items():
                self._users.setdefault(tier.value, ShelfUser(shelf, self._bell))
            return len(self._users) >= least and (not least or self._whole())

        if self._shared.try_open(wait_s):
            self._until(complete, wait_s)
        return sorted(self._users)

    def reopen(self, wait_s: float) -> list[str]:
        """Once its shelves are over, close them and open what is there then; the tiers."""
        assert self._until(lambda: self._shared.link.over, wait_s), "nobody has noticed"
        for user in self._users.values():
            user.shelf.check()
            user.shelf.close(5.0)
        self._users.clear()
        self._leases.clear()
        self._asked.clear()
        return self.open(wait_s, 2)

    def refusal(self) -> str:
        """Why there are none."""
        return self._shared.refusal

    def owner(self) -> int:
        """This engine's number."""
        return self._shared.seat.owner

    def slab(self, tier: str) -> int:
        """The descriptor that I/O goes through."""
        return self._shared.seat.slabs[TIERS[Tier(tier)]].slab.descriptor

    def keeper(self) -> int:
        """Process of the keeper that was greeted last."""
        return self._shared.seat.keeper_process

    def settled(self, tier: str, wait_s: float) -> int:
        """Slots in use by all engines after a while."""
        self._until(lambda: False, wait_s)
        return self._users[tier].shelf.used_count

    def joined(self, wait_s: float, but_keeper: int = 0) -> bool:
        """Wait for a line to a keeper, another than that process, and whole mirrors."""
        seat, link = self._shared.seat, self._shared.link

        def is_joined() -> bool:
            return link.line is not None and seat.keeper_process != but_keeper and self._whole()

        return self._until(is_joined, wait_s)

    def lost(self, wait_s: float) -> bool:
        """Wait for the line to break."""
        return self._until(lambda: self._shared.link.line is None, wait_s)

    def used(self, tier: str, most: int, wait_s: float) -> int:
        """Wait until at most so many slots are in use by all engines; how many are."""
        shelf = self._users[tier].shelf
        self._until(lambda: shelf.used_count <= most, wait_s)
        return shelf.used_count

    def hang(self, what: str) -> None:
        """From now on calls of this kind hang; "" for none."""
        assert self._faults is not None, "rows of this engine cannot hang"
        if what:
            call = Call(what)
            self._faults.inject([Fault(call, self._faults.count(call) + 1, Effect.HANG, sticky=True)])
        else:
            self._faults.inject([])
            self._faults.release()

    def stats(self, tier: str) -> dict[str, int]:
        """The shelf's numbers."""
        return self._users[tier].shelf.stats()

    def check(self) -> None:
        """Assert the shelves."""
        for user in self._users.values():
            user.shelf.poll(time.monotonic())
            user.shelf.check()

    def fork(self) -> int:
        """Fork a child that sleeps; its process."""
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        return child

    def descriptors(self) -> int:
        """Open descriptors and threads of this process."""
        return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))

    def close(self) -> None:
        """Close everything."""
        for user in self._users.values():
            user.shelf.close(5.0)
        self._shared.close()

    def _books(self, tier: str) -> SharedBooks:
        return self._shared.books[Tier(tier)]

    def _whole(self) -> bool:
        return all(books.current for books in self._shared.books.values())

    def _until(self, true: Callable[[], bool], wait_s: float) -> bool:
        end = time.monotonic() + wait_s
        while not true():
            if time.monotonic() >= end:
                return False
            self._bell.wait(0.02)
            for user in self._users.values():
                user.shelf.poll(time.monotonic())
        return True
