"""Digests of weights that were hashed before, in one small private file of the cache directory.

Owns the file's format and when a digest may be kept. A file that is damaged, gone or not ours is no memory; losing it
costs the time of hashing. Knows neither models nor what a fingerprint is made of. Used by the assembly.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.cache_directory import CacheDirectory
from kvtier.errors import ShelfError
from kvtier.io.files import lock_exclusively, open_private

log = logging.getLogger(__name__)

MEMORY_NAME = "digests"
SPARE_NAME = "digests.new"
ENTRIES_MAX = 64
SETTLED_NS = 2 * 10**9
"""Younger files may change again within the same time stamp, as in git's index; two seconds are FAT's."""

_MAGIC = b"kvtier-digests-1"
_KEY_BYTES = _SUM_BYTES = 32
_ENTRY_BYTES = 2 * _KEY_BYTES


class DigestFile:
    """A `DigestMemory` of at most `ENTRIES_MAX` models, the latest kept, shared by all engines of a cache directory."""

    def __init__(self, path: Path, clock_ns: Callable[[], int] = time.time_ns) -> None:
        """`path`: the cache directory, made if it is not there."""
        self._path = path
        self._clock_ns = clock_ns

    def recall(self, fingerprint: bytes) -> bytes | None:
        """See `DigestMemory`."""
        try:
            with contextlib.closing(CacheDirectory(self._path, None)) as cache:
                return _read(cache.top).get(fingerprint)
        except (ShelfError, OSError) as error:
            log.info("no digests are remembered: %s", error)
            return None

    def remember(self, fingerprint: bytes, digest: bytes, changed_ns: int) -> None:
        """See `DigestMemory`. Skipped while another engine writes."""
        assert len(fingerprint) == len(digest) == _KEY_BYTES
        if self._clock_ns() - changed_ns < SETTLED_NS:
            return
        try:
            with contextlib.closing(CacheDirectory(self._path, None)) as cache:
                _add(cache, fingerprint, digest)
        except (ShelfError, OSError) as error:
            log.info("the digest of the weights is not remembered: %s", error)


def _read(top: int) -> dict[bytes, bytes]:
    """Digest by fingerprint, oldest first; empty unless the file is whole."""
    try:
        descriptor = open_private(MEMORY_NAME, os.O_RDONLY, top)
    except FileNotFoundError:
        return {}
    try:
        data = os.pread(descriptor, len(_MAGIC) + ENTRIES_MAX * _ENTRY_BYTES + _SUM_BYTES + 1, 0)
    finally:
        os.close(descriptor)
    body, found_sum = data[:-_SUM_BYTES], data[-_SUM_BYTES:]
    entries = body[len(_MAGIC) :]
    whole = body[: len(_MAGIC)] == _MAGIC and len(entries) % _ENTRY_BYTES == 0
    if not whole or hashlib.sha256(body).digest() != found_sum:
        log.info("%s in the cache directory is damaged or of another version: ignored", MEMORY_NAME)
        return {}
    starts = range(0, len(entries), _ENTRY_BYTES)
    return {entries[at : at + _KEY_BYTES]: entries[at + _KEY_BYTES : at + _ENTRY_BYTES] for at in starts}


def _add(cache: CacheDirectory, fingerprint: bytes, digest: bytes) -> None:
    """Write the file anew beside the old one and swap them, under a lock on the new one."""
    descriptor = open_private(SPARE_NAME, os.O_RDWR | os.O_CREAT, cache.top)
    try:
        if not lock_exclusively(descriptor, 0.0) or not cache.is_current(SPARE_NAME, descriptor):
            return
        digests = _read(cache.top)
        digests.pop(fingerprint, None)
        digests[fingerprint] = digest
        body = _MAGIC + b"".join(key + value for key, value in list(digests.items())[-ENTRIES_MAX:])
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, body + hashlib.sha256(body).digest(), 0)
        os.rename(SPARE_NAME, MEMORY_NAME, src_dir_fd=cache.top, dst_dir_fd=cache.top)
    finally:
        os.close(descriptor)
