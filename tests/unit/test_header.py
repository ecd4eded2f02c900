"""The row header: packs, parses, and tells every kind of wrong row from the right one, in C++ and in Python."""

from __future__ import annotations

import dataclasses
import random

import pytest
from xxhash import xxh3_64_intdigest

from kvtier.record import Record, tenant_digest
from kvtier.tiers import header
from kvtier.tiers.checksum import slice_sums
from kvtier.tiers.header import (
    HEADER_BYTES,
    SLICES_MAX,
    RowFormat,
    Verdict,
    check_row,
    pack_header,
    parse_header,
)
from tests.rows import LAYOUT, NAMESPACE, aligned, block_hashes, filled

FORM = RowFormat.of(LAYOUT, NAMESPACE)
HASH, OTHER_HASH = block_hashes(2)
WAYS = {"chosen": (header._pack, header._is_header_of), "python": (header.pack_plainly, header.is_header_of_plainly)}


@pytest.fixture(autouse=True, params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of the two packs and judges."""
    pack, is_header_of = WAYS[request.param]
    monkeypatch.setattr(header, "_pack", pack)
    monkeypatch.setattr(header, "_is_header_of", is_header_of)
    return str(request.param)


def written(block_hash: bytes = HASH, slot: int = 5, generation: int = 9) -> tuple[memoryview, memoryview, Record]:
    """A header, its row and their record."""
    row, page = filled(block_hash), aligned(HEADER_BYTES)
    sums = slice_sums(row, FORM.slice_bytes)
    record = Record(block_hash, slot, generation, 3, sums, -2, 77, tenant_digest("someone"), pinned=True)
    pack_header(page, record, FORM)
    return page, row, record


def test_a_header_parses_to_what_was_packed() -> None:
    page, row, record = written()
    assert parse_header(page) == (record, FORM)
    assert check_row(page, row, record, FORM) is Verdict.GOOD
    assert check_row(page, row, record, FORM, bytes(len(record.sums))) is Verdict.SUMS, "sums that were taken count"


def test_what_a_row_was_raised_to_since_it_was_written_makes_it_no_other_row() -> None:
    page, row, record = written()
    for raised in (record._replace(priority=0), record._replace(expiry_s=0), record._replace(pinned=False)):
        assert check_row(page, row, raised, FORM) is Verdict.GOOD


@pytest.mark.parametrize(
    "change", [{"priority": 101}, {"priority": -101}, {"expiry_s": 1 << 40}, {"generation": 1 << 62}]
)
def test_a_header_with_impossible_numbers_is_none(change: dict[str, int]) -> None:
    page, row, record = written()
    bad = record._replace(**change)  # type: ignore[arg-type]
    pack_header(page, bad, FORM)
    assert parse_header(page) is None and check_row(page, row, bad, FORM) is Verdict.HEADER


def test_packing_leaves_nothing_of_what_the_page_held_before() -> None:
    page, _, record = written()
    dirty = aligned(HEADER_BYTES)
    dirty[:] = b"\xff" * HEADER_BYTES
    pack_header(dirty, record, FORM)
    assert dirty == page


def test_every_flipped_bit_of_the_header_is_caught() -> None:
    page, row, record = written()
    chance = random.Random(1)
    places = [
        *range(300),
        *(chance.randrange(HEADER_BYTES) for _ in range(300)),
        *range(HEADER_BYTES - 8, HEADER_BYTES),
    ]
    for place in places:
        page[place] ^= 1 << chance.randrange(8)
        assert check_row(page, row, record, FORM) is Verdict.HEADER, place
        pack_header(page, record, FORM)


def test_the_two_ways_pack_the_same_bytes_and_judge_alike_whatever_a_header_with_a_right_sum_says() -> None:
    page, _, record = written()
    where = (record, FORM.namespace, FORM.row_bytes, FORM.slice_bytes)
    for pack, is_header_of in WAYS.values():
        other = aligned(HEADER_BYTES)
        other[:] = b"\xee" * HEADER_BYTES
        pack(other, *where)
        assert other == page
        assert is_header_of(page, record._replace(pinned=int(record.pinned)), *where[1:]), "a number is a truth, too"
    chance = random.Random(4)
    judged = dict[int, bool]()
    for place in [*range(200), *(chance.randrange(HEADER_BYTES - 8) for _ in range(100))]:
        before = page[place]
        page[place] ^= 1 << chance.randrange(8)
        page[-8:] = xxh3_64_intdigest(page[:-8]).to_bytes(8, "little")
        judged[place], plainly = (is_header_of(page, *where) for _, is_header_of in WAYS.values())
        assert judged[place] == plainly, place
        page[place] = before
    assert not any(judged[place] for place in [*range(100), *range(104, 136), *range(152, 176)])
    assert all(judged[place] for place in [100, 136, *range(145, 152)]), "priority and expiry, a little; what is unused"


def test_a_flipped_bit_anywhere_in_the_row_is_caught() -> None:
    page, row, record = written()
    chance = random.Random(2)
    for _ in range(300):
        place, bit = chance.randrange(row.nbytes), 1 << chance.randrange(8)
        row[place] ^= bit
        assert check_row(page, row, record, FORM) is Verdict.SUMS
        row[place] ^= bit
    assert check_row(page, row, record, FORM) is Verdict.GOOD


def test_swapped_slices_and_torn_rows_are_caught() -> None:
    page, row, record = written()
    size = FORM.slice_bytes
    first, second = bytes(row[:size]), bytes(row[size : 2 * size])
    row[: 2 * size] = second + first
    assert check_row(page, row, record, FORM) is Verdict.SUMS
    row[: 2 * size] = first + second
    row[2 * size :] = bytes(filled(OTHER_HASH)[2 * size :])
    assert check_row(page, row, record, FORM) is Verdict.SUMS


@pytest.mark.parametrize(
    "change",
    [
        {"block_hash": OTHER_HASH},
        {"slot": 6},
        {"generation": 10},
        {"depth": 4},
        {"tenant": tenant_digest("someone else")},
        {"sums": bytes(24)},
    ],
)
def test_a_sound_row_of_another_record_is_caught(change: dict[str, object]) -> None:
    page, row, record = written()
    assert check_row(page, row, record._replace(**change), FORM) is Verdict.IDENTITY  # type: ignore[arg-type]


def test_a_row_of_another_namespace_or_geometry_is_caught() -> None:
    page, row, record = written()
    for form in (
        dataclasses.replace(FORM, namespace=bytes(32)),
        RowFormat(NAMESPACE, 2 * FORM.slice_bytes, FORM.slice_bytes),
    ):
        assert check_row(page, row[: form.row_bytes], record, form) is Verdict.IDENTITY


def test_zeros_noise_and_short_pages_are_no_headers() -> None:
    noise = random.Random(3).randbytes(HEADER_BYTES)
    for page in (bytes(HEADER_BYTES), noise, b"", bytes(written()[0])[:4095]):
        assert parse_header(memoryview(page)) is None


def test_a_layout_of_too_many_layers_has_no_format() -> None:
    RowFormat(NAMESPACE, SLICES_MAX * 4096, 4096)
    with pytest.raises(AssertionError):
        RowFormat(NAMESPACE, (SLICES_MAX + 1) * 4096, 4096)


def test_the_most_layers_fit_beside_the_sum() -> None:
    form = RowFormat(NAMESPACE, SLICES_MAX * 4096, 4096)
    record = Record(HASH, 1, 1, 0, bytes(range(1, 9)) * SLICES_MAX)
    page = aligned(HEADER_BYTES)
    pack_header(page, record, form)
    assert parse_header(page) == (record, form)
