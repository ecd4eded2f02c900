"""The log of an NVMe directory on disk: what it takes to find the rows again after the process is gone.

Owns the file format, replay, and one thread that writes at once, syncs once a second and rewrites the file before it
passes its bound. The caller never waits for the disk. Losing the file, or any part of it, costs warmth and never
truth: rows prove themselves. Knows no file but its own and the slab that it syncs before itself.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvtier.io.base import KernelCalls, SystemCalls
from kvtier.record import Grant, Record
from kvtier.tiers.header import SUM_BYTES

log = logging.getLogger(__name__)

JOURNAL_NAME = "journal"
SPARE_NAME = "journal.new"
JOURNAL_VERSION = 1
SLACK_BYTES = 64 << 10
SYNC_S = 1.0
RETRY_S = 1.0
WRITE_BYTES = 1 << 20

_MARK = b"kvtj"
_FRAME = struct.Struct("<4sB3xI")
_SUM = struct.Struct("<Q")
_HEAD = struct.Struct("<I4x16sQQQ")
_RECORD = struct.Struct("<32s16sIiQQQ")


class _Kind(enum.IntEnum):
    HEAD = 1
    RESERVED = 2
    PUBLISHED = 3
    DROPPED = 4


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
        return _FRAME.size + _HEAD.size + _SUM.size + self.slot_count * self.published_bytes

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
    """Of another slab or version."""
    DAMAGED = "damaged"
    """Broken in the middle, or not a journal."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a journal says. Unless WHOLE, `records` is empty and `generation` only a lower bound."""

    state: ReplayState
    records: list[Record]
    generation: int
    """The highest generation it has seen."""


def replay(folder: int, shape: JournalShape) -> Replay:
    """Read the journal in the folder (a descriptor). Never raises for what it finds there."""
    try:
        descriptor = os.open(JOURNAL_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return Replay(ReplayState.MISSING, [], 0)
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


class Journal:
    """Appends changes of one directory (`ChangeLog`). Made with what was replayed or rebuilt; starts with a rewrite."""

    def __init__(
        self,
        folder: int,
        shape: JournalShape,
        slab_descriptor: int,
        records: Sequence[Record],
        generation: int,
        calls: SystemCalls | None = None,
    ) -> None:
        """`folder` and `slab_descriptor` must stay open until `close` has returned True."""
        self._folder = folder
        self._shape = shape
        self._slab = slab_descriptor
        self._calls = calls if calls is not None else KernelCalls()
        self._changed = threading.Condition()
        self._live = {record.slot: self._published_frame(record) for record in records}
        self._generation = generation
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._rewrite = True
        self._closing = False
        self._descriptor = -1
        self._file_bytes = 0
        self._failing = False
        self._thread = threading.Thread(target=self._work, name="kvtier-journal", daemon=True)
        self._thread.start()

    def reserved(self, grants: Sequence[Grant]) -> None:
        """The slots' old rows are gone."""
        self._gone(_Kind.RESERVED, grants)

    def dropped(self, records: Sequence[Record]) -> None:
        """The rows are hidden."""
        self._gone(_Kind.DROPPED, [Grant(record.slot, record.generation) for record in records])

    def published(self, records: Sequence[Record]) -> None:
        """The rows can be read."""
        frames = [self._published_frame(record) for record in records]
        with self._changed:
            for record, frame in zip(records, frames, strict=True):
                self._live[record.slot] = frame
            self._append(frames)

    def close(self, deadline_s: float) -> bool:
        """Write and sync what is left; False if the disk did not answer in time (the thread is left behind)."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _gone(self, kind: _Kind, grants: Sequence[Grant]) -> None:
        numbers = [number for grant in grants for number in grant]
        frame = _frame(kind, struct.pack(f"<{len(numbers)}Q", *numbers), self._seed)
        with self._changed:
            for slot, generation in grants:
                self._live.pop(slot, None)
                self._generation = max(self._generation, generation)
            self._append([frame])

    def _published_frame(self, record: Record) -> bytes:
        fields = (record.block_hash, record.tenant, record.depth, record.priority)
        body = _RECORD.pack(*fields, record.slot, record.generation, record.expiry_s)
        return _frame(_Kind.PUBLISHED, body + record.sums, self._seed)

    @property
    def _seed(self) -> int:
        return seed_of(self._shape.epoch)

    def _append(self, frames: Sequence[bytes]) -> None:
        """Under the lock. What a stuck disk leaves unwritten is bounded: beyond a rewrite's worth, a rewrite it is."""
        self._pending += frames
        self._pending_bytes += sum(map(len, frames))
        if self._pending_bytes > self._shape.snapshot_bytes_max:
            self._pending, self._pending_bytes, self._rewrite = [], 0, True
        self._changed.notify()

    def _work(self) -> None:
        sync_at: float | None = None
        while True:
            frames, rewrite, closing = self._next(sync_at)
            try:
                if rewrite:
                    self._write_anew(frames)
                elif frames:
                    self._file_bytes += self._write(self._descriptor, frames, self._file_bytes)
                if sync_at is None and (frames or rewrite):
                    sync_at = time.monotonic() + SYNC_S
                if sync_at is not None and (closing or time.monotonic() >= sync_at):
                    self._sync()
                    sync_at = None
                self._report(None)
            except OSError as error:
                self._report(error)
                if closing:
                    return
                with self._changed:
                    self._rewrite = True
                    self._changed.wait(RETRY_S)
                continue
            if closing:
                return

    def _next(self, sync_at: float | None) -> tuple[list[bytes], bool, bool]:
        """Wait for something to do: (frames to write, whether as a new file, whether to end after it)."""
        with self._changed:
            while not (self._pending or self._rewrite or self._closing):
                left_s = None if sync_at is None else sync_at - time.monotonic()
                if left_s is not None and left_s <= 0:
                    break
                self._changed.wait(left_s)
            if self._file_bytes + self._pending_bytes > self._shape.file_bytes_max:
                self._rewrite = True
            rewrite, frames = self._rewrite, self._pending
            if rewrite:
                frames = [self._head_frame(), *self._live.values()]
            self._pending, self._pending_bytes, self._rewrite = [], 0, False
            return frames, rewrite, self._closing

    def _head_frame(self) -> bytes:
        shape = self._shape
        head = _HEAD.pack(JOURNAL_VERSION, shape.epoch, shape.slot_count, shape.slice_count, self._generation)
        return _frame(_Kind.HEAD, head, 0)

    def _write_anew(self, frames: list[bytes]) -> None:
        """Make the file anew beside the old one and swap them; at every instant one whole file has the name."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SPARE_NAME, dir_fd=self._folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(SPARE_NAME, flags, 0o600, dir_fd=self._folder)
        try:
            os.fchmod(descriptor, 0o600)
            file_bytes = self._write(descriptor, frames, 0)
            self._calls.fdatasync(descriptor)
            os.rename(SPARE_NAME, JOURNAL_NAME, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            os.close(descriptor)
            raise
        old, self._descriptor, self._file_bytes = self._descriptor, descriptor, file_bytes
        if old >= 0:
            os.close(old)
        os.fsync(self._folder)

    def _write(self, descriptor: int, frames: list[bytes], offset: int) -> int:
        data = memoryview(b"".join(frames))
        written = 0
        while written < len(data):
            count = self._calls.pwritev(descriptor, [data[written : written + WRITE_BYTES]], offset + written)
            if count == 0:
                raise OSError(errno.EIO, "nothing was written")
            written += count
        return written

    def _sync(self) -> None:
        """The rows first: what a synced journal promises should be there."""
        self._calls.fdatasync(self._slab)
        self._calls.fdatasync(self._descriptor)

    def _report(self, error: OSError | None) -> None:
        if error is not None and not self._failing:
            log.warning("journal cannot be written, NVMe may come back colder: %s", error.strerror)
        if error is None and self._failing:
            log.warning("journal is written again")
        self._failing = error is not None


def _replay_bytes(data: bytes, shape: JournalShape) -> Replay:
    head = _frame_at(data, 0, 0)
    if head is None or head[0] != _Kind.HEAD or len(head[1]) != _HEAD.size:
        return Replay(ReplayState.DAMAGED, [], 0)
    version, epoch, _, slice_count, generation = _HEAD.unpack(head[1])
    if version != JOURNAL_VERSION or epoch != shape.epoch or slice_count != shape.slice_count:
        return Replay(ReplayState.FOREIGN, [], 0)
    seed = seed_of(epoch)
    live: dict[int, Record] = {}
    offset = head[2]
    while (frame := _frame_at(data, offset, seed)) is not None:
        kind, body, offset = frame
        if kind == _Kind.PUBLISHED and len(body) == _RECORD.size + slice_count * SUM_BYTES:
            block_hash, tenant, depth, priority, slot, row_generation, expiry_s = _RECORD.unpack_from(body)
            sums = bytes(body[_RECORD.size :])
            generation = max(generation, row_generation)
            if slot < shape.slot_count:
                live[slot] = Record(block_hash, slot, row_generation, depth, sums, priority, expiry_s, tenant)
        elif kind in (_Kind.RESERVED, _Kind.DROPPED) and len(body) % 16 == 0:
            for slot, row_generation in struct.iter_unpack("<QQ", body):
                generation = max(generation, row_generation)
                live.pop(slot, None)
        else:
            return Replay(ReplayState.DAMAGED, [], generation)
    if _any_frame_after(data, offset, seed):
        return Replay(ReplayState.DAMAGED, [], generation)
    return Replay(ReplayState.WHOLE, list(live.values()), generation)


def seed_of(epoch: bytes) -> int:
    """Seed of a journal's sums: a frame of another slab's journal never passes for one of this."""
    return int.from_bytes(epoch[:8], "little")


def _frame(kind: _Kind, body: bytes, seed: int) -> bytes:
    framed = _FRAME.pack(_MARK, kind, len(body)) + body
    return framed + _SUM.pack(xxh3_64_intdigest(framed, seed))


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
    """Whether a sound frame follows a broken one: then it is damage and no torn end."""
    place = data.find(_MARK, offset)
    while place >= 0:
        if _frame_at(data, place, seed) is not None:
            return True
        place = data.find(_MARK, place + 1)
    return False


def _read_all(descriptor: int) -> bytes:
    pieces: list[bytes] = []
    while piece := os.read(descriptor, WRITE_BYTES):
        pieces.append(piece)
    return b"".join(pieces)
