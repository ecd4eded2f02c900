"""Checks and locks on what shelves lie in: plain files, our own, private; memory of a fixed length; held by one.

Works on open descriptors only, so nothing can be swapped in between. Used by cache_directory.py, slabs and the keeper.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import time

from kvtier.errors import ShelfError

LOCK_PAUSE_S = 0.02

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_FLOCK = struct.Struct("hhqqi4x")
"""struct flock of Linux on 64 bits: type, whence, start, length, pid."""


def check_private(descriptor: int, name: str) -> None:
    """ShelfError unless this is a plain file of ours without other links; its mode becomes 0600."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
        raise ShelfError(f"{name} in the cache directory is no plain file of this user's own; remove it")
    os.fchmod(descriptor, 0o600)


def seal(descriptor: int) -> None:
    """Fix the length of a memfd: whoever maps it never meets a signal."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)


def check_sealed(descriptor: int, total_bytes: int) -> None:
    """ShelfError unless this is a memfd of exactly that length, sealed."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise ShelfError("a descriptor is no sealed memory") from None
    if seals & _SEALS != _SEALS or os.fstat(descriptor).st_size != total_bytes:
        raise ShelfError("a descriptor is not the memory that it should be")


def lock_request(kind: int, start: int, length: int) -> bytes:
    """A `struct flock` for a run of bytes."""
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)


def lock_exclusively(descriptor: int, end: float, start: int = 0, length: int = 1) -> bool:
    """Take an exclusive OFD lock on bytes of a file, trying until the monotonic time `end`; whether it was got.

    It is held until the last descriptor of this open file is closed and its last I/O has landed.
    """
    request = lock_request(fcntl.F_WRLCK, start, length)
    while True:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
            return True
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= end:
                return False
            time.sleep(LOCK_PAUSE_S)
