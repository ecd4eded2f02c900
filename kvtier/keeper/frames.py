"""Messages cut out of what a socket gives, and made fit to send: msgpack behind a length, no longer than a bound.

Whatever breaks that is a `WireError` and costs its sender the connection, nothing more. Knows no message and no
socket. Used by all three ends: keeper, engines, operators.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from kvtier.errors import KvtierError

FRAME_BYTES_MAX = 4 << 20
_LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()

Item = TypeVar("Item")


class WireError(KvtierError):
    """What came is no message of this protocol: too long, malformed, out of bounds."""


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes over the socket."""
    body = _ENCODER.encode(message)
    assert len(body) <= FRAME_BYTES_MAX, len(body)
    return _LENGTH.pack(len(body)) + body


class Frames(Generic[Item]):
    """Cuts what a socket gives into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Item]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes, length_max: int = FRAME_BYTES_MAX) -> Iterator[Item]:
        """The messages that are whole with `data`. Raises WireError at the first that is none, or longer than that."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                if length > length_max:
                    raise WireError(f"a frame of {length} bytes")
                end = start + _LENGTH.size + length
                if len(self._buffer) < end:
                    break
                body = bytes(memoryview(self._buffer)[start + _LENGTH.size : end])
                start = end
                try:
                    message = self._decoder.decode(body)
                except msgspec.MsgspecError as error:
                    raise WireError(str(error)) from None
                yield message
        finally:
            del self._buffer[:start]
