"""An engine's shelves in a process of their own, driven line by line, to be killed, stopped and forked at will.

Run as `python -m tests.shelf_worker CACHE_DIRECTORY DRAM_SLOTS NVME_BYTES LINGER_S`: reads one JSON list a line,
[command, arguments...], and answers each with one JSON value. `Worker` is the other end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.block import Tier
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.keeper.opening import TIERS, SharedShelves
from kvtier.keeper.shared import SharedBooks
from kvtier.record import NO_TENANT, Lease
from kvtier.shelf import WriteItem
from tests.rows import IO, LAYOUT, NAMESPACE, NVME_BYTES, SLOT_BYTES, Bell, ShelfUser, block_hashes, filled

ROOT = Path(__file__).parent.parent


class Worker:
    """One worker process. Every call waits for its answer."""

    def __init__(self, path: Path, dram_slots: int = 64, nvme_bytes: int = NVME_BYTES, linger_s: float = 5.0) -> None:
        arguments = [str(path), str(dram_slots), str(nvme_bytes), str(linger_s)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.shelf_worker", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def __call__(self, command: str, *arguments: Any) -> Any:
        """Run a command and wait for its answer."""
        self.start(command, *arguments)
        return self.answer()

    def start(self, command: str, *arguments: Any) -> None:
        """Start a command; its answer is due."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the answer of the last command."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the worker has died"
        return json.loads(line)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self._process.kill()
        self._end()

    def close(self) -> None:
        """Close its shelves and let it end; whatever it was told before."""
        if self._process.poll() is None:
            with contextlib.suppress(BrokenPipeError, AssertionError):
                self("close")
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._end()

    def _end(self) -> None:
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Commands:
    """What a worker can do. Tiers are named by their value."""

    def __init__(self, path: Path, dram_slots: int, nvme_bytes: int, linger_s: float) -> None:
        self._bell = Bell()
        self._faults = FaultyCalls()
        budgets = (dram_slots * SLOT_BYTES, nvme_bytes)
        self._shared = SharedShelves(
            LAYOUT, NAMESPACE, path, budgets, IO, self._bell, linger_s, "lru", calls=self._faults
        )
        self._users: dict[str, ShelfUser] = {}
        self._leases: dict[str, list[Lease]] = {}

    def open(self, wait_s: float) -> list[str]:
        """Open the shelves; the tiers that are there."""
        if self._shared.try_open(wait_s):
            for tier, shelf in self._shared.shelves.items():
                self._users.setdefault(tier.value, ShelfUser(shelf, self._bell))
        return list(self._users)

    def refusal(self) -> str:
        """Why there are none."""
        return self._shared.refusal

    def owner(self) -> int:
        """This engine's number."""
        return self._shared.seat.owner

    def slab(self, tier: str) -> int:
        """The descriptor that I/O goes through."""
        return self._shared.seat.slabs[TIERS[Tier(tier)]].slab.descriptor

    def settled(self, tier: str, wait_s: float) -> int:
        """Slots in use by all engines after a while."""
        self._until(lambda: False, wait_s)
        return self._users[tier].shelf.used_count

    def keeper(self) -> int:
        """Process of the keeper that was greeted last."""
        return self._shared.seat.keeper_process

    def joined(self, wait_s: float) -> bool:
        """Wait for a line to a keeper and whole mirrors."""
        return self._until(lambda: self._shared.link.line is not None and self._whole(), wait_s)

    def lost(self, wait_s: float) -> bool:
        """Wait for the line to break."""
        return self._until(lambda: self._shared.link.line is None, wait_s)

    def write(self, tier: str, seed: int, first: int, count: int, wait_s: float) -> int:
        """Write blocks until all are there or the time is up; how many this engine has published."""
        user, end, published = self._users[tier], time.monotonic() + wait_s, 0
        hashes = block_hashes(first + count, seed)[first:]
        while True:
            left = [h for h in hashes if not user.shelf.holds(h)]
            if not left or time.monotonic() >= end:
                return published
            user.now = time.monotonic()
            done = user.write(left[: IO.in_flight_max])
            published += sum(one is not None and one.outcome.value == "done" for one in done)
            user.finish([])
            if not any(done):
                self._bell.wait(0.02)
                user.shelf.poll(time.monotonic())

    def outcomes(self, tier: str, seed: int, first: int, count: int) -> list[str | None]:
        """Try once to write blocks: how each ended."""
        user = self._users[tier]
        user.now = time.monotonic()
        items = [WriteItem(h, place, filled(h)) for place, h in enumerate(block_hashes(first + count, seed)[first:])]
        tickets = user.shelf.write(items, user.now)
        ended: dict[int, str] = {}
        while set(tickets) - {None} - set(ended):
            ended |= {done.ticket: done.outcome.value for done in user.shelf.poll(time.monotonic())}
            self._bell.wait(0.02)
        return [None if ticket is None else ended[ticket] for ticket in tickets]

    def begin(self, tier: str, seed: int, first: int, count: int) -> int:
        """Start writing blocks and leave them in flight; how many were started."""
        items = [WriteItem(h, 0, filled(h)) for h in block_hashes(first + count, seed)[first:]]
        return sum(ticket is not None for ticket in self._users[tier].shelf.write(items, time.monotonic()))

    def hang(self, what: str) -> None:
        """From now on calls of this kind hang; "" for none."""
        if what:
            call = Call(what)
            self._faults.inject([Fault(call, self._faults.count(call) + 1, Effect.HANG, sticky=True)])
        else:
            self._faults.inject([])
            self._faults.release()

    def hits(self, tier: str, seed: int, first: int, count: int) -> int:
        """Blocks that are found and read, every byte judged."""
        user = self._users[tier]
        user.shelf.poll(time.monotonic())
        hashes = block_hashes(first + count, seed)[first:]
        return sum(user.hits(hashes[start : start + 64]) for start in range(0, count, 64))

    def known(self, tier: str, seed: int, first: int, count: int, wait_s: float) -> int:
        """Wait until so many blocks are known here; how many are."""
        shelf, hashes = self._users[tier].shelf, block_hashes(first + count, seed)[first:]
        self._until(lambda: all(map(shelf.holds, hashes)), wait_s)
        return sum(map(shelf.holds, hashes))

    def lease(self, tier: str, seed: int, first: int, count: int) -> int:
        """Lease blocks in place; how many were got."""
        books = self._books(tier)
        records = [r for h in block_hashes(first + count, seed)[first:] for r in books.find([h])]
        number = books.ask_leases(records, time.monotonic())
        end = time.monotonic() + 20
        while number not in (answers := books.leases(time.monotonic())):
            assert time.monotonic() < end
            self._bell.wait(0.02)
        self._leases.setdefault(tier, []).extend(lease for lease in answers[number] if lease is not None)
        return len(self._leases[tier])

    def release(self, tier: str) -> None:
        """Give all leases back."""
        self._books(tier).end_leases(self._leases.pop(tier, []))

    def reserve(self, tier: str, count: int) -> int:
        """Take reservations and keep them; how many were got."""
        books, got = self._books(tier), 0
        end = time.monotonic() + 3
        while got < count and time.monotonic() < end:
            got += len(books.reserve(count - got, NO_TENANT))
            books.answers(time.monotonic())
            self._bell.wait(0.01)
        return got

    def used(self, tier: str, wanted: int, wait_s: float) -> int:
        """Wait until so many slots are in use by all engines; how many are."""
        shelf = self._users[tier].shelf
        self._until(lambda: shelf.used_count == wanted, wait_s)
        return shelf.used_count

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


def main() -> None:
    commands = Commands(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(commands, name)(*arguments)), flush=True)
        if name == "close":
            return


if __name__ == "__main__":
    main()
