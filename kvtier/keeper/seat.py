"""An engine's place at its keeper: the owner number and its locks, the slabs and slot tables of one layout.

Taken with the first welcome and kept, whatever keepers come and go, until a keeper has other shelves or the cache
directory is gone: then a new seat is made in its place. Tiers that were not to be had are added by a later welcome.
Used by the client (on its thread) and by whoever opens the shelves after.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.cache_directory import CacheDirectory
from kvtier.errors import ShelfError
from kvtier.keeper.fields import TermsSent
from kvtier.keeper.owners import lock_byte, open_owners, reopen
from kvtier.keeper.slot_table import SlotTable
from kvtier.keeper.wire import DRAM, OTHERS, PROTOCOL_VERSION, Hello, Welcome
from kvtier.terms import Terms
from kvtier.tiers.header import RowFormat
from kvtier.tiers.slab import Slab, join_dram_slab, join_nvme_slab


@dataclass(eq=False, slots=True)
class SharedSlab:
    """One shelf's bytes and slot table."""

    slab: Slab
    table: SlotTable
    memory: int | None
    """DRAM: the descriptor that the slab came on, to hand on; the slab's own has the lock."""


@dataclass(eq=False)
class Seat:
    """See the module. `slabs` is filled by `take`."""

    cache: CacheDirectory
    layout: str
    """Its name."""
    form: RowFormat
    budgets: tuple[int, int]
    policy: str
    terms: tuple[Terms, Terms]
    owner: int = -1
    slabs: dict[int, SharedSlab] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unfit: str = ""
    """That of the notes which is about the configuration."""
    keeper_process: int = 0
    _owners: int = -1

    def greeting(self) -> tuple[Hello, list[int]]:
        """What to say to a keeper, and the descriptors to say it with."""
        epochs = [(tier, shared.slab.epoch, shared.slab.slot_count) for tier, shared in self.slabs.items()]
        descriptors: list[int] = []
        for shared in self.slabs.values():
            descriptors += [shared.memory] if shared.memory is not None else []
            descriptors.append(shared.table.descriptor)
        form, name = self.form, self.layout
        sizes = (form.row_bytes, form.slice_bytes, list(self.budgets))
        terms = [TermsSent(*one) for one in self.terms]
        return Hello(PROTOCOL_VERSION, name, *sizes, self.policy, self.owner, epochs, terms), descriptors

    def take(self, welcome: Welcome, descriptors: Sequence[int]) -> None:
        """Lock the number and open the slabs that are not open yet; those that are must be the keeper's.

        Takes the descriptors over. ShelfError or OSError: it could not be, and nothing has changed.
        """
        left = list(descriptors)
        try:
            mine = {(tier, shared.slab.epoch) for tier, shared in self.slabs.items()}
            if self.owner not in (-1, welcome.owner) or not mine <= {(tier, epoch) for tier, epoch, _ in welcome.slabs}:
                raise ShelfError(OTHERS)
            with self.cache.forking, contextlib.ExitStack() as undo:
                if self.owner < 0:
                    self._owners = self.cache.hold(open_owners(self.cache.top))
                    undo.callback(self.leave)
                    if not lock_byte(self._owners, welcome.owner):
                        raise ShelfError(f"owner number {welcome.owner} is taken")
                    self.owner = welcome.owner
                self.slabs |= self._open_missing(welcome, left, undo)
                undo.pop_all()
            self.keeper_process, self.notes, self.unfit = welcome.pid, welcome.notes, welcome.unfit
        finally:
            for descriptor in left:
                os.close(descriptor)

    def leave(self) -> None:
        """Give the number up: to the keeper this engine is dead from now on."""
        if self._owners >= 0:
            self.cache.drop(self._owners)
        self._owners = self.owner = -1

    def close(self, stuck: bool) -> None:
        """Give the number up; with I/O stuck the slabs stay open, so that their locks tell of it."""
        self.leave()
        if not stuck:
            for shared in self.slabs.values():
                shared.slab.mapping = None
                shared.table.close()
            self.cache.close()

    def _open_missing(self, welcome: Welcome, left: list[int], undo: contextlib.ExitStack) -> dict[int, SharedSlab]:
        """Every slab on a descriptor of our own, which tells of our I/O by its lock; takes what it uses from `left`."""
        opened: dict[int, SharedSlab] = {}
        for tier, epoch, slot_count in welcome.slabs:
            needed = 2 if tier == DRAM else 1
            if len(left) < needed or slot_count == 0:
                raise ShelfError("the keeper has sent too few descriptors")
            given, left[:needed] = left[:needed], []
            if tier in self.slabs:
                for descriptor in given:
                    os.close(descriptor)
                continue
            memory = self._hold(given.pop(0), undo) if tier == DRAM else None
            table = SlotTable(given.pop(0), slot_count, writable=False)
            undo.callback(table.close)
            self._hold(table.descriptor, undo)
            if memory is not None:
                slab = join_dram_slab(memory, self.form.slot_bytes, slot_count, epoch)
                slab.descriptor = self._hold(reopen(memory), undo)
                assert slab.mapping is not None
                slab.mapping.madvise(mmap.MADV_DONTFORK)  # a child that outlives its parent would keep the memory
            else:
                folder = self.cache.folder(self.layout)
                undo.callback(self.cache.drop, folder)
                slab = join_nvme_slab(folder, self.form.slot_bytes, slot_count, epoch)
                self._hold(slab.descriptor, undo)
            if not lock_byte(slab.descriptor, self.owner):
                raise ShelfError(f"I/O of an engine that was owner {self.owner} is still under way")
            opened[tier] = SharedSlab(slab, table, memory)
        return opened

    def _hold(self, descriptor: int, undo: contextlib.ExitStack) -> int:
        undo.callback(self.cache.drop, descriptor)
        return self.cache.hold(descriptor)
