"""`Books` that engines share: a mirror to look things up in, a stock of reservations to write with, a keeper to ask.

Looking up, reserving and dropping cost no round trip; publishing is answered later, or not in time. While the keeper is
away finds go on from the mirror, writes from what is left of the stock, and on its return it is told what is held.
All on the engine thread. Owned by the shelves of one layout, by way of their `Link`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from operator import itemgetter

from kvtier.block import BlockHash
from kvtier.books import BookCounts
from kvtier.directory import PublishOutcome
from kvtier.keeper.asked import AskedRows
from kvtier.keeper.fields import as_claims, pieces
from kvtier.keeper.leases import Leases
from kvtier.keeper.link import ANSWER_S, Link
from kvtier.keeper.mirror import Mirror
from kvtier.keeper.published import Publications
from kvtier.keeper.slot_table import SlotTable
from kvtier.keeper.stock import Stock
from kvtier.keeper.uses import Uses
from kvtier.keeper.wire import (
    Abandon,
    Acquired,
    Drop,
    Gone,
    Granted,
    Here,
    Numbers,
    Published,
    Reserve,
    Retain,
    Snapshot,
    Unpin,
)
from kvtier.record import Grant, Lease, Record
from kvtier.retention import Retention
from kvtier.ticket import Reply

_SLOT_OF = itemgetter(0)


class SharedBooks:
    """`Books` over a link. See the module."""

    def __init__(self, tier_index: int, slot_count: int, table: SlotTable, link: Link, stock: Stock) -> None:
        """The `stock` is empty, and the books' own from now on."""
        self.tier_index = tier_index
        self.used_slots = 0
        self.evictions = 0
        self.counts = self._told_counts = BookCounts()
        self._table = table
        self._link = link
        self._slot_count = slot_count
        self._stock = stock
        self._mirror = Mirror(slot_count)
        self._coming: Mirror | None = None
        self._out: dict[int, Grant] = {}
        """By slot: granted and being written, or published and not answered for."""
        self._publications = Publications(tier_index, link)
        self._answers: list[tuple[Record, PublishOutcome | None]] = []
        self._uses = Uses(tier_index, link)
        self._replies: list[Reply] = []
        self._lost: list[Grant] = []
        self._tended = -math.inf, 0
        self._asked = AskedRows(tier_index, link, self._out, self._replies, stock)
        self.leases = Leases(tier_index, link, self._replies)
        self.ask_rows, self.give_rows = self._asked.ask, self._asked.give
        self.ask_leases, self.end_leases = self.leases.ask, self.leases.end
        self.whole = False
        """The mirror has been filled once."""
        link.add(self)

    def __repr__(self) -> str:
        return f"SharedBooks(known={len(self._mirror)}, stock={len(self._stock)}, line={self._link.line})"

    # ---- `Books` ---------------------------------------------------------------------------------------------------

    def find(self, hashes: Sequence[BlockHash]) -> list[Record]:
        """See `Books`."""
        return self._mirror.find(hashes)

    def holds(self, block_hash: BlockHash) -> bool:
        """See `Books`."""
        return self._mirror.get(block_hash) is not None

    def touch(self, hashes: Sequence[BlockHash], now: float) -> None:
        """See `Books`: noted here, sent in batches."""
        self._mirror.touch(hashes)
        self._uses.note(hashes, now, counts=True)

    def stamp(self, hashes: Sequence[BlockHash], now: float) -> None:
        """See `Books`: noted here, sent in batches."""
        self._mirror.touch(hashes)
        self._uses.note(hashes, now, counts=False)

    def reserve(self, count: int, tenant: bytes) -> list[Grant]:
        """See `Books`: from the stock. What it lacks is asked for, and there the next time."""
        now = time.monotonic()
        grants = self._stock.take(count, tenant, now)
        self._out.update(zip(map(_SLOT_OF, grants), grants, strict=True))
        self._top_up(now)
        return grants

    def publish(self, records: Sequence[Record], now: float, lease: bool = False) -> None:
        """See `Books`."""
        if self._link.over:
            self._answers += [(record, None) for record in records]
            return
        self._publications.ask(records, lease, now)

    def answers(self, now: float) -> list[tuple[Record, PublishOutcome | None]]:
        """See `Books`. Also what the books do by themselves: listen, top up, give back, tell of uses."""
        if self._uses or self._link.is_due(*self._tended, now):
            self._link.pump(now)
            self._tended = now, self._link.heard_count
            self._expire(now)
            self._top_up(now)
            self.give_rows(self._stock.idle(time.monotonic()))
            self._uses.tell(now)
        answers, self._answers = self._answers, []
        return answers

    def abandon(self, grants: Sequence[Grant]) -> None:
        """See `Books`. A keeper that is away learns of it when it greets."""
        for grant in grants:
            self._out.pop(grant.slot, None)
        for piece in pieces(grants):
            self._link.send(Abandon(self.tier_index, as_claims(piece)))

    def drop(self, records: Sequence[Record]) -> list[Record]:
        """See `Books`."""
        mine = [record for record in records if self._mirror.has(record)]
        self._mirror.remove(record.slot for record in mine)
        there = [record for record in mine if self._table.is_ready(record.slot, record.generation)]
        for piece in pieces((record.slot, record.generation) for record in there):
            self._link.send(Drop(self.tier_index, as_claims(piece)))
        return there

    def acquire(self, records: Sequence[Record]) -> list[Lease | None]:
        """See `Books`: holds nothing; `intact` tells afterwards whether somebody else was granted the slot."""
        return [Lease(record) if self._table.is_ready(record.slot, record.generation) else None for record in records]

    def intact(self, lease: Lease) -> bool:
        """See `Books`. A slot's entry changes before anybody may write into it."""
        return self._table.is_ready(lease.record.slot, lease.record.generation)

    def release(self, leases: Sequence[Lease]) -> None:
        """See `Books`."""

    def replies(self) -> list[Reply]:
        """See `Books`."""
        replies = self._replies[:]
        self._replies.clear()
        return replies

    def lost_claims(self) -> list[Grant]:
        """See `Books`: those that a keeper which has come back does not know of."""
        lost, self._lost = self._lost, []
        return lost

    def coldest(self, count: int) -> list[Record]:
        """See `Books`, as far as this engine's own uses tell."""
        return self._mirror.oldest(count)

    def retain(self, hashes: Sequence[BlockHash], asked: Retention) -> None:
        """See `Books`. Said only of blocks that are not known to have as much; a keeper that is away misses it."""
        wanted = [block_hash for block_hash in hashes if self._mirror.lacks(block_hash, asked)]
        for piece in pieces(wanted):
            self._link.send(Retain(self.tier_index, piece, asked.priority, asked.expiry_s, asked.pinned))

    def unpin(self, hashes: Sequence[BlockHash]) -> None:
        """See `Books`. A keeper that is away misses it."""
        for piece in pieces(hashes):
            self._link.send(Unpin(self.tier_index, piece))

    def expire(self, unix_s: float, boot_s: float) -> None:  # noqa: ARG002
        """See `Books`: the keeper does it for all; while it is away each for itself."""
        self._mirror.expire(unix_s)

    def check(self) -> None:
        """See `Books`."""
        self._mirror.check()
        assert len(set(self.held())) == len(self.held()), "a grant is held twice"

    def close(self, stuck: bool) -> None:
        """Give everything back, but with I/O `stuck` not the slots that it may write to: they wait for its end."""
        self.give_rows(self._stock.held())
        if not stuck:
            self.abandon(list(self._out.values()))
        self._stock.clear()

    @property
    def supplied(self) -> bool:
        """See `Books`."""
        return self._stock.supplied

    @property
    def reports(self) -> bool:
        """See `Books`: one engine does, which the keeper names."""
        return self._link.reports

    @property
    def current(self) -> bool:
        """The mirror is that of the keeper that is there."""
        return self.whole and self._coming is None

    # ---- from the link ---------------------------------------------------------------------------------------------

    def held(self) -> list[Grant]:
        """Every grant that this engine has."""
        return [*self._out.values(), *self._stock.held()]

    def joined(self, now: float) -> None:
        """There is a keeper: ask again what was not answered."""
        self._coming = Mirror(self._slot_count)
        self._publications.ask_again()
        self._stock.want(0)
        self._top_up(now)

    def lost(self) -> None:
        """There is none: what was asked is not answered any more."""
        self._stock.line_lost()
        self._asked.refuse()
        self.leases.refuse()

    def end(self) -> None:
        """The shelf is gone with its directory."""
        self.lost()
        self._mirror = Mirror(self._slot_count)
        self._stock.clear()
        self._answers += [(record, None) for one in self._publications.expired(math.inf) for record in one.records]

    def told(self, message: Gone | Here | Snapshot | Numbers) -> None:
        """An event of the keeper's."""
        if isinstance(message, Numbers):
            self.used_slots = message.used_slots
            self.counts, self._told_counts = self.counts.grown(self._told_counts, message.counts), message.counts
            return
        mirror = self._mirror if self._coming is None else self._coming
        if isinstance(message, Gone):
            mirror.remove(message.slots)
            return
        mirror.add(message.rows)
        if isinstance(message, Snapshot) and message.last:
            self._mirror, self._coming, self.whole = mirror, None, True
            owner = self._link.client.seat.owner
            self._lost += [claim for claim in self.leases.held() if not self._table.is_leased(*claim, owner)]

    def answered(self, message: Granted | Published | Acquired) -> bool:
        """An answer; whether the question was ours."""
        if isinstance(message, Acquired):
            return self.leases.answered(message)
        if isinstance(message, Granted):
            now = time.monotonic()
            ours = self._stock.answered(message.number, message.grants, now) or self._asked.answered(message)
            self.evictions += message.evicted_count if ours else 0
            return ours
        answer = self._publications.answered(message)
        if answer is None:
            return False
        (records, lease, _), outcomes = answer
        answers = list(zip(records, outcomes, strict=True))
        here = records
        if any(message.outcomes):
            here = [record for record, outcome in answers if outcome is PublishOutcome.PUBLISHED]
        mirror = self._mirror if self._coming is None else self._coming
        mirror.add(here, unless_known=True)  # it may have been told of, with the pin that it was granted
        self.leases.add(here if lease else ())
        out = self._out.pop
        for record in records:
            out(record.slot, None)
        self._answers += answers
        return True

    # ---- by itself -------------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        """End what nobody has answered; the row is given back, or a lease on it if it was published after all."""
        for records, lease, _ in self._publications.expired(now):
            self._answers += [(record, None) for record in records]
            claims = [Grant(record.slot, record.generation) for record in records]
            self.abandon(claims)
            self.leases.release(claims if lease else ())
        self._stock.expire(now)
        self._asked.expire(now)
        self.leases.expire(now)

    def _top_up(self, now: float) -> None:
        """Ask for reservations where fewer lie in stock than are wanted."""
        for tenant, count in self._stock.missing():
            number = self._link.number()
            deadline_ns = time.monotonic_ns() + int(ANSWER_S * 1e9)
            if self._link.send(Reserve(number, self.tier_index, count, tenant, deadline_ns)):
                self._stock.asked(number, tenant, count, now + ANSWER_S)
