"""A context larger than HBM over shelves that are shared: its rows stay while it attends them, whoever else is there.

Cancelled in the middle of a pass, its keeper killed or stopped, its rows cleared, its engine killed: never another
token than without trouble, and nothing is held in the end. A second engine writes over all that is not held meanwhile.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier import Engine, FinishReason, Request, SamplingParams
from kvtier.block import KVLayout, Tier
from kvtier.cache_directory import layout_name
from kvtier.keeper.desk import Desk
from kvtier.keeper.shared import SharedBooks
from kvtier.keeper.slot_table import SlotEntry
from kvtier.record import Lease
from kvtier.shelf import Shelf
from kvtier.tiers.header import slice_sums
from tests.engines import BLOCK, Gate, Sink, keepers, opened, wait_for
from tests.stopped import stopped
from tests.tiny import make_checkpoint

LAYOUT = KVLayout(3, 2, 16, BLOCK, "float32")
SLOT_BYTES = LAYOUT.row_bytes + 4096
HBM_BLOCKS, DRAM_BLOCKS = 10, 28
OUTPUT = 40
PROMPT = [(11 * place + place * place) % 290 + 3 for place in range(22 * BLOCK + 5)]
PARAMS = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
OTHERS = [[(13 * number + 5 * place) % 290 + 3 for place in range(6 * BLOCK + 2)] for number in range(14)]
SHARED: dict[str, object] = {
    "tiers__hbm__bytes": HBM_BLOCKS * LAYOUT.row_bytes,
    "tiers__dram__bytes": DRAM_BLOCKS * SLOT_BYTES,
    "tiers__dram__staging_bytes": 0,
    "tiers__nvme__bytes": 8 * SLOT_BYTES + 100_000,
    "tiers__linger_s": 0.5,
    "scheduler__streamed_max": 1,
    "scheduler__streamed_hbm": 1.0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """The answer of an engine whose HBM holds everything."""
    with opened(model, tiers__dram__bytes=0) as engine:
        [done] = engine.generate([PROMPT], PARAMS)
        assert engine.stats()["streamed_dram_bytes"] == 0
        return done.token_ids


Start = Callable[..., Engine]


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    """Engines on one cache directory, which see each other's shelves. In the end none holds anything."""
    with ExitStack() as stack:
        engines: list[Engine] = []

        def start_one(**more: object) -> Engine:
            values = SHARED | more
            engines.append(stack.enter_context(opened(model, tiers__nvme__path=tmp_path / "cache", **values)))
            wait_for(lambda: "dram_slots_total" in engines[-1].stats())
            return engines[-1]

        yield start_one
        for engine in engines:
            wait_for(partial(holds_nothing, engine))


def holds_nothing(engine: Engine) -> bool:
    """No row of a shelf is held for a streamed sequence."""
    return engine.stats()["dram_held"] == engine.stats()["nvme_held"] == 0


def dram(engine: Engine) -> Shelf:
    return engine._store._shelves[Tier.DRAM]


def slots(engine: Engine) -> list[SlotEntry]:
    """What the keeper says of each slot of DRAM."""
    return list(dram(engine)._books._table.entries())  # type: ignore[attr-defined]


def owner(engine: Engine) -> int:
    return int(dram(engine)._books._link.client.seat.owner)  # type: ignore[attr-defined]


def leased(engine: Engine) -> list[Lease]:
    """Leases of an engine that stands still: each is the keeper's, too, and its row is what it was."""
    leases, entries = list(dram(engine).holdings._leases), slots(engine)
    for lease in leases:
        entry = entries[lease.record.slot]
        assert entry.generation == lease.record.generation and entry.leases >> owner(engine) & 1, "nobody keeps it"
        with dram(engine).view(lease) as row:
            assert slice_sums(row, LAYOUT.slice_bytes) == lease.record.sums, "a leased row has changed"
    return leases


def overwrite(other: Engine) -> None:
    """Another engine needs all of DRAM that nobody holds."""
    before = other.stats()["dram_evictions"]
    other.generate(OTHERS, SamplingParams(max_tokens=1, temperature=0.0))
    wait_for(lambda: other.stats()["waiting_writes"] == other.stats()["writing_blocks"] == 0)
    assert other.stats()["dram_evictions"] > before


class Streaming:
    """A streamed request that stands still in a pass over leased rows."""

    def __init__(self, engine: Engine, tokens: int = 3) -> None:
        self.engine, self.sink, self.gate = engine, Sink(), Gate(engine)
        self.handle = engine.submit(Request(PROMPT, PARAMS), self.sink)
        self._let = 0
        self.go_on(lambda: len(self.sink.token_ids) >= tokens)

    def go_on(self, far_enough: Callable[[], bool]) -> None:
        """Pass by pass, until something is so, and it stands still in the next pass."""
        wait_for(lambda: self._stands_still(far_enough))

    def _stands_still(self, far_enough: Callable[[], bool]) -> bool:
        in_a_pass = len(self.gate.passes) > self._let
        if in_a_pass and not far_enough():
            self.gate.let(1)
            self._let += 1
            return False
        return in_a_pass


def kill_keeper(cache: Path) -> int:
    [keeper] = keepers(cache)
    os.kill(keeper, signal.SIGKILL)
    return keeper


def test_cancelled_in_mid_pass_it_keeps_its_rows_until_the_pass_is_over_and_then_gives_all_back(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.loop.PUBLISH_S", 0.0)
    engine, other = start(), start()
    streaming = Streaming(engine)
    assert engine.metrics.streamed_requests.value() == 1
    streaming.handle.cancel()
    overwrite(other)
    assert len(leased(engine)) >= len(PROMPT) // BLOCK - HBM_BLOCKS and not streaming.sink.done.is_set()
    streaming.gate.open()
    assert streaming.sink.final().finish_reason is FinishReason.CANCELLED
    wait_for(lambda: engine.stats()["dram_held"] == 0)
    wait_for(lambda: not any(entry.leases for entry in slots(engine)))
    wait_for(lambda: engine.metrics.streamed_requests.value() == 0)
    assert engine.stats()["streamed_dram_bytes"] == engine.metrics.streamed_bytes.value("dram") > 0


def test_a_keeper_that_is_killed_in_mid_pass_costs_no_row_that_is_attended(
    start: Start, tmp_path: Path, expected: list[int]
) -> None:
    engine, other = start(), start()
    streaming = Streaming(engine)
    killed = kill_keeper(tmp_path / "cache")
    before, link = leased(engine), dram(engine)._books._link  # type: ignore[attr-defined]
    wait_for(lambda: link.client._line == 2 and keepers(tmp_path / "cache") != [killed])  # greeted, and not yet joined
    streaming.go_on(lambda: link.line == 2)
    overwrite(other)
    assert set(before) <= set(leased(engine)), "the next keeper does not keep them"
    streaming.gate.open()
    assert streaming.sink.final().finish_reason is FinishReason.LENGTH and streaming.sink.token_ids == expected


def test_a_keeper_that_is_stopped_holds_a_streamed_answer_up_and_spoils_none(
    start: Start, tmp_path: Path, expected: list[int]
) -> None:
    engine, other = start(), start()
    streaming = Streaming(engine)
    [keeper] = keepers(tmp_path / "cache")
    with stopped(keeper):
        streaming.gate.open()
        wait_for(lambda: len(streaming.sink.token_ids) > BLOCK)
    assert streaming.sink.final().finish_reason is FinishReason.LENGTH and streaming.sink.token_ids == expected
    overwrite(other)
    assert engine.stats()["streamed_dram_bytes"] > 0


def test_rows_that_are_cleared_meanwhile_stay_for_who_attends_them(
    start: Start, tmp_path: Path, expected: list[int]
) -> None:
    engine, other = start(), start()
    streaming = Streaming(engine)
    before = leased(engine)
    with Desk(tmp_path / "cache") as desk:
        desk.overview()
        with desk.change(layout_name(LAYOUT)) as change:
            hidden = change.hide(layout_name(LAYOUT), 0, [lease.record for lease in before])
    assert hidden == len(before) > 10
    overwrite(other)
    assert leased(engine) == before
    streaming.gate.open()
    assert streaming.sink.final().finish_reason is FinishReason.LENGTH and streaming.sink.token_ids == expected


def test_shelves_that_are_lost_meanwhile_are_done_without_and_the_answer_is_the_same(
    start: Start, tmp_path: Path, expected: list[int]
) -> None:
    engine = start()
    streaming = Streaming(engine)
    lost = dram(engine)
    shutil.rmtree(tmp_path / "cache")
    wait_for(lambda: not keepers(tmp_path / "cache"))
    assert len(lost.holdings) > 10
    streaming.gate.open()
    assert streaming.sink.final().finish_reason is FinishReason.LENGTH and streaming.sink.token_ids == expected
    assert lost.is_lost and len(lost.holdings) == 0 and dram(engine) is not lost
    [again] = engine.generate([PROMPT], PARAMS)
    assert again.token_ids == expected and again.origin["dram"] > 0


def test_a_context_may_take_every_row_of_a_shared_shelf(start: Start, expected: list[int]) -> None:
    working_set = HBM_BLOCKS - 4  # what hung reads could keep
    needed = -(-(len(PROMPT) + OUTPUT - 1) // BLOCK) - working_set
    engine = start(tiers__dram__bytes=needed * SLOT_BYTES)
    assert engine._intake._capacity.slots_max == working_set
    books = dram(engine)._books
    assert isinstance(books, SharedBooks)
    stock = books._stock
    wait_for(lambda: len(stock) > 0)  # of the rows that it needs, some lie ready for other writes
    assert dram(engine).slot_count == needed
    [done] = engine.generate([PROMPT], PARAMS)
    assert done.token_ids == expected and engine.stats()["streamed_dram_bytes"] > 0
    wait_for(lambda: len(stock) > 0)
    [again] = engine.generate([PROMPT], PARAMS, cache_tenant="somebody")  # who has no stock
    assert again.token_ids == expected


def test_what_a_killed_engine_held_is_room_for_the_next_one(
    model: Path, start: Start, tmp_path: Path, expected: list[int]
) -> None:
    other = start()
    command = [sys.executable, "-m", "tests.faults.test_streamed_shelf", str(model), str(tmp_path / "cache")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > DRAM_BLOCKS // 2, "there would be room for both"
        wait_for(lambda: sum(bool(entry.leases) for entry in slots(other)) > 10)
        overwrite(other)
        process.kill()
    [done] = other.generate([PROMPT], PARAMS)
    assert done.token_ids == expected and other.stats()["streamed_dram_bytes"] > 0
    wait_for(lambda: {entry.leases for entry in slots(other)} <= {0, 1 << owner(other)})


def test_rows_on_nvme_are_kept_while_others_write_and_the_keeper_is_replaced(
    start: Start, tmp_path: Path, expected: list[int]
) -> None:
    less = {
        "tiers__dram__bytes": 20 * SLOT_BYTES,
        "tiers__dram__staging_bytes": 40 * LAYOUT.slice_bytes,
        "tiers__nvme__bytes": DRAM_BLOCKS * SLOT_BYTES + 100_000,
    }
    engine, other = start(**less), start(**less)
    sink, killed, run_layers = Sink(), threading.Event(), engine._runner.run_layers

    def run_layers_later(*arguments: Any) -> None:
        assert killed.wait(60)
        run_layers(*arguments)

    engine._runner.run_layers = run_layers_later  # type: ignore[method-assign]
    engine.submit(Request(PROMPT, PARAMS), sink)
    wait_for(lambda: engine.stats()["nvme_held"] > 10)
    before = keepers(tmp_path / "cache")
    kill_keeper(tmp_path / "cache")
    killed.set()
    other.generate(OTHERS, SamplingParams(max_tokens=1, temperature=0.0))
    assert sink.final().finish_reason is FinishReason.LENGTH and sink.token_ids == expected
    assert engine.stats()["streamed_nvme_bytes"] > 0 and keepers(tmp_path / "cache") != before


def test_all_that_one_has_computed_comes_to_nvme_once_and_is_found_by_the_next(
    start: Start, expected: list[int]
) -> None:
    less = {
        "tiers__dram__bytes": 20 * SLOT_BYTES,
        "tiers__dram__staging_bytes": 40 * LAYOUT.slice_bytes,
        "tiers__nvme__bytes": 3 * DRAM_BLOCKS * SLOT_BYTES + 100_000,
    }
    engine = start(**less)
    [done] = engine.generate([PROMPT], PARAMS)
    assert done.token_ids == expected and engine.stats()["streamed_nvme_bytes"] > 0
    wait_for(lambda: engine.stats()["waiting_writes"] == engine.stats()["writing_blocks"] == 0)
    sealed, stats = (len(PROMPT) + OUTPUT - 1) // BLOCK, engine.stats()
    copies = engine.metrics.demoted_blocks.value
    assert stats["nvme_writes"] == sealed and stats["dropped_writes"] == 0
    assert copies("hbm", "dram") + copies("hbm", "nvme") == sealed, "a block was copied more than once"
    [again] = engine.generate([PROMPT], PARAMS)
    assert again.token_ids == expected and again.origin["computed"] == len(PROMPT) % BLOCK


def main() -> None:
    """An engine that stands still with leased rows, until it is killed."""
    with opened(Path(sys.argv[1]), tiers__nvme__path=Path(sys.argv[2]), **SHARED) as engine:
        wait_for(lambda: "dram_slots_total" in engine.stats())
        Streaming(engine)
        print(engine.stats()["dram_held"], flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
