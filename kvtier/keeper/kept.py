"""The shelves of one row layout in the keeper: those that are there, those being opened, and why one is missing.

Opening may wait for a disk or for memory, so it happens on a thread of its own (`Opening`); the keeper's loop takes the
end of it in. Knows no engine. Owned by the house; opened by openings.py.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.cache_directory import CacheDirectory
from kvtier.errors import ConfigError, KvtierError
from kvtier.eviction import PolicyMaker
from kvtier.keeper.ledger import Ledger
from kvtier.keeper.owners import is_locked
from kvtier.keeper.takeover import CLOSE_S, Opened
from kvtier.keeper.wire import DRAM, NVME, TIER_NAMES, Numbers
from kvtier.process_limits import what_is_short
from kvtier.terms import Terms
from kvtier.tiers.header import RowFormat
from kvtier.tiers.slab import SLAB_NAME

log = logging.getLogger(__name__)


class Opening:
    """One tier on its way, on a thread. Once `ended`: `opened`, or `error` says why there is none."""

    def __init__(self, work: Callable[[], Opened], promised_bytes: int, done: Callable[[], None]) -> None:
        """`done` is called from the thread at the end. `promised_bytes`: what of a budget is spoken for meanwhile.

        RuntimeError: there can be no more threads now.
        """
        self.promised_bytes = promised_bytes
        self.opened: Opened | None = None
        self.error = "its opening has failed"
        self.unfit = False
        """The error is one of configuration: this machine has not got what is asked for."""
        self.ended = False
        self._work = work
        self._done = done
        threading.Thread(target=self._run, name="kvtier-opening", daemon=True).start()

    def _run(self) -> None:
        try:
            self.opened = self._work()
        except (KvtierError, OSError, RuntimeError) as error:  # RuntimeError: no more threads
            self.error, self.unfit = what_is_short(error) or str(error), isinstance(error, ConfigError)
        finally:
            self.ended = True
            self._done()


@dataclass(eq=False, slots=True)
class KeptLayout:
    """Ledgers of one layout by tier index. See the module."""

    name: str
    form: RowFormat
    policy: PolicyMaker
    terms: Sequence[Terms]
    """By tier index."""
    opened: dict[int, Opened] = field(default_factory=dict)
    openings: dict[int, Opening] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)
    """Why a tier is not there, by its index."""
    unfit: set[int] = field(default_factory=set)
    """Tiers whose note is about the configuration."""
    lonely_since: float = 0.0
    """When somebody of this layout was here last."""
    leaving: list[tuple[threading.Thread, int]] = field(default_factory=list)
    """Threads that let tiers go, and how many bytes of memory each."""
    told: dict[int, Numbers] = field(default_factory=dict)
    """What engines were told last of each tier."""

    @property
    def is_leaving(self) -> bool:
        """Tiers are on their way out."""
        self.leaving = [(thread, held_bytes) for thread, held_bytes in self.leaving if thread.is_alive()]
        return bool(self.leaving)

    @property
    def leaving_bytes(self) -> int:
        """Bytes of DRAM that are on their way out, and not free yet."""
        return sum(held_bytes for _, held_bytes in self.leaving) if self.is_leaving else 0

    @property
    def ledgers(self) -> dict[int, Ledger]:
        """Books by tier index, DRAM first."""
        return {tier: self.opened[tier].ledger for tier in (DRAM, NVME) if tier in self.opened}

    @property
    def epochs(self) -> list[tuple[int, bytes, int]]:
        """(tier, epoch, slots) of what is there."""
        return [(tier, ledger.slab.epoch, ledger.slab.slot_count) for tier, ledger in self.ledgers.items()]

    def descriptors(self) -> list[int]:
        """Those that go with `epochs`: DRAM slab and slot table, the slot table of NVMe."""
        found: list[int] = []
        for tier, ledger in self.ledgers.items():
            found += [ledger.slab.descriptor] if tier == DRAM else []
            found.append(ledger.table.descriptor)
        return found

    def has_io(self, owner: int) -> bool:
        """Whether I/O of an owner through any slab may be under way."""
        return any(is_locked(ledger.slab.descriptor, owner) for ledger in self.ledgers.values())

    def is_current(self, cache: CacheDirectory) -> bool:
        """Whether its files are still those of their names, or have been let go of. Any thread."""
        opened = self.opened.get(NVME)
        if opened is None:
            return True
        slab, current = opened.ledger.slab, False
        with contextlib.suppress(OSError):
            current = slab.is_whole() and cache.is_current(SLAB_NAME, slab.descriptor, opened.folder)
        return current or self.opened.get(NVME) is not opened

    def take_in(self) -> list[int]:
        """End what has been opened; the tiers that are there now and were not before."""
        found: list[int] = []
        for tier, opening in [(tier, opening) for tier, opening in self.openings.items() if opening.ended]:
            del self.openings[tier]
            if opening.opened is None:
                self.note(tier, opening.error, opening.unfit)
                continue
            self.opened[tier] = opening.opened
            self.notes.pop(tier, None)
            self.unfit.discard(tier)
            found.append(tier)
            ledger = opening.opened.ledger
            counts = len(ledger), ledger.slab.slot_count
            log.info("layout %s: %s with %d blocks in %d slots", self.name, TIER_NAMES[tier], *counts)
        return found

    def note(self, tier: int, text: str, unfit: bool = False) -> None:
        """A tier is not there because of this; `unfit`: see `Opening`."""
        self.unfit = self.unfit | {tier} if unfit else self.unfit - {tier}
        text = f"{TIER_NAMES[tier]}: {text}"
        if self.notes.get(tier) != text:
            log.warning("layout %s without %s", self.name, text)
        self.notes[tier] = text

    def leave(self, cache: CacheDirectory) -> None:
        """Let everything go on a thread, however long the disk takes. RuntimeError: there can be no more threads."""
        opened = dict(self.opened)
        arguments = (list(opened.values()), cache)
        closing = threading.Thread(target=_close_all, args=arguments, name="kvtier-closing", daemon=True)
        self.opened.clear()  # before any descriptor is closed: see `is_current`
        try:
            closing.start()
        except RuntimeError:
            self.opened.update(opened)
            raise
        self.told.clear()
        self.leaving.append((closing, opened[DRAM].ledger.slab.total_bytes if DRAM in opened else 0))

    def close(self, cache: CacheDirectory) -> None:
        """Bring the journal to disk and let everything go; waits for the disk."""
        for opened in self.opened.values():
            opened.close(cache)
        self.opened.clear()
        for thread, _ in self.leaving:
            thread.join(CLOSE_S)


def _close_all(opened: Sequence[Opened], cache: CacheDirectory) -> None:
    for one in opened:
        while not one.close(cache):
            pass
