"""A cache directory as an operator works on it: through its keeper, or without one on its files.

The same verbs for both. Looking disturbs nobody; changing goes through the keeper, or takes the directory's lock for
that moment. Refuses what is no cache directory of this user, with the reason. Called by the command line.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from kvtier.block import BlockHash
from kvtier.cache_directory import LOCK_NAME, CacheDirectory
from kvtier.errors import ShelfError
from kvtier.io.files import lock_exclusively
from kvtier.keeper.fields import OWNERS_MAX, as_claims, pieces
from kvtier.keeper.offline import Offline, layout_names
from kvtier.keeper.operator_line import ANSWER_S, Line, OperatorLine, call_keeper
from kvtier.keeper.operator_wire import (
    ANSWER_DECODER,
    CHANGES_MAX,
    Answer,
    Borrow,
    Counted,
    Hide,
    LayoutView,
    Lent,
    ListRows,
    ListTenants,
    Overview,
    Pin,
    Question,
    RowPage,
    Survey,
    TenantPage,
    Unpin,
)
from kvtier.keeper.owners import is_locked, open_owners
from kvtier.keeper.spawn import knock
from kvtier.keeper.wire import NVME
from kvtier.record import Grant, Record
from kvtier.tiers.header import HEADER_BYTES
from kvtier.tiers.slab import Slab, join_nvme_slab

LOCK_WAIT_S = 0.5
"""How long a change waits for another process that has the directory for a moment."""
Ask = Callable[[Question], Answer]
Kind = TypeVar("Kind")


class Change:
    """What may be done while a cache directory is open to change. Made by `Desk.change`."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def hide(self, layout: str, tier: int, records: Iterable[Record]) -> int:
        """Drop those rows that are still there; how many were."""
        claims = pieces(((record.slot, record.generation) for record in records), CHANGES_MAX)
        return self._count(Hide(layout, tier, as_claims(piece)) for piece in claims).done

    def pin(self, layout: str, tier: int, hashes: Iterable[BlockHash]) -> Counted:
        """Never evict these blocks, as far as the budget for pins goes. Counts those that were not pinned before."""
        return self._count(Pin(layout, tier, piece) for piece in pieces(hashes, CHANGES_MAX))

    def unpin(self, layout: str, tier: int, hashes: Iterable[BlockHash]) -> Counted:
        """Let these blocks be evicted again. Counts those that were pinned."""
        return self._count(Unpin(layout, tier, piece) for piece in pieces(hashes, CHANGES_MAX))

    def _count(self, questions: Iterable[Question]) -> Counted:
        answers = [_expect(Counted, self._ask(question)) for question in questions]
        return Counted(sum(answer.done for answer in answers), sum(answer.refused for answer in answers))


class Desk:
    """See the module. A context manager; not for two threads."""

    def __init__(self, path: Path, answer_s: float = ANSWER_S, *, call: bool = True) -> None:
        """Open what is there and call its keeper. ShelfError: no cache directory, not ours, or a keeper in trouble.

        `call` False: look at the files alone, whoever keeps them.
        """
        _check_directory(path)
        self.path = path
        self.cache = CacheDirectory(path, None)
        self.keeper: OperatorLine | None = None
        self._looking: Offline | None = None
        self._kept: set[str] = set()
        try:
            if call:
                self.keeper = call_keeper(self.cache.top, answer_s)
        except BaseException:
            self.cache.close()
            raise

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up and let go of everything."""
        if self.keeper is not None:
            self.keeper.close()
        self._forget()
        self.cache.close()

    def is_occupied(self) -> bool:
        """Whether some process has the directory's lock: its keeper, or an engine with `sharing: false`."""
        lock = self.cache.open_lock()
        try:
            return is_locked(lock, 0)
        finally:
            os.close(lock)

    def keeper_pid(self) -> int:
        """The process at the door, whatever it speaks; 0 for none."""
        link = knock(self.cache.top)
        if link is None:
            return 0
        with link:
            return Line(link, ANSWER_DECODER).pid

    def keeper_is_there(self, pid: int) -> bool:
        """Whether that process answers the door now, or still holds the lock on its way out."""
        return (self.keeper_pid() or self.is_occupied() * pid) == pid

    def overview(self) -> Overview:
        """Everything in numbers. Layouts that the keeper has not opened are read from their files."""
        kept = _expect(Overview, self.keeper.ask(Survey())) if self.keeper is not None else Overview(None, [], [])
        self._kept = {layout.name for layout in kept.layouts}
        self._forget()
        found = _expect(Overview, self._look(Survey())).layouts
        kept.layouts += [layout for layout in found if layout.name not in self._kept]
        return kept

    def is_kept(self, layout: str) -> bool:
        """Whether the keeper had this layout open at the last overview."""
        return layout in self._kept

    def rows(self, layout: str, tier: int) -> Iterator[RowPage]:
        """All readable rows of a shelf, page by page, each as it is when it is asked for."""
        first = 0
        while True:
            page = _expect(RowPage, self._asker(layout)(ListRows(layout, tier, first)))
            yield page
            if page.last or page.following <= first:
                return
            first = page.following

    def tenants(self, layout: str, tier: int) -> dict[bytes, int]:
        """Slots by tenant."""
        found: dict[bytes, int] = {}
        first = 0
        while True:
            page = _expect(TenantPage, self._asker(layout)(ListTenants(layout, tier, first)))
            if not page.tenants:
                return found
            found |= dict(page.tenants)
            first += len(page.tenants)

    def still_there(self, layout: str, tier: int, records: Iterable[Record]) -> set[Grant]:
        """Slot and generation of those rows that are readable now, whatever else they are kept for."""
        if not self.is_kept(layout):
            self._forget()
        there: set[Grant] = set()
        known: set[tuple[int, int]] = set()
        following = 0
        for slot, generation in sorted((record.slot, record.generation) for record in records):
            if slot >= following:
                page = _expect(RowPage, self._asker(layout)(ListRows(layout, tier, slot)))
                known, following = {(row.slot, row.generation) for row in page.rows}, page.following
            if (slot, generation) in known:
                there.add(Grant(slot, generation))
        return there

    def open_slab(self, layout: LayoutView, tier: int) -> Slab:
        """A shelf's bytes on a descriptor of its own; its rows can be read through it."""
        view = next(view for view in layout.tiers if view.tier == tier)
        slot_bytes = layout.row_bytes + HEADER_BYTES
        if tier == NVME:
            return join_nvme_slab(self.cache.folder(layout.name), slot_bytes, view.slots, view.epoch)
        assert self.keeper is not None, "DRAM without a keeper"
        lent = _expect(Lent, self.keeper.ask(Borrow(layout.name)))
        descriptor = self.keeper.take_descriptor()
        try:
            if lent.epoch != view.epoch or os.fstat(descriptor).st_size < lent.slots * slot_bytes:
                raise ShelfError("DRAM was made anew meanwhile; run this again")
        except BaseException:
            os.close(descriptor)
            raise
        return Slab(descriptor, 0, slot_bytes, lent.slots, lent.epoch)

    @contextlib.contextmanager
    def change(self, layout: str) -> Iterator[Change]:
        """Open a layout to change, for the `with` block. ShelfError: somebody has it for himself, or it is no good."""
        if self.keeper is not None and self.is_kept(layout):
            yield Change(self.keeper.ask)
            return
        with contextlib.ExitStack() as held:
            # a keeper that is there has the directory's lock, and finds the slab locked should it open this layout now
            cache = self.cache if self.keeper is not None else held.enter_context(_locked(self.cache))
            opened = Offline(cache, [layout], changing=True)
            try:
                yield Change(opened.ask)
            finally:
                opened.close()

    def _asker(self, layout: str) -> Ask:
        return self.keeper.ask if self.keeper is not None and self.is_kept(layout) else self._look

    def _look(self, question: Question) -> Answer:
        if self._looking is None:
            names = [name for name in layout_names(self.cache.top) if name not in self._kept]
            self._looking = Offline(self.cache, names, changing=False)
        return self._looking.ask(question)

    def _forget(self) -> None:
        """What was read from files is old."""
        if self._looking is not None:
            self._looking.close()
            self._looking = None


@contextlib.contextmanager
def _locked(cache: CacheDirectory) -> Iterator[CacheDirectory]:
    """The same directory, locked as an engine with `sharing: false` would."""
    lock = cache.open_lock()
    try:
        if not lock_exclusively(lock, time.monotonic() + LOCK_WAIT_S):
            raise ShelfError(
                f"cache directory {cache.path} is in use by an engine with sharing: false, or a keeper has just come; "
                "stop that engine, or try again"
            )
    except BaseException:
        os.close(lock)
        raise
    locked = CacheDirectory(cache.path, None, lock)
    try:
        owners = locked.hold(open_owners(locked.top))
        if any(is_locked(owners, owner) for owner in range(OWNERS_MAX)):  # their slot table would undo the change
            raise ShelfError(
                f"cache directory {cache.path}: engines are here, between two keepers; try again once "
                "`kvtier shelf stat` names a keeper"
            )
        yield locked
    finally:
        locked.close()


def _check_directory(path: Path) -> None:
    """ShelfError unless somebody has made a cache directory there; nothing is made by looking for one."""
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            raise ShelfError(f"{path} is a symlink; give the cache directory itself")
        if not stat.S_ISDIR(status.st_mode):
            raise ShelfError(f"{path} is no directory; give a cache directory (tiers.nvme.path)")
        if status.st_uid != os.geteuid():
            raise ShelfError(f"{path} belongs to user {status.st_uid}; run this as that user, not as {os.geteuid()}")
        os.lstat(path / LOCK_NAME)
    except FileNotFoundError:
        missing = "is not there" if not os.path.lexists(path) else f"is no cache directory: it has no {LOCK_NAME}"
        raise ShelfError(f"{path} {missing}; give the directory that an engine has as tiers.nvme.path") from None
    except OSError as error:
        raise ShelfError(f"{path} cannot be read: {error.strerror}") from None


def _expect(kind: type[Kind], answer: object) -> Kind:
    if not isinstance(answer, kind):
        raise ShelfError(f"the keeper answers with {type(answer).__name__}")
    return answer
