"""The keeper's door: who is let in, who is not, and what nonsense costs. A real keeper, spoken to by bare sockets."""

from __future__ import annotations

import array
import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from kvtier.cache_directory import CacheDirectory, layout_name
from kvtier.keeper.fields import OWNERS_MAX, as_rows
from kvtier.keeper.frames import Frames, WireError, frame
from kvtier.keeper.owners import lock_byte, open_owners
from kvtier.keeper.spawn import connect, hang_up, interpreter, knock
from kvtier.keeper.wire import (
    ENGINE_DECODER,
    KEEPER_DECODER,
    PROTOCOL_VERSION,
    Granted,
    Held,
    Hello,
    Here,
    Join,
    Publish,
    Published,
    Refused,
    Reserve,
    Stop,
    ToEngine,
    ToKeeper,
    Welcome,
)
from kvtier.record import NO_TENANT, Grant, Record
from tests.rows import LAYOUT, SLOT_BYTES

HELLO = Hello(PROTOCOL_VERSION, layout_name(LAYOUT), LAYOUT.row_bytes, LAYOUT.slice_bytes, [64 * SLOT_BYTES, 0], "lru")


class Caller:
    """A bare connection to the keeper of a cache directory."""

    def __init__(self, cache: CacheDirectory) -> None:
        link = connect(cache, time.monotonic() + 30, 0.5, lambda: False)
        assert link is not None
        self.link = link
        self.link.settimeout(60)
        self.cache = cache
        self.lock = -1
        self._frames = Frames(ENGINE_DECODER)
        self._messages: list[ToEngine] = []

    def say(self, message: ToKeeper) -> None:
        self.link.sendall(frame(message))

    def say_with(self, message: ToKeeper, descriptors: Sequence[int]) -> None:
        """Say it with descriptors, which stay ours."""
        socket.send_fds(self.link, [frame(message)], list(descriptors))

    def hear(self) -> ToEngine | None:
        """The next message; None when the keeper has hung up."""
        while not self._messages:
            try:
                data, extra, _, _ = self.link.recvmsg(65536, 256)
            except ConnectionError:
                return None
            for _, _, payload in extra:
                for descriptor in array.array("i", payload):
                    os.close(descriptor)
            if not data:
                return None
            self._messages += self._frames.feed(data)  # type: ignore[arg-type]
        return self._messages.pop(0)

    def hang_up(self) -> None:
        if self.link.fileno() >= 0:
            hang_up(self.cache, self.link)

    def hear_the_end(self) -> bool:
        """Whether the keeper hangs up."""
        while self.hear() is not None:
            pass
        return True

    def join(self) -> int:
        """Greet, lock and join; the number. The lock lives until the cache directory is closed."""
        self.say(HELLO)
        welcome = self.hear()
        assert isinstance(welcome, Welcome), welcome
        self.lock = self.cache.hold(open_owners(self.cache.top))
        assert lock_byte(self.lock, welcome.owner)
        self.say(Join([], []))
        return welcome.owner

    def reserve(self, count: int, deadline_ns: int) -> int:
        """How many slots are granted."""
        return len(self._granted(count, deadline_ns))

    def reserve_one(self, deadline_ns: int) -> Grant:
        """A slot."""
        return self._granted(1, deadline_ns)[0]

    def reserve_all(self, count: int, deadline_ns: int) -> Sequence[Grant]:
        """So many slots."""
        return self._granted(count, deadline_ns)

    def _granted(self, count: int, deadline_ns: int) -> Sequence[Grant]:
        self.say(Reserve(5, 0, count, NO_TENANT, deadline_ns))
        while not isinstance(answer := self.hear(), Granted):
            assert answer is not None
        return answer.grants


Call = Callable[[], Caller]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheDirectory]:
    opened = CacheDirectory(tmp_path / "cache", None)
    yield opened
    opened.close()


@pytest.fixture
def call(cache: CacheDirectory) -> Iterator[Callable[[], Caller]]:
    """Opens connections; all are closed in the end."""
    callers: list[Caller] = []

    def call_once() -> Caller:
        callers.append(Caller(cache))
        return callers[-1]

    yield call_once
    for caller in callers:
        caller.hang_up()


def later() -> int:
    return time.monotonic_ns() + 6 * 10**10


def test_another_protocol_is_refused_and_told_why(call: Call) -> None:
    caller = call()
    caller.say(msgspec.structs.replace(HELLO, version=PROTOCOL_VERSION - 1))
    answer = caller.hear()
    assert isinstance(answer, Refused) and f"the keeper speaks {PROTOCOL_VERSION}" in answer.reason
    assert caller.hear() is None
    assert call().join() == 0, "the keeper goes on"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"row_bytes": 4097}, "geometry"),
        ({"row_bytes": 100, "slice_bytes": 100}, "geometry"),
        ({"policy": "best"}, "eviction"),
        ({"owner": 3}, "without its lock"),
    ],
)
def test_an_impossible_greeting_is_refused(call: Call, changes: dict[str, object], reason: str) -> None:
    caller = call()
    caller.say(msgspec.structs.replace(HELLO, **changes))
    answer = caller.hear()
    assert isinstance(answer, Refused) and reason in answer.reason


def test_64_engines_are_served_and_the_65th_is_refused_until_one_has_gone(call: Call) -> None:
    callers: list[Caller] = []
    for number in range(OWNERS_MAX):  # one by one: who dawdles is hung up on
        callers.append(call())
        assert callers[-1].join() == number
    late = call()
    late.say(HELLO)
    answer = late.hear()
    assert isinstance(answer, Refused) and "64 engines" in answer.reason
    assert callers[0].reserve(1, later()) == callers[-1].reserve(1, later()) == 1


def test_an_engine_that_has_not_locked_its_number_cannot_join(call: Call) -> None:
    caller = call()
    caller.say(HELLO)
    assert isinstance(caller.hear(), Welcome)
    caller.say(Join([], []))
    assert caller.hear() is None


@pytest.mark.parametrize("message", [Reserve(1, 0, 1, NO_TENANT, 1 << 61), Join([], [])], ids=["reserve", "join"])
def test_nobody_is_served_before_a_greeting(call: Call, message: ToKeeper) -> None:
    caller = call()
    caller.say(message)
    assert caller.hear() is None


def test_what_comes_after_its_deadline_is_dropped(call: Call) -> None:
    caller = call()
    caller.join()
    caller.say(Reserve(4, 0, 60, NO_TENANT, time.monotonic_ns() - 1))
    assert caller.reserve(64, later()) == 64, "the first was not granted"


def test_who_comes_back_has_what_it_names_and_the_rest_is_free(call: Call) -> None:
    first = call()
    owner = first.join()
    assert first.reserve(10, later()) == 10
    again = call()
    again.say(msgspec.structs.replace(HELLO, owner=owner))
    welcome = again.hear()
    assert isinstance(welcome, Welcome) and welcome.owner == owner
    again.say(Join([], []))
    assert again.reserve(64, later()) == 64
    assert first.hear_the_end(), "the line from before is over"


def test_what_is_held_may_be_named_in_several_messages(call: Call) -> None:
    first = call()
    owner = first.join()
    grants = [(0, *grant) for grant in first.reserve_all(10, later())]
    again = call()
    again.say(msgspec.structs.replace(HELLO, owner=owner))
    assert isinstance(again.hear(), Welcome)
    again.say(Held(grants[:4], []))
    again.say(Held(grants[4:7], []))
    again.say(Join(grants[7:9], []))
    assert again.reserve(64, later()) == 64 - 9, "one was not named and is free"
    again.say(Held(grants[:1], []))
    assert again.hear_the_end(), "joined already"


def test_who_names_more_than_there_is_or_before_its_greeting_is_hung_up_on(call: Call) -> None:
    early = call()
    early.say(Held([(0, 1, 1)], []))
    assert early.hear() is None
    first = call()
    owner = first.join()
    again = call()
    again.say(msgspec.structs.replace(HELLO, owner=owner))
    assert isinstance(again.hear(), Welcome)
    for _ in range(3):
        again.say(Held([], [(0, slot, 1) for slot in range(60)]))
    assert again.hear_the_end()
    assert call().join() != owner, "the keeper goes on"


def test_who_publishes_what_is_there_is_told_where(call: Call) -> None:
    first, second = call(), call()
    first.join()
    second.join()
    grants = [caller.reserve_one(later()) for caller in (first, second)]
    rows = [Record(bytes(range(32)), *grant, 0, bytes(8 * LAYOUT.layers)) for grant in grants]
    for caller, row in zip((first, second), rows, strict=True):
        caller.say(Publish(7, 0, as_rows([row]), later()))
        while not isinstance(answer := caller.hear(), Published):
            assert answer is not None
            here = answer if isinstance(answer, Here) else None
    assert answer.outcomes == [1] and here is not None and here.rows == [rows[0]]


def test_ten_thousand_messages_of_nonsense_cost_their_sender_its_line_and_nobody_else(
    cache: CacheDirectory, call: Call
) -> None:
    """A few on a line, all sent before it is shut down; the keeper hangs up once it has heard what it wants to hear."""
    chance = random.Random(1)
    good = call()
    good.join()
    seeds = [frame(one) for one in (HELLO, Join([], []), Reserve(1, 0, 9, NO_TENANT, 1 << 61))]
    greeted = 0
    for sent in range(10_000):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if names_an_owner(data):  # of this process, which may come back by another line
            continue
        bad = knock(cache.top)
        assert bad is not None, "nobody is there any more"
        answer = b""
        with bad, contextlib.suppress(ConnectionError):
            bad.settimeout(60)
            bad.sendall((frame(HELLO) if chance.random() < 0.2 else b"") + data)
            bad.shutdown(socket.SHUT_WR)
            while more := bad.recv(65536):
                answer += more
        greeted += len(answer) > 0
        assert sent % 500 or good.reserve(1, later()) == 1, "the keeper goes on"
    assert 500 < greeted < 9_000
    assert good.reserve(8, later()) == 8


def names_an_owner(data: bytearray) -> bool:
    """Whether it is a greeting of who has had a number before."""
    with contextlib.suppress(WireError):
        return any(isinstance(one, Hello) and one.owner >= 0 for one in Frames(KEEPER_DECODER).feed(bytes(data)))
    return False


def test_a_number_that_an_engine_has_is_not_given_to_another_process(cache: CacheDirectory, call: Call) -> None:
    good = call()
    owner = good.join()
    taken = good.reserve_all(8, later())
    words = [frame(msgspec.structs.replace(HELLO, owner=owner)), frame(Join([], []))]
    program = (
        "import os, socket, sys\n"
        "os.chdir(sys.argv[1])\n"
        "link = socket.socket(socket.AF_UNIX); link.settimeout(60)\n"
        "link.connect('keeper.sock'); link.sendall(bytes.fromhex(sys.argv[2]))\n"
        "answer = link.recv(1000)\n"
        "try:\n    link.sendall(bytes.fromhex(sys.argv[3]))\n    while link.recv(65536): pass\n"
        "except OSError: pass\n"
        "sys.stdout.buffer.write(answer)\n"
    )
    command = [sys.executable, "-c", program, str(cache.path), *(word.hex() for word in words)]
    answer = subprocess.run(command, capture_output=True, timeout=120, check=True).stdout
    [refused] = Frames(ENGINE_DECODER).feed(answer)
    assert isinstance(refused, Refused) and "another process" in refused.reason
    assert good.reserve(64, later()) == 64 - len(taken), "what it holds is still its own"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_refused_though_it_could_reach_the_socket(cache: CacheDirectory, call: Call) -> None:
    good = call()
    good.join()
    os.chmod(cache.path / "keeper.sock", 0o666)
    program = (
        "import os, socket, sys\n"
        "os.chdir(sys.argv[1]); os.setuid(65534)\n"
        "link = socket.socket(socket.AF_UNIX); link.settimeout(60)\n"
        "link.connect('keeper.sock')\n"
        "try:\n    link.sendall(bytes.fromhex(sys.argv[2]))\n    print(len(link.recv(1000)))\n"
        "except ConnectionError:\n    print(0)\n"
    )
    os.chmod(cache.path, 0o755)
    try:
        command = [sys.executable, "-c", program, str(cache.path), frame(HELLO).hex()]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    finally:
        os.chmod(cache.path, 0o700)
    assert answer.stdout.strip() == "0", answer
    assert good.reserve(1, later()) == 1


def test_asked_to_stop_the_keeper_leaves_when_nobody_is_there(cache: CacheDirectory, call: Call) -> None:
    first = call()
    first.say(HELLO)
    welcome = first.hear()
    assert isinstance(welcome, Welcome)
    first.link.shutdown(socket.SHUT_RDWR)
    stopper = call()
    stopper.say(Stop(PROTOCOL_VERSION))
    assert stopper.hear() is None
    end = time.monotonic() + 60
    while os.path.exists(f"/proc/{welcome.pid}"):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert not (cache.path / "keeper.sock").exists()
    assert isinstance(call().link, socket.socket), "and the next one is started"


def test_a_cache_directory_with_a_path_longer_than_an_address_is_served(tmp_path: Path) -> None:
    opened = CacheDirectory(tmp_path / ("long" * 40) / "cache", None)
    caller = Caller(opened)
    assert caller.join() == 0
    caller.hang_up()
    opened.close()


def test_the_interpreter_is_found_inside_a_foreign_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/server/some_stub")
    found = interpreter()
    code = "import sys; print(sys.version_info[:2])"
    answer = subprocess.run([found, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert answer.stdout.strip() == str(sys.version_info[:2])
