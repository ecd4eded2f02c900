"""Opens, checks and locks what shelves lie in: plain private files of our own; memory of a fixed length; held by one.

What is open is what is checked, so nothing can be swapped in between. Used by cache_directory.py, slabs, journals and
the keeper.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import time

from kvtier.errors import ShelfError

LOCK_PAUSE_S = 0.02

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_NEVER_WAIT = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC

_FLOCK = struct.Struct("hhqqi4x")
"""struct flock of Linux on 64 bits: type, whence, start, length, pid."""


def open_private(name: str, flags: int, folder: int) -> int:
    """Descriptor of a plain file of ours in a folder (a descriptor), of mode 0600; made if `flags` have O_CREAT.

    Never waits, follows no symlink and wakes no device, whatever was put in its place: then, or if it has other links,
    ShelfError says so. Every file of a cache directory is opened by this. OSError as it comes.
    """
    with contextlib.suppress(FileNotFoundError):
        _check_private(os.stat(name, dir_fd=folder, follow_symlinks=False), name)
    descriptor = os.open(name, flags | _NEVER_WAIT, 0o600, dir_fd=folder)
    try:
        _check_private(os.fstat(descriptor), name)
        os.fchmod(descriptor, 0o600)
        os.set_blocking(descriptor, True)  # io_uring would take it for a wish that reads of a plain file fail early
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_private(status: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
        raise ShelfError(f"{name} in the cache directory is no plain file of this user's own; remove it")


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
