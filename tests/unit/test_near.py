"""Slices of far rows are near when a layer attends to them, whatever a device does first; the rest is left in place."""

from __future__ import annotations

import ctypes
import dataclasses
from functools import partial

import pytest
import torch
from late import LateLauncher

from kvtier.attention import AttentionBatch
from kvtier.batch import PassBatch
from kvtier.block import KVLayout
from kvtier.config import EngineConfig
from kvtier.device.near import NearPass, NearSlices
from kvtier.sizing import near_row_count
from kvtier.tiers.hbm import HbmArena

CPU = torch.device("cpu")
LAYOUT = KVLayout(7, 1, 32, 16, "float32")
WORDS = LAYOUT.slice_bytes // 8


class Place:
    """HBM of four rows, and six far ones; each slice is filled with a number of its own."""

    def __init__(self, launcher: LateLauncher, slices_max: int, windows: list[int | None] | None = None) -> None:
        self.launcher = launcher
        self.arena = HbmArena(LAYOUT, 4)
        self.far = torch.zeros(6, LAYOUT.layers, WORDS, dtype=torch.int64)
        self.near = NearSlices(self.arena, windows or [None] * LAYOUT.layers, slices_max, CPU, launcher)
        self.contents: dict[int, int] = {}
        for row in range(10):
            for layer in range(LAYOUT.layers):
                at = self.address(row) + layer * LAYOUT.slice_bytes
                self.contents[at] = 100 * row + layer + 1
                ctypes.memmove(at, (ctypes.c_int64 * WORDS)(*[self.contents[at]] * WORDS), LAYOUT.slice_bytes)
        self.seen: list[tuple[int, list[list[int]]]] = []
        """Of each layer, what its slices hold when it is run."""
        self.in_place: list[int] = []
        """Of each layer, how many far rows it reads where they are."""

    def address(self, row: int) -> int:
        return self.arena.address(row) if row < 4 else self.far[row - 4].data_ptr()

    def batch(self, tables: list[list[int]], counts: list[int], spares: int = 0) -> PassBatch:
        """A pass over sequences whose blocks are those rows; the last one is not full."""
        width = max(map(len, tables)) + spares
        wide = torch.tensor([[*map(self.address, table), *[0] * (width - len(table))] for table in tables])
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = torch.tensor([len(table) * LAYOUT.block_tokens - 3 for table in tables], dtype=torch.int32)
        none = torch.zeros(int(starts[-1]), dtype=torch.int64)
        return PassBatch(none, none, none, AttentionBatch(wide, starts, lengths, none, none.int()))

    def expected(self, tables: list[list[int]], layers: range) -> list[tuple[int, list[list[int]]]]:
        return [(layer, [[100 * row + layer + 1 for row in table] for table in tables]) for layer in layers]

    def run(self, begun: NearPass, layers: range, batch: PassBatch) -> None:
        begun.run(layers, batch.attention, lambda only, given: self.launcher.give(partial(self._attend, only, given)))

    def _attend(self, only: range, batch: AttentionBatch) -> None:
        [layer] = only
        rows = [[row for row in table if row] for table in batch.tables.tolist()]
        far = {self.address(row) for row in range(4, 10)}
        self.in_place.append(sum(row in far for table in rows for row in table))
        self.seen.append((layer, [[self._slice(row + layer * LAYOUT.slice_bytes) for row in table] for table in rows]))

    def _slice(self, at: int) -> int:
        words = (ctypes.c_int64 * WORDS).from_address(at)
        assert words[0] == words[-1]
        return words[0]


TABLES = [[4, 5, 0], [1, 6, 7, 2], [8, 3]]


@pytest.mark.parametrize("seed", range(12))
def test_slices_are_near_when_a_layer_attends_to_them(seed: int) -> None:
    place = Place(LateLauncher(seed), 8)
    for _ in range(2):
        batch = place.batch(TABLES, [5, 2, 9])
        begun = place.near.begin(batch)
        assert begun is not None
        place.run(begun, range(LAYOUT.layers), batch)
        place.launcher.catch_up()
        assert place.seen == place.expected(TABLES, range(LAYOUT.layers)) and not any(place.in_place)
        place.seen.clear()
    assert place.launcher.gathered_count == place.near.brought_count == 2 * 5 * LAYOUT.layers
    assert place.launcher.late_count > 0


@pytest.mark.parametrize("seed", range(12))
def test_rows_that_move_between_layers_are_brought_from_where_they_are(seed: int) -> None:
    """As those that are staged: their slices are overwritten once the device has done with them."""
    place = Place(LateLauncher(seed), 8)
    batch = place.batch([[0, 4, 5, 0, 1]], [20])
    batch.attention.tables[0, [0, 3]] = 0  # come near later
    begun = place.near.begin(batch)
    assert begun is not None
    other, expected = place.batch([[6, 4]], [2]), []
    for first in range(0, LAYOUT.layers, 2):
        layers = range(first, min(first + 2, LAYOUT.layers))
        rows = [8, 9] if first % 4 == 0 else [9, 7]
        batch.attention.tables[0, [0, 3]] = torch.tensor([place.address(row) for row in rows])
        begun.note_tables()
        for layer in layers:
            place.run(begun, range(layer, layer + 1), batch)
        place.launcher.catch_up()
        place.far[[row - 4 for row in rows], layers.start : layers.stop] = -1
        expected += place.expected([[rows[0], 4, 5, rows[1], 1]], layers)
        between = place.near.begin(other)  # a pass of others uses the same memory
        assert between is not None
        place.run(between, layers, other)
        expected += place.expected([[6, 4]], layers)
    place.launcher.catch_up()
    assert place.seen == expected
    assert not any(place.in_place)


def test_the_next_layer_is_copied_while_one_is_attended_to_and_none_before_what_went_before() -> None:
    class Patient(LateLauncher):
        def _stir(self) -> None:
            """Nothing comes early."""

    place, log = Place(Patient(0), 8), []
    batch = place.batch(TABLES, [5, 2, 9])
    begun = place.near.begin(batch)
    assert begun is not None
    place.launcher.give(lambda: log.append("tables"))
    place.run(begun, range(3), batch)
    place.launcher.beside.run_to(1)
    assert log == ["tables"], "of which the copy is told where to read"
    place.launcher.beside.run_to(2)
    assert place.launcher.gathered_count == 2 * 5 and not place.seen
    place.launcher.beside.run_to(3)
    assert len(place.seen) == 1, "the third takes the place of the first"


def test_what_does_not_fit_and_layers_with_a_window_are_read_in_place() -> None:
    place = Place(LateLauncher(1), 3, [9, None, None, 9, None, None, 9])
    batch = place.batch(TABLES, [5, 2, 9], spares=2)
    begun = place.near.begin(batch)
    assert begun is not None
    place.run(begun, range(LAYOUT.layers), batch)
    place.launcher.catch_up()
    assert place.seen == place.expected(TABLES, range(LAYOUT.layers))
    assert place.in_place == [5, 2, 2, 5, 2, 2, 5]
    assert place.near.brought_count == 4 * 3


def test_only_sequences_with_several_queries_have_rows_brought_near() -> None:
    place = Place(LateLauncher(1), 8)
    assert place.near.begin(place.batch(TABLES, [1, 1, 1])) is None
    assert place.near.begin(place.batch([[0, 1], [2]], [5, 1])) is None, "all in HBM"
    batch = place.batch(TABLES, [1, 2, 1])
    begun = place.near.begin(batch)
    assert begun is not None
    place.run(begun, range(2), batch)
    place.launcher.catch_up()
    assert place.in_place == [3, 3] and place.seen == place.expected(TABLES, range(2))


def test_what_of_hbm_is_for_slices() -> None:
    deep = dataclasses.replace(LAYOUT, layers=32)

    def rows(slot_count: int, blocks: int, layout: KVLayout = deep, **overrides: object) -> int:
        values = {"model": "/nowhere", "tiers.dram.bytes": "1GiB", "tiers.nvme.bytes": 0} | overrides
        config = EngineConfig.load(None, values)
        return near_row_count(config, layout, slot_count, blocks * LAYOUT.block_tokens)

    assert rows(100, 100) == 0, "every context fits"
    assert rows(100, 101) == 7 and rows(100, 112) == 7 and rows(100, 113) == 8, "two layers of 32"
    assert rows(100, 1000) == rows(100, 101, LAYOUT) == 25, "a quarter"
    assert rows(3, 1000) == 0
    assert rows(100, 101, **{"tiers.dram.bytes": 0}) == rows(100, 101, **{"scheduler.streamed_max": 0}) == 0
