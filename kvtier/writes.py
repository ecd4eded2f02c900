"""Writes of one shelf, from the slot that is reserved for a row to the answer of the books that it counts.

Keeps what is asked for a block while its row is under way. Owned by the shelf, on its thread.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator, Sequence

from kvtier.block import BlockHash
from kvtier.books import Books
from kvtier.directory import PublishOutcome
from kvtier.holdings import ShelfHoldings
from kvtier.io.base import IoResult
from kvtier.record import Grant, Record
from kvtier.retention import PLAIN, Retention
from kvtier.ticket import ShelfDone, ShelfOperation, ShelfOutcome, WriteItem
from kvtier.transfers import Flight, RowTransfers, Transfer
from kvtier.watch import TransferWatch

SPACE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""What the next write would meet as well: the breaker opens at once."""

PUBLISHED = {
    PublishOutcome.PUBLISHED: ShelfOutcome.DONE,
    PublishOutcome.DUPLICATE: ShelfOutcome.DUPLICATE,
    PublishOutcome.STALE: ShelfOutcome.STALE,
    None: ShelfOutcome.UNANSWERED,
}


class ShelfWrites:
    """See the module. Its length is that of all writes under way."""

    def __init__(self, books: Books, holdings: ShelfHoldings, transfers: RowTransfers, watch: TransferWatch) -> None:
        self.lacking = False
        """The last write found fewer slots than it needed."""
        self._books = books
        self._holdings = holdings
        self._transfers = transfers
        self._watch = watch
        self._writing: dict[BlockHash, Retention] = {}
        """Rows under way, and what was asked for them meanwhile."""
        self._unsure: dict[int, Callable[[], bool]] = {}
        self._to_lease: set[Grant] = set()
        """Rows under way that are leased once they are published."""
        self._published: dict[Grant, tuple[Flight, IoResult]] = {}

    def __len__(self) -> int:
        return len(self._writing)

    @property
    def unanswered_count(self) -> int:
        """Rows that are written, and the books have yet to say whether they count."""
        return len(self._published)

    def retain(self, hashes: Sequence[BlockHash], asked: Retention) -> None:
        """A request that asks for `asked` uses these blocks: note it for those that are under way."""
        for block_hash in self._writing.keys() & hashes if self._writing else ():
            self._writing[block_hash] = _longer(self._writing[block_hash], asked)

    def start(self, items: Sequence[WriteItem], room: int, now: float) -> list[int | None]:
        """Start `room` of them at most; a ticket each, None if it is here or under way, lacks a slot, or trouble."""
        self.lacking = False
        chosen: dict[BlockHash, int] = {}
        for place, item in enumerate(items):
            if len(chosen) == room:
                break
            known = item.block_hash in self._writing or self._books.holds(item.block_hash)
            if not known and item.block_hash not in chosen:
                chosen[item.block_hash] = place
        allowed = self._watch.allowed(ShelfOperation.WRITE, len(chosen), now)
        tickets: list[int | None] = [None] * len(items)
        starting: list[Transfer] = []
        for place, grant in self._slots(items, list(itertools.islice(chosen.values(), allowed))):
            item = items[place]
            tickets[place] = ticket = self._transfers.ticket()
            sums = item.sums if item.sums is not None else b""
            priority, expiry_s, pinned, tenant = item.retention
            record = Record(item.block_hash, *grant, item.depth, sums, priority, expiry_s, tenant, pinned)
            starting.append(Transfer(ticket, record, item.source))
            self._writing[item.block_hash] = PLAIN
            if item.intact is not None:
                self._unsure[ticket] = item.intact
            if item.leased:
                self._to_lease.add(grant)
        if allowed and not starting:  # no slot for a probe, or not yet: it is made once there is one
            self._watch.spared(ShelfOperation.WRITE, now)
        self._transfers.start(ShelfOperation.WRITE, starting)
        return tickets

    def end(self, ended: Sequence[tuple[Flight, IoResult]], now: float) -> list[ShelfDone]:
        """Publish what was written; returns the ends of those writes that failed."""
        if not ended:
            return []
        done: list[ShelfDone] = []
        for flight, result in ended:
            intact = self._unsure.pop(flight.ticket, None)
            grant = Grant(flight.record.slot, flight.record.generation)
            outcome = ShelfOutcome.DONE
            if result.error_number == errno.ECANCELED:
                outcome = ShelfOutcome.REFUSED
            elif result.error_number is not None:
                no_space = result.error_number in SPACE_ERRORS
                self._watch.trouble(flight.operation, result.error_number, now, at_once=no_space)
                outcome = ShelfOutcome.NO_SPACE if no_space else ShelfOutcome.IO_ERROR
            elif intact is not None and not intact():
                outcome = ShelfOutcome.STALE
            else:
                self._published[grant] = (flight, result)
                continue
            self._books.abandon([grant])
            self._to_lease.discard(grant)
            del self._writing[flight.record.block_hash]
            done.append(flight.done(result, outcome))
        written = [flight.record for flight, result in ended if result.error_number is None]
        if written:
            self._watch.succeeded(ShelfOperation.WRITE)
        written = [record for record in written if Grant(record.slot, record.generation) in self._published]
        asked = [record for record in written if Grant(record.slot, record.generation) in self._to_lease]
        if asked:
            self._books.publish(asked, now, lease=True)
            written = [record for record in written if Grant(record.slot, record.generation) not in self._to_lease]
        self._books.publish(written, now)
        return done

    def answered(self, now: float) -> list[ShelfDone]:
        """The ends of written rows that the books have answered for."""
        done: list[ShelfDone] = []
        for record, outcome in self._books.answers(now):
            grant = Grant(record.slot, record.generation)
            flight, result = self._published.pop(grant)
            lease = None
            if grant in self._to_lease:
                self._to_lease.remove(grant)
                lease = self._holdings.lease(record) if outcome is PublishOutcome.PUBLISHED else None
            asked = self._writing.pop(record.block_hash)
            if asked.asks:
                self._books.retain([record.block_hash], asked)
            done.append(flight.done(result, PUBLISHED[outcome], lease))
        return done

    def check(self) -> None:
        """Assert that it and the transfers agree on what is under way."""
        flights = self._transfers.flights()
        writing = [flight.record.block_hash for flight in flights if flight.operation is ShelfOperation.WRITE]
        writing += [flight.record.block_hash for flight, _ in self._published.values()]
        assert sorted(writing) == sorted(self._writing)

    def _slots(self, items: Sequence[WriteItem], places: Sequence[int]) -> Iterator[tuple[int, Grant]]:
        """A slot for each of these places: the one that was asked for, or one that can be had at once."""
        for place in places:
            grant = items[place].grant
            if grant is not None:
                self._holdings.use(grant)
                self._to_lease.add(grant)
                yield place, grant
        without = (place for place in places if items[place].grant is None)
        for tenant, group in itertools.groupby(without, key=lambda place: items[place].retention.tenant):
            wanting = list(group)
            grants = self._books.reserve(len(wanting), tenant)
            self.lacking |= len(grants) < len(wanting)
            yield from zip(wanting, grants, strict=False)


def _longer(before: Retention, asked: Retention) -> Retention:
    return before.raised(asked) if before.asks else asked
