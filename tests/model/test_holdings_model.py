"""Rows asked for and leases in place over a line that is slow, breaks and mends, under keepers that come and go.

Two engines' real books and the keeper's real ones; only the line between them is made here, of frames in two queues,
and the clock. After each random step whatever an engine believes to hold, the keeper keeps for it: else a row that is
attended in place could be overwritten. In the end nothing is held that nobody knows of. A failure names its seed.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.directory import PublishOutcome, SlotState
from kvtier.eviction import LeastRecentlyUsed
from kvtier.holdings import ShelfHoldings
from kvtier.keeper import answers, asked, leases, link, published, shared
from kvtier.keeper.answers import Answers
from kvtier.keeper.client import Lost, Seated
from kvtier.keeper.frames import Frames, frame
from kvtier.keeper.ledger import Ledger
from kvtier.keeper.link import ANSWER_S, Link
from kvtier.keeper.shared import SharedBooks
from kvtier.keeper.slot_table import SlotTable
from kvtier.keeper.stock import Stock
from kvtier.keeper.telling import Teller
from kvtier.keeper.wire import ENGINE_DECODER, KEEPER_DECODER, Held, Join
from kvtier.record import NO_TENANT, Grant, Lease, Record, tenant_digest
from kvtier.terms import SlotLimits
from kvtier.tiers.slab import Slab, make_dram_slab
from tests.rows import LAYOUT, SLOT_BYTES, block_hashes

LAYOUT_NAME = "layout"
SLOTS = 24
PIECE = 3
"""Rows in one message."""
HASHES = block_hashes(16)
TENANTS = [NO_TENANT, tenant_digest("a")]
QUOTA = 8
STEPS = 400
SUMS = bytes(8 * LAYOUT.layers)


class Clock:
    """Stands in for the `time` module where deadlines are made and looked at."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)


class Line:
    """One engine's connection: `KeeperClient` to the engine, `Connection` to the keeper, two queues between them."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.seat = SimpleNamespace(owner=owner)
        self.layout, self.tiers, self.budgets = LAYOUT_NAME, frozenset({0}), [1, 1]
        self.joined = self.closing = self.reports = False
        self.held: tuple[list[Any], list[Any]] = ([], [])
        self.backlog = 0
        self.number = 0
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()
        self.inbox: list[object] = []

    def send(self, *what: Any) -> None:
        """As client (line, message), or as connection (message)."""
        if len(what) == 1:
            self.send_bytes(frame(what[0]))
        elif what[0] == self.number:
            self.up.append(frame(what[1]))

    def send_bytes(self, data: bytes) -> None:
        self.down.append(data)

    def send_lazily(self, frames: Iterable[bytes]) -> None:
        self.down.extend(frames)

    @property
    def has_news(self) -> bool:
        return bool(self.inbox)

    def take(self) -> list[object]:
        taken, self.inbox = self.inbox, []
        return taken

    def cut(self) -> None:
        if self.number:
            self.up.clear()
            self.down.clear()
            self.joined, self.held = False, ([], [])
            self.inbox.append(Lost())

    def mend(self) -> None:
        self.number += 1
        self.inbox.append(Seated(self.number))


class Keeper:
    """The keeper's books and what answers from them."""

    def __init__(
        self, slab: Slab, table: SlotTable, lines: list[Line], records: list[Record], floor: int, seen: Counter[str]
    ) -> None:
        limits = SlotLimits(SLOTS // 4, QUOTA)
        self.ledger = Ledger(0, slab, LAYOUT.layers, table, None, floor, LeastRecentlyUsed, limits)
        self.ledger.restore(records, list(table.entries()), 0.0)
        house: Any = SimpleNamespace(
            layouts={LAYOUT_NAME: SimpleNamespace(ledgers={0: self.ledger}, told={})},
            joined=lambda _: [line for line in lines if line.joined],
            lives=lambda _: True,
        )
        self._seen = seen
        self._teller = Teller(house)
        self._answers = Answers(house, self._teller)

    def hear(self, line: Any) -> None:
        """The next message of an engine."""
        for message in Frames(KEEPER_DECODER).feed(line.up.popleft()):
            if isinstance(message, Held):
                self._seen["held in parts"] += 1
                self._answers.note_held(line, message)
            elif isinstance(message, Join):
                self._answers.join(line, message)
            else:
                self._answers.answer(line, message)  # type: ignore[arg-type]
        self._teller.tell()


class Engine:
    """One engine's books, and what it does with them."""

    def __init__(self, line: Any, table: SlotTable, chance: random.Random, clock: Clock) -> None:
        self.line: Line = line
        self.link = Link(line, lambda: None, lambda: None)
        self.books = SharedBooks(0, SLOTS, table, self.link, Stock(SLOTS, 4))
        self.holdings = ShelfHoldings(self.books)
        self.rows: list[tuple[Grant, bytes]] = []
        self.leases: list[Lease] = []
        self.seen: Counter[str] = Counter()
        self._chance = chance
        self._clock = clock
        self._questions: dict[int, tuple[str, int, int, bytes]] = {}
        self._writing: dict[Grant, bool] = {}

    def ask_rows(self) -> None:
        count, tenant = self._chance.randint(1, 8), self._chance.choice(TENANTS)
        least = self._chance.choice([None, None, 0, 1])
        number = self.holdings.ask_rows(count, tenant, least)
        self._questions[number] = ("rows", count, count if least is None else least, tenant)

    def ask_leases(self) -> None:
        records = [record for block_hash in self._some_hashes() for record in self.books.find([block_hash])]
        records += [lease.record for lease in self.leases[:1]]
        if records:
            number = self.holdings.ask_leases(records)
            self._questions[number] = ("leases", len(records), 0, b"")

    def give_rows(self) -> None:
        self._chance.shuffle(self.rows)
        count = self._chance.randint(0, 3)
        given, self.rows = self.rows[:count], self.rows[count:]
        self.holdings.give_rows([grant for grant, _ in given])

    def end_leases(self) -> None:
        self._chance.shuffle(self.leases)
        count = self._chance.randint(1, 4)
        given, self.leases = self.leases[:count], self.leases[count:]
        self.holdings.end_leases(given)

    def write_into_asked(self) -> None:
        if self.rows:
            grant, tenant = self.rows.pop()
            self.holdings.use(grant)
            self._writing[grant] = True
            record = Record(self._chance.choice(HASHES), *grant, 0, SUMS, tenant=tenant)
            self.books.publish([record], self._clock.now, lease=True)

    def write(self) -> None:
        tenant = self._chance.choice(TENANTS)
        for grant in self.books.reserve(2, tenant):
            self._writing[grant] = False
            record = Record(self._chance.choice(HASHES), *grant, 0, SUMS, tenant=tenant)
            self.books.publish([record], self._clock.now)

    def drop(self) -> None:
        self.books.drop([record for block_hash in self._some_hashes()[:1] for record in self.books.find([block_hash])])

    def poll(self) -> None:
        """What a shelf does at each poll."""
        for record, outcome in self.books.answers(self._clock.now):
            grant = Grant(record.slot, record.generation)
            if self._writing.pop(grant) and outcome is PublishOutcome.PUBLISHED:
                self.leases.append(self.holdings.lease(record))
                self.seen["leased with publication"] += 1
            self.seen[f"publication {outcome}"] += 1
        for reply in self.holdings.replies():
            kind, count, least, tenant = self._questions.pop(reply.number)
            if kind == "leases":
                assert reply.grants is None and reply.leases is not None and len(reply.leases) == count
                self.leases += [lease for lease in reply.leases if lease is not None]
                self.seen["leased"] += any(reply.leases)
                self.seen["not leased"] += None in reply.leases
                continue
            assert reply.leases is None and (reply.grants is None or least <= len(reply.grants) <= count)
            self.rows += [(grant, tenant) for grant in reply.grants or ()]
            self.seen["rows"] += bool(reply.grants)
            self.seen["many rows"] += len(reply.grants or ()) > PIECE
            self.seen["no rows"] += reply.grants is None
        assert self.holdings.lost_leases() == [], "the keeper has lost a lease"

    def idle(self) -> bool:
        return not self._questions and not self._writing

    def _some_hashes(self) -> list[bytes]:
        return self._chance.sample(HASHES, 5)


class Machine:
    """One run."""

    def __init__(self, seed: int, slab: Slab, clock: Clock) -> None:
        self.chance, self.clock, self.slab = random.Random(seed), clock, slab
        self.table = SlotTable.make(SLOTS)
        self.lines = [Line(3), Line(17)]
        self.seen: Counter[str] = Counter()
        self.keeper = Keeper(slab, self.table, self.lines, [], 0, self.seen)
        self.engines = [Engine(line, self.table, self.chance, clock) for line in self.lines]
        for line in self.lines:
            line.mend()

    def step(self) -> None:
        engine = self.chance.choice(self.engines)
        moves = [engine.ask_rows, engine.ask_leases, engine.give_rows, engine.end_leases, engine.write, engine.drop]
        moves += 2 * [engine.write_into_asked] + 3 * [engine.poll] + 8 * [self.deliver]
        self.chance.choice(moves)()
        if self.chance.random() < 0.02:
            self.chance.choice([self.wait, self.cut, self.replace])()
        self.clock.now += self.chance.choice([0.0, 0.01, 0.3])
        self.judge()

    def deliver(self) -> None:
        """Some of what is under way arrives; each queue in order."""
        for line in self.chance.sample(self.lines, 2):
            for _ in range(self.chance.randint(0, 4)):
                if line.up and self.chance.random() < 0.7:
                    self.keeper.hear(line)
                if line.down and self.chance.random() < 0.7:
                    line.inbox += Frames(ENGINE_DECODER).feed(line.down.popleft())

    def wait(self) -> None:
        """Nobody answers for longer than anybody waits."""
        self.clock.now += ANSWER_S + 0.1
        self.seen["waits"] += 1

    def cut(self) -> None:
        line = self.chance.choice(self.lines)
        line.cut()
        line.mend()
        self.seen["cuts"] += 1

    def replace(self) -> None:
        """The keeper is killed; the next one finds slot table and headers, as in a takeover of DRAM."""
        entries = list(self.table.entries())
        records = [r for r in self.keeper.ledger.records() if entries[r.slot].state is SlotState.READY]
        for line in self.lines:
            line.cut()
        floor = max(entry.generation for entry in entries) + 100
        self.keeper = Keeper(self.slab, self.table, self.lines, records, floor, self.seen)
        for line in self.lines:
            line.mend()
        self.seen["keepers"] += 1

    def judge(self) -> None:
        """Whatever an engine holds, the keeper holds for it, and in shared memory anybody can see it."""
        self.keeper.ledger.check()
        entries = list(self.table.entries())
        for engine in self.engines:
            owner = engine.line.owner
            for lease in engine.leases:
                entry = entries[lease.record.slot]
                assert entry.generation == lease.record.generation, "a leased row was given to somebody else"
                assert entry.leases >> owner & 1 and entry.state is not SlotState.FREE, "a lease that nobody keeps"
            for grant, _ in engine.rows:
                entry = entries[grant.slot]
                assert (entry.generation, entry.writer) == (grant.generation, owner), "a row that nobody keeps"
            assert len(engine.holdings) == len(engine.rows) + len(engine.leases)
            engine.books.check()

    def settle(self) -> None:
        """All that is under way arrives; then keeper and engines agree about everything."""
        for _ in range(200):
            for line, engine in zip(self.lines, self.engines, strict=True):
                while line.up:
                    self.keeper.hear(line)
                while line.down:
                    line.inbox += Frames(ENGINE_DECODER).feed(line.down.popleft())
                engine.poll()
            self.clock.now += 0.05
            if all(engine.idle() for engine in self.engines) and not any(line.up for line in self.lines):
                break
        self.judge()
        for line, engine in zip(self.lines, self.engines, strict=True):
            assert engine.idle(), "a question was never answered"
            claims = self.keeper.ledger._claims
            held = {(lease.record.slot, lease.record.generation) for lease in engine.leases}
            assert set(claims.leases_of(line.owner).items()) == held, "leases that nobody knows of"
            assert set(claims.grants_of(line.owner).items()) == set(engine.books.held()), "rows that nobody knows of"
            assert set(engine.books._out.values()) == {grant for grant, _ in engine.rows}, "rows that nobody uses"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (answers, asked, leases, published, shared):
        monkeypatch.setattr(module, "time", made)
    for module in (asked, leases):
        monkeypatch.setattr(module, "ROWS_MAX", PIECE)
    monkeypatch.setattr(link, "HELD_MAX", PIECE)
    return made


@pytest.fixture(scope="module")
def slab() -> Iterator[Slab]:
    made = make_dram_slab(SLOT_BYTES, SLOTS)
    yield made
    made.close()


def test_what_an_engine_holds_the_keeper_keeps_whatever_happens_to_the_line(clock: Clock, slab: Slab) -> None:
    seen: Counter[str] = Counter()
    for seed in range(16):
        machine = Machine(seed, slab, clock)
        try:
            for _ in range(STEPS):
                machine.step()
            machine.settle()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        seen.update(machine.seen)
        for engine in machine.engines:
            seen.update(engine.seen)
    assert len(seen) >= 14 and min(seen.values()) > 8, f"the run must do it all, or it proves nothing: {seen}"
