"""One connection as the keeper has it: bounded whoever is at the other end, fair, and in order."""

from __future__ import annotations

import os
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator

import pytest

from kvtier.keeper import connection as module
from kvtier.keeper.connection import Connection
from kvtier.keeper.frames import Frames, WireError, frame
from kvtier.keeper.wire import ENGINE_DECODER, PROTOCOL_VERSION, Gone, Held, Stop

Pair = tuple[Connection, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = Connection(near, 0.0)
    yield connection, far
    connection.close()
    far.close()


def drain(far: socket.socket) -> bytes:
    far.setblocking(False)
    taken = b""
    try:
        while data := far.recv(1 << 20):
            taken += data
    except BlockingIOError:
        pass
    return taken


def test_who_does_not_read_is_cut_off_at_the_bound(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 12)
    connection, _ = pair
    piece = frame(Gone(0, list(range(1000))))
    told: list[int] = []

    def tell_on() -> None:
        while len(told) < 10_000:
            connection.send_bytes(piece)
            told.append(len(piece))
            connection.flush()

    with pytest.raises(ConnectionResetError):
        tell_on()
    assert 1 << 20 < sum(told) < 3 << 20, "the bound and what the socket itself holds"


def test_small_messages_are_counted_with_what_each_takes_of_memory(pair: Pair) -> None:
    connection, far = pair
    piece = frame(Gone(0, []))
    tracemalloc.start()
    try:
        for _ in range(100_000):
            connection.send_bytes(bytes(bytearray(piece)))
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.8 * taken_bytes < connection.unread_bytes < 1.2 * taken_bytes
    while connection.wants_to_write:
        connection.flush()
        drain(far)
    assert connection.unread_bytes == 0


def test_a_long_snapshot_takes_turns_and_what_changes_meanwhile_comes_after_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLUSH_BYTES", 1)
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    connection, far = pair
    made: list[int] = []

    def pieces() -> Iterator[bytes]:
        for number in range(5):
            made.append(number)
            yield frame(Gone(0, [number]))

    connection.send_lazily(pieces())
    connection.send(Gone(1, [99]))
    frames, heard = Frames(ENGINE_DECODER), list[object]()
    turns = 0
    while connection.wants_to_write:
        connection.flush()
        turns += 1
        heard += frames.feed(drain(far))
        assert len(made) <= turns, "a piece is made when its turn comes"
    assert heard == [*(Gone(0, [number]) for number in range(5)), Gone(1, [99])] and turns >= 6


def test_descriptors_of_broken_messages_are_closed(pair: Pair) -> None:
    connection, far = pair
    before = len(os.listdir("/proc/self/fd"))
    for data in (b"\xff\xff\xff\xff", frame(Stop(PROTOCOL_VERSION))[:3]):
        with open(os.devnull) as given:
            socket.send_fds(far, [data], [given.fileno()] * 3)
        try:
            _, descriptors = connection.receive()
            module.close_all(descriptors)
        except module.WireError:
            pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_of_a_first_message_no_more_is_kept_than_a_greeting_has(pair: Pair) -> None:
    connection, far = pair
    far.sendall(struct.pack("<I", module.GREETING_BYTES_MAX + 1) + bytes(100))
    with pytest.raises(WireError, match="a frame of"):
        connection.receive()


def test_who_is_known_may_send_messages_of_any_length(pair: Pair) -> None:
    connection, far = pair
    connection.owner = 1
    long = frame(Held([(0, slot, slot) for slot in range(20_000)], []))
    assert len(long) > module.GREETING_BYTES_MAX
    sender = threading.Thread(target=far.sendall, args=(long,))
    sender.start()
    heard: list[object] = []
    while not heard:
        heard += connection.receive()[0]
    sender.join()
    assert isinstance(heard[0], Held) and len(heard[0].grants) == 20_000
