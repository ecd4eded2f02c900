"""Checks and locks on files of a cache directory: plain, our own, private, and held by one engine.

Works on open descriptors only, so nothing can be swapped in between. Used by cache_directory.py and the slab.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import time

from kvtier.errors import ShelfError

LOCK_PAUSE_S = 0.02

_FLOCK = struct.Struct("hhqqi4x")
"""struct flock of Linux on 64 bits: type, whence, start, length, pid."""


def check_private(descriptor: int, name: str) -> None:
    """ShelfError unless this is a plain file of ours without other links; its mode becomes 0600."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
        raise ShelfError(f"{name} in the cache directory is no plain file of this user's own; remove it")
    os.fchmod(descriptor, 0o600)


def lock_exclusively(descriptor: int, end: float) -> bool:
    """Take an exclusive OFD lock on a file's first byte, trying until the monotonic time `end`; whether it was got.

    It is held until the last descriptor of this open file is closed and its last I/O has landed.
    """
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    while True:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
            return True
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= end:
                return False
            time.sleep(LOCK_PAUSE_S)
