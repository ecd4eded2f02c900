"""An engine's shelves in a process of their own, driven line by line, to be killed, stopped and forked at will.

Reads one JSON list a line, [command, arguments...], and answers each with one JSON value. Started by tests/nursery.py,
whose `Worker` is the other end. What an engine does all day is in tests/soak/life.py.
"""

from __future__ import annotations

import json
import os
import time
from typing import TextIO

from kvtier.block import Tier
from kvtier.keeper.opening import TIERS
from kvtier.record import NO_TENANT, Grant
from kvtier.shelf import WriteItem
from kvtier.tiers.header import HEADER_BYTES
from tests.rows import IO, ShelfUser, block_hashes, filled, payload
from tests.shelf_engine import EngineCommands, Setting
from tests.soak.life import Life

SCRIPT_BLOCKS = 5
"""What a script writes a tier; it drops the first of them."""
WAIT_S = 60.0


class Commands(EngineCommands):
    """What a worker can do. Tiers are named by their value."""

    def live(self, seed: int, blocks_max: int, wait_s: float, known: list[tuple[str, int, int]]) -> dict[str, object]:
        """Write, read and attend for a while; see `Life`."""
        shelves = {Tier(name): user.shelf for name, user in self._users.items()}
        return Life(shelves, self._bell, known, self._retention).run(seed, blocks_max, wait_s)

    def anew(self, wait_s: float, tiers: int) -> list[str]:
        """Part with shelves that are lost and take those that come, until there are so many; what is there."""

        def complete() -> bool:
            for name, user in list(self._users.items()):
                if user.shelf.is_lost:
                    user.shelf.close(5.0)
                    del self._users[name]
            for shelf in self._shared.poll(time.monotonic()):
                self._users[shelf.tier.value] = ShelfUser(shelf, self._bell)
            return len(self._users) == tiers and self._shared.link.line is not None and self._whole()

        self._until(complete, wait_s)
        return sorted(self._users)

    def write(self, tier: str, seed: int, first: int, count: int, wait_s: float) -> int:
        """Write blocks until all are there or the time is up; how many this engine has published."""
        user, end, published = self._users[tier], time.monotonic() + wait_s, 0
        hashes = block_hashes(first + count, seed, first)
        while True:
            left = [h for h in hashes if not user.shelf.holds(h)]
            if not left or time.monotonic() >= end:
                return published
            user.now = time.monotonic()
            done = user.write(left[: IO.in_flight_max])
            published += sum(one is not None and one.outcome.value == "done" for one in done)
            user.finish([])
            if not any(done):
                self._bell.wait(0.02)
                user.shelf.poll(time.monotonic())

    def outcomes(self, tier: str, seed: int, first: int, count: int) -> list[str | None]:
        """Try once to write blocks: how each ended."""
        user = self._users[tier]
        user.now = time.monotonic()
        items = [WriteItem(h, place, filled(h)) for place, h in enumerate(block_hashes(first + count, seed, first))]
        tickets = user.shelf.write(items, user.now)
        ended: dict[int, str] = {}
        while set(tickets) - {None} - set(ended):
            ended |= {done.ticket: done.outcome.value for done in user.shelf.poll(time.monotonic())}
            self._bell.wait(0.02)
        return [None if ticket is None else ended[ticket] for ticket in tickets]

    def begin(self, tier: str, seed: int, first: int, count: int) -> int:
        """Start writing blocks, as there are slots for them, and leave them in flight; how many were started."""
        shelf = self._users[tier].shelf
        left = [WriteItem(h, 0, filled(h)) for h in block_hashes(first + count, seed, first)]

        def started() -> bool:
            tickets = shelf.write(left, time.monotonic())
            left[:] = [item for item, ticket in zip(left, tickets, strict=True) if ticket is None]
            return not left

        self._until(started, WAIT_S)
        return count - len(left)

    def hits(self, tier: str, seed: int, first: int, count: int) -> int:
        """Blocks that are found and read, every byte judged."""
        user = self._users[tier]
        user.shelf.poll(time.monotonic())
        hashes = block_hashes(first + count, seed, first)
        return sum(user.hits(hashes[start : start + 64]) for start in range(0, count, 64))

    def known(self, tier: str, seed: int, first: int, count: int, wait_s: float) -> int:
        """Wait until so many blocks are known here; how many are."""
        shelf, hashes = self._users[tier].shelf, block_hashes(first + count, seed, first)
        self._until(lambda: all(map(shelf.holds, hashes)), wait_s)
        return sum(map(shelf.holds, hashes))

    def lease(self, tier: str, seed: int, first: int, count: int) -> int:
        """Lease blocks in place; how many were got."""
        shelf = self._users[tier].shelf
        records = [r for h in block_hashes(first + count, seed, first) for r in shelf.find([h])]
        reply = self._users[tier].reply(shelf.holdings.ask_leases(records))
        self._leases.setdefault(tier, []).extend(lease for lease in reply.leases or () if lease is not None)
        return len(self._leases[tier])

    def release(self, tier: str) -> None:
        """Give all leases back."""
        self._users[tier].shelf.holdings.end_leases(self._leases.pop(tier, []))

    def ask(self, tier: str, count: int, least: int, wait_s: float = 0.0) -> int:
        """Ask for rows to hold, at least so many or none, until they are had or the time is up; how many were got."""
        user, end = self._users[tier], time.monotonic() + wait_s
        grants: list[Grant] = []
        while not grants:
            grants = user.reply(user.shelf.holdings.ask_rows(count, NO_TENANT, least)).grants or []
            if time.monotonic() >= end:
                break
        self._asked.setdefault(tier, []).extend(grants)
        return len(grants)

    def write_into(self, tier: str, seed: int, first: int, count: int) -> int:
        """Write blocks into rows that were asked for; how many are published, and leased from then on."""
        user, asked = self._users[tier], self._asked[tier]
        hashes = block_hashes(first + min(count, len(asked)), seed, first)
        items = [WriteItem(h, place, filled(h), grant=asked[place]) for place, h in enumerate(hashes)]
        tickets = user.shelf.write(items, time.monotonic())
        self._asked[tier] = [grant for grant, ticket in zip(asked, tickets, strict=False) if ticket is None]
        self._asked[tier] += asked[len(tickets) :]
        leases = [one.lease for one in user.finish(tickets) if one is not None and one.lease is not None]
        self._leases.setdefault(tier, []).extend(leases)
        return len(leases)

    def give(self, tier: str) -> None:
        """Give rows back that were asked for."""
        self._users[tier].shelf.holdings.give_rows(self._asked.pop(tier, []))

    def reserve(self, tier: str, count: int, wait_s: float = WAIT_S) -> int:
        """Take reservations and keep them, until there are so many or the time is up; how many were got."""
        books, got = self._books(tier), 0
        end = time.monotonic() + wait_s
        while got < count and time.monotonic() < end:
            got += len(books.reserve(count - got, NO_TENANT))
            books.answers(time.monotonic())
            self._bell.wait(0.01)
        return got

    def promote(self, seed: int, count: int, wait_s: float) -> int:
        """Read rows of NVMe straight into reserved slots of DRAM, again and again; how many."""
        shelf, books, read = self._users["nvme"].shelf, self._books("dram"), 0
        records = [record for h in block_hashes(count, seed) for record in shelf.find([h])]
        nvme, dram = (self._shared.seat.slabs[TIERS[tier]].slab for tier in (Tier.NVME, Tier.DRAM))
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            grants = books.reserve(2, NO_TENANT)
            for grant, record in zip(grants, records, strict=False):
                with dram.view(grant.slot) as row:
                    os.preadv(nvme.descriptor, [row], nvme.offset(record.slot) + HEADER_BYTES)
                    assert bytes(row) == payload(record.block_hash), "somebody else writes into this slot"
                read += 1
            books.abandon(grants)
            self._until(lambda: False, 0.001)
        return read

    def leased(self, tier: str) -> int:
        """Judge every row that is leased, where it lies; how many there are."""
        shelf, leases = self._users[tier].shelf, self._leases.get(tier, [])
        for lease in leases:
            with shelf.view(lease) as row:
                assert bytes(row) == payload(lease.record.block_hash), "a leased row has changed"
        return len(leases)

    def look(self, seed: int, count: int, wait_s: float) -> int:
        """Look at leased rows in place, and read others by copy, again and again; how often."""
        end, looks = time.monotonic() + wait_s, 0
        while time.monotonic() < end:
            for tier in self._users:
                looks += self.leased(tier) + self.hits(tier, seed, 0, count)
        return looks

    def script(self, seed: int) -> int:
        """All that books can be asked for, once, counted in steps from here on; how many steps that were."""
        self._steps.armed = True
        for tier in self._users:
            self.write(tier, seed, 0, SCRIPT_BLOCKS, 20)
            books = self._books(tier)
            taken = books.reserve(2, NO_TENANT)
            self._until(lambda: False, 0.05)
            books.abandon(taken)
            books.drop(books.find(block_hashes(1, seed)))
            self.ask(tier, 3, 3)
            self.write_into(tier, seed, SCRIPT_BLOCKS, 1)
            self.give(tier)
            self.hits(tier, seed, 1, SCRIPT_BLOCKS - 1)
        self.lease("dram", seed, 1, 3)
        self.leased("dram")
        self.release("dram")
        self._until(lambda: False, 0.1)
        return self._steps.count


def serve(lines: TextIO, setting: Setting) -> None:
    """Do as told until told to close, or nobody is there to tell."""
    commands = Commands(setting)
    for line in lines:
        name, *arguments = json.loads(line)
        lines.write(json.dumps(getattr(commands, name)(*arguments)) + "\n")
        lines.flush()
        if name == "close":
            return
    commands.close()
