"""The cache directory on disk: made private, locked by one engine or its keeper, with one folder per row layout.

Owns modes, ownership checks, the lock and the byte budget over all layouts; knows nothing of slabs or journals: what
they take is layout_bytes.py's. Every path below it is opened through its descriptor and never through a symlink. Used
by shelves.py and the keeper.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import stat
import threading
import time
import weakref
from pathlib import Path

from kvtier.block import KVLayout
from kvtier.errors import ShelfError
from kvtier.io.files import lock_exclusively, open_private
from kvtier.layout_bytes import FOLDER_FLAGS, claimed_bytes, taken_bytes
from kvtier.namespace import FORMAT_VERSION
from kvtier.tiers.header import HEADER_VERSION

LOCK_NAME = "keeper.lock"
WAY_OUT = "name a directory on a disk that can be written; it is made if it is not there"


class CacheDirectory:
    """An open cache directory; with `wait_s` one that this process alone may use until `close`."""

    def __init__(self, path: Path, wait_s: float | None, lock: int | None = None) -> None:
        """Make or open `path` and lock it, waiting up to `wait_s` for another engine. ShelfError says what is wrong.

        `wait_s` None: not locked by this process, or by whoever handed it the locked descriptor `lock`, which is taken
        over, whatever happens.
        """
        self.path = path
        self.forking = threading.RLock()
        """Held while a descriptor is opened on a thread of its own, so that a child cannot inherit it unseen."""
        self._descriptors: list[int] = []
        self._lock = -1 if lock is None else self.hold(lock)
        try:
            self.top = self.hold(_open_private_folder(path))
            if lock is None and wait_s is not None:
                self._lock = self.hold(self.open_lock())
                if not lock_exclusively(self._lock, time.monotonic() + wait_s):
                    raise ShelfError(
                        f"cache directory {path} is in use by another engine; waited {wait_s:g} s. "
                        "Stop that engine or give this one another tiers.nvme.path"
                    )
            if self._lock >= 0 and not self.is_current(LOCK_NAME, self._lock):
                raise ShelfError(f"cache directory {path}: {LOCK_NAME} was replaced while it was being locked")
        except OSError as error:
            self.close()
            raise ShelfError(f"tiers.nvme.path: {path} cannot be used: {error.strerror}; {WAY_OUT}") from None
        except BaseException:
            self.close()
            raise
        _close_in_children(self)

    def hold(self, descriptor: int) -> int:
        """Close `descriptor` with the directory, and in any forked child; returns it."""
        self._descriptors.append(descriptor)
        return descriptor

    def drop(self, descriptor: int) -> None:
        """Close a held descriptor now."""
        self._descriptors.remove(descriptor)
        os.close(descriptor)

    def layout_folder(self, layout: KVLayout) -> int:
        """Descriptor of the layout's own folder, made if it is not there. ShelfError if it cannot be."""
        return self.folder(layout_name(layout))

    def folder(self, name: str) -> int:
        """Descriptor of a folder in the directory, made if it is not there. ShelfError if it cannot be."""
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.top)
            folder = os.open(name, FOLDER_FLAGS, dir_fd=self.top)
            try:
                _check_owner(os.fstat(folder), name)
                os.fchmod(folder, 0o700)
            except BaseException:
                os.close(folder)
                raise
            return self.hold(folder)
        except OSError as error:
            raise ShelfError(f"layout folder {name} of the cache directory cannot be used: {error.strerror}") from None

    def other_bytes(self, layout: KVLayout) -> int:
        """Bytes of this directory's budget that all other layouts take, or may come to take as they are."""
        return self.bytes_beside(layout_name(layout))

    def bytes_beside(self, own: str) -> int:
        """The same for all folders but this one."""
        return sum(claimed_bytes(self.top, name) for name in os.listdir(self.top) if name != own)

    def holds_lock(self) -> bool:
        """Whether the lock that this process holds is still that of the directory."""
        return self._lock >= 0 and self.is_current(LOCK_NAME, self._lock)

    def is_there(self) -> bool:
        """Whether the path still leads to this directory."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.top))
        except OSError:
            return False

    def close(self) -> None:
        """Close every descriptor, the lock after all that it guards; no I/O may use them any more."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def open_lock(self) -> int:
        """A descriptor of its own of the lock file, not locked."""
        return open_private(LOCK_NAME, os.O_RDWR | os.O_CREAT, self.top)

    def is_current(self, name: str, descriptor: int, folder: int | None = None) -> bool:
        """Whether a name in the directory, or in that folder of it, still leads to an open file."""
        try:
            named = os.stat(name, dir_fd=self.top if folder is None else folder, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(named, os.fstat(descriptor))


def layout_name(layout: KVLayout) -> str:
    """Folder name of a row layout: a digest of its geometry and of the format versions."""
    geometry = [layout.layers, layout.kv_heads, layout.head_dim, layout.block_tokens, layout.dtype]
    return hashlib.sha256(json.dumps([geometry, FORMAT_VERSION, HEADER_VERSION]).encode()).hexdigest()[:32]


def claimed_beside(path: Path, layout: KVLayout) -> int:
    """What `CacheDirectory.other_bytes` would say of the directory at `path`, without its lock; 0 if there is none."""
    try:
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return sum(claimed_bytes(top, name) for name in os.listdir(top) if name != layout_name(layout))
    finally:
        os.close(top)


def free_disk_bytes(path: Path) -> int:
    """Bytes that a cache directory at `path` may take: what is free on its disk and what it has already."""
    existing = path
    while not os.path.exists(existing) and existing != existing.parent:
        existing = existing.parent
    disk = os.statvfs(existing)
    used = 0
    with contextlib.suppress(OSError):  # what is there cannot be seen: opening it will say why
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            used = sum(taken_bytes(top, name) for name in os.listdir(top))
        finally:
            os.close(top)
    return disk.f_bavail * disk.f_frsize + used


def _open_private_folder(path: Path) -> int:
    """Descriptor of the directory, 0700 and ours; parents that are missing are made 0700 too."""
    made = False
    for folder in [*reversed(path.absolute().parents), path.absolute()]:
        if not folder.exists() and not folder.is_symlink():
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
                os.chmod(folder, 0o700)
                made = True
    try:
        descriptor = os.open(path, FOLDER_FLAGS)
    except OSError as error:
        raise ShelfError(
            f"tiers.nvme.path: {path} cannot be opened: {error.strerror} (a symlink is refused, too); {WAY_OUT}"
        ) from None
    try:
        status = os.fstat(descriptor)
        _check_owner(status, str(path))
        if stat.S_IMODE(status.st_mode) != 0o700 and not made:
            names = set(os.listdir(descriptor))
            if status.st_mode & stat.S_ISVTX or (names and LOCK_NAME not in names):
                raise ShelfError(
                    f"cache directory {path} has mode {stat.S_IMODE(status.st_mode):04o} and holds other files; "
                    "give it a directory of its own, or chmod 700 it"
                )
        os.fchmod(descriptor, 0o700)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_owner(status: os.stat_result, name: str) -> None:
    if status.st_uid != os.geteuid():
        raise ShelfError(f"{name} belongs to user {status.st_uid}, this engine runs as user {os.geteuid()}")


def _close_in_children(directory: CacheDirectory) -> None:
    """A forked child must not keep the lock of a parent that ends before it. No fork comes between open and `hold`."""
    number = id(directory)
    _OPENED[number] = weakref.ref(directory, lambda _: _OPENED.pop(number, None))


_OPENED: dict[int, weakref.ref[CacheDirectory]] = {}
"""All of this process, for hooks at forks, which the process has for good: one for each would be a leak."""
_FORKING: dict[int, list[CacheDirectory]] = {}
"""Those that a fork by a thread, named by its identity, has stopped for its moment."""


def _before_fork() -> None:
    stopped: list[CacheDirectory] = []
    _FORKING[threading.get_ident()] = stopped
    for reference in list(_OPENED.values()):
        directory = reference()
        if directory is not None:
            directory.forking.acquire()
            stopped.append(directory)


def _after_fork(child: bool) -> None:
    for directory in _FORKING.pop(threading.get_ident(), []):
        directory.forking.release()
        if child:
            directory.close()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=functools.partial(_after_fork, child=False),
    after_in_child=functools.partial(_after_fork, child=True),
)
