"""Reads the rows of a shelf again and judges them, a few at a time, while servers use them.

Each row is read through a descriptor of its own (direct I/O for NVMe) and must match its record to the last byte. Knows
no books: that a row may have changed meanwhile is for its caller to find out. Called by the command line.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import mmap
import threading
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvtier.io.base import IoRequest, IoResult, Operation
from kvtier.io.threads import ThreadsEngine
from kvtier.record import Record
from kvtier.tiers.header import HEADER_BYTES, RowFormat, Verdict, check_row, parse_header
from kvtier.tiers.slab import Slab

READERS = 4
BUFFERS_BYTES_MAX = 256 << 20
WAIT_S = 0.5
PACE_S = 0.01


class Judgement(enum.Enum):
    """What a row is."""

    GOOD = "good"
    HEADER = "header"
    IDENTITY = "identity"
    SUMS = "sums"
    SHORT = "short"
    """The file ends before the row."""
    UNREADABLE = "unreadable"
    """The disk gave an error: the row may still be there."""


class Judged(NamedTuple):
    """A row that was read."""

    record: Record
    judgement: Judgement


def judge(slab: Slab, form: RowFormat, records: Iterable[Record], bytes_per_s: float = 0.0) -> Iterator[list[Judged]]:
    """Judge all rows, in the order in which their reads end; `bytes_per_s` 0 reads as fast as the readers can.

    The namespace of `form` does not matter: each row's header tells its own, and the block hash is made of it.
    """
    count = max(1, min(2 * READERS, BUFFERS_BYTES_MAX // form.slot_bytes))
    memory = memoryview(mmap.mmap(-1, count * form.slot_bytes))
    free = [memory[start : start + form.slot_bytes] for start in range(0, len(memory), form.slot_bytes)]
    waiting: dict[int, tuple[Record, memoryview]] = {}
    rung = threading.Event()
    engine = ThreadsEngine(min(READERS, count), 1, count, rung.set)
    started, begun = time.monotonic(), 0
    coming = iter(records)
    following = next(coming, None)
    try:
        while following is not None or waiting:
            while following is not None and free and _is_due(started, begun * form.slot_bytes, bytes_per_s):
                buffer = free.pop()
                waiting[begun] = following, buffer
                assert engine.submit([_request(slab, form, following, buffer, begun)]) == 1
                begun += 1
                following = next(coming, None)
            rung.wait(PACE_S if bytes_per_s else WAIT_S)
            rung.clear()
            ended = [(waiting.pop(result.tag), result) for result in engine.poll()]
            free += [buffer for (_, buffer), _ in ended]
            if ended:
                yield [Judged(record, _judgement(result)) for (record, _), result in ended]
    finally:
        engine.close(WAIT_S)


def _is_due(started: float, begun_bytes: int, bytes_per_s: float) -> bool:
    return not bytes_per_s or time.monotonic() - started >= begun_bytes / bytes_per_s


def _request(slab: Slab, form: RowFormat, record: Record, buffer: memoryview, tag: int) -> IoRequest:
    header, row = buffer[:HEADER_BYTES], buffer[HEADER_BYTES:]
    then = functools.partial(_verdict, header, row, record, form)
    return IoRequest(Operation.READ, slab.descriptor, slab.offset(record.slot), (header, row), tag, then=then)


def _verdict(header: memoryview, row: memoryview, record: Record, form: RowFormat) -> Verdict:
    parsed = parse_header(header)
    if parsed is None:
        return Verdict.HEADER
    return check_row(header, row, record, dataclasses.replace(form, namespace=parsed[1].namespace))


def _judgement(result: IoResult) -> Judgement:
    if result.error_number is not None:
        return Judgement.UNREADABLE
    return Judgement(result.value.value) if isinstance(result.value, Verdict) else Judgement.SHORT
