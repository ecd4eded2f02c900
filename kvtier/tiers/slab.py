"""The bytes of a shelf: one file descriptor cut into slots of header and row.

DRAM is a memfd, allocated at start and mapped so that rows can be used in place; NVMe is one fallocated file, opened
for direct I/O where the file system can. Owns sizes and offsets; knows no hash. Opened by shelves.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import struct
from dataclasses import dataclass

from kvtier.block import ALIGNMENT
from kvtier.byte_text import free_text, needed_text
from kvtier.errors import ConfigError, ShelfError
from kvtier.io.base import SystemCalls, uninterrupted
from kvtier.io.files import check_sealed, lock_exclusively, open_private, seal
from kvtier.tiers.header import HEADER_BYTES
from kvtier.tiers.memory import address_of, advise_huge, check_memory, populate_by_advice
from kvtier.tiers.superblock import (
    SLAB_VERSION,
    SUPERBLOCK_BYTES,
    SlabShape,
    parse_superblock,
    read_superblock,
    write_superblock,
)

log = logging.getLogger(__name__)

SLAB_NAME = "nvme.slab"
EPOCH_BYTES = 16
KEEPER_BYTE = 64
"""The byte that whoever keeps the books locks on a slab; an owner's is that of its number."""
ALL_OWNERS = (0, KEEPER_BYTE + 1)
"""(start, length) of the bytes of every owner and the keeper's: held by an engine that shares with nobody."""


@dataclass(eq=False, slots=True)
class Slab:
    """Slots of `slot_bytes` from `base_bytes` on. `mapping` is there for DRAM only."""

    descriptor: int
    base_bytes: int
    slot_bytes: int
    slot_count: int
    epoch: bytes
    """Random identity of a slab since it was made; the journal belongs to one epoch."""
    direct: bool = False
    mapping: mmap.mmap | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of the file."""
        return self.base_bytes + self.slot_count * self.slot_bytes

    def offset(self, slot: int) -> int:
        """Where a slot's header begins in the file."""
        assert 0 <= slot < self.slot_count, slot
        return self.base_bytes + slot * self.slot_bytes

    @property
    def memory(self) -> memoryview:
        """All of DRAM's slots in place."""
        assert self.mapping is not None, "rows of NVMe cannot be viewed in place"
        return memoryview(self.mapping)

    def view(self, slot: int) -> memoryview:
        """A DRAM slot's row in place."""
        start = self.offset(slot) + HEADER_BYTES
        return self.memory[start : start + self.slot_bytes - HEADER_BYTES]

    def address(self, slot: int) -> int:
        """Where a DRAM slot's row begins in this process; valid while the mapping lives."""
        assert self.mapping is not None, "rows of NVMe have no address"
        return address_of(self.mapping) + self.offset(slot) + HEADER_BYTES

    def is_whole(self) -> bool:
        """Whether the file is as long as it was made."""
        return os.fstat(self.descriptor).st_size >= self.total_bytes

    def close(self) -> None:
        """Close the descriptor; a mapping goes with its last view. No I/O may use either any more."""
        self.mapping = None
        os.close(self.descriptor)


def make_dram_slab(slot_bytes: int, slot_count: int, key: str = "tiers.dram.bytes") -> Slab:
    """A fresh memfd with every page allocated. ConfigError, naming `key`, if that much memory is not free."""
    total_bytes = slot_bytes * slot_count
    check_memory(key, total_bytes)
    epoch = os.urandom(EPOCH_BYTES)
    descriptor = os.memfd_create("kvtier-dram", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, total_bytes)
        mapping = mmap.mmap(descriptor, total_bytes)
        advise_huge(mapping)
        populate_by_advice(mapping)
        os.posix_fallocate(descriptor, 0, total_bytes)  # a hole would be a signal at some later write, not an error
        seal(descriptor)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise ConfigError(f"{key}: {needed_text(total_bytes)} of memory refused ({error.strerror})") from None
        raise
    return Slab(descriptor, 0, slot_bytes, slot_count, epoch, mapping=mapping)


def join_dram_slab(descriptor: int, slot_bytes: int, slot_count: int, epoch: bytes) -> Slab:
    """The slab in a memfd that somebody else made, mapped. ShelfError unless it is one of that length."""
    check_sealed(descriptor, slot_bytes * slot_count)
    return Slab(descriptor, 0, slot_bytes, slot_count, epoch, mapping=mmap.mmap(descriptor, slot_bytes * slot_count))


def join_nvme_slab(folder: int, slot_bytes: int, slot_count: int, epoch: bytes) -> Slab:
    """The slab file in the folder as somebody else has opened it, on a descriptor of its own and not locked."""
    try:
        plain = open_private(SLAB_NAME, os.O_RDWR, folder)
        try:
            if read_superblock(plain, slot_bytes)[0] != epoch:
                raise ShelfError("NVMe slab was replaced")
            descriptor, direct = _reopen_direct(folder, plain)
        finally:
            os.close(plain)
    except OSError as error:
        raise ShelfError(f"NVMe slab cannot be opened: {error.strerror}") from None
    return Slab(descriptor, SUPERBLOCK_BYTES, slot_bytes, slot_count, epoch, direct)


def nvme_identity(folder: int, slot_bytes: int) -> tuple[bytes, int] | None:
    """(epoch, slots) of the slab file in the folder; None if there is none of this geometry.

    ShelfError: it is no plain file. OSError as it comes.
    """
    try:
        descriptor = open_private(SLAB_NAME, os.O_RDONLY, folder)
    except FileNotFoundError:
        return None
    try:
        epoch, slot_count = read_superblock(descriptor, slot_bytes)
    finally:
        os.close(descriptor)
    return None if epoch is None else (epoch, slot_count)


def open_nvme_slab(
    folder: int,
    slot_bytes: int,
    slot_count: int,
    calls: SystemCalls,
    end: float = 0.0,
    lock: tuple[int, int] = ALL_OWNERS,
) -> tuple[Slab, bool]:
    """The slab file in the folder (a descriptor), made, grown or cut to `slot_count`; also whether its rows are new.

    Waits until the monotonic time `end` for writes of a dead engine that have yet to land. A file of another geometry
    or version is emptied first, with one log line. ShelfError if the disk has no room, with the file left as it was.
    """
    descriptor = -1
    try:
        descriptor = open_private(SLAB_NAME, os.O_RDWR | os.O_CREAT, folder)
        _lock(descriptor, end, lock)
        epoch, old_count = read_superblock(descriptor, slot_bytes)
        fresh = epoch is None
        slab = Slab(descriptor, SUPERBLOCK_BYTES, slot_bytes, slot_count, epoch or os.urandom(EPOCH_BYTES))
        if not fresh and old_count != slot_count:
            log.warning("NVMe slab resized from %d to %d slots", old_count, slot_count)
        _resize(slab, folder, fresh, calls)
        write_superblock(descriptor, SlabShape(slab.epoch, slot_bytes, slot_count), calls)
        plain = descriptor
        slab.descriptor, slab.direct = _reopen_direct(folder, plain)
        descriptor = slab.descriptor
        os.close(plain)
        _lock(descriptor, end, lock)
        descriptor = -1
        return slab, fresh
    except OSError as error:
        raise ShelfError(f"NVMe slab cannot be opened: {error.strerror}") from None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _lock(descriptor: int, end: float, lock: tuple[int, int]) -> None:
    """A lock on the descriptor that does the I/O outlives its process until the last write has landed."""
    if not lock_exclusively(descriptor, end, *lock):
        raise ShelfError("NVMe slab: writes of an engine that is gone are still under way")


def find_nvme_slab(folder: int) -> Slab:
    """The slab file in the folder to look at, whatever its geometry: not locked, not changed, buffered.

    ShelfError if it is not there or not of this version; what its superblock says is bounded by the file's length.
    """
    try:
        descriptor = open_private(SLAB_NAME, os.O_RDONLY, folder)
    except OSError as error:
        raise ShelfError(f"{SLAB_NAME} cannot be opened: {error.strerror}") from None
    try:
        found = parse_superblock(os.pread(descriptor, SUPERBLOCK_BYTES, 0))
        if found is None:
            raise ShelfError(f"{SLAB_NAME} has a damaged superblock; the next engine makes it anew")
        version, shape = found
        if version != SLAB_VERSION:
            raise ShelfError(f"{SLAB_NAME} is of version {version}, this is {SLAB_VERSION}")
        row_bytes = shape.slot_bytes - HEADER_BYTES
        room_bytes = os.fstat(descriptor).st_size - SUPERBLOCK_BYTES
        if row_bytes <= 0 or row_bytes % ALIGNMENT or not 0 < shape.slot_count * shape.slot_bytes <= room_bytes:
            raise ShelfError(f"{SLAB_NAME} is shorter than its superblock says; the next engine makes it whole")
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise ShelfError(f"{SLAB_NAME} cannot be read: {error.strerror}") from None
        raise
    return Slab(descriptor, SUPERBLOCK_BYTES, shape.slot_bytes, shape.slot_count, shape.epoch)


def direct_io_alignment(descriptor: int) -> int | None:
    """Largest alignment that direct I/O needs here, 0 if it is not possible, None if the kernel does not tell."""
    answer = (ctypes.c_char * 256)()
    libc = ctypes.CDLL(None, use_errno=True)
    if not callable(getattr(libc, "statx", None)) or libc.statx(descriptor, b"", 0x1000, 0x2000, answer) != 0:
        return None
    (mask,) = struct.unpack_from("<I", answer, 0)
    if not mask & 0x2000:  # STATX_DIOALIGN, Linux 6.1
        return None
    memory, offset = struct.unpack_from("<II", answer, 0x98)
    return 0 if memory == 0 or offset == 0 else max(memory, offset)


def _resize(slab: Slab, folder: int, fresh: bool, calls: SystemCalls) -> None:
    """Give the file its bytes, all of them allocated; on failure it is as before, or gone if it was new."""
    before = os.fstat(slab.descriptor)
    if fresh:
        os.ftruncate(slab.descriptor, 0)
    elif before.st_size > slab.total_bytes:
        os.ftruncate(slab.descriptor, slab.total_bytes)
    disk = os.fstatvfs(slab.descriptor)
    free_bytes = disk.f_bavail * disk.f_frsize
    needed_bytes = slab.total_bytes - os.fstat(slab.descriptor).st_blocks * 512
    error = None
    if needed_bytes <= free_bytes:
        try:
            uninterrupted(calls.fallocate, slab.descriptor, 0, slab.total_bytes)
        except OSError as failure:
            error = failure
    if needed_bytes > free_bytes or error is not None:
        if fresh:
            with contextlib.suppress(OSError):
                os.unlink(SLAB_NAME, dir_fd=folder)
        else:
            os.ftruncate(slab.descriptor, min(before.st_size, slab.total_bytes))
        raise ShelfError(
            f"tiers.nvme.bytes: the slab needs {needed_text(needed_bytes)} more on its disk, "
            f"{free_text(free_bytes)} are free"
            + (f" ({error.strerror})" if error is not None else "")
            + "; lower tiers.nvme.bytes or choose another tiers.nvme.path"
        )


def _reopen_direct(folder: int, descriptor: int) -> tuple[int, bool]:
    """A descriptor of the same file for the engine's I/O, and whether it is direct."""
    again = _open_direct(folder, descriptor)
    direct = again is not None
    again = again if again is not None else open_private(SLAB_NAME, os.O_RDWR, folder)
    try:
        if not os.path.samestat(os.fstat(again), os.fstat(descriptor)):
            raise ShelfError("NVMe slab was replaced while it was opened")
    except BaseException:
        os.close(again)
        raise
    return again, direct


def _open_direct(folder: int, descriptor: int) -> int | None:
    """The slab file for direct I/O, `descriptor` being open on it; None, with a line why, where that cannot be."""
    alignment = direct_io_alignment(descriptor)
    refused = "the file system cannot"
    if alignment is None or 0 < alignment <= ALIGNMENT:
        try:
            return open_private(SLAB_NAME, os.O_RDWR | os.O_DIRECT, folder)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # no reason to do without for good
                raise
            refused = error.strerror or refused
    elif alignment > ALIGNMENT:
        refused = f"it needs an alignment of {alignment} bytes"
    log.warning("NVMe slab uses buffered I/O, not direct I/O: %s", refused)
    return None
