"""The keeper's door: who is let in, under which number, and with which shelves.

Owns the rules of rule 13 and 15 of the protocol: greetings that wait while their shelves are opened, the survivors of
the keeper before this one, who come first, and what everyone must prove. Called by the server, on its thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.block import ALIGNMENT
from kvtier.errors import ShelfError
from kvtier.eviction import POLICIES
from kvtier.keeper.connection import Connection
from kvtier.keeper.fields import OWNERS_MAX
from kvtier.keeper.frames import WireError
from kvtier.keeper.house import House
from kvtier.keeper.kept import KeptLayout
from kvtier.keeper.openings import Openings
from kvtier.keeper.takeover import Handover
from kvtier.keeper.wire import DRAM, NVME, OTHERS, PROTOCOL_VERSION, TIER_NAMES, Hello, Refused, Welcome
from kvtier.tiers.header import SLICES_MAX, RowFormat

log = logging.getLogger(__name__)

LAYOUTS_MAX = 32
ANSWER_S = 8.0
"""How long a greeting waits for shelves that are being opened; what is not there then comes later."""
RECOVERY_S = 5.0
"""How long newcomers wait for the survivors."""
JOIN_S = 20.0
"""What a connection gets to say its greeting, and after it to join."""


@dataclass(slots=True)
class Greeting:
    """A `Hello` that waits for its answer."""

    hello: Hello
    kept: KeptLayout
    brought: dict[int, list[os.stat_result]]
    """What the descriptors that came with it were, by tier."""
    end: float
    asked: bool = False
    """Its shelves have been asked for."""


class Greeter:
    """See the module."""

    def __init__(self, house: House, openings: Openings, end: Callable[[Connection], None]) -> None:
        """`end` ends a connection."""
        self._house = house
        self._openings = openings
        self._end = end
        self._survivors = house.living()
        self._recovered_at = time.monotonic() + RECOVERY_S
        self._waiting: dict[Connection, Greeting] = {}

    @property
    def busy(self) -> bool:
        """Somebody waits for an answer."""
        return bool(self._waiting)

    def hello(self, connection: Connection, hello: Hello, descriptors: list[int]) -> None:
        """A greeting. Takes those descriptors that it uses out of the list. WireError: it is none."""
        if connection.owner is not None or connection in self._waiting:
            raise WireError("a second greeting")
        reason = self._refusal(hello)
        if reason:
            self._refuse(connection, reason)
            return
        handed = _handed(hello, descriptors)
        try:
            brought = {tier: _statuses(one) for tier, one in handed.items()}
            kept = self._layout(hello)
            now = time.monotonic()
            connection.layout = hello.layout
            self._waiting[connection] = greeting = Greeting(hello, kept, brought, now + ANSWER_S)
            if handed:
                self._ask(greeting, handed, now)
        except ShelfError as error:
            self._refuse(connection, str(error))
        finally:
            for one in handed.values():
                one.close()
        self.answer(now=time.monotonic())

    def answer(self, now: float) -> None:
        """Answer those whose shelves are there, or who have waited long enough."""
        for connection, greeting in list(self._waiting.items()):
            if not greeting.asked and (now >= self._recovered_at or not self._survivors - {greeting.hello.owner}):
                self._ask(greeting, {}, now)
            if not greeting.asked or (greeting.kept.openings and now < greeting.end):
                continue
            del self._waiting[connection]
            try:
                self._welcome(connection, greeting)
            except OSError:
                self._end(connection)

    def tend(self, now: float) -> None:
        """Forget survivors that are dead and connections that do not join; try again what could not be opened."""
        self._survivors = {owner for owner in self._survivors if self._house.lives(owner)}
        for connection in [one for one in self._house.connections.values() if one.dawdles(now - JOIN_S)]:
            if connection not in self._waiting:
                self._end(connection)
        self._openings.retry(self._may_make(now), now)
        self.answer(now)

    def gone(self, connection: Connection) -> None:
        """A connection has ended."""
        self._waiting.pop(connection, None)

    def _ask(self, greeting: Greeting, handed: dict[int, Handover], now: float) -> None:
        greeting.asked = True
        may_make = self._may_make(now, greeting.hello.owner)
        self._openings.want(greeting.kept, greeting.hello.budgets, handed, may_make)

    def _may_make(self, now: float, owner: int = -1) -> set[int]:
        """Tiers that may be opened without a survivor's help: no DRAM while one could bring it, or there were two."""
        if not self._survivors - {owner}:
            return {DRAM, NVME}
        return {NVME} if now >= self._recovered_at else set()

    def _welcome(self, connection: Connection, greeting: Greeting) -> None:
        hello, kept = greeting.hello, greeting.kept
        if not _same_shelves(hello, kept, greeting.brought):
            self._refuse(connection, OTHERS)
            return
        owner = hello.owner if hello.owner >= 0 else self._free_owner()
        if owner is None:
            self._refuse(connection, f"{OWNERS_MAX} engines share this cache directory already")
            return
        others = [other for other in self._house.connections.values() if other.owner == owner]
        if any(other.pid != connection.pid for other in others):
            self._refuse(connection, "another process has this number")
            return
        self._survivors.discard(owner)
        for other in others:
            self._end(other)
        connection.owner, connection.budgets, connection.tiers = owner, hello.budgets, frozenset(kept.opened)
        missing = [tier for tier in (DRAM, NVME) if tier not in kept.opened and hello.budgets[tier]]
        notes = [kept.notes.get(tier, f"{TIER_NAMES[tier]}: is still being opened") for tier in missing]
        unfit = next((kept.notes[tier] for tier in missing if tier in kept.unfit), "")
        connection.send_with(Welcome(owner, os.getpid(), kept.epochs, notes, unfit), kept.descriptors())

    def _refuse(self, connection: Connection, reason: str) -> None:
        self._waiting.pop(connection, None)
        log.info("an engine is refused: %s", reason)
        connection.send(Refused(reason))
        connection.closing = True

    def _refusal(self, hello: Hello) -> str:
        if hello.version != PROTOCOL_VERSION:
            return f"protocol {hello.version}, the keeper speaks {PROTOCOL_VERSION}"
        slices, rest = divmod(hello.row_bytes, hello.slice_bytes)
        if rest or hello.slice_bytes % ALIGNMENT or not 0 < slices <= SLICES_MAX:
            return "impossible geometry"
        if hello.policy not in POLICIES:
            return f"eviction {hello.policy} is unknown to the keeper"
        if hello.owner >= 0 and not self._house.lives(hello.owner):
            return "an owner without its lock"
        return ""

    def _layout(self, hello: Hello) -> KeptLayout:
        layouts = self._house.layouts
        kept = layouts.get(hello.layout)
        if kept is None:
            if not any(hello.budgets):
                raise ShelfError("no engine has this row layout open")  # an operator's guest sets nobody's terms
            if len(layouts) >= LAYOUTS_MAX:
                raise ShelfError(f"{LAYOUTS_MAX} row layouts share this cache directory already")
            form = RowFormat(bytes(32), hello.row_bytes, hello.slice_bytes)
            terms = tuple(hello.terms)
            kept = layouts[hello.layout] = KeptLayout(hello.layout, form, POLICIES[hello.policy], terms)
        elif (kept.form.row_bytes, kept.form.slice_bytes) != (hello.row_bytes, hello.slice_bytes):
            raise ShelfError("another geometry under the same name")
        elif kept.terms != tuple(hello.terms) and any(hello.budgets):  # an operator's guest has no terms
            log.warning("layout %s: an engine asks for other pins, quotas or write budget than the first", kept.name)
        return kept

    def _free_owner(self) -> int | None:
        taken = self._house.present()
        for layout in self._house.layouts.values():
            for ledger in layout.ledgers.values():
                taken |= ledger.owners()
        for owner in range(OWNERS_MAX):
            if owner not in taken and not self._house.lives(owner) and not self._house.has_io(owner):
                return owner
        return None


def _handed(hello: Hello, descriptors: list[int]) -> dict[int, Handover]:
    """What has come with a greeting, taken out of the list; WireError, with nothing kept, if it does not fit."""
    handed: dict[int, Handover] = {}
    try:
        for tier, epoch, slot_count in hello.epochs:
            needed = 2 if tier == DRAM else 1
            if tier in handed or slot_count == 0 or len(descriptors) < needed:
                raise WireError("descriptors are missing")
            slab = descriptors.pop(0) if tier == DRAM else None
            handed[tier] = Handover(epoch, slot_count, descriptors.pop(0), slab)
    except WireError:
        for one in handed.values():
            one.close()
        raise
    return handed


def _statuses(handed: Handover) -> list[os.stat_result]:
    return [os.fstat(one) for one in (handed.table, handed.slab) if one is not None]


def _same_shelves(hello: Hello, kept: KeptLayout, brought: dict[int, list[os.stat_result]]) -> bool:
    """Whether all that the engine has is what the keeper has: slab, slots, and the very same slot table."""
    for tier, epoch, slot_count in hello.epochs:
        if (tier, epoch, slot_count) not in kept.epochs:
            return False
        ledger = kept.ledgers[tier]
        mine = [os.fstat(ledger.table.descriptor)]
        mine += [os.fstat(ledger.slab.descriptor)] if tier == DRAM else []
        if not all(os.path.samestat(*pair) for pair in zip(mine, brought[tier], strict=True)):
            return False
    return True
