"""The keeper's messages: what goes in comes out, and whatever else comes is refused without harm."""

from __future__ import annotations

import math
import random
import struct

import msgspec
import pytest

from kvtier.keeper.fields import ROWS_MAX, SLOTS_MAX, pieces, row_pieces
from kvtier.keeper.frames import FRAME_BYTES_MAX, Frames, WireError, frame
from kvtier.keeper.wire import (
    ENGINE_DECODER,
    HELD_MAX,
    KEEPER_DECODER,
    Abandon,
    CountsSent,
    Drop,
    Held,
    Hello,
    Here,
    Join,
    Numbers,
    Publish,
    Reserve,
    Retain,
    Snapshot,
    Touch,
    Unpin,
)
from kvtier.record import GENERATION_END, NO_TENANT, Record
from kvtier.terms import STANDARD
from kvtier.tiers.header import SLICES_MAX, SUM_BYTES

RECORD = Record(bytes(range(32)), 7, 9, 3, bytes(24), -2, 5, bytes(range(16)), pinned=True)
HELLO = Hello(1, "0" * 32, 12288, 4096, [1, 2], "lru")
MESSAGES = [
    HELLO,
    Held([(0, 1, 2)], [(1, 3, 4), (1, 5, 6)]),
    Join([], [(1, 7, 8)]),
    Reserve(1, 0, 5, NO_TENANT, 10),
    Publish(2, 1, [RECORD], 10, lease=True),
    Abandon(0, [(1, 2), (3, 4)]),
    Drop(1, [(5, 6)]),
    Touch(0, 1.5, True, [bytes(32)]),
    Retain(1, [bytes(32)], -100, 5, True),
    Unpin(0, [bytes(32)]),
]


def test_messages_come_out_as_they_went_in_however_they_are_cut() -> None:
    data = b"".join(map(frame, MESSAGES))
    for step in (1, 7, len(data)):
        frames = Frames(KEEPER_DECODER)
        got = [message for start in range(0, len(data), step) for message in frames.feed(data[start : start + step])]
        assert got == MESSAGES
    (numbers,) = Frames(ENGINE_DECODER).feed(frame(Numbers(1, 3, CountsSent(1, 2, 3, 4, 5))))
    assert numbers == Numbers(1, 3, CountsSent(1, 2, 3, 4, 5))
    (here,) = Frames(ENGINE_DECODER).feed(frame(Here(1, [RECORD])))
    assert isinstance(here, Here) and here.rows[0] == RECORD


def test_the_most_that_one_message_names_as_held_fits_a_frame_with_the_highest_numbers() -> None:
    most = [(1, SLOTS_MAX - 1 - place, GENERATION_END - 1 - place) for place in range(HELD_MAX)]
    (join,) = Frames(KEEPER_DECODER).feed(frame(Join(most, most)))
    assert isinstance(join, Join) and join.grants == join.leases == most


@pytest.mark.parametrize(
    "message",
    [
        Reserve(1, 0, 0, NO_TENANT, 10),
        Reserve(1, 0, ROWS_MAX + 1, NO_TENANT, 10),
        Reserve(1, 2, 1, NO_TENANT, 10),
        Reserve(1, 0, 1, b"short", 10),
        Reserve(-1, 0, 1, NO_TENANT, 10),
        Publish(1, 0, [RECORD._replace(block_hash=bytes(31))], 10),
        Publish(1, 0, [RECORD._replace(slot=-1)], 10),
        Publish(1, 0, [RECORD._replace(generation=1 << 63)], 10),
        Publish(1, 0, [RECORD._replace(sums=bytes(8 * 4096))], 10),
        Publish(1, 0, [RECORD] * (ROWS_MAX + 1), 10),
        Drop(0, [(1, -1)]),
        Touch(0, 1.5, True, [bytes(33)]),
        msgspec.structs.replace(HELLO, layout="../" * 10 + "ab"),
        msgspec.structs.replace(HELLO, budgets=[1]),
        msgspec.structs.replace(HELLO, terms=[STANDARD]),
        msgspec.structs.replace(HELLO, terms=[STANDARD, STANDARD._replace(pin_share=1.1)]),
        msgspec.structs.replace(HELLO, terms=[STANDARD, STANDARD._replace(pin_share=math.nan)]),
        msgspec.structs.replace(HELLO, terms=[STANDARD, STANDARD._replace(tenant_bytes=-1)]),
        msgspec.structs.replace(HELLO, terms=[STANDARD, STANDARD._replace(write_bytes_day=1 << 51)]),
        Publish(1, 0, [RECORD._replace(priority=101)], 10),
        Publish(1, 0, [RECORD._replace(expiry_s=1 << 40)], 10),
        Retain(0, [bytes(32)], 101, 0, False),
        Retain(0, [bytes(32)], 0, -1, False),
        Retain(0, [bytes(31)], 0, 0, True),
        Unpin(1, [bytes(32)] * (ROWS_MAX + 1)),
        msgspec.structs.replace(HELLO, owner=64),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_is_out_of_bounds_is_no_message(message: Reserve) -> None:
    with pytest.raises(WireError):
        list(Frames(KEEPER_DECODER).feed(frame(message)))


def test_a_frame_that_is_too_long_is_refused_before_it_is_there() -> None:
    with pytest.raises(WireError, match="a frame of"):
        list(Frames(KEEPER_DECODER).feed(struct.pack("<I", FRAME_BYTES_MAX + 1)))


def test_what_the_keeper_says_is_nothing_an_engine_may_say() -> None:
    with pytest.raises(WireError):
        list(Frames(KEEPER_DECODER).feed(frame(Snapshot(0, [], last=True))))


def test_ten_thousand_random_frames_raise_nothing_else() -> None:
    chance = random.Random(3)
    good = [frame(message) for message in MESSAGES]
    refused = accepted = 0
    for _ in range(10_000):
        data = bytearray(chance.choice(good))
        for _ in range(chance.randrange(1, 4)):
            kind = chance.randrange(3)
            if len(data) <= 4:
                break
            place = chance.randrange(4, len(data))
            if kind == 0:
                data[place] ^= 1 << chance.randrange(8)
            elif kind == 1:
                del data[place:]
            else:
                data[place:place] = chance.randbytes(chance.randrange(1, 9))
        data[:4] = struct.pack("<I", max(0, len(data) - 4))
        try:
            accepted += len(list(Frames(KEEPER_DECODER).feed(bytes(data))))
        except WireError:
            refused += 1
    assert refused > 5000 and accepted > 100


def test_pieces_are_bounded_and_whole() -> None:
    assert list(pieces(range(5), 2)) == [[0, 1], [2, 3], [4]] and list(pieces([], 2)) == []


@pytest.mark.parametrize("slices", [1, 30, 126, SLICES_MAX])
def test_rows_of_any_model_fit_the_frames_that_they_are_sent_in(slices: int) -> None:
    largest = (1 << 32) - 1, (1 << 62) - 1, (1 << 32) - 1, bytes(SUM_BYTES * slices), -100, (1 << 40) - 1
    rows = [Record(number.to_bytes(32, "big"), *largest, bytes(16), True) for number in range(ROWS_MAX + 1)]
    sent = [frame(Here(1, piece)) for piece in row_pieces(rows)]
    got = [row for data in sent for here in Frames(ENGINE_DECODER).feed(data) for row in here.rows]  # type: ignore[union-attr]
    assert got == rows and len(sent) <= 2 + len(b"".join(sent)) // (FRAME_BYTES_MAX // 2)
    assert list(row_pieces([])) == []
