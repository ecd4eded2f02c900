"""Free memory as this machine and its cgroup tell it, and the pages and arenas made from it."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.tiers.memory import AlignedPages, address_of, check_memory, free_memory_bytes, populate

MIB = 1 << 20


def machine(root: Path, available_kib: int, cgroup: str, files: dict[str, str]) -> Path:
    """A root folder with a /proc and a cgroup tree."""
    for name, text in {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:  {available_kib} kB\n",
        "proc/self/cgroup": cgroup,
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    root = machine(tmp_path, 2048, "0::/\n", {"sys/fs/cgroup/memory.max": "max\n"})
    assert free_memory_bytes(root) == 2 * MIB


@pytest.mark.parametrize("where", ["a/b", "a", ""])
def test_the_tightest_cgroup_v2_above_the_process_counts(tmp_path: Path, where: str) -> None:
    folder = f"sys/fs/cgroup/{where}".rstrip("/")
    files = {
        f"{folder}/memory.max": f"{10 * MIB}\n",
        f"{folder}/memory.current": f"{8 * MIB}\n",
        f"{folder}/memory.stat": f"anon 5\nactive_file {1 * MIB}\ninactive_file {2 * MIB}\n",
    }
    root = machine(tmp_path, 1 << 20, "0::/a/b\n", files)
    assert free_memory_bytes(root) == 5 * MIB, "limit - used + page cache"


def test_cgroup_v1_counts_too(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": f"{3 * MIB}\n",
        "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": f"{4 * MIB}\n",
    }
    root = machine(tmp_path, 1 << 20, "5:cpu,cpuacct:/y\n4:memory:/docker/x\n", files)
    assert free_memory_bytes(root) == 0


def test_what_does_not_fit_names_key_asked_and_free(tmp_path: Path) -> None:
    root = machine(tmp_path, 2048, "0::/\n", {})
    check_memory("tiers.dram.bytes", 2 * MIB, root)
    with pytest.raises(
        ConfigError, match=r"tiers\.dram\.bytes: 3\.0 MiB of memory asked, 2\.0 MiB are free .* lower tiers\.dram"
    ):
        check_memory("tiers.dram.bytes", 3 * MIB, root)


def test_this_machine_has_memory() -> None:
    assert MIB < free_memory_bytes() < 1 << 50


def test_populating_keeps_what_was_written() -> None:
    mapping = mmap.mmap(-1, 8 * 4096)
    mapping[5000] = 7
    populate(mapping)
    assert mapping[5000] == 7 and address_of(mapping) % 4096 == 0


def test_pages_are_distinct_and_reused() -> None:
    pages = AlignedPages(3)
    taken = [pages.take() for _ in range(3)]
    for number, page in enumerate(taken):
        page[:] = bytes([number]) * 4096
    assert [page[0] for page in taken] == [0, 1, 2] and len(pages) == 0
    pages.give(taken[1])
    assert pages.take() is taken[1]
