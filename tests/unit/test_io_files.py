"""Files of a cache directory: opened if they are plain and our own, refused by name if not, and never waited for."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.cache_directory import LOCK_NAME, CacheDirectory
from kvtier.digest_memory import MEMORY_NAME, SPARE_NAME, DigestFile
from kvtier.errors import ShelfError
from kvtier.io.base import KernelCalls
from kvtier.io.files import open_private
from kvtier.keeper.owners import OWNERS_NAME, open_owners
from kvtier.keeper.spawn import LOG_NAME, _open_log
from kvtier.replay import JOURNAL_NAME, JournalShape, ReplayState, journal_slices, replay
from kvtier.tiers.slab import SLAB_NAME, find_nvme_slab, join_nvme_slab, nvme_identity, open_nvme_slab
from tests.strange import KINDS, ends, put

NAME = "file"
SLOT_BYTES = 3 * 4096
FLAGS = {"read": os.O_RDONLY, "append": os.O_WRONLY | os.O_CREAT | os.O_APPEND, "change": os.O_RDWR | os.O_CREAT}
REFUSAL = r"in the cache directory is no plain file of this user's own; remove it"


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheDirectory]:
    directory = CacheDirectory(tmp_path / "cache", None)
    yield directory
    directory.close()


def put_again(cache: CacheDirectory, name: str, kind: str) -> None:
    """In the place of whatever has this name."""
    place = cache.path / name
    if place.is_symlink() or place.exists():
        place.rmdir() if place.is_dir() else place.unlink()
    (place.parent / "elsewhere").unlink(missing_ok=True)
    put(place, kind)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_plain_file_of_ours_is_refused_by_name(cache: CacheDirectory, kind: str, flags: int) -> None:
    put(cache.path / NAME, kind)
    before = os.listdir("/proc/self/fd"), sorted(os.listdir(cache.path))
    with pytest.raises(ShelfError, match=rf"^file {REFUSAL}"):
        ends(lambda: open_private(NAME, flags, cache.top))
    assert (os.listdir("/proc/self/fd"), sorted(os.listdir(cache.path))) == before, "left open, or made"


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_put_there_in_the_very_moment_is_refused_too(
    cache: CacheDirectory, kind: str, flags: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache.path / NAME, kind)
    before = os.listdir("/proc/self/fd")

    def not_there_yet(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(os, "stat", not_there_yet)
    with pytest.raises((ShelfError, OSError)):
        ends(lambda: open_private(NAME, flags, cache.top))
    assert os.listdir("/proc/self/fd") == before
    monkeypatch.undo()
    assert not (cache.path / "elsewhere").exists() or (cache.path / "elsewhere").read_bytes() == b"of somebody else"


def test_a_pipe_that_somebody_writes_to_is_refused_and_not_read(cache: CacheDirectory) -> None:
    put(cache.path / NAME, "pipe")
    writer = os.open(cache.path / NAME, os.O_RDWR)
    os.write(writer, b"kvtj")
    for flags in FLAGS.values():
        with pytest.raises(ShelfError, match=REFUSAL):
            ends(lambda flags=flags: open_private(NAME, flags, cache.top))  # type: ignore[misc]
    assert os.read(writer, 9) == b"kvtj"
    os.close(writer)


def test_a_plain_file_is_made_private_and_is_waited_for_by_whoever_reads_it(cache: CacheDirectory) -> None:
    with pytest.raises(FileNotFoundError):
        open_private(NAME, os.O_RDONLY, cache.top)
    before = os.umask(0o777)
    try:
        made = open_private(NAME, os.O_RDWR | os.O_CREAT, cache.top)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.fstat(made).st_mode) == 0o600
    assert os.get_blocking(made) and not os.get_inheritable(made)
    os.close(made)


def refusal_of(work: Callable[[], object]) -> str:
    with pytest.raises(ShelfError) as caught:
        ends(work)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_of_a_cache_directory_is_opened_like_that(cache: CacheDirectory, kind: str) -> None:
    put_again(cache, LOCK_NAME, kind)
    assert refusal_of(cache.open_lock).startswith(LOCK_NAME)
    assert LOCK_NAME in refusal_of(lambda: CacheDirectory(cache.path, 0.0))
    put_again(cache, OWNERS_NAME, kind)
    assert refusal_of(lambda: open_owners(cache.top)).startswith(OWNERS_NAME)
    put_again(cache, LOG_NAME, kind)
    assert refusal_of(lambda: _open_log(cache)).startswith(LOG_NAME)
    put_again(cache, SLAB_NAME, kind)
    for slab_work in (
        lambda: open_nvme_slab(cache.top, SLOT_BYTES, 3, KernelCalls()),
        lambda: find_nvme_slab(cache.top),
        lambda: join_nvme_slab(cache.top, SLOT_BYTES, 3, bytes(16)),
        lambda: nvme_identity(cache.top, SLOT_BYTES),
    ):
        assert refusal_of(slab_work).startswith(SLAB_NAME)


@pytest.mark.parametrize("kind", KINDS)
def test_a_journal_that_is_none_counts_as_damaged_and_says_so(
    cache: CacheDirectory, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(cache.path / JOURNAL_NAME, kind)
    assert ends(lambda: replay(cache.top, JournalShape(bytes(16), 3, 2))).state is ReplayState.DAMAGED
    assert f"{JOURNAL_NAME} in the cache directory is no plain file" in caplog.text
    assert ends(lambda: journal_slices(cache.top)) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_digests_that_are_no_file_are_no_memory(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    CacheDirectory(tmp_path / "cache", None).close()
    memory = DigestFile(tmp_path / "cache", lambda: 10**11)
    for name in (SPARE_NAME, MEMORY_NAME):
        put(tmp_path / "cache" / name, kind)
        caplog.clear()
        ends(lambda: memory.remember(bytes(32), bytes(32), 0))
        assert f"{name} in the cache directory is no plain file" in caplog.text
        assert ends(lambda: memory.recall(bytes(32))) is None
        (tmp_path / "cache" / "elsewhere").unlink(missing_ok=True)
        if name == SPARE_NAME:
            place = tmp_path / "cache" / SPARE_NAME
            place.rmdir() if kind == "folder" else place.unlink()
