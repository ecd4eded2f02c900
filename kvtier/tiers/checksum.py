"""The sums of the slices of rows, one xxh3_64 each, taken alone or while the rows are copied.

In C++ where that was built: it reads memory once, and lets go of the GIL meanwhile. Else with the xxhash package, which
holds it. The sums are the same. Called on I/O workers.
"""

from __future__ import annotations

from collections.abc import Callable

from xxhash import xxh3_64_digest

SUM_BYTES = 8

SumRows = Callable[[list[memoryview], int], list[bytes]]
"""(rows, slice_bytes): the sums of each row's slices in order. Slices are whole KiB, rows whole slices."""
CopyRows = Callable[[list[memoryview], list[memoryview], int], list[bytes]]
"""(sources, targets, slice_bytes): copy rows; for each the sums of the slices as they have come to its target.

Others may write to a source meanwhile: what is torn has other sums. ValueError: a target is not as long as its source.
"""


def sum_plainly(rows: list[memoryview], slice_bytes: int) -> list[bytes]:
    """`SumRows` without the native module."""
    return [
        b"".join([xxh3_64_digest(row[start : start + slice_bytes]) for start in range(0, row.nbytes, slice_bytes)])
        for row in rows
    ]


def copy_plainly(sources: list[memoryview], targets: list[memoryview], slice_bytes: int) -> list[bytes]:
    """`CopyRows` without the native module: slice by slice, so that each is summed while it is in the caches."""
    sums: list[bytes] = []
    for source, target in zip(sources, targets, strict=True):
        taken: list[bytes] = []
        for start in range(0, source.nbytes, slice_bytes):
            piece = target[start : start + slice_bytes]
            piece[:] = source[start : start + slice_bytes]
            taken.append(xxh3_64_digest(piece))
        sums.append(b"".join(taken))
    return sums


def _fastest() -> tuple[SumRows, CopyRows]:
    try:
        from kvtier._native import checksum_rows, copy_rows
    except ImportError:
        return sum_plainly, copy_plainly
    return checksum_rows, copy_rows


sum_rows, copy_rows = _fastest()


def slice_sums(row: memoryview, slice_bytes: int) -> bytes:
    """The sums of one row's slices, 8 bytes each, in order."""
    return sum_rows([row], slice_bytes)[0]
