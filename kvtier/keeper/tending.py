"""What the keeper looks after by itself: owners that are gone, layouts that nobody uses, its files, its own end.

Reads locks; waits for nothing. Called by the server, on its thread, a few times a second. Only the look at paths, which
may hang with the disk, has a thread of its own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from kvtier.boot_clock import boot_s
from kvtier.keeper.connection import Connection
from kvtier.keeper.fields import OWNERS_MAX
from kvtier.keeper.house import House
from kvtier.keeper.kept import KeptLayout
from kvtier.keeper.ledger import Ledger
from kvtier.keeper.owners import OWNERS_NAME, is_locked
from kvtier.keeper.wire import NVME, SOCKET_NAME, TIER_NAMES

log = logging.getLogger(__name__)

FIRST_S = 5.0
"""How much longer than the linger the keeper waits for its first engine."""


class Tender:
    """See the module."""

    def __init__(self, house: House, linger_s: float, end: Callable[[Connection], None]) -> None:
        """`end` ends a connection. The socket must be bound."""
        self.linger_s = linger_s
        self._house = house
        self._end = end
        self._lonely_since = time.monotonic() + FIRST_S
        self._socket = os.stat(SOCKET_NAME, dir_fd=house.cache.top)

    def hurry(self) -> None:
        """Leave as soon as nobody is there."""
        self.linger_s = 0.0
        self._lonely_since = min(self._lonely_since, time.monotonic())

    def was_here(self, now: float) -> None:
        """An engine has gone. It may have come after the last look at who is here."""
        self._lonely_since = now

    def owners(self, now: float) -> None:
        """Take back what the dead held, once their I/O has landed, and hide what has expired.

        Dead is who has lost its lock, whatever connection there is: a forked child may have inherited it.
        """
        for connection in list(self._house.connections.values()):
            if connection.joined and connection.owner is not None and not self._house.lives(connection.owner):
                self._end(connection)
        present = self._house.present()
        for kept in list(self._house.layouts.values()):
            for tier, ledger in kept.ledgers.items():
                ledger.expire(time.time(), boot_s())
                for owner in ledger.owners() - present:
                    if not self._house.lives(owner) and not kept.has_io(owner):
                        log.info("owner %d is gone, its slots of %s are free again", owner, TIER_NAMES[tier])
                        ledger.forget(owner)
            nvme = kept.ledgers.get(NVME)
            if nvme is not None and nvme.frozen:
                nvme.frozen = any(kept.has_io(owner) for owner in range(OWNERS_MAX) if owner not in present)
            self._let_go(kept, now)

    def lonely(self, busy: bool, now: float) -> bool:
        """Whether nobody has been there for the linger. `busy`: somebody is at the door."""
        if busy or self._house.present() or self._house.living():
            self._lonely_since = now
            return False
        return now - self._lonely_since >= self.linger_s

    def files_are_there(self) -> bool:
        """Whether directory, locks, socket and slabs are still those of their names. On the thread of a `FileWatch`."""
        cache = self._house.cache
        files = cache.is_there() and cache.holds_lock() and cache.is_current(OWNERS_NAME, self._house.owners)
        layouts = list(self._house.layouts.values())
        return files and self.socket_is_ours() and all(kept.is_current(cache) for kept in layouts)

    def socket_is_ours(self) -> bool:
        """Whether the socket's name still leads to the one that was bound."""
        try:
            return os.path.samestat(os.stat(SOCKET_NAME, dir_fd=self._house.cache.top), self._socket)
        except OSError:
            return False

    def _let_go(self, kept: KeptLayout, now: float) -> None:
        """Let a layout go that nobody has open any more, so that another can have its memory, and its place."""
        here = any(connection.layout == kept.name for connection in self._house.connections.values())
        if here or kept.openings or any(map(_is_used, kept.ledgers.values())):
            kept.lonely_since = now
        elif not kept.opened:
            if not kept.is_leaving:
                del self._house.layouts[kept.name]
        elif now - kept.lonely_since >= self.linger_s and (self._house.present() or self._house.living()):
            try:
                kept.leave(self._house.cache)
            except RuntimeError:  # no more threads: the next look tries again
                return
            log.info("layout %s: nobody uses it, its memory is free again", kept.name)


def _is_used(ledger: Ledger) -> bool:
    """Whether an owner has a claim on a slot, or I/O through the slab may be under way."""
    return bool(ledger.owners()) or any(is_locked(ledger.slab.descriptor, owner) for owner in range(OWNERS_MAX))
