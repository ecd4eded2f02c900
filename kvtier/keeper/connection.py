"""One engine's socket as the keeper sees it: frames in, frames out, both bounded, descriptors with the greeting.

Never waits: what an engine does not read stays in its queue, and an engine that reads nothing for too long loses its
connection. Knows no message's meaning. Owned by the server, on its thread.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence

from kvtier.keeper.wire import KEEPER_DECODER, Frames, ToEngine, ToKeeper, WireError, frame

READ_BYTES = 256 << 10
QUEUE_BYTES_MAX = 64 << 20
CHUNK_BYTES = 256 << 10
DESCRIPTORS_MAX = 4


class Connection:
    """See the module."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self.link = link
        self.owner: int | None = None
        self.layout = ""
        self.joined = False
        self.closing = False
        """Close it once all that is queued has gone."""
        self._frames = Frames(KEEPER_DECODER)
        self._queue: deque[bytes | Iterator[bytes]] = deque()
        self._queued_bytes = 0
        self._buffer = memoryview(b"")

    @property
    def wants_to_write(self) -> bool:
        """Something is queued."""
        return bool(self._queue) or len(self._buffer) > 0

    def receive(self) -> tuple[list[ToKeeper], list[int]]:
        """Whole messages that have come, and descriptors, which are the caller's. ConnectionError when it has ended."""
        descriptors: list[int] = []
        try:
            if self.owner is None:
                size = array.array("i", [0] * DESCRIPTORS_MAX)
                data, extra, _, _ = self.link.recvmsg(
                    READ_BYTES, socket.CMSG_SPACE(len(size) * size.itemsize), socket.MSG_CMSG_CLOEXEC
                )
                for level, kind, payload in extra:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        got = array.array("i")
                        got.frombytes(payload[: len(payload) - len(payload) % got.itemsize])
                        descriptors += got
            else:
                data = self.link.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError
            return list(self._frames.feed(data)), descriptors  # type: ignore[arg-type]
        except BlockingIOError:
            return [], descriptors
        except (WireError, OSError):
            close_all(descriptors)
            raise

    def send_with(self, message: ToEngine, descriptors: Sequence[int]) -> None:
        """Send the first message of this connection with descriptors. OSError if it does not go at once."""
        data = frame(message)
        assert not self.wants_to_write
        if socket.send_fds(self.link, [data], list(descriptors)) != len(data):
            raise ConnectionResetError

    def send(self, message: ToEngine) -> None:
        """Queue a message."""
        self.send_bytes(frame(message))

    def send_bytes(self, data: bytes) -> None:
        """Queue a framed message."""
        self._queue.append(data)
        self._queued_bytes += len(data)

    def send_lazily(self, frames: Iterator[bytes]) -> None:
        """Queue framed messages that are made when their turn comes."""
        self._queue.append(frames)

    def flush(self) -> None:
        """Write what the socket takes. ConnectionError if the other side is gone, or too far behind."""
        while self.wants_to_write:
            if not self._buffer:
                self._buffer = memoryview(self._following())
            try:
                sent = self.link.send(self._buffer)
            except BlockingIOError:
                break
            self._buffer = self._buffer[sent:]
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
                self._queued_bytes -= len(first)
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
