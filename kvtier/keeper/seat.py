"""An engine's place at its keeper: the owner number and its locks, the slabs and slot tables of one layout.

Taken once and kept while the engine lives, whatever keepers come and go; a keeper that has other slabs is refused.
Used by the client (on its thread, to greet) and by whoever opens the shelves after.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.block import KVLayout
from kvtier.cache_directory import CacheDirectory, layout_name
from kvtier.errors import ShelfError
from kvtier.keeper.kept import DRAM
from kvtier.keeper.owners import lock_byte, open_owners, reopen
from kvtier.keeper.slot_table import SlotTable
from kvtier.keeper.wire import PROTOCOL_VERSION, Hello, Welcome
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
    """See the module. `slabs` is filled by the first `take`."""

    cache: CacheDirectory
    layout: KVLayout
    form: RowFormat
    budgets: tuple[int, int]
    policy: str
    owner: int = -1
    slabs: dict[int, SharedSlab] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    keeper_process: int = 0
    _owners: int = -1

    def greeting(self) -> tuple[Hello, list[int]]:
        """What to say to a keeper, and the descriptors to say it with."""
        epochs = [(tier, shared.slab.epoch, shared.slab.slot_count) for tier, shared in self.slabs.items()]
        descriptors: list[int] = []
        for shared in self.slabs.values():
            descriptors += [shared.memory] if shared.memory is not None else []
            descriptors.append(shared.table.descriptor)
        form = self.form
        name = layout_name(self.layout)
        hello = Hello(
            PROTOCOL_VERSION,
            name,
            form.row_bytes,
            form.slice_bytes,
            list(self.budgets),
            self.policy,
            self.owner,
            epochs,
        )
        return hello, descriptors

    def take(self, welcome: Welcome, descriptors: Sequence[int]) -> None:
        """Lock the number and open the slabs; with them already there, check that they are the keeper's.

        Takes the descriptors over. ShelfError: this keeper is not for us.
        """
        left = list(descriptors)
        self.keeper_process = welcome.pid
        try:
            if self.owner < 0:
                self._lock_number(welcome.owner)
                self.slabs = self._open_all(welcome, left)
                self.notes = welcome.notes
            mine = {(tier, shared.slab.epoch) for tier, shared in self.slabs.items()}
            if self.owner != welcome.owner or not mine <= {(tier, epoch) for tier, epoch, _ in welcome.slabs}:
                raise ShelfError("the keeper has other shelves than this engine")
        except ShelfError:
            if not self.slabs:
                self.leave()
            raise
        finally:
            for descriptor in left:
                os.close(descriptor)

    def leave(self) -> None:
        """Give the number up: to the keeper this engine is dead from now on."""
        if self._owners >= 0:
            self.cache.drop(self._owners)
        self._owners = self.owner = -1

    def _lock_number(self, owner: int) -> None:
        self._owners = self.cache.hold(open_owners(self.cache.top))
        if not lock_byte(self._owners, owner):
            raise ShelfError(f"owner number {owner} is taken")
        self.owner = owner

    def _open_all(self, welcome: Welcome, left: list[int]) -> dict[int, SharedSlab]:
        """Every slab on a descriptor of our own, which tells of our I/O by its lock; takes what it uses from `left`."""
        opened: dict[int, SharedSlab] = {}
        for tier, epoch, slot_count in welcome.slabs:
            if len(left) < (2 if tier == DRAM else 1) or slot_count == 0:
                raise ShelfError("the keeper has sent too few descriptors")
            memory = self.cache.hold(left.pop(0)) if tier == DRAM else None
            table = SlotTable(left.pop(0), slot_count, writable=False)
            self.cache.hold(table.descriptor)
            if memory is not None:
                slab = join_dram_slab(memory, self.form.slot_bytes, slot_count, epoch)
                slab.descriptor = reopen(memory)
            else:
                folder = self.cache.layout_folder(self.layout)
                slab = join_nvme_slab(folder, self.form.slot_bytes, slot_count, epoch)
            self.cache.hold(slab.descriptor)
            if not lock_byte(slab.descriptor, self.owner):
                raise ShelfError(f"I/O of an engine that was owner {self.owner} is still under way")
            opened[tier] = SharedSlab(slab, table, memory)
        return opened

    def close(self, stuck: bool) -> None:
        """Give the number up; with I/O stuck the slabs stay open, so that their locks tell of it."""
        self.leave()
        if not stuck:
            for shared in self.slabs.values():
                shared.slab.mapping = None
                shared.table.close()
            self.cache.close()
