"""Operators at the keeper's door: one question, one bounded answer, and engines that notice nothing of it."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.cache_directory import CacheDirectory
from kvtier.errors import ShelfError
from kvtier.keeper.connection import Connection
from kvtier.keeper.fields import as_claims
from kvtier.keeper.frames import Frames, frame
from kvtier.keeper.house import House
from kvtier.keeper.operator_line import KeeperTrouble, OperatorLine, call_keeper
from kvtier.keeper.operator_wire import (
    ANSWER_DECODER,
    CHANGES_MAX,
    PAGE_SLOTS,
    QUESTION_DECODER,
    Admitted,
    Answer,
    Borrow,
    Counted,
    Hide,
    Leave,
    Lent,
    ListRows,
    ListTenants,
    Overview,
    Pin,
    RowPage,
    Survey,
    TenantPage,
    Unpin,
)
from kvtier.keeper.operators import IDLE_S, OPERATORS_MAX, Operators
from kvtier.keeper.server import Server
from kvtier.keeper.spawn import knock
from kvtier.keeper.wire import DRAM, NVME, PROTOCOL_VERSION, Operate, Refused, Reserve
from kvtier.record import NO_TENANT
from tests.rows import block_hashes
from tests.shelf_desk import SharingEngine

Call = Callable[[], OperatorLine]
HASHES = block_hashes(20)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharingEngine]:
    opened = SharingEngine(tmp_path_factory.mktemp("operators") / "cache")
    opened.write("dram", HASHES)
    yield opened
    opened.close()


@pytest.fixture
def call(engine: SharingEngine) -> Iterator[Call]:
    """Opens lines of operators; all are closed in the end."""
    lines: list[OperatorLine] = []

    def call_once() -> OperatorLine:
        line = call_keeper(top(engine), 60.0)
        assert line is not None
        lines.append(line)
        return line

    yield call_once
    for line in lines:
        line.close()


def top(engine: SharingEngine) -> int:
    return engine.shared.seat.cache.top


def layout(line: OperatorLine) -> str:
    overview = line.ask(Survey())
    assert isinstance(overview, Overview)
    return overview.layouts[0].name


class Bare:
    """A bare socket to the keeper."""

    def __init__(self, engine: SharingEngine) -> None:
        link = knock(top(engine))
        assert link is not None
        self.link: socket.socket = link
        self.link.settimeout(60)
        self._frames: Frames[Answer] = Frames(ANSWER_DECODER)

    def hear(self) -> list[Answer]:
        """Everything until the keeper hangs up."""
        heard: list[Answer] = []
        try:
            while data := self.link.recv(1 << 20):
                heard += self._frames.feed(data)
        except ConnectionError:
            pass
        self.link.close()
        return heard


def test_another_version_is_refused_and_told_why(engine: SharingEngine) -> None:
    bare = Bare(engine)
    bare.link.sendall(frame(Operate(PROTOCOL_VERSION + 1)))
    [refused] = bare.hear()
    assert isinstance(refused, Refused) and f"the keeper speaks {PROTOCOL_VERSION}" in refused.reason


def test_a_few_operators_are_let_in_and_engines_are_none_of_them(call: Call) -> None:
    lines = [call() for _ in range(OPERATORS_MAX)]
    with pytest.raises(KeeperTrouble, match="8 operators are here already"):
        call()
    assert all(isinstance(line.ask(Survey()), Overview) for line in lines)
    lines[0].close()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            call()
            break
        except KeeperTrouble:
            time.sleep(0.01)
    else:
        pytest.fail("a place was not free again")


def test_who_idles_gives_its_place_to_another_and_who_asks_does_not(
    engine: SharingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, ended, now = House(CacheDirectory(engine.path, None), -1), list[Connection](), 100.0

    def end(connection: Connection) -> None:
        ended.append(house.connections.pop(id(connection)))

    operators = Operators(house, lambda: 0.0, end)
    monkeypatch.setattr("kvtier.keeper.operators.time.monotonic", lambda: now)

    def come() -> tuple[Connection, socket.socket]:
        mine, its = socket.socketpair()
        connection = Connection(mine, now)
        house.connections[id(connection)] = connection
        operators.admit(connection, Operate(PROTOCOL_VERSION))
        return connection, its

    lines = [come() for _ in range(OPERATORS_MAX)]
    now += IDLE_S - 0.1
    for connection, _ in lines[1:]:
        connection.flush()
        operators.answer(connection, ListRows("0" * 32, 0, 0))
    late = come()
    assert late[0].closing and not ended
    now += 0.1
    fresh = come()
    assert not fresh[0].closing and ended == [lines[0][0]], "only the one that has asked nothing"
    for connection, its in [*lines, late, fresh]:
        connection.close()
        its.close()
    house.cache.close()


def test_who_does_not_wait_for_answers_loses_its_line(engine: SharingEngine) -> None:
    for early in (frame(Survey()) * 2, frame(Survey()) + frame(ListRows("0" * 32, 0, 0))):
        bare = Bare(engine)
        bare.link.sendall(frame(Operate(PROTOCOL_VERSION)))
        assert isinstance(next(iter(bare._frames.feed(bare.link.recv(4096)))), Admitted)
        bare.link.sendall(early)
        assert len(bare.hear()) <= 1
    assert engine.hits("dram", HASHES) == 20


def test_what_engines_say_is_no_question_and_questions_are_nothing_that_engines_say(engine: SharingEngine) -> None:
    bare = Bare(engine)
    bare.link.sendall(frame(Operate(PROTOCOL_VERSION)) + frame(Reserve(1, 0, 1, NO_TENANT, 1 << 61)))
    assert not any(not isinstance(answer, Admitted) for answer in bare.hear())
    bare = Bare(engine)
    bare.link.sendall(frame(Hide("0" * 32, 0, [])))
    assert bare.hear() == []


def test_who_asks_the_keeper_to_leave_is_heard_though_another_asks_something_else(tmp_path: Path) -> None:
    server = Server(CacheDirectory(tmp_path / "cache", 0.0), 0.2)
    ends = [socket.socketpair() for _ in range(2)]
    leaver, other = (Connection(link, time.monotonic()) for link, _ in ends)
    for connection, question in ((leaver, Leave()), (other, Survey())):
        connection.admit_operator()
        server._handle(connection, question, [])
    assert server._leaving == "an operator asked for it"
    server.run()
    server._house.cache.close()
    for pair in ends:
        for one in pair:
            one.close()


def test_what_is_not_there_is_said(call: Call) -> None:
    line = call()
    name = layout(line)
    for question in (ListRows("0" * 32, 0, 0), Hide("0" * 32, 1, []), Borrow("0" * 32), ListTenants("f" * 32, 0, 0)):
        with pytest.raises(ShelfError, match="is not open"):
            line.ask(question)
    page = line.ask(ListRows(name, DRAM, 1 << 31))
    assert isinstance(page, RowPage) and page.last and not page.rows
    assert line.ask(Hide(name, DRAM, as_claims([(1 << 31, 5), (0, 1 << 61)]))) == Counted(0)
    assert line.ask(Pin(name, NVME, [bytes(32)])) == line.ask(Unpin(name, NVME, [bytes(32)])) == Counted(0)
    tenants = line.ask(ListTenants(name, DRAM, 1 << 61))
    assert isinstance(tenants, TenantPage) and not tenants.tenants


def test_lent_memory_can_be_read_and_not_written(engine: SharingEngine, call: Call) -> None:
    line = call()
    lent = line.ask(Borrow(layout(line)))
    assert isinstance(lent, Lent)
    memory = line.take_descriptor()
    [record] = engine.records("dram", HASHES[:1])
    slab = engine.shared.seat.slabs[DRAM].slab
    assert lent.epoch == slab.epoch and os.pread(memory, 8, slab.offset(record.slot)) == b"kvtirow\n"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(memory, b"x", slab.offset(record.slot))
    os.close(memory)
    assert engine.hits("dram", HASHES) == 20


def test_questions_beyond_their_bounds_cost_the_line_alone(engine: SharingEngine, call: Call) -> None:
    name = layout(call())
    for question in (
        Pin(name, DRAM, [bytes(32)] * (CHANGES_MAX + 1)),
        Pin(name, DRAM, [b"short"]),
        ListRows(name, 2, 0),
        ListRows("../../../etc", 0, 0),
        ListRows(name, DRAM, -1),
        Hide(name, DRAM, as_claims([(1 << 40, 1)])),
    ):
        with pytest.raises(KeeperTrouble, match="hung up"):
            call().ask(question)
    assert engine.hits("dram", HASHES) == 20


def test_nonsense_costs_its_sender_the_line_and_nobody_else(engine: SharingEngine, call: Call) -> None:
    chance = random.Random(3)
    name = layout(call())
    seeds = [frame(one) for one in (Survey(), ListRows(name, 0, 0), ListTenants(name, 1, 0), Hide(name, 0, []))]
    hung_up = 0
    for _ in range(300):
        bare = Bare(engine)
        bare.link.sendall(frame(Operate(PROTOCOL_VERSION)))
        assert bare.link.recv(4096)
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(4, len(data))] = chance.randrange(256)
        bare.link.sendall(data)
        bare.link.shutdown(socket.SHUT_WR)
        hung_up += not bare.hear()
    assert hung_up > 100
    assert isinstance(call().ask(Survey()), Overview)
    assert engine.hits("dram", HASHES) + engine.hits("nvme", HASHES) == 20


def test_pages_cover_every_slot_once(call: Call) -> None:
    line = call()
    name, seen, first = layout(line), list[bytes](), 0
    while True:
        page = line.ask(ListRows(name, DRAM, first))
        assert isinstance(page, RowPage) and len(page.rows) == len(page.uses) == len(page.idle_s) <= PAGE_SLOTS
        seen += [row.block_hash for row in page.rows]
        if page.last:
            break
        assert page.following > first
        first = page.following
    assert sorted(seen) == sorted(HASHES)


def test_every_question_survives_its_own_encoding() -> None:
    name = "a" * 32
    for question in (Survey(), ListRows(name, 1, 3), Pin(name, 0, [bytes(32)]), Hide(name, 1, [])):
        assert QUESTION_DECODER.decode(frame(question)[4:]) == question
