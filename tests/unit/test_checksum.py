"""Sums of slices in C++ and in Python, alone and while copying, against the xxhash package."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable

import pytest
from xxhash import xxh3_64_digest

from kvtier.tiers import checksum
from tests.rows import aligned

try:
    from kvtier import _native

    ISAS: list[str] = _native.checksum_isas()
except ImportError:
    ISAS = []

Sum = Callable[[list[memoryview], int], list[bytes]]
Copy = Callable[[list[memoryview], list[memoryview], int], list[bytes]]
SUMS: dict[str, Sum] = {"chosen": checksum.sum_rows, "python": checksum.sum_plainly}
COPIES: dict[str, Copy] = {"chosen": checksum.copy_rows, "python": checksum.copy_plainly}
for isa, runs in itertools.product(ISAS, (1, 8)):
    SUMS[f"{isa}-{runs}"] = functools.partial(_native.checksum_rows, isa=isa, runs=runs)
    COPIES[f"{isa}-{runs}"] = functools.partial(_native.copy_rows, isa=isa, runs=runs)

ROW_BYTES = 24 << 10
SLICES = (1024, 2048, 4096, 12 << 10, 24 << 10)


def noise(seed: int, count: int = ROW_BYTES) -> memoryview:
    row = aligned(count)
    row[:] = random.Random(seed).randbytes(count)
    return row


def expected(row: memoryview, slice_bytes: int) -> bytes:
    return b"".join(xxh3_64_digest(row[start : start + slice_bytes]) for start in range(0, row.nbytes, slice_bytes))


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("slice_bytes", SLICES)
def test_sums_are_those_of_xxhash(name: str, slice_bytes: int) -> None:
    rows = [noise(seed) for seed in range(3)]
    assert SUMS[name](rows, slice_bytes) == [expected(row, slice_bytes) for row in rows]
    assert SUMS[name]([], slice_bytes) == []


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("slice_bytes", SLICES)
@pytest.mark.parametrize("shift", [0, 8, 1])
def test_copies_are_whole_and_summed_wherever_they_lie(name: str, slice_bytes: int, shift: int) -> None:
    sources = [noise(seed, ROW_BYTES + shift)[shift:] for seed in range(2)]
    room = aligned(3 * ROW_BYTES)
    room[:] = b"\xaa" * room.nbytes
    starts = [shift, ROW_BYTES + 64 + shift]
    targets = [room[start : start + ROW_BYTES] for start in starts]
    assert COPIES[name](sources, targets, slice_bytes) == [expected(row, slice_bytes) for row in sources]
    assert targets == sources
    around = [*range(starts[0]), *range(starts[0] + ROW_BYTES, starts[1]), *range(starts[1] + ROW_BYTES, room.nbytes)]
    assert {room[place] for place in around} == {0xAA}


@pytest.mark.parametrize("name", SUMS)
def test_every_byte_counts(name: str) -> None:
    row = noise(7, 4096)
    (before,) = SUMS[name]([row], 2048)
    for place in [*range(0, 4096, 61), 2047, 2048, 4095]:
        row[place] ^= 1
        (after,) = SUMS[name]([row], 2048)
        assert [before[:8] == after[:8], before[8:] == after[8:]] == [place >= 2048, place < 2048]
        row[place] ^= 1


@pytest.mark.skipif(not ISAS, reason="kvtier._native was not built")
def test_the_native_sums_refuse_what_they_cannot_do() -> None:
    row = noise(1)
    for rows, slice_bytes in (([row], 0), ([row], 1000), ([row[:-1]], 1024), ([row[:1024]], 2048)):
        with pytest.raises(ValueError):
            _native.checksum_rows(rows, slice_bytes)
    for targets in ([], [row[1024:]], [row, row]):
        with pytest.raises(ValueError):
            _native.copy_rows([row], targets, 1024)
    with pytest.raises(ValueError, match="isa"):
        _native.checksum_rows([row], 1024, isa="mmx")
    with pytest.raises(ValueError, match="runs"):
        _native.checksum_rows([row], 1024, runs=3)
    with pytest.raises(BufferError):
        _native.copy_rows([row], [memoryview(bytes(ROW_BYTES))], 1024)
    with pytest.raises(TypeError):
        _native.checksum_rows([1], 1024)
