"""What the keeper answers an engine that has joined, message by message.

Deadlines are looked at before work is done: what comes late is dropped. Checks nothing that the ledger checks. Called
by the server, on its thread.
"""

from __future__ import annotations

import time

from kvtier.directory import PublishOutcome
from kvtier.keeper.connection import Connection
from kvtier.keeper.fields import as_claims, row_pieces
from kvtier.keeper.frames import WireError
from kvtier.keeper.house import House
from kvtier.keeper.ledger import Ledger
from kvtier.keeper.telling import Teller
from kvtier.keeper.wire import (
    Abandon,
    Acquire,
    Acquired,
    Drop,
    Granted,
    Held,
    Here,
    Join,
    Publish,
    Published,
    Release,
    Reserve,
    Retain,
    Touch,
    Unpin,
)
from kvtier.retention import Retention

ABOUT_ROWS = (Reserve, Publish, Abandon, Drop, Touch, Acquire, Release, Retain, Unpin)
AboutRows = Reserve | Publish | Abandon | Drop | Touch | Acquire | Release | Retain | Unpin

DUPLICATE = PublishOutcome.DUPLICATE
_OUTCOMES = {PublishOutcome.PUBLISHED: 0, PublishOutcome.DUPLICATE: 1, PublishOutcome.STALE: 2}


class Answers:
    """See the module."""

    def __init__(self, house: House, teller: Teller) -> None:
        self._house = house
        self._teller = teller

    def note_held(self, connection: Connection, held: Held | Join) -> None:
        """A part of what an engine says that it has. WireError: it has joined, or names more than there is."""
        if connection.joined:
            raise WireError("joined already")
        ledgers = self._house.layouts[connection.layout].ledgers.values()
        held_max = 2 * sum(ledger.slab.slot_count for ledger in ledgers)
        for known, more in zip(connection.held, (held.grants, held.leases), strict=True):
            known += more
            if len(known) > held_max:
                raise WireError(f"it holds more than there is: {len(known)} slots, {held_max} are twice of all")

    def join(self, connection: Connection, join: Join) -> None:
        """An engine holds its locks and has said all that it has; it is told all there is."""
        owner = connection.owner
        if connection.joined or owner is None or not self._house.lives(owner):
            raise WireError("joined twice, or without its lock")
        self.note_held(connection, join)
        held_grants, held_leases = connection.held
        connection.joined, connection.held = True, ([], [])
        for tier, ledger in self._house.layouts[connection.layout].ledgers.items():
            grants = [(slot, generation) for where, slot, generation in held_grants if where == tier]
            leases = [(slot, generation) for where, slot, generation in held_leases if where == tier]
            ledger.reconcile(owner, grants, leases)
        self._teller.tell(but=connection)
        self._teller.introduce(connection)
        self._teller.name_reporters()

    def answer(self, connection: Connection, message: AboutRows) -> None:
        """A message about rows. WireError: about none that there are."""
        owner, ledger = connection.owner, self._house.layouts[connection.layout].ledgers.get(message.tier)
        if ledger is None or owner is None or message.tier not in connection.tiers:
            raise WireError("no such shelf")
        now = time.monotonic()
        if isinstance(message, (Reserve, Publish, Acquire)) and message.deadline_ns < time.monotonic_ns():
            return
        if isinstance(message, Reserve):
            before = ledger.evictions
            grants = ledger.reserve(owner, message.count, message.tenant, message.least)
            self._teller.tell()
            connection.send(Granted(message.number, message.tier, as_claims(grants), ledger.evictions - before))
        elif isinstance(message, Publish):
            self._publish(connection, owner, ledger, message, now)
        elif isinstance(message, Acquire):
            answers = zip(message.grants, ledger.acquire(owner, message.grants), strict=True)
            connection.send(Acquired(message.number, message.tier, [claim for claim, got in answers if got]))
        elif isinstance(message, Abandon):
            ledger.abandon(owner, message.grants, message.unused)
        elif isinstance(message, Drop):
            ledger.drop(message.grants)
        elif isinstance(message, Touch):
            at = message.at if 0.0 <= message.at <= now else now  # neither the future nor a NaN
            ledger.touch(message.hashes, at, message.counts)
        elif isinstance(message, Retain):
            ledger.retain(message.hashes, Retention(message.priority, message.expiry_s, message.pinned))
        elif isinstance(message, Unpin):
            ledger.unpin(message.hashes)
        else:
            ledger.release(owner, message.grants)

    def _publish(self, connection: Connection, owner: int, ledger: Ledger, message: Publish, now: float) -> None:
        self._teller.tell()
        outcomes = ledger.publish(owner, message.rows, message.lease, now)
        self._teller.tell(but=connection)  # it knows what it has published when it hears of it
        ends = zip(message.rows, outcomes, strict=True)
        others = [row.block_hash for row, end in ends if end is DUPLICATE or row.pinned]  # a pin may not be granted
        for rows in row_pieces(ledger.rows_of(others)):
            connection.send(Here(message.tier, rows))
        connection.send(Published(message.number, [_OUTCOMES[outcome] for outcome in outcomes]))
