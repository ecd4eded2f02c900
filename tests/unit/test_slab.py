"""Slabs: allocated whole, private, resized in place, remade when foreign, and clean after a failed allocation."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, ShelfError
from kvtier.io.base import KernelCalls
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.io.files import open_private
from kvtier.tiers.header import HEADER_BYTES
from kvtier.tiers.slab import SLAB_NAME, direct_io_alignment, make_dram_slab, open_nvme_slab
from kvtier.tiers.superblock import SUPERBLOCK_BYTES

SLOT_BYTES = HEADER_BYTES + 8192


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def opened(folder: int, slot_count: int, slot_bytes: int = SLOT_BYTES) -> tuple[bytes, bool]:
    """Open and close; (epoch, fresh)."""
    slab, fresh = open_nvme_slab(folder, slot_bytes, slot_count, KernelCalls())
    slab.close()
    return slab.epoch, fresh


def mark(tmp_path: Path, slab_slot: int) -> None:
    """Write something into a slot, past the superblock."""
    with open(tmp_path / SLAB_NAME, "r+b") as file:
        file.seek(SUPERBLOCK_BYTES + slab_slot * SLOT_BYTES)
        file.write(b"mark")


def marked(tmp_path: Path, slab_slot: int) -> bool:
    data = (tmp_path / SLAB_NAME).read_bytes()
    return data[SUPERBLOCK_BYTES + slab_slot * SLOT_BYTES :][:4] == b"mark"


def test_a_dram_slab_shows_its_rows_in_place() -> None:
    slab = make_dram_slab(SLOT_BYTES, 4)
    os.pwrite(slab.descriptor, b"head" + bytes(HEADER_BYTES - 4) + b"row", slab.offset(2))
    view = slab.view(2)
    assert bytes(view[:3]) == b"row" and view.nbytes == 8192 and bytes(slab.view(1)) == bytes(8192)
    view[:4] = b"back"
    assert os.pread(slab.descriptor, 4, slab.offset(2) + HEADER_BYTES) == b"back"
    assert os.fstat(slab.descriptor).st_blocks * 512 >= slab.total_bytes == 4 * SLOT_BYTES
    assert not os.get_inheritable(slab.descriptor)
    slab.close()
    assert bytes(view[:4]) == b"back", "the mapping lives as long as its last view"


def test_dram_that_is_not_there_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"tiers\.dram\.bytes"):
        make_dram_slab(SLOT_BYTES, 1 << 40)


def test_an_nvme_slab_is_private_and_fully_allocated_whatever_the_umask(folder: int, tmp_path: Path) -> None:
    for umask in (0, 0o777):
        before = os.umask(umask)
        try:
            slab, fresh = open_nvme_slab(folder, SLOT_BYTES, 7, KernelCalls())
        finally:
            os.umask(before)
        status = os.stat(tmp_path / SLAB_NAME)
        assert fresh and stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size == slab.total_bytes == SUPERBLOCK_BYTES + 7 * SLOT_BYTES
        assert status.st_blocks * 512 >= slab.total_bytes and not os.get_inheritable(slab.descriptor)
        slab.close()
        os.unlink(tmp_path / SLAB_NAME)


def test_rows_and_epoch_stay_when_it_is_opened_again(folder: int, tmp_path: Path) -> None:
    epoch, fresh = opened(folder, 5)
    mark(tmp_path, 3)
    assert fresh and opened(folder, 5) == (epoch, False) and marked(tmp_path, 3)


def test_growing_and_shrinking_keep_the_rows_that_fit(
    folder: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    epoch, _ = opened(folder, 5)
    mark(tmp_path, 1)
    mark(tmp_path, 4)
    assert opened(folder, 9) == (epoch, False) and marked(tmp_path, 1) and marked(tmp_path, 4)
    assert os.stat(tmp_path / SLAB_NAME).st_blocks * 512 >= 9 * SLOT_BYTES
    assert opened(folder, 2) == (epoch, False) and marked(tmp_path, 1)
    assert os.stat(tmp_path / SLAB_NAME).st_size == SUPERBLOCK_BYTES + 2 * SLOT_BYTES
    assert opened(folder, 5) == (epoch, False) and not marked(tmp_path, 4)
    assert "resized from 5 to 9 slots" in caplog.text and "resized from 9 to 2 slots" in caplog.text


def test_a_slab_that_was_truncated_underneath_is_whole_again(folder: int, tmp_path: Path) -> None:
    epoch, _ = opened(folder, 5)
    mark(tmp_path, 0)
    os.truncate(tmp_path / SLAB_NAME, SUPERBLOCK_BYTES + SLOT_BYTES)
    assert opened(folder, 5) == (epoch, False) and marked(tmp_path, 0)
    assert os.stat(tmp_path / SLAB_NAME).st_blocks * 512 >= 5 * SLOT_BYTES


@pytest.mark.parametrize("damage", ["superblock", "geometry", "noise"])
def test_a_foreign_or_damaged_slab_is_made_anew_with_one_line(
    folder: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    epoch, _ = opened(folder, 5)
    mark(tmp_path, 2)
    if damage == "superblock":
        with open(tmp_path / SLAB_NAME, "r+b") as file:
            file.seek(20)
            file.write(b"\xff")
    elif damage == "noise":
        (tmp_path / SLAB_NAME).write_bytes(b"something else entirely" * 1000)
    slot_bytes = 2 * SLOT_BYTES if damage == "geometry" else SLOT_BYTES
    again, fresh = opened(folder, 5, slot_bytes)
    assert fresh and again != epoch and not marked(tmp_path, 2)
    assert len([record for record in caplog.records if "made anew" in record.message]) == 1


def test_a_failed_allocation_leaves_nothing_behind(folder: int, tmp_path: Path) -> None:
    class HalfAllocated(KernelCalls):
        """ext4 keeps what it got before it ran out."""

        def fallocate(self, descriptor: int, offset: int, length: int) -> None:
            os.posix_fallocate(descriptor, offset, length // 2)
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ShelfError, match=r"tiers\.nvme\.bytes: .* more on its disk.* are free .*No space"):
        open_nvme_slab(folder, SLOT_BYTES, 50, HalfAllocated())
    assert os.listdir(tmp_path) == []
    epoch, _ = opened(folder, 5)
    mark(tmp_path, 4)
    size = os.stat(tmp_path / SLAB_NAME).st_size
    with pytest.raises(ShelfError):
        open_nvme_slab(folder, SLOT_BYTES, 50, HalfAllocated())
    assert os.stat(tmp_path / SLAB_NAME).st_size == size
    assert opened(folder, 5) == (epoch, False) and marked(tmp_path, 4)


def test_more_than_the_disk_has_is_refused_before_it_is_tried(folder: int, tmp_path: Path) -> None:
    calls = FaultyCalls()
    with pytest.raises(ShelfError, match=r"tiers\.nvme\.bytes: the slab needs"):
        open_nvme_slab(folder, SLOT_BYTES, 1 << 40, calls)
    assert calls.count(Call.ALLOCATE) == 0 and os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", [Call.ALLOCATE, Call.WRITE, Call.SYNC])
def test_errors_while_opening_are_shelf_errors_and_leak_no_descriptor(folder: int, call: Call) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ShelfError):
            open_nvme_slab(folder, SLOT_BYTES, 5, FaultyCalls([Fault(call, 1, Effect.ERROR, errno.EIO)]))
    assert len(os.listdir("/proc/self/fd")) == before


def test_links_and_directories_are_refused(folder: int, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for make in (os.symlink, os.link):
        make(victim, tmp_path / SLAB_NAME)
        with pytest.raises(ShelfError):
            opened(folder, 5)
        os.unlink(tmp_path / SLAB_NAME)
    os.mkdir(tmp_path / SLAB_NAME)
    with pytest.raises(ShelfError):
        opened(folder, 5)
    assert victim.read_text() == "mine"


def test_where_direct_io_is_refused_it_is_buffered_with_one_line(
    folder: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse)
    caplog.set_level(logging.WARNING)
    slab, _ = open_nvme_slab(folder, SLOT_BYTES, 5, KernelCalls())
    os.pwrite(slab.descriptor, b"unaligned", 4097)
    assert not slab.direct and os.pread(slab.descriptor, 9, 4097) == b"unaligned"
    slab.close()
    assert [record.message for record in caplog.records if "buffered" in record.message] == [
        "NVMe slab uses buffered I/O, not direct I/O: Invalid argument"
    ]


def test_direct_io_is_what_the_kernel_says(folder: int) -> None:
    slab, _ = open_nvme_slab(folder, SLOT_BYTES, 5, KernelCalls())
    alignment = direct_io_alignment(slab.descriptor)
    assert alignment is None or alignment & (alignment - 1) == 0
    assert slab.direct or alignment in (None, 0)
    slab.close()


def test_a_slab_with_writes_of_a_dead_engine_under_way_is_left_alone(folder: int, tmp_path: Path) -> None:
    epoch, _ = opened(folder, 5)
    held, _ = open_nvme_slab(folder, SLOT_BYTES, 5, KernelCalls())
    for slot_count in (5, 9):
        with pytest.raises(ShelfError, match="still under way"):
            opened(folder, slot_count)
    assert os.stat(tmp_path / SLAB_NAME).st_size == held.total_bytes
    held.close()
    assert opened(folder, 5) == (epoch, False)


def test_a_slab_is_whole_until_it_is_cut_short(folder: int, tmp_path: Path) -> None:
    slab, _ = open_nvme_slab(folder, SLOT_BYTES, 5, KernelCalls())
    assert slab.is_whole()
    os.truncate(tmp_path / SLAB_NAME, slab.total_bytes - 1)
    assert not slab.is_whole()
    slab.close()


def test_a_moment_without_descriptors_is_no_reason_to_do_without_direct_io(
    folder: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def scarce(name: str, flags: int, folder: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_private(name, flags, folder)

    monkeypatch.setattr("kvtier.tiers.slab.open_private", scarce)
    with pytest.raises(ShelfError, match=os.strerror(errno.EMFILE)):
        open_nvme_slab(folder, SLOT_BYTES, 5, KernelCalls())
    assert "buffered" not in caplog.text
