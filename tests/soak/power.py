"""Power cuts: what was published before the last completed sync is there again, nothing is wrong, and it always opens.

Two disks are cut off while a shelf writes: a real ext4 on a loop device, shut down without flushing its log, and the
seam's model of a disk that forgets any subset of what it was not told to sync. Both must fail once syncs are left out.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import logging
import os
import random
import shutil
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol
from unittest import mock

from kvtier import journal
from kvtier.errors import ShelfError
from kvtier.io.base import KernelCalls, SystemCalls
from kvtier.io.unsynced import UnsyncedCalls
from kvtier.shelf import ShelfOutcome
from tests.rows import ShelfUser, nvme_user
from tests.soak.quiet import quiet

SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
IMAGE_BYTES = 48 << 20
NVME_BYTES = 12 << 20
SYNC_S = 0.05
"""A twentieth of the product's, so that a cycle of some tenths of a second sees a few syncs."""
KEPT_MIN = 0.95
BATCH = 8
MOUNT_S = 30.0


class Disk(Protocol):
    """Something to cut off."""

    path: Path
    calls: SystemCalls

    def cut(self) -> None:
        """The power fails: from now on nothing is written. Any thread."""

    def back(self) -> None:
        """It returns, with what has survived. Nothing may be open on it."""


class ModelDisk:
    """A folder behind `UnsyncedCalls`: a random subset of the unsynced pages is lost, sometimes all of them."""

    def __init__(self, path: Path, chance: random.Random, syncs: bool) -> None:
        self.path = path
        self._chance = chance
        self._syncs = syncs
        self.lost_pages = 0
        self.back()

    def cut(self) -> None:
        """See `Disk`."""
        self.lost_pages += self._unsynced.cut(None if self._chance.random() < 0.25 else self._chance.getrandbits(32))

    def back(self) -> None:
        """See `Disk`."""
        self.calls: SystemCalls
        self.calls = self._unsynced = UnsyncedCalls(syncs=self._syncs)


class WithoutSync(KernelCalls):
    """A program that has forgotten to sync."""

    def fdatasync(self, descriptor: int) -> None:
        """Nothing."""


class Ext4Disk:
    """An ext4 file system of its own in a file."""

    def __init__(self, scratch: Path, syncs: bool) -> None:
        self.path = scratch / "disk"
        self.calls: SystemCalls = KernelCalls() if syncs else WithoutSync()
        self.path.mkdir()
        image = scratch / "image"
        with open(image, "wb") as file:
            file.truncate(IMAGE_BYTES)
        _run("mkfs.ext4", "-q", "-F", str(image))
        self._device = _run("losetup", "-f", "--show", str(image)).strip()
        self._mount()

    def cut(self) -> None:
        """See `Disk`."""
        top = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(top, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(top)

    def back(self) -> None:
        """See `Disk`."""
        _run("umount", str(self.path))
        self._mount()

    def close(self) -> None:
        """Leave nothing behind."""
        subprocess.run(["umount", "-l", str(self.path)], capture_output=True)
        subprocess.run(["losetup", "-d", self._device], capture_output=True)

    def _mount(self) -> None:
        """Mount it alive: who has copied the mounts meanwhile, as containers do, keeps the dead one for a while."""
        end = time.monotonic() + MOUNT_S
        while True:
            _run("mount", "-o", "commit=300", self._device, str(self.path))
            try:
                (self.path / "alive").touch()
                return
            except OSError:
                assert time.monotonic() < end, "somebody else has a mount of this file system and keeps it dead"
            _run("umount", str(self.path))
            time.sleep(0.1)


def ext4_reason() -> str:
    """Why no file system can be cut off here; "" if it can."""
    if os.geteuid() != 0:
        return "only root may mount a file system and shut it down"
    for program in ("mkfs.ext4", "losetup", "mount"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if subprocess.run(["losetup", "-f"], capture_output=True).returncode != 0:
        return "there is no loop device"
    return ""


class Ledger:
    """`SystemCalls` of a journal that note what must survive: blocks whose rows were synced, and then their records."""

    def __init__(self, inner: SystemCalls, known: set[bytes]) -> None:
        """`known`: what has survived so far."""
        self.durable: set[bytes] = set()
        self.cutting = threading.Event()
        """The power begins to fail. A sync of ext4 that is under way then may say it has succeeded and has not."""
        self.syncs = 0
        self._inner = inner
        self._lock = threading.Lock()
        self._written, self._rows_synced = set(known), set(known)
        self._unrecorded, self._recorded = set(known), set[bytes]()
        self._journal = self._synced_file = -1

    def begin(self, hashes: Sequence[bytes]) -> None:
        """These will be written."""
        with self._lock:
            self._unrecorded.update(hashes)

    def end(self, hashes: Sequence[bytes]) -> None:
        """The rows of these are written."""
        with self._lock:
            self._written.update(hashes)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `SystemCalls`."""
        return self._inner.preadv(descriptor, buffers, offset)

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `SystemCalls`."""
        moved = self._inner.pwritev(descriptor, buffers, offset)
        self._journal = descriptor
        data = b"".join(buffers)[:moved]
        with self._lock:
            seen = {block_hash for block_hash in self._unrecorded if block_hash in data}
            self._unrecorded -= seen
            self._recorded |= seen
        return moved

    def fdatasync(self, descriptor: int) -> None:
        """See `SystemCalls`."""
        with self._lock:
            rows, records = set(self._written), self._recorded & self._rows_synced
        self._inner.fdatasync(descriptor)
        if self.cutting.is_set():
            return
        if descriptor != self._journal:
            self._rows_synced = rows
            return
        file = os.fstat(descriptor).st_ino
        if file == self._synced_file:  # a file just made has yet to get its name, which is durable by its next sync
            self.durable |= records
            self.syncs += 1
        self._synced_file = file

    def fallocate(self, descriptor: int, offset: int, length: int) -> None:
        """See `SystemCalls`."""
        self._inner.fallocate(descriptor, offset, length)


def cut_off_ext4(count: int, seed: int, scratch: Path, syncs: bool = True) -> dict[str, object]:
    """Shut ext4 down under a writing shelf: it opens warm, 95 % of what was synced is there, no block is wrong."""
    disk = Ext4Disk(scratch, syncs)
    try:
        return _cycles(disk, count, random.Random(seed))
    finally:
        disk.close()


def forget_unsynced(count: int, seed: int, scratch: Path, syncs: bool = True) -> dict[str, object]:
    """Lose random subsets of unsynced writes under a writing shelf: the same holds as for a real file system."""
    chance = random.Random(seed)
    disk = ModelDisk(scratch, chance, syncs)
    numbers = _cycles(disk, count, chance)
    assert disk.lost_pages > 0
    return {**numbers, "lost pages": disk.lost_pages}


def _cycles(disk: Disk, count: int, chance: random.Random) -> dict[str, object]:
    """Open, judge what must be there, write, cut; `count` times."""
    numbers: Counter[str] = Counter()
    slowest_s = 0.0
    seed, made = chance.getrandbits(32), itertools.count()
    expected: set[bytes] = set()
    with mock.patch.object(journal, "SYNC_S", SYNC_S), quiet(logging.ERROR):
        for cycle in range(count + 1):
            early = 0 < cycle < count and chance.random() < 0.3  # the power fails while the shelf is being opened
            off = threading.Event()
            ledger = Ledger(disk.calls, expected)
            if early:
                _cut_after(disk, chance.uniform(0, 0.02), ledger, off)
            started = time.monotonic()
            try:
                user = nvme_user(disk.path / "cache", NVME_BYTES, disk.calls, journal_calls=ledger)
            except (ShelfError, OSError):
                assert early and off.wait(60), "the shelf does not open"
                numbers["cut while opening"] += 1
                disk.back()
                continue
            slowest_s = max(slowest_s, time.monotonic() - started)
            if not early:
                expected = _judge(user, expected, numbers)
            if cycle == count:
                user.shelf.check()
                user.shelf.close(10.0)
                break
            if not early:
                _cut_after(disk, chance.uniform(0.02, 0.4), ledger, off)
            written = _write(user, (_block(seed, number) for number in made), ledger, off)
            survivors = {block_hash for block_hash in expected | ledger.durable if user.shelf.holds(block_hash)}
            numbers["published"] += written
            numbers["completed syncs"] += ledger.syncs
            expected = survivors
            user.shelf.close(10.0)
            disk.back()
    kept = numbers["kept"] / max(1, numbers["synced"])
    assert numbers["synced"] > 0 and kept >= KEPT_MIN, f"{kept:.1%} of what was synced has survived"
    return {**numbers, "kept share": round(kept, 4), "slowest opening s": round(slowest_s, 3)}


def _judge(user: ShelfUser, expected: set[bytes], numbers: Counter[str]) -> set[bytes]:
    """Read all that must be there, every byte judged; returns what is."""
    records = [record for block_hash in sorted(expected) for record in user.shelf.find([block_hash])]
    done = user.read(records)
    there = {end.block_hash for end in done if end is not None and end.outcome is ShelfOutcome.DONE}
    numbers["synced"] += len(expected)
    numbers["kept"] += len(there)
    numbers["bad rows refused"] += user.shelf.stats()["bad_row"]
    return there


def _write(user: ShelfUser, blocks: Iterator[bytes], ledger: Ledger, off: threading.Event) -> int:
    """Write blocks until the power is off; how many were published."""
    published = 0
    while not off.is_set():
        batch = list(itertools.islice(blocks, BATCH))
        ledger.begin(batch)
        ended = user.write(batch)
        written = [end.block_hash for end in ended if end is not None and end.outcome is ShelfOutcome.DONE]
        ledger.end(written)
        published += len(written)
    return published


def _cut_after(disk: Disk, delay_s: float, ledger: Ledger, off: threading.Event) -> None:
    """Cut the power from another thread."""

    def cut() -> None:
        ledger.cutting.set()
        disk.cut()
        off.set()

    threading.Timer(delay_s, cut).start()


def _block(seed: int, number: int) -> bytes:
    return hashlib.sha256(f"power {seed} {number}".encode()).digest()


def _run(*command: str) -> str:
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, f"{' '.join(command)}: {found.stderr.strip()}"
    return found.stdout
