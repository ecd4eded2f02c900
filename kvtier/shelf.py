"""One shelf: a slab, the directory over it, and the I/O engine between its rows and the caller's memory.

Owns the life of every transfer: reserve, write, publish; find, read, verify. A row is either exactly what its record
says or a miss; trouble is an outcome, never an exception. Knows neither sequences nor other tiers. All calls come from
the engine thread and return at once.
"""

from __future__ import annotations

import errno
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from kvtier.block import BlockHash, Tier
from kvtier.books import Books
from kvtier.breaker import Breaker
from kvtier.directory import PublishOutcome
from kvtier.io.base import IoEngine, IoResult
from kvtier.record import Grant, Lease, Record, tenant_digest
from kvtier.ticket import ReadItem, ShelfDone, ShelfLimits, ShelfOperation, ShelfOutcome, WriteItem
from kvtier.tiers.header import RowFormat, Verdict
from kvtier.tiers.slab import Slab
from kvtier.transfers import Flight, RowTransfers

__all__ = [
    "Lease",
    "ReadItem",
    "Record",
    "Shelf",
    "ShelfDone",
    "ShelfLimits",
    "ShelfOperation",
    "ShelfOutcome",
    "WriteItem",
]

log = logging.getLogger(__name__)

SPACE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""What the next write would meet as well: the breaker opens at once."""

ANSWER_PAUSE_S = 0.001
"""Between two looks for the last answers while a shelf is closed."""


class Shelf:
    """See the module. Made by `open_dram_shelf` and `open_nvme_shelf`."""

    def __init__(
        self,
        tier: Tier,
        form: RowFormat,
        slab: Slab,
        books: Books,
        engine: IoEngine,
        limits: ShelfLimits,
        close_files: Callable[[float, int], None],
    ) -> None:
        """`close_files(deadline_s, stuck)` closes slab and books, whose descriptors `stuck` transfers may still use."""
        self.tier = tier
        self.slot_count = slab.slot_count
        self.row_bytes = form.row_bytes
        self.bytes_total = slab.total_bytes
        self._slab = slab
        self._books = books
        self._transfers = RowTransfers(form, slab, engine, limits.in_flight_max)
        self._limits = limits
        self._close_files = close_files
        self._writing: set[BlockHash] = set()
        self._unsure: dict[int, Callable[[], bool]] = {}
        self._published: dict[Grant, tuple[Flight, IoResult]] = {}
        self._waiting: deque[tuple[int, Record, memoryview]] = deque()
        self._breakers = {operation: Breaker(limits.failures_max, limits.pause_s) for operation in ShelfOperation}
        self._counts: Counter[str] = Counter()
        self._now = time.monotonic()
        self._closed = False

    def __repr__(self) -> str:
        return f"Shelf({self.tier.value}, {self._books!r}, in_flight={self.in_flight})"

    @property
    def in_flight(self) -> int:
        """Tickets given whose end has not been polled."""
        return len(self._transfers) + len(self._waiting) + len(self._published)

    @property
    def used_count(self) -> int:
        """Slots that are not free."""
        return self._books.used_slots

    def find(self, hashes: Sequence[BlockHash]) -> list[Record]:
        """Records of the leading run of `hashes` that can be read here. Holds nothing."""
        return self._books.find(hashes)

    def holds(self, block_hash: BlockHash) -> bool:
        """Whether a readable row has this hash."""
        return self._books.holds(block_hash)

    def touch(self, hashes: Sequence[BlockHash], now: float) -> None:
        """Note a use. Give whole chains from their first block on, so that no parent looks colder than its child."""
        self._books.touch(hashes, now)

    def stamp(self, hashes: Sequence[BlockHash], now: float) -> None:
        """Note when the blocks of a chain were last used; no further use of them."""
        self._books.stamp(hashes, now)

    def write(self, items: Sequence[WriteItem], now: float) -> list[int | None]:
        """Start writing rows; a ticket each, None if it is here or being written, there is no room, or trouble."""
        self._now = now
        chosen: dict[BlockHash, int] = {}
        room = 0 if self._closed else self._transfers.room(ShelfOperation.WRITE)
        for place, item in enumerate(items):
            if len(chosen) == room:
                break
            known = item.block_hash in self._writing or self._books.holds(item.block_hash)
            if not known and item.block_hash not in chosen:
                chosen[item.block_hash] = place
        allowed = self._allowed(ShelfOperation.WRITE, len(chosen))
        tickets: list[int | None] = [None] * len(items)
        starting: list[tuple[int, Record, memoryview]] = []
        groups = itertools.groupby(itertools.islice(chosen.values(), allowed), key=lambda place: items[place].tenant)
        for tenant, group in groups:
            places, digest = list(group), tenant_digest(tenant)
            for place, grant in zip(places, self._books.reserve(len(places), digest), strict=False):
                item = items[place]
                tickets[place] = ticket = self._transfers.ticket()
                sums = item.sums if item.sums is not None else b""
                record = Record(item.block_hash, *grant, item.depth, sums, item.priority, 0, digest)
                starting.append((ticket, record, item.source))
                self._writing.add(item.block_hash)
                if item.intact is not None:
                    self._unsure[ticket] = item.intact
        self._transfers.start(ShelfOperation.WRITE, starting)
        return tickets

    def read(self, items: Sequence[ReadItem]) -> list[int | None]:
        """Start reading rows by copy; a ticket each, None where the breaker is open or too many reads wait."""
        tickets: list[int | None] = []
        for item in items:
            assert item.target.nbytes == self.row_bytes, item.target.nbytes
            if (
                self._closed
                or len(self._waiting) >= self._limits.waiting_max
                or self._allowed(ShelfOperation.READ, 1) == 0
            ):
                tickets.append(None)
            else:
                ticket = self._transfers.ticket()
                self._waiting.append((ticket, item.record, item.target))
                tickets.append(ticket)
        self._start_reads()
        return tickets

    def poll(self, now: float) -> list[ShelfDone]:
        """What has ended since the last call: written rows are published, bad ones dropped, the next reads started."""
        self._now = now
        ended = self._transfers.poll()
        done = self._end_writes([pair for pair in ended if pair[0].operation is ShelfOperation.WRITE])
        done += self._end_published()
        done += self._end_reads([pair for pair in ended if pair[0].operation is ShelfOperation.READ])
        self._notice_late()
        if self._breakers[ShelfOperation.READ].is_open:
            done += self._refuse_waiting()
        self._start_reads()
        for item in done:
            self._counts[f"{item.operation.value}_bytes"] += item.moved_bytes
            self._counts[item.operation.value if item.outcome is ShelfOutcome.DONE else item.outcome.value] += 1
        return done

    def acquire(self, records: Sequence[Record]) -> list[Lease | None]:
        """A lease on each row that is still there; whoever copies from it asks `intact` before the copy counts."""
        return self._books.acquire(records)

    def view(self, lease: Lease) -> memoryview:
        """A leased DRAM row in place; use it until the lease is released."""
        return self._slab.view(lease.record.slot)

    def intact(self, lease: Lease) -> bool:
        """Whether a leased row has been there, unchanged, all the time until now."""
        return self._books.intact(lease)

    def release(self, leases: Sequence[Lease]) -> None:
        """Give leases back, each as often as it was acquired."""
        self._books.release(leases)

    def coldest(self, count: int) -> list[Record]:
        """The rows that would be evicted next, coldest first."""
        return self._books.coldest(count)

    def drop(self, records: Sequence[Record], reason: str) -> None:
        """Hide rows at once and count them under `dropped_<reason>`, a name from the caller's closed set."""
        self._counts[f"dropped_{reason}"] += len(self._books.drop(records))

    def stats(self) -> dict[str, int]:
        """Plain numbers: slots, bytes, transfers, evictions, and failures by the value of their outcome."""
        counts = self._counts
        values = {
            "slots_used": self.used_count,
            "slots_total": self.slot_count,
            "bytes_total": self.bytes_total,
            "in_flight": self.in_flight,
            "evictions": self._books.evictions,
            "reads": counts["read"],
            "writes": counts["write"],
            "read_bytes": counts["read_bytes"],
            "write_bytes": counts["write_bytes"],
            "late": counts["late"],
            "breaker_openings": sum(breaker.openings for breaker in self._breakers.values()),
        }
        values |= {outcome.value: counts[outcome.value] for outcome in ShelfOutcome if outcome is not ShelfOutcome.DONE}
        return values | {key: count for key, count in counts.items() if key.startswith("dropped_")}

    def check(self) -> None:
        """Assert the books, and that transfers and header pages agree."""
        self._books.check()
        self._transfers.check()
        flights = self._transfers.flights()
        writing = [flight.record.block_hash for flight in flights if flight.operation is ShelfOperation.WRITE]
        writing += [flight.record.block_hash for flight, _ in self._published.values()]
        assert sorted(writing) == sorted(self._writing)

    def close(self, deadline_s: float) -> None:
        """Let what is in flight end, up to the deadline, publish it, and close slab and books.

        Memory and descriptor of a transfer that is still stuck then are left to it: they go with the process.
        """
        if self._closed:
            return
        end = time.monotonic() + deadline_s
        self._closed = True
        self._waiting.clear()
        stuck = self._transfers.close(deadline_s)
        self.poll(time.monotonic())
        while self._published and time.monotonic() < end:
            time.sleep(ANSWER_PAUSE_S)
            self.poll(time.monotonic())
        self._close_files(max(0.0, end - time.monotonic()), stuck)
        if stuck:
            log.warning("%s shelf closed with %d transfers stuck", self.tier.value, stuck)

    def _allowed(self, operation: ShelfOperation, count: int) -> int:
        """How many transfers may start. One that hangs is the probe itself: another would only hang beside it."""
        breaker = self._breakers[operation]
        hung = (flight.late and flight.operation is operation for flight in self._transfers.flights())
        return 0 if breaker.is_open and any(hung) else breaker.allow(count, self._now)

    def _start_reads(self) -> None:
        count = min(len(self._waiting), self._transfers.room(ShelfOperation.READ))
        self._transfers.start(ShelfOperation.READ, [self._waiting.popleft() for _ in range(count)])

    def _end_writes(self, ended: Sequence[tuple[Flight, IoResult]]) -> list[ShelfDone]:
        """Publish what was written; returns the ends of those writes that failed."""
        done: list[ShelfDone] = []
        for flight, result in ended:
            intact = self._unsure.pop(flight.ticket, None)
            grant = Grant(flight.record.slot, flight.record.generation)
            outcome = ShelfOutcome.DONE
            if result.error_number == errno.ECANCELED:
                outcome = ShelfOutcome.REFUSED
            elif result.error_number is not None:
                no_space = result.error_number in SPACE_ERRORS
                self._trouble(flight.operation, result.error_number, at_once=no_space)
                outcome = ShelfOutcome.NO_SPACE if no_space else ShelfOutcome.IO_ERROR
            elif intact is not None and not intact():
                outcome = ShelfOutcome.STALE
            else:
                self._published[grant] = (flight, result)
                continue
            self._books.abandon([grant])
            self._writing.discard(flight.record.block_hash)
            done.append(_done(flight, result, outcome))
        written = [flight.record for flight, result in ended if result.error_number is None]
        if written:
            self._breakers[ShelfOperation.WRITE].succeeded()
        written = [record for record in written if Grant(record.slot, record.generation) in self._published]
        self._books.publish(written, self._now)
        return done

    def _end_published(self) -> list[ShelfDone]:
        """The ends of written rows that the books have answered for."""
        done: list[ShelfDone] = []
        for record, outcome in self._books.answers(self._now):
            flight, result = self._published.pop(Grant(record.slot, record.generation))
            self._writing.discard(record.block_hash)
            done.append(_done(flight, result, PUBLISHED[outcome]))
        return done

    def _end_reads(self, ended: Sequence[tuple[Flight, IoResult]]) -> list[ShelfDone]:
        done: list[ShelfDone] = []
        for flight, result in ended:
            outcome = ShelfOutcome.DONE
            if result.error_number == errno.ECANCELED:
                outcome = ShelfOutcome.REFUSED
            elif result.error_number is not None:
                self._trouble(flight.operation, result.error_number)
                outcome = ShelfOutcome.IO_ERROR
            else:
                self._breakers[ShelfOperation.READ].succeeded()
                if result.value is not Verdict.GOOD:
                    outcome = self._miss(flight.record, result)
            done.append(_done(flight, result, outcome))
        return done

    def _miss(self, record: Record, result: IoResult) -> ShelfOutcome:
        """A row that came but is not the one: drop its record, unless that has changed meanwhile."""
        if not self._books.drop([record]):
            return ShelfOutcome.STALE
        return ShelfOutcome.SHORT_READ if result.value is None else ShelfOutcome.BAD_ROW

    def _trouble(self, operation: ShelfOperation, error_number: int, at_once: bool = False) -> None:
        breaker = self._breakers[operation]
        openings = breaker.openings
        if at_once:
            breaker.trip(self._now)
        else:
            breaker.failed(self._now)
        if breaker.openings > openings:
            name = errno.errorcode.get(error_number, str(error_number))
            log.warning("%s shelf: no more %ss for now: %s", self.tier.value, operation.value, name)
            self._transfers.cancel(operation)

    def _notice_late(self) -> None:
        """A transfer that hangs counts as a failure once; the flights are in order of their start."""
        for flight in self._transfers.flights():
            if flight.seen_at is None:
                flight.seen_at = self._now
            if not flight.late and self._now - flight.seen_at > self._limits.late_s:
                flight.late = True
                self._counts["late"] += 1
                self._trouble(flight.operation, errno.ETIMEDOUT)

    def _refuse_waiting(self) -> list[ShelfDone]:
        refused = [
            ShelfDone(ticket, ShelfOperation.READ, ShelfOutcome.REFUSED, record.block_hash, 0, 0)
            for ticket, record, _ in self._waiting
        ]
        self._waiting.clear()
        return refused


def _done(flight: Flight, result: IoResult, outcome: ShelfOutcome) -> ShelfDone:
    block_hash = flight.record.block_hash
    return ShelfDone(flight.ticket, flight.operation, outcome, block_hash, result.moved_bytes, result.duration_ns)


PUBLISHED = {
    PublishOutcome.PUBLISHED: ShelfOutcome.DONE,
    PublishOutcome.DUPLICATE: ShelfOutcome.DUPLICATE,
    PublishOutcome.STALE: ShelfOutcome.STALE,
    None: ShelfOutcome.UNANSWERED,
}
