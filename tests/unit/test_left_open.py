"""Whatever call fails while files and memory are being opened: no descriptor is left open, and no thread."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from engines import wait_for

from kvtier.cache_directory import CacheDirectory, layout_name
from kvtier.errors import KvtierError, ShelfError
from kvtier.eviction import LeastRecentlyUsed
from kvtier.io.base import KernelCalls
from kvtier.keeper.desk import Desk
from kvtier.keeper.offline import Offline
from kvtier.keeper.seat import Seat
from kvtier.keeper.slot_table import SlotTable
from kvtier.keeper.takeover import make_dram, open_nvme
from kvtier.keeper.wire import Welcome
from kvtier.layout_bytes import claimed_bytes
from kvtier.machine import disk_read_bytes_s
from kvtier.shelves import open_dram_shelf, open_nvme_shelf, row_format
from kvtier.terms import STANDARD
from kvtier.tiers.slab import find_nvme_slab, join_nvme_slab, make_dram_slab, nvme_identity, open_nvme_slab
from tests.rows import IO, LAYOUT, NAMESPACE, SLOT_BYTES
from tests.scarce import descriptors, threads

NAME = layout_name(LAYOUT)
NVME_BYTES = 8 * SLOT_BYTES + (1 << 20)
CALLS_MAX = 400
CALLS: list[tuple[Any, str]] = [(fcntl, "fcntl")]
CALLS += [(os, name) for name in ("open", "memfd_create", "fstat", "stat", "fstatvfs", "listdir", "mkdir", "pread")]
CALLS += [(os, name) for name in ("preadv", "pwritev", "ftruncate", "posix_fallocate", "fchmod", "set_blocking")]
CALLS += [(os, name) for name in ("fdatasync", "urandom")]


class Failing:
    """The nth of these calls by this thread raises an error; the others happen."""

    def __init__(self, nth: int, kind: type[BaseException]) -> None:
        self.count = 0
        self._nth = nth
        self._kind = kind
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """A call is made."""
        if threading.get_ident() == self._thread:
            self.count += 1
            if self.count == self._nth:
                raise self._kind(errno.EIO, "injected")

    def instead_of(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """What makes the call, unless it is the nth."""

        def make(*arguments: Any, **named: Any) -> Any:
            self.begin()
            return call(*arguments, **named)

        return make

    def mapping(self) -> type[mmap.mmap]:
        """What maps, unless that is the nth call."""
        failing = self

        class Mapping(mmap.mmap):
            def __new__(cls, *arguments: Any, **named: Any) -> Mapping:
                failing.begin()
                return super().__new__(cls, *arguments, **named)

            def madvise(self, *arguments: Any) -> None:
                failing.begin()
                super().madvise(*arguments)

        return Mapping


def slab_made(path: Path) -> None:
    with closing(CacheDirectory(path, 0.0)) as cache:
        slab, _ = open_nvme_slab(cache.folder(NAME), SLOT_BYTES, 8, KernelCalls())
        slab.close()


def slab_joined(path: Path) -> None:
    with closing(CacheDirectory(path, None)) as cache:
        folder = cache.folder(NAME)
        identity = nvme_identity(folder, SLOT_BYTES)
        assert identity is not None
        join_nvme_slab(folder, SLOT_BYTES, identity[1], identity[0]).close()


def slab_found(path: Path) -> None:
    with closing(CacheDirectory(path, None)) as cache:
        find_nvme_slab(cache.folder(NAME)).close()
        assert claimed_bytes(cache.top, NAME) > 0


def memory(_: Path) -> None:
    make_dram_slab(SLOT_BYTES, 4).close()
    table = SlotTable.make(4)
    table.close()
    os.close(table.descriptor)


def shelf_of_memory(_: Path) -> None:
    open_dram_shelf(LAYOUT, NAMESPACE, 8 * SLOT_BYTES, IO, lambda: None).close(10.0)


def shelf_of_nvme(path: Path) -> None:
    open_nvme_shelf(LAYOUT, NAMESPACE, path, NVME_BYTES, IO, lambda: None).close(10.0)


def books_of_memory(path: Path) -> None:
    with closing(CacheDirectory(path, None)) as cache:
        make_dram(row_format(LAYOUT, NAMESPACE), LeastRecentlyUsed, STANDARD, 8 * SLOT_BYTES).close(cache)


def books_of_nvme(path: Path) -> None:
    with closing(CacheDirectory(path, None)) as cache:
        form = row_format(LAYOUT, NAMESPACE)
        open_nvme(cache, NAME, form, LeastRecentlyUsed, STANDARD, NVME_BYTES, None, 0.0).close(cache)


def seat_taken(path: Path) -> None:
    form = row_format(LAYOUT, NAMESPACE)
    with ExitStack() as undo:
        cache = undo.enter_context(closing(CacheDirectory(path, None)))
        dram = make_dram(form, LeastRecentlyUsed, STANDARD, 8 * SLOT_BYTES)
        undo.callback(dram.close, cache)
        nvme = open_nvme(cache, NAME, form, LeastRecentlyUsed, STANDARD, NVME_BYTES, None, 0.0)
        undo.callback(nvme.close, cache)
        seat = Seat(CacheDirectory(path, None), NAME, form, (1, 1), "lru", (STANDARD, STANDARD))
        undo.callback(seat.close, False)
        slabs = [(tier, one.ledger.slab.epoch, one.ledger.slab.slot_count) for tier, one in ((0, dram), (1, nvme))]
        tables = [one.ledger.table.descriptor for one in (dram, nvme)]
        given = [os.dup(one) for one in (dram.ledger.slab.descriptor, *tables)]
        seat.take(Welcome(0, os.getpid(), slabs, [], ""), given)


def files_looked_at(path: Path) -> None:
    with closing(CacheDirectory(path, None)) as cache, closing(Offline(cache, [NAME], changing=False)):
        pass


def files_changed(path: Path) -> None:
    with Desk(path) as desk, desk.change(NAME):
        assert not desk.is_occupied() or desk.keeper is None


def disk_measured(path: Path) -> None:
    path.mkdir(exist_ok=True)
    disk_read_bytes_s(path, 4096, 2, 1)


OPENINGS = (
    slab_made,
    slab_joined,
    slab_found,
    memory,
    shelf_of_memory,
    shelf_of_nvme,
    books_of_memory,
    books_of_nvme,
    seat_taken,
    files_looked_at,
    files_changed,
    disk_measured,
)


@pytest.mark.parametrize("kind", [OSError, MemoryError])
@pytest.mark.parametrize("opening", OPENINGS)
def test_a_call_that_fails_leaves_nothing_open(
    opening: Callable[[Path], None], kind: type[BaseException], tmp_path: Path
) -> None:
    shelf_of_nvme(tmp_path / "cache")
    opening(tmp_path / "cache")  # what is kept for good is kept from here on
    gc.collect()
    before, ours = descriptors(), threads()
    for nth in range(1, CALLS_MAX):
        failing = Failing(nth, kind)
        with pytest.MonkeyPatch.context() as patch:
            for module, name in CALLS:
                patch.setattr(module, name, failing.instead_of(getattr(module, name)))
            patch.setattr(mmap, "mmap", failing.mapping())
            with suppress(kind, KvtierError):
                opening(tmp_path / "cache")
        if descriptors() != before:
            gc.collect()
        assert descriptors().items() <= before.items(), f"call {nth}"
        wait_for(lambda: threads() <= ours)
        if failing.count < nth:
            assert nth > 5
            return
    raise AssertionError("there are more calls than that")


def test_a_slab_that_is_replaced_while_it_is_opened_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab_made(tmp_path / "cache")
    before = descriptors()
    for alignment in (4096, 0):
        with monkeypatch.context() as patch:
            patch.setattr("kvtier.tiers.slab.direct_io_alignment", lambda _, alignment=alignment: alignment)
            patch.setattr(os.path, "samestat", lambda *_: False)
            with (
                pytest.raises(ShelfError, match="replaced while"),
                closing(CacheDirectory(tmp_path / "cache", None)) as cache,
            ):
                open_nvme_slab(cache.folder(NAME), SLOT_BYTES, 8, KernelCalls())
    assert descriptors().items() <= before.items()
