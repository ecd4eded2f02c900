"""Errors that mean a process has no descriptors or threads left, and engines that are made in such a process."""

from __future__ import annotations

import errno
import gc
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest
from engines import GREEDY, PROMPTS, end_keepers, keepers, opened, wait_for
from tiny import make_checkpoint

from kvtier.cache_directory import CacheDirectory, layout_name
from kvtier.errors import ConfigError, KvtierError, ShelfError
from kvtier.eviction import LeastRecentlyUsed
from kvtier.keeper.connection import Connection
from kvtier.keeper.frames import WireError, frame
from kvtier.keeper.opening import SharedShelves
from kvtier.keeper.server import Server
from kvtier.keeper.spawn import connect, hang_up, knock
from kvtier.keeper.takeover import open_nvme
from kvtier.keeper.wire import Stop
from kvtier.outbox import Outbox
from kvtier.process_limits import (
    raise_descriptor_limit,
    shortage_as_config_error,
    what_is_short,
    why_no_ring,
    why_not_registered,
)
from kvtier.shelves import row_format
from kvtier.terms import STANDARD
from tests.rows import IO, LAYOUT, NAMESPACE, NVME_BYTES
from tests.scarce import NO_THREAD, descriptors, descriptors_left, threads, threads_left

PLENTY = 40
"""Descriptors, or threads, with which an engine has all that it wants."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", tokenizer=True)


def test_an_error_that_means_a_limit_names_it_and_the_way_out_however_it_comes() -> None:
    files = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "journal")
    limit = f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,}"
    assert limit in what_is_short(files) and "ulimit -n" in what_is_short(files)
    assert what_is_short(Exception("Too many open files (os error 24)")) == what_is_short(files)
    assert "fs.file-max" in what_is_short(OSError(errno.ENFILE, "x"))
    assert "ulimit -u" in what_is_short(RuntimeError(NO_THREAD))
    assert what_is_short(OSError(errno.ENOENT, "x")) == what_is_short(RuntimeError("x")) == what_is_short(None) == ""
    with pytest.raises(ShelfError) as raised:
        _wrapped(files)
    assert what_is_short(raised.value) == what_is_short(files)


def _wrapped(error: OSError) -> None:
    try:
        raise error
    except OSError:
        raise ShelfError("the cache directory cannot be used") from None


def test_memory_that_io_uring_may_not_lock_names_the_limit_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    no_memory, forbidden = (OSError(number, os.strerror(number)) for number in (errno.ENOMEM, errno.EPERM))
    for limit, way_out in ((1 << 16, ", a process may lock 64.0 KiB here; raise `ulimit -l`"), (-1, "")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        texts = why_no_ring(no_memory), why_not_registered(errno.ENOMEM)
        for text in texts:
            assert f"Cannot allocate memory{way_out}" in text and ("ulimit" in text) == bool(way_out)
        assert why_no_ring(forbidden) == "Operation not permitted"
        assert "Linux 5.19" in why_not_registered(errno.EINVAL)


def test_only_a_shortage_becomes_a_config_error() -> None:
    with pytest.raises(ConfigError, match="ulimit -u"), shortage_as_config_error():
        raise RuntimeError(NO_THREAD)
    with pytest.raises(ZeroDivisionError), shortage_as_config_error():
        _ = 1 // 0


def test_a_process_gives_itself_all_descriptors_that_it_may_have() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_senders_that_were_started_end_if_another_cannot_be() -> None:
    before = threads()
    with threads_left(2), pytest.raises(RuntimeError, match=NO_THREAD):
        Outbox(4)
    wait_for(lambda: threads() <= before)


def test_kernels_for_which_there_are_no_threads_are_refused_and_nobody_waits() -> None:
    """In a process of its own, whose address space holds the stacks of a few threads more."""
    program = """
import resource
from pathlib import Path
from kvtier.attention.native import NativeAttention
from kvtier.errors import ConfigError
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
used_bytes = int(status["VmSize"].split()[0]) << 10
resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (45 << 20), resource.RLIM_INFINITY))
for _ in range(20):
    try:
        NativeAttention(64)
    except ConfigError as error:
        print(error)
"""
    pytest.importorskip("kvtier._native")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert ended.stdout.count("threads: 64 cannot be started") == 20, ended


@pytest.mark.parametrize("scarce", [descriptors_left, threads_left])
def test_an_engine_is_refused_by_name_or_serves_without_a_tier_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, scarce: object
) -> None:
    assert callable(scarce)
    _make(checkpoint, tmp_path / "before", scarce(PLENTY))
    gc.collect()
    before, ours = descriptors(), threads()
    refused = lacking = 0
    for count in range(18):
        caplog.clear()
        said = _make(checkpoint, tmp_path / f"cache{count}", scarce(count))
        gc.collect()
        wait_for(lambda: (descriptors(), threads()) == (before, ours))
        refused += isinstance(said, ConfigError)
        lacking += any("ulimit" in record.getMessage() for record in caplog.records)
        assert said is None or "ulimit" in str(said), (count, said)
    assert refused > 2 and lacking > 2
    assert _make(checkpoint, tmp_path / "after", scarce(PLENTY)) is None


def _make(checkpoint: Path, cache: Path, scarce: AbstractContextManager[None]) -> KvtierError | None:
    """Make an engine and let it serve; why there was none."""
    scarce.__enter__()
    try:
        options: dict[str, object] = {"tiers__nvme__bytes": "4MiB", "tiers__nvme__path": cache, "sharing": False}
        with opened(checkpoint, tiers__dram__staging_bytes="64KiB", **options) as engine:
            scarce.__exit__(None, None, None)
            assert len(engine.generate(PROMPTS[:1], GREEDY)) == 1
        return None
    except KvtierError as error:
        scarce.__exit__(None, None, None)
        return error


def _shared(cache: Path) -> SharedShelves:
    return SharedShelves(LAYOUT, NAMESPACE, cache, (1 << 20, 1 << 20), IO, lambda: None, 0.0, "lru")


@pytest.mark.parametrize("scarce", [descriptors_left(1), threads_left(0)])
def test_a_line_that_cannot_be_made_leaves_no_descriptor(tmp_path: Path, scarce: AbstractContextManager[None]) -> None:
    before = descriptors()
    with scarce, pytest.raises((OSError, RuntimeError)) as raised:
        _shared(tmp_path / "cache")
    assert what_is_short(raised.value)
    assert descriptors().items() <= before.items()


def test_starting_a_keeper_without_descriptors_leaves_none_behind(tmp_path: Path) -> None:
    cache = CacheDirectory(tmp_path / "cache", None)
    before, met = descriptors(), 0
    for count in range(8):
        with descriptors_left(count), suppress(OSError, ShelfError):
            link = connect(cache, time.monotonic() + 0.5, 0.0, lambda: False)
            met += link is not None
            if link is not None:
                hang_up(cache, link)
        assert descriptors().items() <= before.items(), count
    end_keepers(tmp_path / "cache")
    cache.close()


def test_a_line_says_once_that_descriptors_are_lacking_and_comes_when_there_are_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.keeper.client.RETRY_S", 0.05)
    shared = _shared(tmp_path / "cache")
    try:
        wait_for(lambda: shared.try_open())
        with caplog.at_level(logging.WARNING):
            (keeper,) = keepers(tmp_path / "cache")
            with descriptors_left(0):
                os.kill(keeper, signal.SIGKILL)
                wait_for(lambda: shared.link.client.refusal.startswith(os.strerror(errno.EMFILE)))
                threading.Event().wait(0.5)
        assert sum("ulimit -n" in record.getMessage() for record in caplog.records) == 1, caplog.text
        wait_for(lambda: shared.try_open())
    finally:
        shared.close()
        end_keepers(tmp_path / "cache")


def test_books_that_lack_a_thread_leave_no_descriptor(tmp_path: Path) -> None:
    cache = CacheDirectory(tmp_path / "cache", 0.0)
    before, form = descriptors(), row_format(LAYOUT, NAMESPACE)
    with threads_left(0), pytest.raises(RuntimeError, match=NO_THREAD):
        open_nvme(cache, layout_name(LAYOUT), form, LeastRecentlyUsed, STANDARD, NVME_BYTES, None, 0.0)
    assert descriptors().items() <= before.items()
    cache.close()


def test_books_that_fail_at_last_leave_no_journal_to_write_into_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("kvtier.keeper.takeover.is_locked", refuse)
    cache = CacheDirectory(tmp_path / "cache", 0.0)
    before, ours, form = descriptors(), threads(), row_format(LAYOUT, NAMESPACE)
    with pytest.raises(OSError, match=os.strerror(errno.ENOLCK)):
        open_nvme(cache, layout_name(LAYOUT), form, LeastRecentlyUsed, STANDARD, NVME_BYTES, None, 0.0)
    assert (descriptors(), threads()) == (before, ours)
    cache.close()


def test_a_keeper_without_descriptors_says_so_once_and_keeps_nobody_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = CacheDirectory(tmp_path / "cache", 0.0)
    server = Server(cache, 600.0)
    try:
        link = knock(cache.top)
        assert link is not None
        for _ in range(3):
            with descriptors_left(0):
                server._accept()
            assert server._socket.fileno() not in server._selector.get_map(), "it would be told so again at once"
            server._accept_again()
        assert sum("ulimit -n" in record.getMessage() for record in caplog.records) == 1
        server._accept()
        assert len(server._house.connections) == 1
        assert server._socket.fileno() in server._selector.get_map()
        link.close()
    finally:
        server._leave()
        cache.close()


def test_a_greeting_whose_descriptors_do_not_all_come_is_no_greeting() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(theirs, 0.0)
    with open(os.devnull) as null:
        socket.send_fds(ours, [frame(Stop(1))], [null.fileno()] * 3)
    before = descriptors()
    with descriptors_left(1), pytest.raises(WireError, match="room"):
        connection.receive()
    assert descriptors().items() <= before.items()
    connection.close()
    ours.close()
