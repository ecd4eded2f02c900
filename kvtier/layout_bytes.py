"""What the folder of a row layout takes of a cache directory's bytes: now, and at most while its books are open.

A journal grows after its slab was made, so whoever gives bytes to another layout counts it with what it may grow to.
Reads superblock and journal head, changes nothing, and believes neither beyond the folder. Used by cache_directory.py.
"""

from __future__ import annotations

import os
import stat

from kvtier.block import ALIGNMENT
from kvtier.errors import ShelfError
from kvtier.journal import SPARE_NAME
from kvtier.replay import JOURNAL_NAME, JournalShape, journal_slices
from kvtier.tiers.header import HEADER_BYTES, SLICES_MAX
from kvtier.tiers.slab import find_nvme_slab

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""How a folder of a cache directory is opened."""
_JOURNAL_NAMES = (JOURNAL_NAME, SPARE_NAME)


def taken_bytes(top: int, name: str) -> int:
    """Bytes of the plain files in a folder of the directory `top` (a descriptor) now; 0 if it is none."""
    return sum(_files(top, name).values())


def claimed_bytes(top: int, name: str) -> int:
    """The same, with the journal as long as it may become while nobody makes the slab anew."""
    files = _files(top, name)
    journal_bytes = sum(files.pop(journal, 0) for journal in _JOURNAL_NAMES)
    return sum(files.values()) + max(journal_bytes, _journal_bytes_max(top, name))


def _journal_bytes_max(top: int, name: str) -> int:
    """Bytes of disk that the journal of the slab in a folder ever takes, its rewrite included; 0 without a slab.

    Until there is a journal, its rows have as many slices as fit them.
    """
    try:
        folder = os.open(name, FOLDER_FLAGS, dir_fd=top)
    except OSError:
        return 0
    try:
        slab = find_nvme_slab(folder)
        slab.close()
        slices_max = min(SLICES_MAX, (slab.slot_bytes - HEADER_BYTES) // ALIGNMENT)
        slice_count = journal_slices(folder)
        if not 0 < slice_count <= slices_max:
            slice_count = slices_max
        return JournalShape(slab.epoch, slab.slot_count, slice_count).total_bytes_max
    except ShelfError:  # no slab that books could be opened on as it is
        return 0
    finally:
        os.close(folder)


def _files(top: int, name: str) -> dict[str, int]:
    """Bytes that each plain file in a folder has or takes; empty if it is none."""
    try:
        folder = os.open(name, FOLDER_FLAGS, dir_fd=top)
    except OSError:
        return {}
    try:
        return {file: _file_bytes(folder, file) for file in os.listdir(folder)}
    finally:
        os.close(folder)


def _file_bytes(folder: int, name: str) -> int:
    """Bytes that a plain file has or takes; 0 for anything else, or if it has gone just now: journals are renamed."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return 0
    return max(status.st_size, status.st_blocks * 512) if stat.S_ISREG(status.st_mode) else 0
