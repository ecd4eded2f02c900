"""Memory that is registered piece by piece: rows move meanwhile, and within, across and beyond the pieces.

`scripts/sanitize` runs these on sanitized builds of the ring.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref

import pytest

from kvtier.io.base import IoRequest, IoResult, Operation
from tests.rows import aligned
from tests.unit.test_uring import PAGE, close, wait_until
from tests.unit.test_uring_registered import ended, file, memory_of, pages_of, uring

try:
    from kvtier._native import Ring
except ImportError:
    pytest.skip("kvtier._native was not built", allow_module_level=True)

__all__ = ["file", "uring"]

PIECES_MAX = 1 << 14
"""The kernel's bound."""


def ring_of_pieces(pages: int) -> Ring:
    """A ring that registers so many pages at a time."""
    return Ring(4, 0, tuple(Operation), IoResult, pages * PAGE)


def shared_pages(count: int) -> memoryview:
    return memoryview(mmap.mmap(-1, count * PAGE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))


def write_of(descriptor: int, *buffers: memoryview, page: int = 0) -> IoRequest:
    return IoRequest(Operation.WRITE, descriptor, page * PAGE, buffers, 1)


def test_what_lies_across_the_border_of_two_pieces_moves_as_ever(file: int) -> None:
    ring, memory = ring_of_pieces(4), memory_of(16)
    content = bytes(memory)
    ring.register_memory(pages_of(memory, 1, 13))  # borders before the pages 5, 9 and 13
    for number, (first, count, within) in enumerate(
        [(1, 4, True), (4, 2, False), (5, 4, True), (8, 6, False), (12, 1, True), (13, 1, True), (13, 2, False)]
    ):
        before = ring.registered_moves
        header, row = aligned(PAGE), pages_of(memory, first, count)
        header[:] = bytes([number]) * PAGE
        ring.push([write_of(file, header, row, page=2)])
        assert ended(ring, 1) == {1: (1 + count) * PAGE} and ring.registered_moves - before == within
        assert os.pread(file, (1 + count) * PAGE, 2 * PAGE) == bytes(header) + bytes(row)
    assert bytes(memory) == content and ring.refusal() == 0
    close(ring)


def test_rows_do_not_wait_until_all_of_a_large_memory_is_registered(file: int) -> None:
    memory = memory_of(1)
    large = shared_pages(8000)
    last = large[-PAGE:]
    last[:] = memory
    for _ in range(50):  # a thread that is kept from the CPU may come too late to see it
        ring = ring_of_pieces(1)
        ring.register_memory(large)
        ring.push([write_of(file, aligned(PAGE), last)])
        assert ended(ring, 1) == {1: 2 * PAGE} and os.pread(file, PAGE, PAGE) == bytes(memory)
        overtook = ring.registered_moves == 0
        close(ring)
        assert ring.refusal() == 0
        if overtook:
            return
    raise AssertionError("it was registered first each time")


def test_a_ring_that_is_closed_while_it_registers_keeps_that_memory_until_it_has_left() -> None:
    ring, memory = ring_of_pieces(1), memory_of(8000)
    kept = weakref.ref(memory)
    ring.register_memory(memory)
    del memory
    if not ring.close():
        assert kept() is not None
    close(ring)
    assert kept() is None and ring.refusal() == 0


def test_more_pieces_than_the_kernel_takes_are_refused_and_what_was_registered_still_counts(file: int) -> None:
    ring = ring_of_pieces(1)
    memory = shared_pages(PIECES_MAX + 1)
    for place in (0, PIECES_MAX - 1, PIECES_MAX):
        pages_of(memory, place, 1)[:] = bytes([place % 251 + 1]) * PAGE
    ring.register_memory(memory)
    wait_until(lambda: ring.refusal() == errno.ENOSPC)
    for place, within in ((0, 1), (PIECES_MAX - 1, 2), (PIECES_MAX, 2)):
        ring.push([write_of(file, pages_of(memory, place, 1))])
        assert ended(ring, 1) == {1: PAGE} and ring.registered_moves == within
        assert os.pread(file, PAGE, 0) == bytes(pages_of(memory, place, 1))
    close(ring)
