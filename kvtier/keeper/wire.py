"""What engines and keeper say to each other: typed messages of bounded fields.

Owns the protocol version and the tag of every message. Knows neither frames nor a socket. Used by server and client.
"""

from __future__ import annotations

from typing import Annotated, Union

import msgspec
from msgspec import Meta, Struct

from kvtier.books import BookCounts
from kvtier.keeper.fields import (
    OWNERS_MAX,
    ROWS_MAX,
    SLOTS_MAX,
    Deadline,
    Expiry,
    Generation,
    Grants,
    Hash,
    Number,
    Priority,
    Rows,
    Slot,
    Tenant,
    TermsSent,
    TierIndex,
)
from kvtier.terms import STANDARD

PROTOCOL_VERSION = 2
SOCKET_NAME = "keeper.sock"
DRAM, NVME = 0, 1
TIER_NAMES = ("DRAM", "NVMe")
OTHERS = "the keeper has other shelves than this engine"
"""Reason of a `Refused` after which an engine lets its shelves go and comes anew."""


def _standard_terms() -> list[TermsSent]:
    return [TermsSent(*STANDARD), TermsSent(*STANDARD)]


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
    terms: Annotated[list[TermsSent], Meta(min_length=2, max_length=2)] = msgspec.field(default_factory=_standard_terms)
    """Of DRAM and NVMe; the layout's first engine's count."""


HELD_MAX = 100_000
"""Grants and leases, each, that one message names: with the highest numbers they fit a frame."""
HeldGrants = Annotated[list[tuple[TierIndex, Slot, Generation]], Meta(max_length=1 << 20)]


class Join(Struct, tag=2, array_like=True):
    """The engine holds its locks now. What it was granted and does not name here, or before, is taken back."""

    grants: HeldGrants
    leases: HeldGrants


class Held(Struct, tag=14, array_like=True):
    """Before `Join`: a part of what the engine holds, if that is too much for one message."""

    grants: HeldGrants
    leases: HeldGrants


class Reserve(Struct, tag=3, array_like=True):
    """Ask for slots to write into; answered by `Granted`."""

    number: Number
    tier: TierIndex
    count: Annotated[int, Meta(gt=0, le=ROWS_MAX)]
    tenant: Tenant
    deadline_ns: Deadline
    least: Annotated[int, Meta(ge=0, le=SLOTS_MAX)] = 0
    """Grant nothing unless there is room for so many, some of which may be asked for later."""


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
    unused: bool = False
    """Nothing was written to them: the write budget has their bytes again."""


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


class Retain(Struct, tag=11, array_like=True):
    """Blocks, of a chain from its first one on, shall stay for the longer of what they have and this."""

    tier: TierIndex
    hashes: Annotated[list[Hash], Meta(max_length=ROWS_MAX)]
    priority: Priority
    expiry_s: Expiry
    pinned: bool


class Unpin(Struct, tag=12, array_like=True):
    """Blocks can be evicted again."""

    tier: TierIndex
    hashes: Annotated[list[Hash], Meta(max_length=ROWS_MAX)]


class Operate(Struct, tag=31, array_like=True):
    """First message of an operator instead of `Hello`; what follows is in operator_wire.py."""

    version: int


class Welcome(Struct, tag=32, array_like=True):
    """Answer to `Hello`: lock byte `owner`, then `Join`. Rides with the descriptors, as `Hello` does."""

    owner: Annotated[int, Meta(ge=0, lt=OWNERS_MAX)]
    pid: int
    slabs: Annotated[list[tuple[TierIndex, bytes, Slot]], Meta(max_length=2)]
    """(tier, epoch, slots)."""
    notes: list[str]
    """Why a tier that was asked for is not there."""
    unfit: str = ""
    """That of them which says that this machine has not got what the configuration asks for."""


class Refused(Struct, tag=33, array_like=True):
    """Answer to `Hello`: not now, or not ever; the connection ends."""

    reason: str


class Granted(Struct, tag=34, array_like=True):
    """Answer to `Reserve`; fewer than asked if there is no room."""

    number: Number
    tier: TierIndex
    grants: Grants
    evicted_count: Annotated[int, Meta(ge=0, le=ROWS_MAX)]
    """Rows that had to go for them."""


class Published(Struct, tag=35, array_like=True):
    """Answer to `Publish`: for each row 0 published, 1 duplicate, 2 stale."""

    number: Number
    outcomes: Annotated[list[Annotated[int, Meta(ge=0, le=2)]], Meta(max_length=ROWS_MAX)]


class Acquired(Struct, tag=36, array_like=True):
    """Answer to `Acquire`: those that are leased now."""

    number: Number
    tier: TierIndex
    grants: Grants


class Gone(Struct, tag=37, array_like=True):
    """The rows in these slots cannot be read any more."""

    tier: TierIndex
    slots: Annotated[list[Slot], Meta(max_length=ROWS_MAX)]


class Here(Struct, tag=38, array_like=True):
    """Rows that can be read now, or whose priority, expiry or pin has changed."""

    tier: TierIndex
    rows: Rows


class Snapshot(Struct, tag=39, array_like=True):
    """A piece of all that can be read; the mirror is whole with the `last` one."""

    tier: TierIndex
    rows: Rows
    last: bool


class CountsSent(BookCounts):
    """Counts as they travel."""

    __slots__ = ()
    pinned: Number
    expired: Number
    pins_refused: Number
    quota_refused: Number
    write_budget_refused: Number


class Numbers(Struct, tag=40, array_like=True):
    """Slots in use, and what this keeper has counted for all engines."""

    tier: TierIndex
    used_slots: Annotated[int, Meta(ge=0, le=SLOTS_MAX)]
    counts: CountsSent


class Reporter(Struct, tag=43, array_like=True):
    """Whether this engine is the one that reports what its layout's shelves hold, for all engines of the host."""

    reports: bool


class Farewell(Struct, tag=41, array_like=True):
    """The shelves of this cache directory are over: its files are gone or replaced."""

    reason: str


ToKeeper = Union[  # noqa: UP007
    Hello, Held, Join, Reserve, Publish, Abandon, Drop, Touch, Acquire, Release, Stop, Retain, Unpin, Operate
]
ToEngine = Union[  # noqa: UP007
    Welcome, Refused, Granted, Published, Acquired, Gone, Here, Snapshot, Numbers, Reporter, Farewell
]

KEEPER_DECODER: msgspec.msgpack.Decoder[ToKeeper] = msgspec.msgpack.Decoder(ToKeeper)
"""For what engines say."""
ENGINE_DECODER: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
"""For what the keeper says."""
