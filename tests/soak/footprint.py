"""What shelves take on a host: processes, descriptors, memory and files of one cache directory, read from /proc.

Counts each open file once, however many processes hold it, those without a name any more included. Knows no keeper and
no engine, only who has something of the directory open. Used by the soak scenarios.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kvtier.directory import SlotState
from kvtier.keeper.slot_table import ENTRY_BYTES, SlotTable

SLAB_NAME, TABLE_NAME = "kvtier-dram", "kvtier-slots"


@dataclass(frozen=True, slots=True)
class Footprint:
    """A moment of a cache directory and everything around it."""

    processes: frozenset[int]
    """Who has anything of it open, or was started on it."""
    names: frozenset[str]
    """Files by their path below the directory."""
    disk_bytes: int
    """Of files in its folders and of those deleted but open: blocks, or lengths where those are more."""
    dram_bytes: int
    """Of memory slabs, slot tables left out."""
    memory_count: int
    """Open memory files."""


def take(path: Path, among: frozenset[int] | None = None) -> Footprint:
    """The footprint of a cache directory; `among`: look at these processes only."""
    top = os.path.realpath(path)
    processes: set[int] = set()
    files: dict[tuple[int, int], int] = {}
    slabs: dict[tuple[int, int], int] = {}
    memories: set[tuple[int, int]] = set()
    for process in list(among) if among is not None else _processes():
        opened = _opened(process)
        mine = [(name, status) for name, status in opened if (name + "/").startswith((top + "/", top + " "))]
        if not mine and among is None:
            continue
        processes |= {process} if mine else set()
        files |= {(s.st_dev, s.st_ino): _bytes(s) for name, s in mine if _counts(name, top, s)}
        for name, status in opened:
            if name.startswith((f"/memfd:{SLAB_NAME}", f"/memfd:{TABLE_NAME}")):
                memories.add((status.st_dev, status.st_ino))
                if SLAB_NAME in name:
                    slabs[(status.st_dev, status.st_ino)] = _bytes(status)
    found: set[str] = set()
    for folder, _, inside in os.walk(top):
        for name in inside:
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(os.path.join(folder, name), follow_symlinks=False)
                found.add(os.path.relpath(os.path.join(folder, name), top))
                if _counts(os.path.join(folder, name), top, status):
                    files[(status.st_dev, status.st_ino)] = _bytes(status)
    return Footprint(frozenset(processes), frozenset(found), sum(files.values()), sum(slabs.values()), len(memories))


def tenant_slots(process: int, tenant: bytes) -> list[int]:
    """Slots that are charged to a tenant in each slot table that a process has open."""
    found: dict[int, int] = {}
    for number, name, status in _numbered(process):
        if name.startswith(f"/memfd:{TABLE_NAME}"):
            with contextlib.suppress(OSError):
                descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDONLY)
                table = SlotTable(descriptor, status.st_size // ENTRY_BYTES, writable=False)
                charged = (entry.state is not SlotState.FREE and entry.tenant == tenant for entry in table.entries())
                found[status.st_ino] = sum(charged)
                table.close()
                os.close(descriptor)
    return list(found.values())


def descriptor_count(process: int) -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{process}/fd"))


def own_bytes(process: int) -> int:
    """Anonymous resident memory of a process."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _opened(process: int) -> list[tuple[str, os.stat_result]]:
    """(name, status) of what a process has open."""
    return [(name, status) for _, name, status in _numbered(process)]


def _numbered(process: int) -> list[tuple[str, str, os.stat_result]]:
    """(number, name, status) of what a process has open; nothing if it is gone or not ours to look at."""
    found: list[tuple[str, str, os.stat_result]] = []
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                link = f"/proc/{process}/fd/{number}"
                found.append((number, os.readlink(link), os.stat(link)))
    return found


def _counts(name: str, top: str, status: os.stat_result) -> bool:
    """Slabs and journals do, which lie in the folders of the directory; locks, socket and the keeper's words do not."""
    return stat.S_ISREG(status.st_mode) and "/" in name[len(top) + 1 :].split(" (deleted)")[0]


def _bytes(status: os.stat_result) -> int:
    return max(status.st_size, status.st_blocks * 512)
