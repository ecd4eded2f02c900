"""An engine at work on its shelves: writes, reads by copy, attends in place, judges every byte, times every call.

What it writes is a chain of its own (a seed), what it reads is that and what it is told of. Runs inside a worker
process (tests/shelf_worker.py), on its thread; a wrong byte is an AssertionError there and so ends the worker.
Times are of what the process had: none in which the machine was busy with others.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvtier.block import Tier
from kvtier.record import Grant, Lease
from kvtier.retention import PLAIN, Retention
from kvtier.shelf import ReadItem, Shelf, WriteItem
from kvtier.ticket import ShelfOutcome
from tests.own_time import OwnTime, own_time, starved_s
from tests.rows import Bell, aligned, block_hashes, payload

Value = TypeVar("Value")

PAUSE_S = 0.003
WRITES_MAX = 2
READS_MAX = 4
LEASES_MAX = 4
ROWS_SHARE = 0.2
"""Of the questions, those for rows to write into."""
LEASE_TURNS = 4
"""How often a leased row is looked at before it is given back."""
END_S = 60.0
"""What has been begun ends within that, whatever has become of disk and keeper."""

right_row = functools.lru_cache(256)(payload)


@dataclass
class _Side:
    """One tier's own work."""

    shelf: Shelf
    known: list[bytes]
    written: int = 0
    """Of the own chain: the first that is not published yet."""
    writing: dict[int, bytes] = field(default_factory=dict)
    reading: dict[int, tuple[bytes, memoryview]] = field(default_factory=dict)


class Life:
    """See the module. One for each `live` command."""

    def __init__(
        self,
        shelves: dict[Tier, Shelf],
        bell: Bell,
        known: Sequence[tuple[str, int, int]],
        retention: Retention = PLAIN,
    ) -> None:
        """`known`: (tier, seed, count) of blocks that others have published."""
        self._sides = {tier: _Side(shelf, []) for tier, shelf in shelves.items()}
        for tier, seed, count in known:
            self._sides[Tier(tier)].known += block_hashes(count, seed)
        self._bell = bell
        self._retention = retention
        self._chance = random.Random()
        self._question: int | None = None
        self._rows: list[Grant] = []
        self._has_looked = False
        self._asks_first = True
        """Nothing is written to DRAM before rows have been asked for, so that some is written into them."""
        self._held: list[Lease] = []
        self._written: list[Lease] = []
        """Come with what was written into rows that were asked for; not looked at yet."""
        self._turns_left = 0
        self._counts = dict.fromkeys(("published", "into_asked", "read", "attended", "missed", "untaken"), 0)
        self._clock = OwnTime()
        self._starved_s = starved_s()
        """Until this turn."""
        self._last = dict.fromkeys(("published", "read", "attended"), self._now())
        self._gaps_s = dict.fromkeys(self._last, 0.0)
        self._call_s = 0.0

    def run(self, seed: int, blocks_max: int, wait_s: float) -> dict[str, object]:
        """Live for `wait_s`, writing up to `blocks_max` blocks a tier; what was done, and the longest of everything."""
        with own_time() as self._clock:
            self._last = dict.fromkeys(self._last, self._now())
            return self._run(seed, blocks_max, wait_s)

    def _run(self, seed: int, blocks_max: int, wait_s: float) -> dict[str, object]:
        self._chance.seed(seed)
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            self._starved_s = starved_s()
            for tier, side in self._sides.items():
                self._write(side, seed, blocks_max)
                self._read(side)
                if tier is Tier.DRAM:
                    self._attend(side)
            self._poll()
            self._bell.wait(PAUSE_S)
        for what in self._last:
            self._close_gap(what)
        self._finish()
        written = {tier.value: side.written for tier, side in self._sides.items()}
        return {
            "written": written,
            **self._counts,
            "call_s": self._call_s,
            **{f"{what}_gap_s": gap_s for what, gap_s in self._gaps_s.items()},
        }

    def _write(self, side: _Side, seed: int, blocks_max: int) -> None:
        """The own chain in order; what was refused or not answered is tried again."""
        dram = side.shelf.tier is Tier.DRAM
        if side.writing or side.written >= blocks_max or (dram and self._asks_first):
            return
        hashes = block_hashes(min(side.written + WRITES_MAX, blocks_max), seed, side.written)
        row_bytes, retention = side.shelf.row_bytes, self._retention
        asked = self._rows[: len(hashes)] if dram else []
        items = [
            WriteItem(h, side.written, _filled(h, row_bytes), retention=retention, grant=grant)
            for h, grant in itertools.zip_longest(hashes, asked)
        ]
        tickets = self._timed(side.shelf.write, items, time.monotonic())
        for item, ticket in zip(items, tickets, strict=True):
            if ticket is not None and item.grant is not None:
                self._rows.remove(item.grant)
            if ticket is not None:
                side.writing[ticket] = item.block_hash
            elif side.shelf.holds(item.block_hash):
                self._note_published(side, item.block_hash)
            else:
                self._counts["untaken"] += 1

    def _read(self, side: _Side) -> None:
        if not side.known or len(side.reading) >= READS_MAX:
            return
        block_hash = self._chance.choice(side.known)
        for record in self._timed(side.shelf.find, [block_hash]):
            target = aligned(side.shelf.row_bytes)
            (ticket,) = self._timed(side.shelf.read, [ReadItem(record, target)])
            if ticket is not None:
                side.reading[ticket] = (block_hash, target)

    def _attend(self, side: _Side) -> None:
        """Lease rows where they lie, look at them again and again, give them back."""
        holdings = side.shelf.holdings
        if self._held:
            for lease in self._held:
                with side.shelf.view(lease) as row:
                    assert bytes(row) == right_row(lease.record.block_hash, row.nbytes), "a leased row has changed"
                self._note("attended")
            self._turns_left -= 1
            if self._turns_left <= 0:
                self._release()
        elif self._question is not None:
            for reply in self._timed(holdings.replies):
                assert reply.number == self._question
                self._held = [lease for lease in reply.leases or () if lease is not None]
                self._rows += reply.grants or ()
                self._asks_first &= reply.leases is not None
                self._question, self._turns_left = None, LEASE_TURNS
        elif self._written:
            self._held, self._written, self._turns_left = self._written, [], LEASE_TURNS
        elif self._wants_rows(side):
            self._question = self._timed(holdings.ask_rows, WRITES_MAX, self._retention.tenant)
        elif side.known:
            hashes = self._chance.choices(side.known, k=LEASES_MAX)
            records = [record for block_hash in set(hashes) for record in side.shelf.find([block_hash])]
            if records:
                self._question = self._timed(holdings.ask_leases, records)
            self._has_looked = True

    def _wants_rows(self, side: _Side) -> bool:
        """Sometimes, and before anything is written, but after others' rows, which may be there already."""
        if self._asks_first:
            return self._has_looked or not side.known
        return not self._rows and self._chance.random() < ROWS_SHARE

    def _release(self) -> None:
        self._timed(self._sides[Tier.DRAM].shelf.holdings.end_leases, self._held)
        self._held = []

    def _poll(self) -> None:
        for side in self._sides.values():
            for done in self._timed(side.shelf.poll, time.monotonic()):
                if done.ticket in side.writing:
                    block_hash = side.writing.pop(done.ticket)
                    if done.lease is not None:
                        self._written.append(done.lease)
                        self._counts["into_asked"] += 1
                    if done.outcome is ShelfOutcome.DONE:
                        self._note_published(side, block_hash)
                elif done.ticket in side.reading:
                    block_hash, target = side.reading.pop(done.ticket)
                    if done.outcome is ShelfOutcome.DONE:
                        assert bytes(target) == right_row(block_hash, target.nbytes), "a wrong row was handed out"
                        self._note("read")
                    else:
                        self._counts["missed"] += 1

    def _note_published(self, side: _Side, block_hash: bytes) -> None:
        side.known.append(block_hash)
        side.written += 1
        self._note("published")

    def _note(self, what: str) -> None:
        self._counts[what] += 1
        self._close_gap(what)

    def _close_gap(self, what: str) -> None:
        self._gaps_s[what] = self._longer(self._last[what], self._gaps_s[what])
        self._last[what] = self._now()

    def _now(self) -> tuple[float, float]:
        """What this process has had, and what its threads had waited for a CPU when the turn began, in seconds."""
        return self._clock.seconds, self._starved_s

    def _longer(self, since: tuple[float, float], longest_s: float) -> float:
        """The longer of `longest_s` and what has passed since then, not counting waits for a CPU."""
        passed_s = self._clock.seconds - since[0]
        return longest_s if passed_s <= longest_s else max(longest_s, passed_s - (starved_s() - since[1]))

    def _finish(self) -> None:
        """End what was begun. Rows whose leases come late are looked at, too: a keeper may not get to run for 2 s."""
        end = time.monotonic() + END_S
        while self._leasing() or any(side.writing or side.reading for side in self._sides.values()):
            assert time.monotonic() < end, "what was begun does not end"
            self._poll()
            if self._leasing():
                self._attend(self._sides[Tier.DRAM])
            self._bell.wait(PAUSE_S)
        self._held += self._written
        self._written = []
        self._release()
        self._sides[Tier.DRAM].shelf.holdings.give_rows(self._rows)
        self._rows = []

    def _leasing(self) -> bool:
        return self._question is not None or bool(self._held)

    def _timed(self, function: Callable[..., Value], *arguments: object) -> Value:
        begun = self._now()
        value = function(*arguments)
        self._call_s = self._longer(begun, self._call_s)
        return value


def _filled(block_hash: bytes, row_bytes: int) -> memoryview:
    row = aligned(row_bytes)
    row[:] = right_row(block_hash, row_bytes)
    return row
