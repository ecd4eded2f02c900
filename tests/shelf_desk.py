"""An engine's shared shelves in this process, the command line over them, and damage to plant in their rows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from typer.testing import CliRunner, Result

from kvtier.block import Tier
from kvtier.cli.main import app
from kvtier.keeper.opening import TIERS, SharedShelves
from kvtier.record import Record
from kvtier.retention import PLAIN, Retention
from kvtier.shelf import WriteItem
from kvtier.tiers.header import HEADER_BYTES
from tests.rows import IO, LAYOUT, NAMESPACE, NVME_BYTES, SLOT_BYTES, Bell, ShelfUser, filled

DRAM_SLOTS = 64


class SharingEngine:
    """What an engine has of a keeper, driven by its test: writes, finds and reads, every byte judged."""

    def __init__(self, path: Path, dram_slots: int = DRAM_SLOTS, linger_s: float = 1.0) -> None:
        self.path = path
        self._bell = Bell()
        budgets = (dram_slots * SLOT_BYTES, NVME_BYTES)
        self.shared = SharedShelves(LAYOUT, NAMESPACE, path, budgets, IO, self._bell, linger_s, "lru")
        assert self.shared.try_open(60), self.shared.refusal
        self.users = {tier.value: ShelfUser(shelf, self._bell) for tier, shelf in self.shared.shelves.items()}
        assert set(self.users) == {"dram", "nvme"}

    def write(self, tier: str, hashes: Sequence[bytes], retention: Retention = PLAIN, timeout_s: float = 60.0) -> None:
        """Write blocks as one chain until all are there."""
        user, end = self.users[tier], time.monotonic() + timeout_s
        while left := [place for place, h in enumerate(hashes) if not user.shelf.holds(h)]:
            assert time.monotonic() < end, f"{len(left)} blocks are not written"
            items = [WriteItem(hashes[p], p, filled(hashes[p]), None, retention) for p in left[: IO.in_flight_max]]
            user.now = time.monotonic()
            user.finish(user.shelf.write(items, user.now))
            self._bell.wait(0.01)
            user.shelf.poll(time.monotonic())

    def records(self, tier: str, hashes: Sequence[bytes]) -> list[Record]:
        """What is known of blocks here, each looked up on its own."""
        shelf = self.users[tier].shelf
        shelf.poll(time.monotonic())
        return [record for block_hash in hashes for record in shelf.find([block_hash])]

    def wait_for(self, tier: str, true: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Listen to the keeper until something is true."""
        end = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < end
            self._bell.wait(0.01)
            self.users[tier].shelf.poll(time.monotonic())

    def hits(self, tier: str, hashes: Sequence[bytes]) -> int:
        """How many blocks are found and read."""
        self.users[tier].shelf.poll(time.monotonic())
        return sum(self.users[tier].hits(hashes[start : start + 32]) for start in range(0, len(hashes), 32))

    def spoil(self, tier: str, record: Record, place: int = HEADER_BYTES + 5) -> None:
        """Flip a bit of a row, or of its header, behind everybody's back."""
        slab = self.shared.seat.slabs[TIERS[Tier(tier)]].slab
        spoil(slab.descriptor if tier == "dram" else self.slab_file, slab.offset(record.slot) + place)

    @property
    def slab_file(self) -> Path:
        """The NVMe slab."""
        [found] = self.path.glob("*/nvme.slab")
        return found

    def close(self) -> None:
        """Leave."""
        for user in self.users.values():
            user.shelf.close(60.0)
        self.shared.close()


def spoil(file: Path | int, offset: int) -> None:
    """Flip one bit."""
    descriptor = os.open(file, os.O_RDWR) if isinstance(file, Path) else file
    byte = os.pread(descriptor, 1, offset)
    os.pwrite(descriptor, bytes([byte[0] ^ 4]), offset)
    if isinstance(file, Path):
        os.close(descriptor)


def shelf(*arguments: object) -> Result:
    """Run `kvtier shelf`; anything but an exit is raised."""
    result = CliRunner().invoke(app, ["shelf", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def shelf_json(*arguments: object, status: int = 0) -> dict[str, object]:
    """Run `kvtier shelf ... --json`: the one object that it prints."""
    result = shelf(*arguments, "--json")
    assert result.exit_code == status, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict) and result.stdout.count("\n") == 1
    return found


def rows_of(*arguments: object) -> list[dict[str, object]]:
    """Run `kvtier shelf ls --blocks --json`: a row a line."""
    result = shelf("ls", *arguments, "--blocks", "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def refusal(*arguments: object) -> str:
    """Run `kvtier shelf`, which must fail with status 2 and one message: that message."""
    result = shelf(*arguments)
    assert result.exit_code == 2 and not result.stdout and "Traceback" not in result.stderr, result.output
    return " ".join(result.stderr.split())
