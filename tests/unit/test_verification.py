"""Judging rows of a shelf again: every way of being wrong has its name, and nothing else is called wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.keeper.verification import Judgement, judge
from kvtier.record import Record
from kvtier.tiers.checksum import slice_sums
from kvtier.tiers.header import HEADER_BYTES, RowFormat, pack_header
from kvtier.tiers.slab import Slab
from tests.rows import LAYOUT, NAMESPACE, SLOT_BYTES, aligned, block_hashes, filled
from tests.shelf_desk import spoil

FORM = RowFormat.of(LAYOUT, NAMESPACE)
HASHES = block_hashes(12)
ANY = RowFormat(bytes(32), LAYOUT.row_bytes, LAYOUT.slice_bytes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slab"


@pytest.fixture
def slab(path: Path) -> Iterator[Slab]:
    """A slab with a row in each of its 12 slots."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    made = Slab(descriptor, 4096, SLOT_BYTES, len(HASHES), bytes(16))
    for row in records():
        header = aligned(HEADER_BYTES)
        pack_header(header, row, FORM)
        os.pwrite(descriptor, bytes(header) + bytes(filled(row.block_hash)), made.offset(row.slot))
    yield made
    made.close()


def records() -> list[Record]:
    return [Record(h, slot, slot + 1, slot, slice_sums(filled(h), LAYOUT.slice_bytes)) for slot, h in enumerate(HASHES)]


def judgements(slab: Slab, rows: list[Record], bytes_per_s: float = 0.0) -> dict[int, Judgement]:
    judged = [one for piece in judge(slab, ANY, rows, bytes_per_s) for one in piece]
    assert sorted(one.record.slot for one in judged) == sorted(row.slot for row in rows)
    return {one.record.slot: one.judgement for one in judged}


def copy_row(path: Path, source: int, target: int) -> None:
    with open(path, "r+b") as file:
        file.seek(4096 + source * SLOT_BYTES)
        row = file.read(SLOT_BYTES)
        file.seek(4096 + target * SLOT_BYTES)
        file.write(row)


def test_rows_as_they_were_written_are_good_whatever_their_namespace(slab: Slab) -> None:
    assert set(judgements(slab, records()).values()) == {Judgement.GOOD}


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda path: spoil(path, 4096 + 5 * SLOT_BYTES + 60), Judgement.HEADER),
        (lambda path: spoil(path, 4096 + 5 * SLOT_BYTES + HEADER_BYTES), Judgement.SUMS),
        (lambda path: spoil(path, 4096 + 6 * SLOT_BYTES - 1), Judgement.SUMS),
        (lambda path: copy_row(path, 4, 5), Judgement.IDENTITY),
    ],
    ids=["header", "first byte", "last byte", "misdirected"],
)
def test_one_bit_is_enough_and_only_that_row_is_bad(
    slab: Slab, path: Path, damage: Callable[[Path], None], expected: Judgement
) -> None:
    damage(path)
    found = judgements(slab, records())
    assert found.pop(5) is expected and set(found.values()) == {Judgement.GOOD}


def test_an_older_generation_in_the_slot_is_not_the_row(slab: Slab) -> None:
    rows = [row._replace(generation=row.generation + 100) if row.slot == 3 else row for row in records()]
    assert judgements(slab, rows)[3] is Judgement.IDENTITY


def test_a_slab_that_ends_early_and_a_disk_that_gives_errors_are_told_apart(slab: Slab, path: Path) -> None:
    os.truncate(path, slab.total_bytes - 5000)
    assert judgements(slab, records())[len(HASHES) - 1] is Judgement.SHORT
    blind = Slab(os.open(path, os.O_WRONLY), 4096, SLOT_BYTES, len(HASHES), bytes(16))
    assert set(judgements(blind, records()).values()) == {Judgement.UNREADABLE}
    blind.close()


def test_the_rate_is_kept(slab: Slab) -> None:
    started = time.monotonic()
    judgements(slab, records(), bytes_per_s=40 * SLOT_BYTES)
    assert time.monotonic() - started >= (len(HASHES) - 1) / 40


def test_whoever_stops_early_leaves_nothing_behind(slab: Slab) -> None:
    before = set(os.listdir("/proc/self/task"))
    pieces = judge(slab, ANY, records() * 50)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    end = time.monotonic() + 60
    while set(os.listdir("/proc/self/task")) - before:
        assert time.monotonic() < end
        time.sleep(0.01)
