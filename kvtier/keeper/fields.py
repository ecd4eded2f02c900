"""What messages are made of: slots, grants, rows and terms as they travel, each within its bounds.

Owns their bounds, and how rows are cut to fit a frame. Knows no message. Used by the messages of engines (wire.py) and
of operators (operator_wire.py), and by whoever sends them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, TypeVar, cast

from msgspec import Meta

from kvtier.keeper.frames import FRAME_BYTES_MAX
from kvtier.record import GENERATION_END, TENANT_BYTES, Grant, Record
from kvtier.retention import EXPIRY_END_S, PRIORITY_MAX, PRIORITY_MIN
from kvtier.terms import Terms
from kvtier.tiers.checksum import SUM_BYTES
from kvtier.tiers.header import SLICES_MAX

ROWS_MAX = 4096
"""Rows, grants or slots in one message."""
_ROW_BYTES = 128
"""What a row takes on the way, its sums left out; somewhat less in fact."""
SLOTS_MAX = 1 << 32
OWNERS_MAX = 64

Item = TypeVar("Item")

Slot = Annotated[int, Meta(ge=0, lt=SLOTS_MAX)]
Generation = Annotated[int, Meta(ge=0, lt=GENERATION_END)]
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
Priority = Annotated[int, Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX)]
Expiry = Annotated[int, Meta(ge=0, lt=EXPIRY_END_S)]
"""Unix seconds; 0: never."""
Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]


class Row(Record):
    """A record as it travels: its fields, bounded."""

    __slots__ = ()
    block_hash: Hash
    slot: Slot
    generation: Generation
    depth: Annotated[int, Meta(ge=0, lt=1 << 32)]
    sums: Annotated[bytes, Meta(min_length=SUM_BYTES, max_length=SUM_BYTES * SLICES_MAX)]
    priority: Priority
    expiry_s: Expiry
    tenant: Tenant
    pinned: bool


class TermsSent(Terms):
    """The terms of a shelf as they travel."""

    __slots__ = ()
    pin_share: Annotated[float, Meta(ge=0, le=1)]
    tenant_bytes: Annotated[int, Meta(ge=0, le=1 << 50)]
    write_bytes_day: Annotated[int, Meta(ge=0, le=1 << 50)]


Rows = Annotated[list[Row], Meta(max_length=ROWS_MAX)]


def row_pieces(records: Sequence[Record]) -> Iterator[list[Row]]:
    """Records of one shelf to send, in lists that fit a frame however many slices their rows have."""
    sums_bytes = len(records[0].sums) if records else 0
    return map(as_rows, pieces(records, min(ROWS_MAX, FRAME_BYTES_MAX // (_ROW_BYTES + sums_bytes))))


def as_rows(records: Sequence[Record]) -> list[Row]:
    """Records to send: they travel as they are."""
    return cast("list[Row]", records if isinstance(records, list) else list(records))


def as_claims(claims: Iterable[tuple[int, int]]) -> list[Claim]:
    """Pairs of slot and generation to send."""
    return cast("list[Claim]", list(claims))


def pieces(items: Iterable[Item], count: int = ROWS_MAX) -> Iterator[list[Item]]:
    """`items` in lists of at most `count`."""
    left = iter(items)
    while piece := list(itertools.islice(left, count)):
        yield piece
