"""The keeper's loop: takes connections, hands each message to whom it concerns, writes what is queued, leaves.

One thread that waits in `select` only; deadlines are checked before work is done. Whatever an engine sends can cost it
its own connection and nothing else. Runs in a process of its own (`__main__`), holding `keeper.lock` all its life.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import time

from kvtier.cache_directory import CacheDirectory
from kvtier.file_watch import FileWatch
from kvtier.keeper.answers import ABOUT_ROWS, Answers
from kvtier.keeper.connection import CREDENTIALS, Connection, close_all
from kvtier.keeper.frames import WireError
from kvtier.keeper.greeting import Greeter
from kvtier.keeper.house import House
from kvtier.keeper.openings import Openings
from kvtier.keeper.operator_wire import Question
from kvtier.keeper.operators import Operators
from kvtier.keeper.owners import open_owners
from kvtier.keeper.telling import Teller
from kvtier.keeper.tending import Tender
from kvtier.keeper.wire import SOCKET_NAME, Farewell, Held, Hello, Join, Operate, Stop, ToKeeper
from kvtier.process_limits import what_is_short

log = logging.getLogger(__name__)

TICK_S = 0.2
WATCH_END_S = 1.0
BACKLOG = 128
GREETINGS_MAX = 128
"""Connections that have not joined yet."""
UNREAD_BYTES_MAX = 256 << 20
"""Of memory, for what all engines together have yet to read."""


class Server:
    """See the module. Serves until `run` returns."""

    def __init__(self, cache: CacheDirectory, linger_s: float) -> None:
        """`cache` holds the lock already."""
        self._house = House(cache, cache.hold(open_owners(cache.top)))
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._openings = Openings(self._house, self._ring)
        self._greeter = Greeter(self._house, self._openings, self._end)
        self._teller = Teller(self._house)
        self._answers = Answers(self._house, self._teller)
        self._socket = _listen(cache)
        self._tender = Tender(self._house, linger_s, self._end)
        self._operators = Operators(self._house, lambda: self._tender.linger_s, self._end)
        self._watch = FileWatch(lambda: self._tender.files_are_there(), self._ring)
        self._leaving = ""
        self._refusing = False
        """The last connection could not be taken."""
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until nobody has been there for the linger, the files are gone, or an engine asked for it."""
        tick_at = 0.0
        while not self._leaving:
            for key, mask in self._selector.select(TICK_S):
                if key.fileobj is self._socket:
                    self._accept()
                elif key.fileobj == self._bell:
                    self._take_in()
                elif mask & selectors.EVENT_READ:
                    self._read(key.data)
            now = time.monotonic()
            if now >= tick_at:
                tick_at = now + TICK_S
                self._accept_again()
                self._tender.owners(now)
                self._greeter.tend(now)
                self._teller.name_reporters()
                if self._tender.lonely(self._greeter.busy, now):
                    self._leaving = f"nobody was here for {self._tender.linger_s:g} s"
            if self._watch.gone:
                self._say_farewell("its files are gone or replaced")
            self._teller.tell()
            self._flush()
            self._bound_unread()
        self._leave()

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _take_in(self) -> None:
        """Something has been opened: whoever waits for it is answered. Or files are gone, which the loop sees."""
        os.eventfd_read(self._bell)
        self._openings.take_in()
        self._greeter.answer(time.monotonic())

    # ---- connections -----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            link, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # whoever knocked has gone
        except OSError as error:
            if not self._refusing:
                log.warning("no connection can be taken: %s", what_is_short(error) or error.strerror)
            self._selector.unregister(self._socket)  # or it would say so again at once, and keep everybody waiting
            self._refusing = True
            return
        _, user, _ = CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        greetings = sum(not (one.joined or one.operates) for one in self._house.connections.values())
        if user != os.geteuid() or greetings >= GREETINGS_MAX:
            log.warning("a connection of user %d was refused", user)
            link.close()
            return
        self._refusing = False
        connection = Connection(link, time.monotonic())
        self._house.connections[link.fileno()] = connection
        self._selector.register(link, selectors.EVENT_READ, connection)

    def _accept_again(self) -> None:
        """Look whether there is room now for connections that could not be taken."""
        if self._refusing and self._socket.fileno() not in self._selector.get_map():
            self._selector.register(self._socket, selectors.EVENT_READ)

    def _read(self, connection: Connection) -> None:
        if self._house.connections.get(connection.link.fileno()) is not connection:
            return
        descriptors: list[int] = []
        try:
            messages, descriptors = connection.receive()
            for message in messages:
                if connection.closing:
                    break
                self._handle(connection, message, descriptors)
        except (WireError, OSError) as error:
            if isinstance(error, WireError):
                log.warning("a connection is ended: %s", error)
            self._end(connection)
        finally:
            close_all(descriptors)

    def _end(self, connection: Connection) -> None:
        if self._house.connections.pop(connection.link.fileno(), None) is not None:
            self._selector.unregister(connection.link)
            if connection.owner is not None:
                self._tender.was_here(time.monotonic())
        self._greeter.gone(connection)
        connection.close()

    def _handle(self, connection: Connection, message: ToKeeper | Question, descriptors: list[int]) -> None:
        """One message. Takes those descriptors that it uses out of the list."""
        if connection.operates:
            self._leaving = self._operators.answer(connection, message) or self._leaving
        elif isinstance(message, Operate):
            self._operators.admit(connection, message)
        elif isinstance(message, Stop):
            self._tender.hurry()
            connection.closing = True
        elif isinstance(message, Hello):
            self._greeter.hello(connection, message, descriptors)
        elif connection.owner is None:
            raise WireError("no greeting")
        elif isinstance(message, Held):
            self._answers.note_held(connection, message)
        elif isinstance(message, Join):
            self._answers.join(connection, message)
        elif not connection.joined:
            raise WireError("not joined")
        elif isinstance(message, ABOUT_ROWS):
            self._answers.answer(connection, message)

    def _flush(self) -> None:
        """Write to whoever reads."""
        for connection in list(self._house.connections.values()):
            if connection.wants_to_write:
                try:
                    connection.flush()
                except OSError:
                    self._end(connection)
                    continue
            if connection.closing and not connection.wants_to_write:
                self._end(connection)
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_to_write else 0)
            if connection.events != events:
                connection.events = events
                self._selector.modify(connection.link, events, connection)

    def _bound_unread(self) -> None:
        """End the connections that are furthest behind until the others' queues fit together."""
        connections = self._house.connections.values()
        over_bytes = sum([one.unread_bytes for one in connections]) - UNREAD_BYTES_MAX
        while over_bytes > 0:
            furthest = max(connections, key=lambda one: one.unread_bytes)
            over_bytes -= furthest.unread_bytes
            log.warning("owner %s is hung up on: of all that do not read it is furthest behind", furthest.owner)
            self._end(furthest)

    # ---- leaving ---------------------------------------------------------------------------------------------------

    def _say_farewell(self, reason: str) -> None:
        self._leaving = reason
        for connection in self._house.connections.values():
            if connection.joined:
                connection.send(Farewell(reason))

    def _leave(self) -> None:
        """The socket goes first, then the books to disk, then with the process the lock."""
        log.info("the keeper leaves: %s", self._leaving)
        self._watch.close(WATCH_END_S)
        cache = self._house.cache
        if cache.is_there() and cache.holds_lock() and self._tender.socket_is_ours():
            with contextlib.suppress(OSError):
                os.unlink(SOCKET_NAME, dir_fd=cache.top)
        self._socket.close()
        for connection in list(self._house.connections.values()):
            self._end(connection)
        for kept in self._house.layouts.values():
            kept.close(cache)


def _listen(cache: CacheDirectory) -> socket.socket:
    """Bind below the directory's descriptor: the path itself may be too long for an address."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET_NAME, dir_fd=cache.top)
    before = os.umask(0o177)
    try:
        listener.bind(f"/proc/self/fd/{cache.top}/{SOCKET_NAME}")
    finally:
        os.umask(before)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener
