"""A disk that forgets what was not synced: the model of a power cut, under the seam of faults.

Keeps, for each page of a file written since its last completed sync, the bytes it had then and after each write; `cut`
puts one of them back, as a disk that had brought just any of its pages to the medium would. What makes, names and sizes
files is taken to be durable at once. For tests and soak runs only: each write costs two reads, and they take turns.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.block import ALIGNMENT
from kvtier.io.base import KernelCalls, Mover, Ring, SystemCalls


@dataclass(eq=False, slots=True)
class _File:
    """Pages of one file that were written since its last sync. `plain` is a descriptor of our own, without locks."""

    plain: int
    synced_bytes: int
    versions: dict[int, list[bytes]] = field(default_factory=dict)
    """By page: its bytes at the last sync, then after each write since."""


class UnsyncedCalls:
    """`SystemCalls` whose writes can be taken back until they are synced."""

    def __init__(self, inner: SystemCalls | None = None, syncs: bool = True) -> None:
        """`syncs` False: a disk that says it has synced and has not, to see a test fail that needs it."""
        self._inner = inner if inner is not None else KernelCalls()
        self._syncs = syncs
        self._files: dict[tuple[int, int], _File] = {}
        self._lock = threading.Lock()
        self._off = False

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `SystemCalls`. EIO once the power is off, like all calls."""
        self._check_power()
        return self._inner.preadv(descriptor, buffers, offset)

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `SystemCalls`."""
        end = offset + sum(buffer.nbytes for buffer in buffers)
        with self._lock:
            self._check_power()
            file = self._file(descriptor)
            pages = range(offset // ALIGNMENT, -(-end // ALIGNMENT))
            for page in pages:
                if page not in file.versions:
                    file.versions[page] = [_page(file.plain, page)]
            moved = self._inner.pwritev(descriptor, buffers, offset)
            for page in pages:
                file.versions[page].append(_page(file.plain, page))
        return moved

    def fdatasync(self, descriptor: int) -> None:
        """See `SystemCalls`. Makes durable what had been written when it began."""
        with self._lock:
            self._check_power()
            file = self._file(descriptor)
            synced_bytes = os.fstat(descriptor).st_size
            counts = {page: len(versions) for page, versions in file.versions.items()}
        self._inner.fdatasync(descriptor)
        with self._lock:
            self._check_power()
            if not self._syncs:
                return
            file.synced_bytes = synced_bytes
            for page, count in counts.items():
                del file.versions[page][: count - 1]
                if len(file.versions[page]) == 1:
                    del file.versions[page]
            if not file.versions:
                os.close(self._files.pop(_identity(descriptor)).plain)

    def fallocate(self, descriptor: int, offset: int, length: int) -> None:
        """See `SystemCalls`."""
        self._check_power()
        self._inner.fallocate(descriptor, offset, length)

    def ring(self, depth: int, slice_bytes: int) -> Ring:  # noqa: ARG002
        """See `SystemCalls`. There is none: what it wrote would not be remembered."""
        raise OSError(errno.ENOSYS, "writes through an io_uring cannot be taken back")

    def mover(self, mover: Mover) -> Mover:
        """See `SystemCalls`. Memory is gone in a power cut, whatever is done."""
        return mover

    def cut(self, seed: int | None = None) -> int:
        """The power fails: each unsynced page goes back to a state since its last sync; returns how many lost writes.

        Which state, the seed decides; None: all go back to the last sync. Whatever is called after that fails with EIO.
        """
        chance = random.Random(seed)
        lost = 0
        with self._lock:
            self._off = True
            for file in self._files.values():
                kept_bytes = file.synced_bytes
                for page, versions in sorted(file.versions.items()):
                    choice = 0 if seed is None else chance.randrange(len(versions))
                    lost += choice < len(versions) - 1
                    os.pwrite(file.plain, versions[choice], page * ALIGNMENT)
                    kept_bytes = max(kept_bytes, (page + 1) * ALIGNMENT if choice else 0)
                os.ftruncate(file.plain, min(kept_bytes, os.fstat(file.plain).st_size))
                os.close(file.plain)
            self._files.clear()
        return lost

    def _file(self, descriptor: int) -> _File:
        """What is known of the file behind a descriptor; under the lock. Kept open, so that its inode stays its own."""
        identity = _identity(descriptor)
        file = self._files.get(identity)
        if file is None:
            synced_bytes = os.fstat(descriptor).st_size
            plain = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            file = self._files[identity] = _File(plain, synced_bytes)
        return file

    def _check_power(self) -> None:
        if self._off:
            raise OSError(errno.EIO, "the power is off")


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _page(descriptor: int, page: int) -> bytes:
    """A page of a file as it is, with zeros behind the file's end."""
    return os.pread(descriptor, ALIGNMENT, page * ALIGNMENT).ljust(ALIGNMENT, b"\0")
