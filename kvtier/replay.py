"""The format of the journal on disk, and reading it back.

Frames of kind, length, body and a sum seeded by the slab's epoch. A torn end is cut off; damage before the end is told
apart from it, because then the slab's headers know more. Every number is bounded before use. Used by journal.py (to
write) and shelves.py (to replay).
"""

from __future__ import annotations

import enum
import logging
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from kvtier.errors import ShelfError
from kvtier.io.files import open_private
from kvtier.record import GENERATION_END, Grant, Record
from kvtier.retention import is_possible
from kvtier.tiers.checksum import SUM_BYTES

log = logging.getLogger(__name__)

JOURNAL_NAME = "journal"
JOURNAL_VERSION = 2
SLACK_BYTES = 64 << 10
HOURS_MAX = 32
"""Hours of which a journal says what was spent: more than count."""
HOUR_END, SPENT_END = 1 << 32, 1 << 62
"""No number that is read is as high."""
READ_BYTES = 1 << 20
SEARCH_PASSES = 4
"""A search for frames behind damage sums up so many times the bytes of the journal at most."""

_MARK = b"kvtj"
_FRAME = struct.Struct("<4sB3xI")
_SUM = struct.Struct("<Q")
_HEAD = struct.Struct("<I4x16sQQQ")
_SPENT = struct.Struct("<QQ")
_RECORD = struct.Struct("<32s16sIiQQQB7x")


class FrameKind(enum.IntEnum):
    """What a frame says."""

    HEAD = 1
    RESERVED = 2
    PUBLISHED = 3
    DROPPED = 4
    SPENT = 5


@dataclass(frozen=True, slots=True)
class JournalShape:
    """What a journal must agree with before a byte of it is believed."""

    epoch: bytes
    slot_count: int
    slice_count: int

    @property
    def published_bytes(self) -> int:
        """Bytes of one published record."""
        return _FRAME.size + _RECORD.size + self.slice_count * SUM_BYTES + _SUM.size

    @property
    def snapshot_bytes_max(self) -> int:
        """Bytes of the longest file that a rewrite makes."""
        spent_bytes = HOURS_MAX * (_FRAME.size + _SPENT.size + _SUM.size)
        return _FRAME.size + _HEAD.size + _SUM.size + spent_bytes + self.slot_count * self.published_bytes

    @property
    def file_bytes_max(self) -> int:
        """Bytes that the journal grows to before it is rewritten."""
        return 2 * self.snapshot_bytes_max + SLACK_BYTES

    @property
    def total_bytes_max(self) -> int:
        """Bytes of disk that the journal ever takes, its rewrite included."""
        return self.file_bytes_max + self.snapshot_bytes_max


class ReplayState(enum.Enum):
    """What was found in place of a journal."""

    WHOLE = "whole"
    """All of it, a torn end perhaps cut off."""
    MISSING = "missing"
    FOREIGN = "foreign"
    """Of another slab or version; of the former what was spent still counts."""
    DAMAGED = "damaged"
    """Broken in the middle, or not a journal."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a journal says. Unless WHOLE, `records` is empty and the others are lower bounds."""

    state: ReplayState
    records: list[Record]
    generation: int
    """The highest generation it has seen."""
    spent: dict[int, int] = field(default_factory=dict)
    """Bytes written to the shelf by hour since the Unix epoch, of the last hours that it knows of."""


def replay(folder: int, shape: JournalShape) -> Replay:
    """Read the journal in the folder (a descriptor). Never raises for what it finds there."""
    try:
        descriptor = open_private(JOURNAL_NAME, os.O_RDONLY, folder)
    except OSError:
        return Replay(ReplayState.MISSING, [], 0)
    except ShelfError as error:
        log.warning("%s", error)
        return Replay(ReplayState.DAMAGED, [], 0)
    try:
        if os.fstat(descriptor).st_size > shape.total_bytes_max:
            return Replay(ReplayState.FOREIGN, [], 0)
        data = _read_all(descriptor)
    except OSError as error:
        log.warning("journal cannot be read: %s", error.strerror)
        return Replay(ReplayState.DAMAGED, [], 0)
    finally:
        os.close(descriptor)
    return _replay_bytes(data, shape)


def journal_slices(folder: int) -> int:
    """Slices of a row as the head of the journal in the folder has it; 0 if there is none of this version."""
    try:
        descriptor = open_private(JOURNAL_NAME, os.O_RDONLY, folder)
    except (OSError, ShelfError):
        return 0
    try:
        head = _frame_at(os.pread(descriptor, _FRAME.size + _HEAD.size + _SUM.size, 0), 0, 0)
    except OSError:
        return 0
    finally:
        os.close(descriptor)
    if head is None or head[0] != FrameKind.HEAD or len(head[1]) != _HEAD.size:
        return 0
    version, _, _, slice_count, _ = _HEAD.unpack(head[1])
    return int(slice_count) if version == JOURNAL_VERSION else 0


def head_frame(shape: JournalShape, generation: int) -> bytes:
    """First frame of a journal; `generation` is the highest one given out so far."""
    head = _HEAD.pack(JOURNAL_VERSION, shape.epoch, shape.slot_count, shape.slice_count, generation)
    return _frame(FrameKind.HEAD, head, 0)


def gone_frame(shape: JournalShape, kind: FrameKind, grants: Sequence[Grant]) -> bytes:
    """RESERVED or DROPPED: what the slots held is gone."""
    numbers = [number for grant in grants for number in grant]
    return _frame(kind, struct.pack(f"<{len(numbers)}Q", *numbers), _seed(shape.epoch))


def published_frame(shape: JournalShape, record: Record) -> bytes:
    """A row that can be read."""
    assert len(record.sums) == shape.slice_count * SUM_BYTES, len(record.sums)
    fields = (record.block_hash, record.tenant, record.depth, record.priority)
    body = _RECORD.pack(*fields, record.slot, record.generation, record.expiry_s, record.pinned)
    return _frame(FrameKind.PUBLISHED, body + record.sums, _seed(shape.epoch))


def spent_frame(shape: JournalShape, hour: int, spent_bytes: int) -> bytes:
    """So much was written to the shelf in an hour."""
    return _frame(FrameKind.SPENT, _SPENT.pack(hour, spent_bytes), _seed(shape.epoch))


def newest_hours(spent: Mapping[int, int]) -> dict[int, int]:
    """Those that are kept: not those without spending, or a clock that was ahead for a day would have them all."""
    return dict(sorted((hour, amount) for hour, amount in spent.items() if amount)[-HOURS_MAX:])


def _seed(epoch: bytes) -> int:
    """Seed of a journal's sums: a frame of another slab's journal never passes for one of this."""
    return int.from_bytes(epoch[:8], "little")


def _frame(kind: FrameKind, body: bytes, seed: int) -> bytes:
    framed = _FRAME.pack(_MARK, kind, len(body)) + body
    return framed + _SUM.pack(xxh3_64_intdigest(framed, seed))


def _replay_bytes(data: bytes, shape: JournalShape) -> Replay:
    head = _frame_at(data, 0, 0)
    if head is None or head[0] != FrameKind.HEAD or len(head[1]) != _HEAD.size:
        return Replay(ReplayState.DAMAGED, [], 0)
    version, epoch, _, slice_count, generation = _HEAD.unpack(head[1])
    if version != JOURNAL_VERSION or epoch != shape.epoch or slice_count != shape.slice_count:
        known = version == JOURNAL_VERSION
        return Replay(ReplayState.FOREIGN, [], 0, _spent_in(data, head[2], _seed(epoch)) if known else {})
    if generation >= GENERATION_END:
        return Replay(ReplayState.DAMAGED, [], 0)
    seed = _seed(epoch)
    live: dict[int, Record] = {}
    spent: dict[int, int] = {}
    offset = head[2]
    while (frame := _frame_at(data, offset, seed)) is not None:
        kind, body, offset = frame
        if kind == FrameKind.PUBLISHED and len(body) == _RECORD.size + slice_count * SUM_BYTES:
            record = _record(body)
            if record is None:
                return Replay(ReplayState.DAMAGED, [], generation, spent)
            generation = max(generation, record.generation)
            if record.slot < shape.slot_count:
                live[record.slot] = record
        elif kind in (FrameKind.RESERVED, FrameKind.DROPPED) and len(body) % 16 == 0:
            for slot, row_generation in struct.iter_unpack("<QQ", body):
                if row_generation >= GENERATION_END:
                    return Replay(ReplayState.DAMAGED, [], generation, spent)
                generation = max(generation, row_generation)
                live.pop(slot, None)
        elif kind == FrameKind.SPENT and len(body) == _SPENT.size:
            hour, spent_bytes = _SPENT.unpack(body)
            if hour >= HOUR_END or spent_bytes >= SPENT_END:
                return Replay(ReplayState.DAMAGED, [], generation, spent)
            spent = newest_hours(spent | {hour: spent_bytes})
        else:
            return Replay(ReplayState.DAMAGED, [], generation, spent)
    if _any_frame_after(data, offset, seed):
        return Replay(ReplayState.DAMAGED, [], generation, spent)
    return Replay(ReplayState.WHOLE, list(live.values()), generation, spent)


def _spent_in(data: bytes, offset: int, seed: int) -> dict[int, int]:
    """What the sound frames from `offset` on say of spending."""
    spent: dict[int, int] = {}
    while (frame := _frame_at(data, offset, seed)) is not None:
        kind, body, offset = frame
        if kind == FrameKind.SPENT and len(body) == _SPENT.size:
            hour, spent_bytes = _SPENT.unpack(body)
            if hour < HOUR_END and spent_bytes < SPENT_END:
                spent = newest_hours(spent | {hour: spent_bytes})
    return spent


def _record(body: memoryview) -> Record | None:
    """The record of a PUBLISHED frame, or None if it cannot be; its slot is not checked."""
    block_hash, tenant, depth, priority, slot, generation, expiry_s, pinned = _RECORD.unpack_from(body)
    if generation >= GENERATION_END or not is_possible(priority, expiry_s) or pinned > 1:
        return None
    sums = bytes(body[_RECORD.size :])
    return Record(block_hash, slot, generation, depth, sums, priority, expiry_s, tenant, bool(pinned))


def _frame_at(data: bytes, offset: int, seed: int) -> tuple[int, memoryview, int] | None:
    """(kind, body, end) of the sound frame at `offset`, or None."""
    if offset + _FRAME.size + _SUM.size > len(data):
        return None
    mark, kind, body_bytes = _FRAME.unpack_from(data, offset)
    end = offset + _FRAME.size + body_bytes
    if mark != _MARK or end + _SUM.size > len(data):
        return None
    view = memoryview(data)
    if _SUM.unpack_from(data, end)[0] != xxh3_64_intdigest(view[offset:end], seed):
        return None
    return kind, view[offset + _FRAME.size : end], end + _SUM.size


def _any_frame_after(data: bytes, offset: int, seed: int) -> bool:
    """Whether a sound frame follows a broken one: then it is damage and no torn end.

    Also if finding out would cost more than a few passes over all of it: no journal that we write has marks like that.
    """
    left_bytes = SEARCH_PASSES * len(data)
    place = data.find(_MARK, offset)
    while place >= 0:
        left_bytes -= _claimed_bytes(data, place)
        if left_bytes < 0 or _frame_at(data, place, seed) is not None:
            return True
        place = data.find(_MARK, place + 1)
    return False


def _claimed_bytes(data: bytes, offset: int) -> int:
    """Bytes that are summed up to check a frame at `offset`."""
    if offset + _FRAME.size > len(data):
        return 0
    claimed_bytes = _FRAME.size + int(_FRAME.unpack_from(data, offset)[2])
    return claimed_bytes if offset + claimed_bytes + _SUM.size <= len(data) else 0


def _read_all(descriptor: int) -> bytes:
    pieces: list[bytes] = []
    while piece := os.read(descriptor, READ_BYTES):
        pieces.append(piece)
    return b"".join(pieces)
