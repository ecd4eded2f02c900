"""The line from an engine to its keeper: one thread that connects, greets, reads and writes, and never gives up.

The engine thread hands messages in and takes messages out; it never waits for the socket. A line that breaks comes
back by itself, with a keeper started anew if need be, and in a new seat when the old one is of no use any more. Knows
no books. Owned by link.py.
"""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.errors import ShelfError
from kvtier.keeper.frames import Frames, WireError, frame
from kvtier.keeper.seat import Seat
from kvtier.keeper.spawn import connect, hang_up
from kvtier.keeper.wire import ENGINE_DECODER, OTHERS, Farewell, Granted, Refused, ToEngine, ToKeeper, Welcome
from kvtier.process_limits import what_is_short

log = logging.getLogger(__name__)

START_S = 20.0
"""What finding or starting a keeper may take, its slabs included."""
RETRY_S = 5.0
BROKEN_RETRY_S = 0.1
GREETING_PAUSE_S = 0.2
"""Between two looks at whether the engine is closing, while the keeper makes up its mind."""
QUEUE_MAX = 4096
"""Messages that wait to be written; with more the line is cut, and mended as after a keeper's death."""
INBOX_MAX = 4096
"""Messages that wait to be taken; with more nothing is read, until the keeper cuts the line."""
FULL_PAUSE_S = 0.05
MOVE_PAUSE_S = 0.02
BUFFER_BYTES = 1 << 20
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Seated:
    """The keeper has said welcome: `Join` is due. `line` numbers the connection."""

    line: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The line is broken; what was not answered will not be."""


class KeeperClient:
    """See the module."""

    def __init__(self, make_seat: Callable[[], Seat], wake: Callable[[], None], linger_s: float) -> None:
        """`wake` is called from the line's thread when there is something to take.

        ShelfError: no seat can be made; OSError, RuntimeError: this process has no more descriptors or threads.
        """
        self.seat = make_seat()
        self._make_seat = make_seat
        self._wake = wake
        self._linger_s = linger_s
        self._inbox: deque[ToEngine | Seated | Lost] = deque()
        self._outbox: deque[tuple[int, ToKeeper]] = deque()
        self._line = 0
        self._bell = -1
        self._closing = threading.Event()
        self._farewell = ""
        self._vacated = threading.Event()
        self.refusal = ""
        """Why the last greeting failed."""
        self._thread = threading.Thread(target=self._run, name="kvtier-keeper-line", daemon=True)
        with contextlib.ExitStack() as undo:
            undo.callback(self.seat.close, stuck=False)
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self._bell)
            self._thread.start()
            undo.pop_all()

    @property
    def backlog(self) -> int:
        """Messages not written yet."""
        return len(self._outbox)

    @property
    def has_news(self) -> bool:
        """There is something to take."""
        return bool(self._inbox)

    def send(self, line: int, message: ToKeeper) -> None:
        """Queue a message for the connection of that number; it is dropped if that has ended. Engine thread."""
        self._outbox.append((line, message))
        self._ring()

    def take(self) -> list[ToEngine | Seated | Lost]:
        """What has come since the last call, in order. Engine thread."""
        taken: list[ToEngine | Seated | Lost] = []
        while self._inbox:
            taken.append(self._inbox.popleft())
        return taken

    def close(self, deadline_s: float) -> bool:
        """Write what is queued, as far as the deadline allows, and hang up; False if the thread is left behind."""
        self._closing.set()
        self._ring()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            return False
        os.close(self._bell)
        self._bell = -1
        return True

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)

    def vacate(self) -> None:
        """After a `Farewell`: nothing uses the seat any more, its I/O has ended. Engine thread."""
        self._vacated.set()
        self._ring()

    def _run(self) -> None:
        while not self._closing.is_set():
            pause_s = RETRY_S
            try:
                self._follow()
                pause_s = 0.0
            except (OSError, WireError, ShelfError) as error:
                reason = what_is_short(error)
                if isinstance(error, OSError) and not reason:  # a keeper that is leaving, or was killed as we greeted
                    self.refusal, pause_s = str(error), BROKEN_RETRY_S
                else:
                    self._refused(reason or str(error))
            if self._farewell or not self.seat.cache.is_there():
                self._move()
                pause_s = 0.0
            self._closing.wait(pause_s)

    def _refused(self, reason: str) -> None:
        """There is no line, and will not be at once: said when it is news."""
        if reason != self.refusal:
            log.warning("no line to the keeper: %s", reason)
        self.refusal = reason
        if reason == OTHERS:
            self._farewell = reason

    def _follow(self) -> None:
        """One line, from connecting to its end."""
        link = connect(self.seat.cache, time.monotonic() + START_S, self._linger_s, self._closing.is_set)
        if link is None and self._closing.is_set():
            return
        if link is None:
            raise ShelfError("no keeper answers, and another engine may have the cache directory for itself")
        try:
            self._greet(link)
            self._tell(Seated(self._line))
            try:
                self._serve(link)
            finally:
                self._tell(Lost())
        finally:
            hang_up(self.seat.cache, link)

    def _move(self) -> None:
        """Have the engine let go of its shelves, give the seat up, and make another in its place."""
        log.warning("the shelves of this engine are over: %s", self._farewell or "their cache directory is gone")
        self._vacated.clear()
        self._tell(Farewell(self._farewell))
        while not self._vacated.is_set():
            if self._closing.wait(MOVE_PAUSE_S):
                return
        self.seat.close(stuck=False)
        self._farewell = ""
        while not self._closing.is_set():
            try:
                self.seat = self._make_seat()
                return
            except ShelfError as error:
                self.refusal = str(error)
                self._closing.wait(RETRY_S)

    def _greet(self, link: socket.socket) -> None:
        """Say hello and take the seat. ShelfError: refused, or no answer in time."""
        hello, descriptors = self.seat.greeting()
        link.settimeout(GREETING_PAUSE_S)
        socket.send_fds(link, [frame(hello)], descriptors)
        end = time.monotonic() + START_S
        frames, taken = Frames(ENGINE_DECODER), list[int]()
        try:
            while time.monotonic() < end and not self._closing.is_set():
                try:
                    data, extra, flags, _ = link.recvmsg(READ_BYTES, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC)
                except TimeoutError:
                    continue
                for level, kind, payload in extra:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        taken += array.array("i", payload[: len(payload) - len(payload) % 4])
                if flags & socket.MSG_CTRUNC:  # the kernel had no numbers for the descriptors that came
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                if not data:
                    raise ConnectionResetError("the keeper has hung up")
                for message in frames.feed(data):
                    if isinstance(message, Refused):
                        raise ShelfError(message.reason)
                    if not isinstance(message, Welcome):
                        raise WireError("no welcome")
                    given, taken = taken, []
                    self.seat.take(message, given)
                    self._line += 1
                    self.refusal = ""
                    return
            raise ShelfError("the keeper does not answer")
        finally:
            for descriptor in taken:
                os.close(descriptor)

    def _serve(self, link: socket.socket) -> None:
        """Read and write until the line breaks or is closed."""
        link.setblocking(False)
        frames = Frames(ENGINE_DECODER)
        unsent, watched = memoryview(b""), 0
        with selectors.PollSelector() as selector:  # needs no descriptor
            selector.register(self._bell, selectors.EVENT_READ)
            while True:
                closing = self._closing.is_set()
                if not unsent:
                    unsent = memoryview(self._following())
                if closing and not unsent:
                    return
                if len(self._outbox) > QUEUE_MAX:
                    log.warning("the keeper does not read what it is told")
                    return
                full = len(self._inbox) > INBOX_MAX
                events = (0 if full else selectors.EVENT_READ) | (selectors.EVENT_WRITE if unsent else 0)
                if events != watched:
                    if watched:
                        selector.unregister(link)
                    if events:
                        selector.register(link, events)
                    watched = events
                for key, mask in selector.select(FULL_PAUSE_S if full else None):
                    if key.fileobj is not link:
                        with contextlib.suppress(BlockingIOError):
                            os.eventfd_read(self._bell)
                        continue
                    try:
                        if mask & selectors.EVENT_READ and not self._receive(link, frames):
                            return
                        if mask & selectors.EVENT_WRITE:
                            unsent = unsent[link.send(unsent) :]
                    except BlockingIOError:
                        continue
                    except OSError:
                        return

    def _receive(self, link: socket.socket, frames: Frames[ToEngine]) -> bool:
        """Take what has come; False at the end."""
        data = link.recv(READ_BYTES)
        for message in frames.feed(data):
            if isinstance(message, Farewell):
                self._farewell = message.reason
            else:
                self._check(message)
                self._inbox.append(message)
        if data:
            self._wake()
        return bool(data)

    def _check(self, message: ToEngine) -> None:
        """WireError for what no keeper says to an engine that has joined; it must not reach the engine's own thread."""
        if isinstance(message, (Welcome, Refused)):
            raise WireError("a second answer to the greeting")
        if isinstance(message, Granted) and message.grants:
            shared = self.seat.slabs.get(message.tier)
            if shared is None or max(message.grants)[0] >= shared.slab.slot_count:
                raise WireError("slots that there are not")

    def _following(self) -> bytes:
        """The next messages, framed; those of an earlier connection are dropped."""
        taken: list[bytes] = []
        taken_bytes = 0
        while self._outbox and taken_bytes < BUFFER_BYTES:
            line, message = self._outbox.popleft()
            if line == self._line:
                taken.append(frame(message))
                taken_bytes += len(taken[-1])
        return b"".join(taken)

    def _tell(self, message: Seated | Lost | Farewell) -> None:
        self._inbox.append(message)
        self._wake()
