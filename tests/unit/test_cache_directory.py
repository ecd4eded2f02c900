"""The cache directory: private whatever was there, refused when it is not ours, locked for one engine at a time."""

from __future__ import annotations

import errno
import gc
import os
import signal
import stat
import threading
import time
from pathlib import Path

import pytest

from kvtier import cache_directory
from kvtier.block import KVLayout
from kvtier.cache_directory import LOCK_NAME, CacheDirectory, free_disk_bytes, layout_name
from kvtier.errors import ShelfError
from tests.own_time import own_time
from tests.rows import LAYOUT

OTHER_LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=16, block_tokens=16, dtype="float32")


def mode(path: Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def open_descriptors() -> set[int]:
    """Descriptors of this process, without the one that lists them."""
    listed = os.listdir("/proc/self/fd")
    return {int(name) for name in listed if os.path.exists(f"/proc/self/fd/{name}")}


@pytest.mark.parametrize("umask", [0, 0o777])
def test_all_that_is_made_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "a" / "b"
    before = os.umask(umask)
    try:
        cache = CacheDirectory(path, 0.0)
        cache.layout_folder(LAYOUT)
    finally:
        os.umask(before)
    assert mode(path) == mode(path.parent) == mode(path / layout_name(LAYOUT)) == 0o700
    assert mode(path / LOCK_NAME) == 0o600
    cache.close()


def test_a_second_engine_waits_and_then_gets_a_clear_error(tmp_path: Path) -> None:
    first = CacheDirectory(tmp_path / "cache", 0.0)
    started = time.monotonic()
    with own_time() as clock, pytest.raises(ShelfError, match=r"in use by another engine; waited 0\.2 s"):
        CacheDirectory(tmp_path / "cache", 0.2)
    assert time.monotonic() - started >= 0.2 and clock.seconds < 5
    first.close()
    CacheDirectory(tmp_path / "cache", 0.0).close()


def test_a_second_engine_gets_in_when_the_first_leaves_in_time(tmp_path: Path) -> None:
    first = CacheDirectory(tmp_path / "cache", 0.0)
    leaving = threading.Timer(0.1, first.close)
    leaving.start()
    CacheDirectory(tmp_path / "cache", 60.0).close()
    leaving.join()


def test_the_lock_ends_with_its_process_and_is_not_kept_by_a_forked_child(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        held = CacheDirectory(tmp_path / "cache", 0.0)
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        os.write(writer, child.to_bytes(4, "little"))
        time.sleep(600)
        held.close()
        os._exit(0)
    child = int.from_bytes(os.read(reader, 4), "little")
    try:
        with pytest.raises(ShelfError, match="in use"):
            CacheDirectory(tmp_path / "cache", 0.0)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        CacheDirectory(tmp_path / "cache", 60.0).close()
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


def test_descriptors_do_not_pass_to_programs_and_do_not_leak(tmp_path: Path) -> None:
    before = open_descriptors()
    cache = CacheDirectory(tmp_path / "cache", 0.0)
    cache.layout_folder(LAYOUT)
    held = open_descriptors() - before
    assert len(held) == 3 and not any(os.get_inheritable(descriptor) for descriptor in held)
    with pytest.raises(ShelfError):
        CacheDirectory(tmp_path / "cache", 0.0)
    cache.close()
    assert open_descriptors() <= before


def test_directories_that_are_gone_leave_nothing_behind_for_forks(tmp_path: Path) -> None:
    kept = CacheDirectory(tmp_path / "cache", None)
    gc.collect()
    known = len(cache_directory._OPENED)
    for _ in range(3):
        CacheDirectory(tmp_path / "cache", None).close()
    gc.collect()
    assert len(cache_directory._OPENED) == known > 0
    child = os.fork()
    if child == 0:
        os._exit(0 if kept._descriptors == [] else 1)
    assert os.waitpid(child, 0)[1] == 0 and kept._descriptors, "closed in the child alone"
    with kept.forking:
        kept.close()


def test_symlinks_are_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(real)
    with pytest.raises(ShelfError, match=r"tiers\.nvme\.path: .* \(a symlink is refused, too\); name a directory"):
        CacheDirectory(link, 0.0)
    (real / LOCK_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ShelfError):
        CacheDirectory(real, 0.0)
    assert not (tmp_path / "elsewhere").exists()
    (real / LOCK_NAME).unlink()
    cache = CacheDirectory(real, 0.0)
    (real / layout_name(LAYOUT)).symlink_to(tmp_path)
    with pytest.raises(ShelfError, match="layout folder"):
        cache.layout_folder(LAYOUT)
    cache.close()


def test_a_shared_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "file").write_text("of someone")
    os.chmod(shared, 0o755)
    with pytest.raises(ShelfError, match="mode 0755 and holds other files"):
        CacheDirectory(shared, 0.0)
    assert mode(shared) == 0o755 and os.listdir(shared) == ["file"]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    os.chmod(temporary, 0o1777)
    with pytest.raises(ShelfError, match="mode 1777"):
        CacheDirectory(temporary, 0.0)
    assert mode(temporary) == 0o1777


def test_an_empty_directory_and_an_own_one_become_private(tmp_path: Path) -> None:
    path = tmp_path / "mounted"
    path.mkdir()
    for _ in range(2):
        os.chmod(path, 0o755)
        CacheDirectory(path, 0.0).close()
        assert mode(path) == 0o700


def test_files_and_unwritable_places_are_clear_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/kvtier")):
        with pytest.raises(ShelfError, match=r"tiers\.nvme\.path: .*; name a directory"):
            CacheDirectory(path, 0.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a directory of someone else's")
def test_a_directory_of_someone_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(ShelfError, match="belongs to user 12345"):
        CacheDirectory(path, 0.0)


def test_layouts_have_folders_of_their_own_and_count_on_one_budget(tmp_path: Path) -> None:
    assert layout_name(LAYOUT) != layout_name(OTHER_LAYOUT)
    cache = CacheDirectory(tmp_path / "cache", 0.0)
    cache.layout_folder(LAYOUT)
    (tmp_path / "cache" / layout_name(LAYOUT) / "file").write_bytes(bytes(10_000))
    assert cache.other_bytes(LAYOUT) == 0
    assert 10_000 <= cache.other_bytes(OTHER_LAYOUT) <= 16_384
    cache.close()


def test_a_file_that_goes_while_bytes_are_counted_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CacheDirectory(tmp_path / "cache", None)
    folder = cache.layout_folder(OTHER_LAYOUT)
    with open(os.open("journal", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=folder), "wb") as file:
        file.write(bytes(10_000))
    monkeypatch.setattr(os, "listdir", lambda place, listed=os.listdir: [*listed(place), "journal.new"])
    assert 10_000 <= cache.other_bytes(LAYOUT) <= 16_384
    assert free_disk_bytes(tmp_path / "cache") > free_disk_bytes(tmp_path)
    cache.close()


def test_free_bytes_count_what_the_directory_has_already(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    bare = free_disk_bytes(path / "not" / "there")
    assert bare > 0
    cache = CacheDirectory(path, 0.0)
    cache.layout_folder(LAYOUT)
    with open(path / layout_name(LAYOUT) / "file", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 64 << 20)
    disk = os.statvfs(path)
    assert free_disk_bytes(path) - disk.f_bavail * disk.f_frsize >= (64 << 20) - (16 << 20)
    cache.close()


def test_a_directory_whose_disk_fails_while_it_is_opened_leaves_no_descriptor_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CacheDirectory(tmp_path / "cache", 0.0).close()
    inner, calls = os.fchmod, list[int]()

    def failing(descriptor: int, mode: int) -> None:
        calls.append(descriptor)
        if len(calls) == fail_at:
            raise OSError(errno.EIO, "the disk is ill")
        inner(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", failing)
    for fail_at in (1, 2):
        calls.clear()
        before = os.listdir("/proc/self/fd")
        with pytest.raises(
            ShelfError, match=r"tiers\.nvme\.path: .* cannot be used: the disk is ill; name a directory"
        ):
            CacheDirectory(tmp_path / "cache", 0.0)
        assert len(calls) == fail_at and os.listdir("/proc/self/fd") == before
