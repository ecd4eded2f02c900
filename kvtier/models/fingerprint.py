"""What a checkpoint's files look like from outside: enough to know them again without hashing all that is in them.

Owns what is looked at: device, inode, length, both time stamps, and a few pages, since images of read-only file systems
may carry frozen stamps. Knows no digest and where none is kept. Used by weights.py.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from kvtier.namespace import framed

SAMPLES = 64
SAMPLE_BYTES = 4096


class DigestMemory(Protocol):
    """Digests of weights by fingerprint, from earlier loads. Neither call raises or waits for long."""

    def recall(self, fingerprint: bytes) -> bytes | None:
        """The digest of the files that looked like this, if they were hashed before."""

    def remember(self, fingerprint: bytes, digest: bytes, changed_ns: int) -> None:
        """Keep a digest, unless the files, last changed at `changed_ns`, may yet change without a new time stamp."""


class FileLook(NamedTuple):
    """One file as it is seen; any change of its content shows in one of these."""

    device: int
    inode: int
    length_bytes: int
    modified_ns: int
    status_ns: int
    """ctime: unlike mtime, nobody can set it back."""
    sample: bytes


def look_at(paths: Iterable[Path]) -> tuple[FileLook, ...]:
    """See each file, links followed. Raises OSError."""
    return tuple(map(_look, paths))


def last_change_ns(looks: Sequence[FileLook]) -> int:
    """The latest time stamp among files."""
    return max(max(look.modified_ns, look.status_ns) for look in looks)


def fingerprint(looks: Sequence[FileLook], places: Mapping[str, int]) -> bytes:
    """32 bytes for files and which tensors are taken from which of them (name -> index in `looks`)."""
    parts = [b"kvtier-fingerprint-1"]
    for *numbers, sample in looks:
        parts += [repr(numbers).encode(), sample]
    for name in sorted(places):
        parts += [name.encode(), str(places[name]).encode()]
    return hashlib.sha256(framed(parts)).digest()


def _look(path: Path) -> FileLook:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        step = max(SAMPLE_BYTES, status.st_size // SAMPLES)
        sample = hashlib.sha256()
        for offset in range(0, status.st_size, step):
            sample.update(os.pread(descriptor, SAMPLE_BYTES, offset))
        numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        return FileLook(*numbers, sample.digest())
    finally:
        os.close(descriptor)
