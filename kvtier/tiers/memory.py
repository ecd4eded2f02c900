"""Host memory for the tiers: how much is free, huge pages, population, addresses and 4 KiB pages for headers.

Owns no budget; it checks what it is asked against what this machine and its cgroup still have. Called at start by the
arena and the slabs, and by shelves for header pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

from kvtier.block import ALIGNMENT
from kvtier.byte_text import free_text, needed_text
from kvtier.errors import ConfigError

_MADV_POPULATE_WRITE = 23
_POPULATE_CHUNK_BYTES = 64 << 20


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that can still be allocated: MemAvailable, or less where a cgroup (v2 or v1) limits this process."""
    available = _mem_available(root)
    for folder, limit_name, usage_name in _cgroups(root):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None:
            available = min(available, max(0, limit - usage + _file_cache_bytes(folder)))
    return available


def check_memory(key: str, asked_bytes: int, root: Path = Path("/")) -> None:
    """ConfigError naming `key`, what was asked and what is free, if it does not fit."""
    free_bytes = free_memory_bytes(root)
    if asked_bytes > free_bytes:
        raise ConfigError(
            f"{key}: {needed_text(asked_bytes)} of memory asked, {free_text(free_bytes)} are free on this machine or "
            f"in its cgroup; lower {key}"
        )


def advise_huge(mapping: mmap.mmap) -> None:
    """Ask for huge pages; a kernel without them is fine."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


def populate(mapping: mmap.mmap) -> None:
    """Give every page of private memory real memory now, so that no later write can fail or stall."""
    if not populate_by_advice(mapping):
        view = memoryview(mapping)
        for page in range(0, len(mapping), ALIGNMENT):
            view[page] = view[page]


def populate_by_advice(mapping: mmap.mmap) -> bool:
    """Ask the kernel (5.14 or later) to populate a mapping, in huge pages where it may; whether it did."""
    try:
        for start in range(0, len(mapping), _POPULATE_CHUNK_BYTES):
            mapping.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATE_CHUNK_BYTES, len(mapping) - start))
    except OSError:
        return False
    return True


def address_of(mapping: mmap.mmap) -> int:
    """Address of a mapping's first byte; valid while the mapping lives."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


class AlignedPages:
    """A fixed set of 4 KiB pages, taken and given back by index; a page in use belongs to one I/O."""

    def __init__(self, count: int) -> None:
        mapping = mmap.mmap(-1, count * ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        populate(mapping)
        self.memory = memoryview(mapping)
        """All of them."""
        self._free = [self.memory[start : start + ALIGNMENT] for start in range(0, count * ALIGNMENT, ALIGNMENT)]

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> memoryview:
        """A free page; there must be one."""
        return self._free.pop()

    def give(self, page: memoryview) -> None:
        """Back to the free ones, once the I/O has completed."""
        self._free.append(page)


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo has no MemAvailable: Linux 3.14 or later is needed")


def _cgroups(root: Path) -> list[tuple[Path, str, str]]:
    """(folder, limit file, usage file) of every cgroup this process is in, up to the root of each hierarchy."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, str, str]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [(top.joinpath(*parts[:depth]), limit, usage) for depth in range(len(parts) + 1)]
    return found


def _file_cache_bytes(folder: Path) -> int:
    """Page cache of files charged to a cgroup: used, but given back under pressure."""
    try:
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(fields.get("active_file", 0)) + int(fields.get("inactive_file", 0))
    except (OSError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    """The whole number in a file; None for `max`, a missing file or anything else."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
