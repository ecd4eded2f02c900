"""The log of an NVMe directory on disk: what it takes to find the rows again after the process is gone.

Owns the file and one thread that writes at once, syncs once a second and rewrites the file before it passes its bound
(the format is replay.py's). The caller never waits for the disk. Losing the file, or any part of it, costs warmth and
never truth: rows prove themselves. Knows no file but its own and the slab that it syncs before itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence

from kvtier.io.base import KernelCalls, SystemCalls, uninterrupted, write_all
from kvtier.record import Grant, Record
from kvtier.replay import (
    JOURNAL_NAME,
    FrameKind,
    JournalShape,
    gone_frame,
    head_frame,
    newest_hours,
    published_frame,
    spent_frame,
)

log = logging.getLogger(__name__)

SPARE_NAME = "journal.new"
SYNC_S = 1.0
RETRY_S = 1.0
WRITE_BYTES = 1 << 20


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
        retry_s: float = RETRY_S,
        spent: Mapping[int, int] | None = None,
    ) -> None:
        """`folder` and `slab_descriptor` must stay open until `close` has returned True."""
        self._folder = folder
        self._shape = shape
        self._slab = slab_descriptor
        self._calls = calls if calls is not None else KernelCalls()
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._live = {record.slot: published_frame(shape, record) for record in records}
        self._generation = generation
        self._spent = newest_hours(spent or {})
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._rewrite = True
        self._closing = False
        self._descriptor = -1
        self._file_bytes = 0
        self._failing = False
        self._make_room()
        self._thread = threading.Thread(target=self._work, name="kvtier-journal", daemon=True)
        self._thread.start()

    def reserved(self, grants: Sequence[Grant]) -> None:
        """The slots' old rows are gone."""
        self._gone(FrameKind.RESERVED, grants)

    def dropped(self, records: Sequence[Record]) -> None:
        """The rows are hidden."""
        self._gone(FrameKind.DROPPED, [Grant(record.slot, record.generation) for record in records])

    def published(self, records: Sequence[Record]) -> None:
        """The rows can be read."""
        self._written(records)

    def retained(self, records: Sequence[Record]) -> None:
        """The rows have another priority, expiry or pin: the later word about a slot counts."""
        self._written(records)

    def _written(self, records: Sequence[Record]) -> None:
        frames = [published_frame(self._shape, record) for record in records]
        with self._changed:
            for record, frame in zip(records, frames, strict=True):
                self._live[record.slot] = frame
            self._append(frames)

    def spent(self, spent_by_hour: Mapping[int, int]) -> None:
        """See `SpendingLog`."""
        frames = [spent_frame(self._shape, *pair) for pair in spent_by_hour.items()]
        with self._changed:
            self._spent = newest_hours({**self._spent, **spent_by_hour})
            self._append(frames)

    def close(self, deadline_s: float) -> bool:
        """Write and sync what is left; False if the disk did not answer in time (the thread is left behind)."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _make_room(self) -> None:
        """Let go of what would, beside the first rewrite, take more than is this journal's: it was of a longer slab.

        Until that rewrite is done rows are found by their headers alone.
        """
        with contextlib.suppress(OSError):
            os.unlink(SPARE_NAME, dir_fd=self._folder)
        with contextlib.suppress(OSError):
            if os.stat(JOURNAL_NAME, dir_fd=self._folder).st_size > self._shape.file_bytes_max:
                os.unlink(JOURNAL_NAME, dir_fd=self._folder)

    def _gone(self, kind: FrameKind, grants: Sequence[Grant]) -> None:
        frame = gone_frame(self._shape, kind, grants)
        with self._changed:
            for slot, generation in grants:
                self._live.pop(slot, None)
                self._generation = max(self._generation, generation)
            self._append([frame])

    def _append(self, frames: Sequence[bytes]) -> None:
        """Under the lock. What a stuck disk leaves unwritten is bounded: beyond a rewrite's worth, a rewrite it is."""
        self._pending += frames
        self._pending_bytes += sum(map(len, frames))
        if self._pending_bytes > self._shape.snapshot_bytes_max:
            self._pending, self._pending_bytes, self._rewrite = [], 0, True
        self._changed.notify()

    def _work(self) -> None:
        try:
            self._follow()
        finally:
            if self._descriptor >= 0:
                os.close(self._descriptor)

    def _follow(self) -> None:
        """Write, sync and rewrite as changes come, until `close`."""
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
                    self._changed.wait(self._retry_s)
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
                spent = [spent_frame(self._shape, *pair) for pair in self._spent.items()]
                frames = [head_frame(self._shape, self._generation), *spent, *self._live.values()]
            self._pending, self._pending_bytes, self._rewrite = [], 0, False
            return frames, rewrite, self._closing

    def _write_anew(self, frames: list[bytes]) -> None:
        """Make the file anew beside the old one and swap them; at every instant one whole file has the name."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SPARE_NAME, dir_fd=self._folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(SPARE_NAME, flags, 0o600, dir_fd=self._folder)
        try:
            os.fchmod(descriptor, 0o600)
            file_bytes = self._write(descriptor, frames, 0)
            uninterrupted(self._calls.fdatasync, descriptor)
            os.rename(SPARE_NAME, JOURNAL_NAME, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            os.close(descriptor)
            raise
        old, self._descriptor, self._file_bytes = self._descriptor, descriptor, file_bytes
        if old >= 0:
            os.close(old)
        os.fsync(self._folder)

    def _write(self, descriptor: int, frames: list[bytes], offset: int) -> int:
        """Bytes written."""
        data = memoryview(b"".join(frames))
        for start in range(0, len(data), WRITE_BYTES):
            write_all(self._calls, descriptor, data[start : start + WRITE_BYTES], offset + start)
        return len(data)

    def _sync(self) -> None:
        """The rows first: what a synced journal promises should be there."""
        uninterrupted(self._calls.fdatasync, self._slab)
        uninterrupted(self._calls.fdatasync, self._descriptor)

    def _report(self, error: OSError | None) -> None:
        if error is not None and not self._failing:
            name = error.filename2 or error.filename or JOURNAL_NAME
            log.warning("journal cannot be written, NVMe may come back colder: %s: %s", name, error.strerror)
        if error is None and self._failing:
            log.warning("journal is written again")
        self._failing = error is not None
