"""Locks that tell who lives and whose I/O is still under way: OFD locks on single bytes, one byte an owner.

A lock is held until the last descriptor of its open file is closed and its last I/O has landed, whatever ends the
process. Works on descriptors; nothing here waits. Used by keeper and engines.
"""

from __future__ import annotations

import fcntl
import os

from kvtier.io.files import lock_request, open_private

OWNERS_NAME = "owners.lock"


def open_owners(top: int) -> int:
    """A descriptor of its own of the owners' file in the cache directory (a descriptor), made if it is not there."""
    return open_private(OWNERS_NAME, os.O_RDWR | os.O_CREAT, top)


def lock_byte(descriptor: int, owner: int) -> bool:
    """Lock an owner's byte through this descriptor; whether it was free."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock_request(fcntl.F_WRLCK, owner, 1))
    except (BlockingIOError, PermissionError):
        return False
    return True


def is_locked(descriptor: int, owner: int) -> bool:
    """Whether somebody holds an owner's byte through another open file."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, lock_request(fcntl.F_WRLCK, owner, 1))
    return int.from_bytes(answer[:2], "little", signed=True) != fcntl.F_UNLCK


def reopen(descriptor: int) -> int:
    """Another open file of the same memory: locks through it are its own."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
