"""What an operator (`kvtier shelf`) asks a keeper and hears: one question at a time, each with one bounded answer.

A connection that begins with `Operate` speaks this and nothing else, so that no engine can say it by mistake. Long
lists are asked for page by page, by slot: the keeper keeps no place for anybody. Knows no socket. Used by operations.py
and operator_line.py.
"""

from __future__ import annotations

from typing import Annotated, Union

import msgspec
from msgspec import Meta, Struct

from kvtier.keeper.fields import OWNERS_MAX, Claim, Hash, Rows, Slot, Tenant, TierIndex
from kvtier.keeper.wire import Refused

PAGE_SLOTS = 512
"""Slots whose rows come in one answer."""
PAGE_TENANTS = 1024
CHANGES_MAX = 128
"""Rows that one question changes: a few milliseconds, for which engines wait."""
LAYOUTS_MAX = 1024

LayoutName = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Text = Annotated[str, Meta(max_length=4096)]
Claims = Annotated[list[Claim], Meta(max_length=CHANGES_MAX)]
Hashes = Annotated[list[Hash], Meta(max_length=CHANGES_MAX)]


class Survey(Struct, tag=1, array_like=True):
    """What is there, and who; answered by `Overview`."""


class ListTenants(Struct, tag=2, array_like=True):
    """Who is charged for slots, after the `first` of them; answered by `TenantPage`."""

    layout: LayoutName
    tier: TierIndex
    first: Count


class ListRows(Struct, tag=3, array_like=True):
    """Rows in the slots from `first` on; answered by `RowPage`."""

    layout: LayoutName
    tier: TierIndex
    first: Slot


class Hide(Struct, tag=4, array_like=True):
    """Drop rows that are still those; answered by `Counted`."""

    layout: LayoutName
    tier: TierIndex
    claims: Claims


class Pin(Struct, tag=5, array_like=True):
    """Never evict these blocks, as far as the budget for pins goes; answered by `Counted`."""

    layout: LayoutName
    tier: TierIndex
    hashes: Hashes


class Unpin(Struct, tag=6, array_like=True):
    """Let these be evicted again; answered by `Counted`."""

    layout: LayoutName
    tier: TierIndex
    hashes: Hashes


class Borrow(Struct, tag=7, array_like=True):
    """The memory of a layout's DRAM, to read; answered by `Lent`."""

    layout: LayoutName


class Leave(Struct, tag=8, array_like=True):
    """Leave now, whoever is there; engines find or start the next keeper. Answered by the end of the line."""


class TierView(Struct, array_like=True):
    """One shelf in numbers. Counts of events since the keeper is there."""

    tier: TierIndex
    epoch: Annotated[bytes, Meta(min_length=16, max_length=16)]
    slots: Slot
    used_slots: Count
    """Slots that are not free: readable, being written, or hidden and still leased."""
    rows: Count
    """Readable."""
    pinned: Count
    evictions: Count
    expirations: Count
    written_bytes: Count
    """Written within the last 24 hours, as far as they are counted."""
    written_bytes_max: Count
    """0: no limit."""
    frozen: bool
    """Nothing is granted until the I/O of engines that are gone has landed."""


class LayoutView(Struct, array_like=True):
    """One row layout."""

    name: LayoutName
    row_bytes: Annotated[int, Meta(ge=0, le=1 << 40)]
    """0, like `slice_bytes`: its files cannot be read."""
    slice_bytes: Annotated[int, Meta(ge=0, le=1 << 40)]
    tiers: Annotated[list[TierView], Meta(max_length=2)]
    notes: Annotated[list[Text], Meta(max_length=16)] = []
    """Why a shelf is not there."""


class OwnerView(Struct, array_like=True):
    """One engine as the keeper knows it."""

    number: Annotated[int, Meta(ge=0, lt=OWNERS_MAX)]
    pid: int
    """As the keeper's own container numbers processes; 0: there is no line to it."""
    layout: Annotated[str, Meta(max_length=32)]
    joined: bool
    alive: bool
    """It holds its lock: dead owners' slots are free once their I/O has landed."""
    reserved_slots: Count
    leased_slots: Count
    asked_bytes: Annotated[list[Count], Meta(max_length=2)] = []
    """By tier index; the shelves keep what the first engine asked for. Empty: there is no line to it."""


class KeeperView(Struct, array_like=True):
    """The keeper itself."""

    pid: int
    version: Annotated[str, Meta(max_length=64)]
    protocol: int
    uptime_s: Seconds
    linger_s: Seconds


class Admitted(Struct, tag=63, array_like=True):
    """Answer to `Operate`: ask."""

    pid: int


class Overview(Struct, tag=64, array_like=True):
    """Answer to `Survey`. Without a keeper the directory's files have told it."""

    keeper: KeeperView | None
    layouts: Annotated[list[LayoutView], Meta(max_length=LAYOUTS_MAX)]
    owners: Annotated[list[OwnerView], Meta(max_length=4 * OWNERS_MAX)]


class TenantPage(Struct, tag=65, array_like=True):
    """Answer to `ListTenants`: slots by tenant. The list is over if it is empty."""

    tenants: Annotated[list[tuple[Tenant, Count]], Meta(max_length=PAGE_TENANTS)]


class RowPage(Struct, tag=66, array_like=True):
    """Answer to `ListRows`; `uses` and `idle_s` belong to the row in the same place. Go on at `following`."""

    rows: Rows
    uses: Annotated[list[Count], Meta(max_length=PAGE_SLOTS)]
    idle_s: Annotated[list[Seconds], Meta(max_length=PAGE_SLOTS)]
    following: Slot
    last: bool


class Counted(Struct, tag=67, array_like=True):
    """How many of the named rows it was done to, and how many were there but refused by a budget."""

    done: Count
    refused: Count = 0


class Lent(Struct, tag=68, array_like=True):
    """Answer to `Borrow`. Rides with a descriptor that can only be read."""

    epoch: Annotated[bytes, Meta(min_length=16, max_length=16)]
    slots: Slot


class Missing(Struct, tag=69, array_like=True):
    """Answer to any question about what is not there, or cannot be changed now."""

    reason: Text


Question = Union[Survey, ListTenants, ListRows, Hide, Pin, Unpin, Borrow, Leave]  # noqa: UP007
QUESTIONS = (Survey, ListTenants, ListRows, Hide, Pin, Unpin, Borrow, Leave)
Answer = Union[Overview, TenantPage, RowPage, Counted, Lent, Missing, Admitted, Refused]  # noqa: UP007

QUESTION_DECODER: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
"""For what operators say."""
ANSWER_DECODER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
"""For what they hear."""
