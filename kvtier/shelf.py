"""One shelf: a slab, the directory over it, and the I/O engine between its rows and the caller's memory.

What its callers see; the life of a transfer is in writes.py (reserve, write, publish) and reads.py (read, verify). A
row is either exactly what its record says or a miss; trouble is an outcome, never an exception. Knows neither sequences
nor other tiers. All calls come from the engine thread and return at once.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvtier.block import BlockHash, Tier
from kvtier.books import Books
from kvtier.boot_clock import boot_s
from kvtier.holdings import ShelfHoldings
from kvtier.io.base import IoEngine
from kvtier.reads import ShelfReads
from kvtier.record import Lease, Record
from kvtier.retention import Retention
from kvtier.ticket import ReadItem, ShelfDone, ShelfLimits, ShelfOperation, ShelfOutcome, WriteItem
from kvtier.tiers.arena import Arena, Window
from kvtier.tiers.crossings import Crossings
from kvtier.tiers.header import HEADER_BYTES, RowFormat
from kvtier.tiers.slab import Slab
from kvtier.transfers import RowTransfers
from kvtier.watch import TransferWatch
from kvtier.writes import ShelfWrites

__all__ = [
    "ReadItem",
    "Shelf",
    "ShelfDone",
    "ShelfLimits",
    "ShelfOutcome",
    "WriteItem",
]

log = logging.getLogger(__name__)

DROP_REASONS = ("evicted", "private", "unreadable")
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
        files_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        """`close_files(deadline_s, stuck)` closes slab and books, whose descriptors `stuck` transfers may still use.

        `files_lost` tells that the files are not the shelf's any more, as somebody else has found.
        """
        self.tier = tier
        self.slot_count = slab.slot_count
        self.row_bytes = form.row_bytes
        self.bytes_total = slab.total_bytes
        self._form = form
        self._slab = slab
        self._books = books
        self._transfers = RowTransfers(form, slab, engine, limits.in_flight_max)
        self._watch = TransferWatch(tier, self._transfers, limits)
        self.holdings = ShelfHoldings(books)
        """Rows and leases that are held for longer than a transfer. Close a shelf only when there are none."""
        self._writes = ShelfWrites(books, self.holdings, self._transfers, self._watch)
        self._reads = ShelfReads(books, self._transfers, self._watch, limits)
        self._window: Window | None = None
        self._close_files = close_files
        self._files_lost = files_lost
        self._counts: Counter[str] = Counter()
        self._now = time.monotonic()
        self._refusing = False
        self._closed = False
        self.is_lost = False
        """Its files are gone, for good: all is a miss. Close it once nothing is in flight, and open another."""

    def __repr__(self) -> str:
        return f"Shelf({self.tier.value}, {self._books!r}, in_flight={self.in_flight})"

    def serve(self, arena: Arena) -> None:
        """Move rows to and from this HBM, and let its passes reach DRAM's rows in place. Before anything is moved."""
        if (ferry := arena.ferry()) is not None:
            self._transfers.cross_by(Crossings(ferry, self.row_bytes))
        if self.tier is Tier.DRAM:
            length = self._slab.slot_count * self._slab.slot_bytes - HEADER_BYTES
            self._window = arena.window(self._slab.address(0), length)

    def write_from(self, dram: Shelf) -> None:
        """Rows to be written will come from there: see `IoEngine.register_memory`."""
        self._transfers.register_memory(dram._slab.memory)

    @property
    def in_flight(self) -> int:
        """Tickets given whose end has not been polled."""
        return len(self._transfers) + len(self._reads) + self._writes.unanswered_count

    @property
    def write_room(self) -> int:
        """Rows that could be under way besides those that are, given slots for them."""
        return 0 if self._closed or self.is_lost else self._transfers.room(ShelfOperation.WRITE)

    @property
    def used_count(self) -> int:
        """Slots that are not free."""
        return self._books.used_slots

    @property
    def supplied(self) -> bool:
        """There were no slots for a write, and there are some now: it is worth another try at once."""
        return self._writes.lacking and self._books.supplied

    @property
    def reports(self) -> bool:
        """Whether this engine reports what the shelf holds."""
        return self._books.reports

    def find(self, hashes: Sequence[BlockHash]) -> list[Record]:
        """Records of the leading run of `hashes` that can be read here. Holds nothing."""
        return [] if self.is_lost else self._books.find(hashes)

    def holds(self, block_hash: BlockHash) -> bool:
        """Whether a readable row has this hash."""
        return not self.is_lost and self._books.holds(block_hash)

    def touch(self, hashes: Sequence[BlockHash], now: float) -> None:
        """Note a use. Give whole chains from their first block on, so that no parent looks colder than its child."""
        self._books.touch(hashes, now)

    def stamp(self, hashes: Sequence[BlockHash], now: float) -> None:
        """Note when the blocks of a chain were last used; no further use of them."""
        self._books.stamp(hashes, now)

    def retain(self, hashes: Sequence[BlockHash], asked: Retention) -> None:
        """A request that asks for `asked` uses these blocks: they stay for the longer of that and what they have.

        Give whole chains from their first block on. Rows that are being written count as being here.
        """
        if asked.asks:
            self._writes.retain(hashes, asked)
            self._books.retain(hashes, asked)

    def unpin(self, hashes: Sequence[BlockHash]) -> None:
        """The policy may evict these blocks again, when their turn comes."""
        self._books.unpin(hashes)

    def write(self, items: Sequence[WriteItem], now: float) -> list[int | None]:
        """Start writing rows; a ticket each, None if it is here or being written, there is no room, or trouble.

        With a ticket an item's `grant` is the write's, without one it is still the caller's.
        """
        self._now = now
        return self._writes.start(items, self.write_room, now)

    def read(self, items: Sequence[ReadItem]) -> list[int | None]:
        """Start reading rows, or slices of them, by copy.

        A ticket each, None where the breaker is open or too many reads wait. Only what ends as DONE in `poll` has been
        verified and may be used. What hangs does not end: who waits has a deadline of its own, and leaves the target.
        """
        assert all(item.target.nbytes == self._form.read_bytes(item.layers) for item in items)
        if self._closed or self.is_lost:
            return [None] * len(items)
        return self._reads.add(items, self._now)

    def cancel_reads(self) -> None:
        """Let go of the reads that have not begun; the next poll says that they were refused."""
        self._transfers.cancel(ShelfOperation.READ)
        self._refusing = True

    def poll(self, now: float) -> list[ShelfDone]:
        """What has ended since the last call: written rows are published, bad ones dropped, the next reads started."""
        self._now = now
        ended = self._transfers.poll()
        done = self._writes.end([pair for pair in ended if pair[0].operation is ShelfOperation.WRITE], now)
        done += self._writes.answered(now)
        self._books.expire(time.time(), boot_s())  # what was published just now may have expired while it was written
        done += self._reads.end([pair for pair in ended if pair[0].operation is ShelfOperation.READ], now)
        self._counts["late"] += self._watch.notice_late(now)
        self.notice_loss()
        if self._refusing or self.is_lost or self._watch.is_open(ShelfOperation.READ):
            done += self._reads.refuse()
            self._refusing = False
        self._reads.start()
        for item in done:
            self._counts[f"{item.operation.value}_bytes"] += item.moved_bytes
            self._counts[item.operation.value if item.outcome is ShelfOutcome.DONE else item.outcome.value] += 1
        return done

    def notice_loss(self) -> None:
        """Look whether the files are still its own.

        If not, what has not started is let go of, the rest ends by itself: an open file outlives its name.
        """
        if not self.is_lost and self._files_lost():
            self.is_lost = True
            self.holdings.lose()
            log.warning("%s shelf: its files are gone, replaced or cut short", self.tier.value)
            for operation in (ShelfOperation.READ, ShelfOperation.WRITE):
                self._transfers.cancel(operation)

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

    def address(self, lease: Lease) -> int:
        """Where the passes that it serves, or else this process, find a leased DRAM row; there until the lease ends."""
        slot = lease.record.slot
        if self._window is None:
            return self._slab.address(slot)
        return self._window.address + slot * self._slab.slot_bytes

    def verify(self, leases: Sequence[Lease]) -> list[int | None]:
        """Judge leased DRAM rows where they lie; a ticket each, like `read`, that ends as DONE or a miss."""
        if self._closed or self.is_lost:
            return [None] * len(leases)
        items = [ReadItem(lease.record, self._slab.view(lease.record.slot)) for lease in leases]
        return self._reads.add(items, self._now, in_place=True)

    def coldest(self, count: int) -> list[Record]:
        """The rows that would be evicted next, coldest first."""
        return self._books.coldest(count)

    def drop(self, records: Sequence[Record], reason: str) -> None:
        """Hide rows at once and count them under `dropped_<reason>`, one of `DROP_REASONS`."""
        assert reason in DROP_REASONS, reason
        self._counts[f"dropped_{reason}"] += len(self._books.drop(records))

    def stats(self) -> dict[str, int]:
        """Plain numbers: slots, bytes, transfers, evictions, and failures by the value of their outcome. Any thread."""
        counts = self._counts  # others may be added meanwhile: never to be walked over
        values = {
            "slots_used": self.used_count,
            "slots_total": self.slot_count,
            "bytes_total": self.bytes_total,
            "in_flight": self.in_flight,
            "held": len(self.holdings),
            "evictions": self._books.evictions,
            "reads": counts["read"],
            "writes": counts["write"],
            "verifies": counts["verify"],
            "read_bytes": counts["read_bytes"],
            "write_bytes": counts["write_bytes"],
            "late": counts["late"],
            "breaker_openings": self._watch.openings,
        }
        failed = {outcome.value: counts[outcome.value] for outcome in ShelfOutcome if outcome is not ShelfOutcome.DONE}
        dropped = {f"dropped_{reason}": counts[f"dropped_{reason}"] for reason in DROP_REASONS}
        return values | failed | self._books.counts._asdict() | dropped

    def check(self) -> None:
        """Assert the books, and that transfers and header pages agree."""
        self._books.check()
        self._transfers.check()
        self._writes.check()

    def close(self, deadline_s: float) -> None:
        """Let what is in flight end, up to the deadline, publish it, and close slab and books.

        Memory and descriptor of a transfer that is still stuck then are left to it: they go with the process.
        """
        if self._closed:
            return
        end = time.monotonic() + deadline_s
        self._closed = True
        self.holdings.lose()
        self._reads.clear()
        stuck = self._transfers.close(deadline_s)
        self.poll(time.monotonic())
        while self._writes.unanswered_count and time.monotonic() < end:
            time.sleep(ANSWER_PAUSE_S)
            self.poll(time.monotonic())
        if self._window is not None:
            self._window.close()
        self._close_files(max(0.0, end - time.monotonic()), stuck)
        if stuck:
            log.warning("%s shelf closed with %d transfers stuck", self.tier.value, stuck)
