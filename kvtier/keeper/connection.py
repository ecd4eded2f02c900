"""One engine's socket as the keeper sees it: frames in, frames out, both bounded, descriptors with the greeting.

Never waits: what an engine does not read stays in its queue, and an engine that reads nothing for too long loses its
connection. Knows no message's meaning. Owned by the server, on its thread.
"""

from __future__ import annotations

import array
import contextlib
import os
import selectors
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterator, Sequence

from kvtier.keeper.frames import FRAME_BYTES_MAX, Frames, WireError, frame
from kvtier.keeper.operator_wire import QUESTION_DECODER, Answer, Question
from kvtier.keeper.wire import KEEPER_DECODER, HeldGrants, ToEngine, ToKeeper

READ_BYTES = 256 << 10
QUEUE_BYTES_MAX = 64 << 20
"""Of memory, for what one engine has yet to read."""
CHUNK_BYTES = 256 << 10
GREETING_BYTES_MAX = 16 << 10
"""What is kept of the first message of somebody who may never end it; a greeting has less than 1 KiB."""
FLUSH_BYTES = 1 << 20
"""What one engine is written in one turn: a long snapshot must not keep the others waiting."""
DESCRIPTORS_MAX = 4
CREDENTIALS = struct.Struct("iII")
"""SO_PEERCRED: process, user, group."""


class Connection:
    """See the module."""

    def __init__(self, link: socket.socket, now: float) -> None:
        link.setblocking(False)
        self.link = link
        self.owner: int | None = None
        self.layout = ""
        self.budgets: list[int] = []
        """What it asked for, by tier index."""
        self.tiers: frozenset[int] = frozenset()
        """What it was given."""
        self.joined = False
        self.held: tuple[HeldGrants, HeldGrants] = ([], [])
        """Grants and leases that it has named before it joins."""
        self.reports = False
        """It was told that it reports for its layout."""
        self.events = selectors.EVENT_READ
        """What the server's selector watches."""
        self.operates = False
        """An operator's: from now on it asks questions and nothing else."""
        self.closing = False
        """Close it once all that is queued has gone."""
        self._frames: Frames[ToKeeper] | Frames[Question] = Frames(KEEPER_DECODER)
        self._queue: deque[bytes | Iterator[bytes]] = deque()
        self._queued_bytes = 0
        self._buffer = memoryview(b"")
        self.heard_at = now
        """When it came, or an operator asked last."""

    @property
    def unread_bytes(self) -> int:
        """Memory of what is queued; what is made when its turn comes has none yet."""
        return self._queued_bytes + len(self._buffer)

    @property
    def wants_to_write(self) -> bool:
        """Something is queued."""
        return bool(self._queue) or len(self._buffer) > 0

    def dawdles(self, since: float) -> bool:
        """It has been there since before that time and has not joined."""
        return not (self.joined or self.operates) and self.heard_at < since

    @property
    def pid(self) -> int:
        """The process at the other end, when it connected."""
        size = CREDENTIALS.size
        return int(CREDENTIALS.unpack(self.link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0])

    def admit_operator(self) -> None:
        """What comes from now on are questions."""
        self.operates, self._frames = True, Frames(QUESTION_DECODER)

    def receive(self) -> tuple[Sequence[ToKeeper | Question], list[int]]:
        """Whole messages that have come, and descriptors, which are the caller's. ConnectionError when it has ended."""
        descriptors: list[int] = []
        try:
            if self.owner is None:
                size = array.array("i", [0] * DESCRIPTORS_MAX)
                data, extra, flags, _ = self.link.recvmsg(
                    READ_BYTES, socket.CMSG_SPACE(len(size) * size.itemsize), socket.MSG_CMSG_CLOEXEC
                )
                for level, kind, payload in extra:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        got = array.array("i")
                        got.frombytes(payload[: len(payload) - len(payload) % got.itemsize])
                        descriptors += got
                if flags & socket.MSG_CTRUNC:
                    raise WireError("more descriptors than there can be, or than the keeper has room for")
            else:
                data = self.link.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError
            known = self.owner is not None or self.operates
            return list(self._frames.feed(data, FRAME_BYTES_MAX if known else GREETING_BYTES_MAX)), descriptors
        except BlockingIOError:
            return [], descriptors
        except (WireError, OSError):
            close_all(descriptors)
            raise

    def send_with(self, message: ToEngine | Answer, descriptors: Sequence[int]) -> None:
        """Send a message with descriptors; nothing may be queued. OSError if it does not go at once."""
        data = frame(message)
        assert not self.wants_to_write
        if socket.send_fds(self.link, [data], list(descriptors)) != len(data):
            raise ConnectionResetError

    def send(self, message: ToEngine | Answer) -> None:
        """Queue a message."""
        self.send_bytes(frame(message))

    def send_bytes(self, data: bytes) -> None:
        """Queue a framed message."""
        self._queue.append(data)
        self._queued_bytes += sys.getsizeof(data)

    def send_lazily(self, frames: Iterator[bytes]) -> None:
        """Queue framed messages that are made when their turn comes."""
        self._queue.append(frames)

    def flush(self) -> None:
        """Write what the socket takes, up to a turn's worth. ConnectionError if the other side is gone, or too slow."""
        left = FLUSH_BYTES
        while self.wants_to_write and left > 0:
            if not self._buffer:
                self._buffer = memoryview(self._following())
            try:
                sent = self.link.send(self._buffer)
            except BlockingIOError:
                break
            self._buffer = self._buffer[sent:]
            left -= sent
        if self._queued_bytes > QUEUE_BYTES_MAX:
            raise ConnectionResetError("an engine does not read what it is told")

    def close(self) -> None:
        """Close the socket."""
        with contextlib.suppress(OSError):
            self.link.close()

    def _following(self) -> bytes:
        """The next bytes of the queue, some frames at once."""
        taken: list[bytes] = []
        taken_bytes = 0
        while self._queue and taken_bytes < CHUNK_BYTES:
            first = self._queue[0]
            if isinstance(first, bytes):
                self._queue.popleft()
                self._queued_bytes -= sys.getsizeof(first)
            else:
                made = next(first, None)
                if made is None:
                    self._queue.popleft()
                    continue
                first = made
            taken.append(first)
            taken_bytes += len(first)
        return b"".join(taken)


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that nobody wants."""
    for descriptor in descriptors:
        os.close(descriptor)
