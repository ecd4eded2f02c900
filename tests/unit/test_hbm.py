"""The arena: aligned, distinct rows, honest addresses, a budget that must fit."""

from __future__ import annotations

import ctypes

import pytest

from kvtier.errors import ConfigError
from kvtier.tiers.hbm import HbmArena
from tests.rows import LAYOUT


def test_views_and_addresses_are_the_same_bytes() -> None:
    arena = HbmArena(LAYOUT, 5)
    for slot in range(5):
        arena.view(slot)[:] = bytes([slot + 1]) * LAYOUT.row_bytes
    for slot in range(5):
        assert arena.address(slot) % 4096 == 0 and arena.view(slot).nbytes == LAYOUT.row_bytes
        assert ctypes.string_at(arena.address(slot), LAYOUT.row_bytes) == bytes([slot + 1]) * LAYOUT.row_bytes
    assert arena.bytes_total == 5 * LAYOUT.row_bytes
    arena.close()


def test_slots_outside_the_arena_are_bugs() -> None:
    arena = HbmArena(LAYOUT, 2)
    for slot in (-1, 2):
        with pytest.raises(AssertionError):
            arena.address(slot)
        with pytest.raises(AssertionError):
            arena.view(slot)
    arena.close()
    with pytest.raises(AssertionError):
        arena.view(0)


def test_a_view_outlives_the_arena() -> None:
    arena = HbmArena(LAYOUT, 1)
    view = arena.view(0)
    view[:] = b"\x05" * LAYOUT.row_bytes
    arena.close()
    assert bytes(view) == b"\x05" * LAYOUT.row_bytes


def test_memory_that_is_not_there_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"tiers\.hbm\.bytes: .* lower tiers\.hbm\.bytes"):
        HbmArena(LAYOUT, (1 << 50) // LAYOUT.row_bytes)
