"""What engines and keeper say to each other: typed msgpack messages in length-framed, bounded frames.

Owns the protocol version and every bound on what may come over the socket; whatever breaks one is a `WireError` and
costs its sender the connection, nothing more. Knows no socket. Used by server and client.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, TypeVar, Union, cast

import msgspec
from msgspec import Meta, Struct

from kvtier.errors import KvtierError
from kvtier.record import TENANT_BYTES, Grant, Record
from kvtier.tiers.header import SLICES_MAX, SUM_BYTES

PROTOCOL_VERSION = 1
FRAME_BYTES_MAX = 4 << 20
ROWS_MAX = 4096
"""Rows, grants or slots in one message."""
SLOTS_MAX = 1 << 32
OWNERS_MAX = 64

Item = TypeVar("Item")

Slot = Annotated[int, Meta(ge=0, lt=SLOTS_MAX)]
Generation = Annotated[int, Meta(ge=0, lt=1 << 62)]
Tenant = Annotated[bytes, Meta(min_length=TENANT_BYTES, max_length=TENANT_BYTES)]


class Claim(Grant):
    """A slot and its generation as they travel."""

    __slots__ = ()
    slot: Slot
    generation: Generation


Grants = Annotated[list[Claim], Meta(max_length=ROWS_MAX)]
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""Of a question: its answer carries the same."""
Deadline = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""CLOCK_MONOTONIC in nanoseconds; what comes later is dropped."""
TierIndex = Annotated[int, Meta(ge=0, le=1)]
"""0: DRAM, 1: NVMe."""
Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]


class Row(Record):
    """A record as it travels: its fields, bounded."""

    __slots__ = ()
    block_hash: Hash
    slot: Slot
    generation: Generation
    depth: Annotated[int, Meta(ge=0, lt=1 << 32)]
    sums: Annotated[bytes, Meta(min_length=SUM_BYTES, max_length=SUM_BYTES * SLICES_MAX)]
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
    expiry_s: Annotated[int, Meta(ge=0, lt=1 << 62)]
    tenant: Tenant


Rows = Annotated[list[Row], Meta(max_length=ROWS_MAX)]


class WireError(KvtierError):
    """What came is no message of this protocol: too long, malformed, out of bounds."""


class Hello(Struct, tag=1, array_like=True):
    """First message of an engine. Rides with the descriptors that it has of this layout, in the order of `epochs`."""

    version: int
    layout: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    row_bytes: Annotated[int, Meta(gt=0, le=1 << 40)]
    slice_bytes: Annotated[int, Meta(gt=0, le=1 << 40)]
    budgets: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 50)]], Meta(min_length=2, max_length=2)]
    """Bytes of DRAM and NVMe to make the slabs with, if they are not there; 0: not wanted."""
    policy: Annotated[str, Meta(max_length=32)]
    """Of eviction; the layout's first engine's counts."""
    owner: Annotated[int, Meta(ge=-1, lt=OWNERS_MAX)] = -1
    """The number whose lock it holds already, or -1."""
    epochs: Annotated[list[tuple[TierIndex, bytes, Slot]], Meta(max_length=2)] = []
    """(tier, epoch, slots) of the slabs that it has. For DRAM come slab and slot table, for NVMe the slot table."""


class Join(Struct, tag=2, array_like=True):
    """The engine holds its locks now. What it was granted and does not name here is taken back."""

    grants: Annotated[list[tuple[TierIndex, Slot, Generation]], Meta(max_length=1 << 20)]
    leases: Annotated[list[tuple[TierIndex, Slot, Generation]], Meta(max_length=1 << 20)]


class Reserve(Struct, tag=3, array_like=True):
    """Ask for slots to write into; answered by `Granted`."""

    number: Number
    tier: TierIndex
    count: Annotated[int, Meta(gt=0, le=ROWS_MAX)]
    tenant: Tenant
    deadline_ns: Deadline


class Publish(Struct, tag=4, array_like=True):
    """Bind written slots to hashes; answered by `Published`."""

    number: Number
    tier: TierIndex
    rows: Rows
    deadline_ns: Deadline
    lease: bool = False
    """Each published reservation becomes a lease in the same step."""


class Abandon(Struct, tag=5, array_like=True):
    """Give reservations back."""

    tier: TierIndex
    grants: Grants


class Drop(Struct, tag=6, array_like=True):
    """Hide rows."""

    tier: TierIndex
    grants: Grants


class Touch(Struct, tag=7, array_like=True):
    """Blocks of a chain were last used at `at`, CLOCK_MONOTONIC in seconds."""

    tier: TierIndex
    at: float
    counts: bool
    """It was one more use of them."""
    hashes: Annotated[list[Hash], Meta(max_length=ROWS_MAX)]


class Acquire(Struct, tag=8, array_like=True):
    """Lease rows; answered by `Acquired`."""

    number: Number
    tier: TierIndex
    grants: Grants
    deadline_ns: Deadline


class Release(Struct, tag=9, array_like=True):
    """End leases."""

    tier: TierIndex
    grants: Grants


class Stop(Struct, tag=10, array_like=True):
    """Ask the keeper to leave as soon as no other engine is there; instead of `Hello`."""

    version: int


class Welcome(Struct, tag=32, array_like=True):
    """Answer to `Hello`: lock byte `owner`, then `Join`. Rides with the descriptors, as `Hello` does."""

    owner: Annotated[int, Meta(ge=0, lt=OWNERS_MAX)]
    pid: int
    slabs: Annotated[list[tuple[TierIndex, bytes, Slot]], Meta(max_length=2)]
    """(tier, epoch, slots)."""
    notes: list[str]
    """Why a tier that was asked for is not there."""


class Refused(Struct, tag=33, array_like=True):
    """Answer to `Hello`: not now, or not ever; the connection ends."""

    reason: str


class Granted(Struct, tag=34, array_like=True):
    """Answer to `Reserve`; fewer than asked if there is no room."""

    number: Number
    grants: Grants
    evicted_count: Annotated[int, Meta(ge=0, le=ROWS_MAX)]
    """Rows that had to go for them."""


class Published(Struct, tag=35, array_like=True):
    """Answer to `Publish`: for each row 0 published, 1 duplicate, 2 stale."""

    number: Number
    outcomes: Annotated[list[Annotated[int, Meta(ge=0, le=2)]], Meta(max_length=ROWS_MAX)]


class Acquired(Struct, tag=36, array_like=True):
    """Answer to `Acquire`."""

    number: Number
    granted: Annotated[list[bool], Meta(max_length=ROWS_MAX)]


class Gone(Struct, tag=37, array_like=True):
    """The rows in these slots cannot be read any more."""

    tier: TierIndex
    slots: Annotated[list[Slot], Meta(max_length=ROWS_MAX)]


class Here(Struct, tag=38, array_like=True):
    """Rows that can be read now."""

    tier: TierIndex
    rows: Rows


class Snapshot(Struct, tag=39, array_like=True):
    """A piece of all that can be read; the mirror is whole with the `last` one."""

    tier: TierIndex
    rows: Rows
    last: bool


class Numbers(Struct, tag=40, array_like=True):
    """Slots in use."""

    tier: TierIndex
    used_slots: int


class Farewell(Struct, tag=41, array_like=True):
    """The shelves of this cache directory are over: its files are gone or replaced."""

    reason: str


ToKeeper = Union[Hello, Join, Reserve, Publish, Abandon, Drop, Touch, Acquire, Release, Stop]  # noqa: UP007
ToEngine = Union[  # noqa: UP007
    Welcome, Refused, Granted, Published, Acquired, Gone, Here, Snapshot, Numbers, Farewell
]

_LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()
KEEPER_DECODER = msgspec.msgpack.Decoder(ToKeeper)
"""For what engines say."""
ENGINE_DECODER = msgspec.msgpack.Decoder(ToEngine)
"""For what the keeper says."""


def frame(message: ToKeeper | ToEngine) -> bytes:
    """A message as it goes over the socket."""
    body = _ENCODER.encode(message)
    assert len(body) <= FRAME_BYTES_MAX, len(body)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts what a socket gives into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[ToKeeper] | msgspec.msgpack.Decoder[ToEngine]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[ToKeeper | ToEngine]:
        """The messages that are whole with `data`. Raises WireError at the first that is none."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                if length > FRAME_BYTES_MAX:
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


def as_rows(records: Sequence[Record]) -> list[Row]:
    """Records to send: they travel as they are."""
    return cast("list[Row]", records if isinstance(records, list) else list(records))


def as_claims(claims: Iterable[tuple[int, int]]) -> list[Claim]:
    """Pairs of slot and generation to send."""
    return cast("list[Claim]", list(claims))


def pieces(items: Iterable[Item], count: int = ROWS_MAX) -> Iterator[list[Item]]:
    """`items` in lists of at most `count`."""
    piece: list[Item] = []
    for item in items:
        piece.append(item)
        if len(piece) == count:
            yield piece
            piece = []
    if piece:
        yield piece
