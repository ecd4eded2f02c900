"""What a layout's folder counts for: its files, and the journal at full length as long as books can be opened on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache_directory import CacheDirectory, layout_name
from kvtier.journal import SPARE_NAME
from kvtier.layout_bytes import claimed_bytes, taken_bytes
from kvtier.replay import JOURNAL_NAME, JournalShape
from kvtier.tiers.header import SLICES_MAX
from kvtier.tiers.slab import SLAB_NAME
from tests.rows import LAYOUT, block_hashes, nvme_user

NAME = layout_name(LAYOUT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a layout that was opened once, with few blocks in it."""
    user = nvme_user(tmp_path / "cache", 2 << 20)
    user.write(block_hashes(3))
    user.shelf.close(60.0)
    return tmp_path / "cache" / NAME


@pytest.fixture
def top(folder: Path) -> Iterator[int]:
    cache = CacheDirectory(folder.parent, None)
    yield cache.top
    cache.close()


def slot_count(folder: Path) -> int:
    return int(os.stat(folder / SLAB_NAME).st_size - 4096) // (4096 + LAYOUT.row_bytes)


def most_bytes(folder: Path, slice_count: int = LAYOUT.layers) -> int:
    """Of a journal."""
    return JournalShape(b"", slot_count(folder), slice_count).total_bytes_max


def test_a_young_journal_counts_at_full_length(folder: Path, top: int) -> None:
    slab_bytes = os.stat(folder / SLAB_NAME).st_size
    assert os.stat(folder / JOURNAL_NAME).st_size < 2000 < most_bytes(folder)
    assert claimed_bytes(top, NAME) == slab_bytes + most_bytes(folder) <= 2 << 20
    assert slab_bytes < taken_bytes(top, NAME) < slab_bytes + 8192 < claimed_bytes(top, NAME)


def test_a_journal_that_is_to_come_counts_too(folder: Path, top: int) -> None:
    os.unlink(folder / JOURNAL_NAME)
    slices_max = LAYOUT.row_bytes // 4096
    assert 0 < LAYOUT.layers <= slices_max <= SLICES_MAX
    assert claimed_bytes(top, NAME) == os.stat(folder / SLAB_NAME).st_size + most_bytes(folder, slices_max)


def test_a_journal_that_is_longer_counts_as_it_is_with_its_rewrite(folder: Path, top: int) -> None:
    (folder / JOURNAL_NAME).write_bytes(bytes(most_bytes(folder) // 4096 * 4096))
    (folder / SPARE_NAME).write_bytes(bytes(64 << 10))
    assert claimed_bytes(top, NAME) == taken_bytes(top, NAME)


@pytest.mark.parametrize("spoil", ["gone", "damaged", "cut"])
def test_without_a_slab_to_open_books_on_there_is_only_what_is_there(folder: Path, top: int, spoil: str) -> None:
    slab = folder / SLAB_NAME
    if spoil == "gone":
        slab.unlink()
    elif spoil == "damaged":
        with slab.open("r+b") as file:
            file.write(bytes(64))
    else:
        os.truncate(slab, os.stat(slab).st_size - 4096)
    assert claimed_bytes(top, NAME) == taken_bytes(top, NAME)


def test_what_is_no_folder_counts_nothing(folder: Path, top: int) -> None:
    (folder.parent / "link").symlink_to(folder)
    os.mkfifo(folder.parent / "pipe")
    for name in ("link", "pipe", "keeper.lock", "absent"):
        assert taken_bytes(top, name) == claimed_bytes(top, name) == 0
