"""Disks that fail under a sequence whose older blocks lie on NVMe, in the middle of it: right tokens, or a clear error.

Every other request goes on meanwhile, and in the end no row, no lease and no staging memory is lost.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from engines import Sink, wait_for
from fakes import flip_byte
from tiny import make_checkpoint

from kvtier import Engine, EngineConfig, Request, SamplingParams
from kvtier.block import KVLayout, Tier
from kvtier.errors import Unavailable
from kvtier.io.base import KernelCalls
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.record import Record
from kvtier.request import FinishReason
from kvtier.runner import RestingPass
from kvtier.shelves import open_nvme_shelf

BLOCK = 16
LAYOUT = KVLayout(3, 2, 16, BLOCK, "float32")
STAGED_MAX = 20
PROMPT = [(7 * place + place * place // 5) % 290 + 3 for place in range(25 * BLOCK + 4)]
SHORT = [(11 * place) % 250 + 3 for place in range(BLOCK + 5)]
LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
BRIEF = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> tuple[list[int], list[int]]:
    """What the long and the short request give where all fits HBM."""
    with opened(checkpoint, tiers__hbm__bytes="4MiB") as engine:
        return engine.generate([PROMPT], LONG)[0].token_ids, engine.generate([SHORT], BRIEF)[0].token_ids


@pytest.fixture
def calls() -> Iterator[FaultyCalls]:
    faulty = FaultyCalls()
    yield faulty
    faulty.release()


@contextmanager
def opened(checkpoint: Path, **more: object) -> Iterator[Engine]:
    values: dict[str, object] = {
        "model": checkpoint,
        "dtype": "float32",
        "block_tokens": BLOCK,
        "threads": 1,
        "tiers.hbm.bytes": 12 * LAYOUT.row_bytes,
        "tiers.dram.bytes": 4 * STAGED_MAX * LAYOUT.slice_bytes,
        "tiers.dram.staging_bytes": 2 * STAGED_MAX * LAYOUT.slice_bytes,
        "sharing": False,
        "io.readers": 1,
        "io.writers": 1,
        "scheduler.streamed_max": 1,
        "scheduler.streamed_hbm": 0.8,
    }
    config = EngineConfig.load(None, values | {name.replace("__", "."): value for name, value in more.items()})
    with Engine(config) as engine:
        yield engine


class Scene:
    """An engine with the long request in the middle of its answer: its engine thread stands in a suspended pass."""

    def __init__(self, engine: Engine, at_token: int = 6, at_layer: int = 0) -> None:
        self.engine, self.sink = engine, Sink()
        self._at, self._reached, self._go = (at_token, at_layer), threading.Event(), threading.Event()
        self._inner = engine._runner.run_layers
        engine._runner.run_layers = self._run_layers  # type: ignore[method-assign]
        self.handle = engine.submit(Request(PROMPT, LONG), self.sink)
        assert self._reached.wait(60), "it never came to its token in a suspended pass"

    def _run_layers(self, resting: RestingPass, layers: range, *rest: object) -> None:
        if (resting.part.sequence.output_count, resting.layer) == self._at and not self._reached.is_set():
            self._reached.set()
            assert self._go.wait(60)
        self._inner(resting, layers, *rest)  # type: ignore[arg-type]

    def go_on(self) -> None:
        self._go.set()

    def nvme_rows(self) -> list[Record]:
        """Rows on NVMe that it attends to, while the engine thread stands still."""
        [stream] = self.engine._scheduler._streams._streams.values()
        return [home.lease.record for home in stream.homes.found.values() if home.tier is Tier.NVME]

    def ask_another(self) -> Sink:
        sink = Sink()
        self.engine.submit(Request(SHORT, BRIEF), sink)
        return sink

    def assert_nothing_is_lost(self) -> None:
        """Once nothing is under way: the books agree, and no row, lease or staging memory is held."""
        engine, store = self.engine, self.engine._store
        stager = store.stager
        assert stager is not None

        def is_idle() -> bool:
            stats = engine.stats()
            return stats["running"] == stats["waiting"] == 0 and not engine._loop._live and stager.in_flight == 0

        wait_for(is_idle)
        wait_for(lambda: all(len(shelf.holdings) == 0 for shelf in list(store._shelves.values())))
        assert engine.healthy and not any(sequence.pinned for sequence in engine._scheduler.sequences)


@contextmanager
def streaming(checkpoint: Path, cache: Path, calls: FaultyCalls, **more: object) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtier.assembly.open_nvme_shelf", functools.partial(open_nvme_shelf, calls=calls))
        more = {"tiers__nvme__bytes": "2MiB", "tiers__nvme__path": cache, **more}
        with opened(checkpoint, **more) as engine:
            yield engine
            calls.release()


Expected = tuple[list[int], list[int]]


class BadSectors(KernelCalls):
    """A disk that cannot read a run of its bytes any more."""

    bad = range(0)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset < self.bad.stop and self.bad.start < offset + sum(buffer.nbytes for buffer in buffers):
            raise OSError(errno.EIO, "injected")
        return super().preadv(descriptor, buffers, offset)


def cut_short(path: Path) -> None:
    """So that no row is left in the file."""
    os.truncate(path, 8192)


@pytest.mark.parametrize("row", [0, -1])
def test_a_byte_that_flips_on_nvme_costs_a_block_and_changes_no_token(
    row: int, checkpoint: Path, tmp_path: Path, calls: FaultyCalls, expected: Expected
) -> None:
    with streaming(checkpoint, tmp_path / "cache", calls) as engine:
        scene = Scene(engine)
        slab, record = engine._store._shelves[Tier.NVME]._slab, scene.nvme_rows()[row]
        flip_byte(slab.descriptor, slab.offset(record.slot) + 4096 + 2 * LAYOUT.slice_bytes, 33)
        scene.go_on()
        assert scene.ask_another().final().finish_reason is FinishReason.LENGTH
        assert scene.sink.final().finish_reason is FinishReason.LENGTH
        assert scene.sink.token_ids == expected[0]
        stats = engine.stats()
        assert stats["nvme_bad_row"] == 1 and stats["streamed_nvme_bytes"] > 0 < stats["streamed_dram_bytes"]
        scene.assert_nothing_is_lost()


def test_a_row_that_cannot_be_read_any_more_is_given_up_for_another(
    checkpoint: Path, tmp_path: Path, expected: Expected
) -> None:
    disk = BadSectors()
    with streaming(checkpoint, tmp_path / "cache", FaultyCalls(inner=disk), io__engine="threads") as engine:
        scene = Scene(engine)
        slab, record = engine._store._shelves[Tier.NVME]._slab, scene.nvme_rows()[1]
        disk.bad = range(slab.offset(record.slot), slab.offset(record.slot) + slab.slot_bytes)
        scene.go_on()
        assert scene.sink.final().error is None and scene.sink.token_ids == expected[0]
        assert engine.stats()["nvme_dropped_unreadable"] == 1
        scene.assert_nothing_is_lost()


@pytest.mark.parametrize("end", [Path.unlink, cut_short])
def test_an_nvme_file_that_is_deleted_or_cut_short_costs_its_blocks_and_changes_no_token(
    end: Callable[[Path], None],
    checkpoint: Path,
    tmp_path: Path,
    calls: FaultyCalls,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.file_watch.WATCH_S", 0.05)
    with streaming(checkpoint, tmp_path / "cache", calls) as engine:
        scene = Scene(engine)
        end(next((tmp_path / "cache").glob("*/nvme.slab")))
        scene.go_on()
        other = scene.ask_another()
        assert other.final().error is None and other.token_ids == expected[1]
        final = scene.sink.final()
        assert scene.sink.token_ids == expected[0][: len(scene.sink.token_ids)]
        assert isinstance(final.error, Unavailable) if final.error else scene.sink.token_ids == expected[0]
        scene.assert_nothing_is_lost()


@pytest.mark.parametrize("effect", [Effect.ERROR, Effect.HANG])
def test_a_disk_that_takes_nothing_more_ends_the_request_by_name_and_no_other(
    effect: Effect,
    checkpoint: Path,
    tmp_path: Path,
    calls: FaultyCalls,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("streams", "scheduler"):
        monkeypatch.setattr(f"kvtier.{module}.STALL_S", 1.0)
    with streaming(checkpoint, tmp_path / "cache", calls) as engine:
        scene = Scene(engine, at_token=0)
        calls.inject([Fault(Call.WRITE, calls.count(Call.WRITE) + 1, effect, errno.ENOSPC, sticky=True)])
        scene.go_on()
        for _ in range(3):
            other = scene.ask_another()
            assert other.final().error is None and other.token_ids == expected[1]
        final = scene.sink.final()
        assert scene.sink.token_ids == expected[0][: len(scene.sink.token_ids)]
        assert isinstance(final.error, Unavailable) and "NVMe takes no blocks" in str(final.error), final
        calls.release()
        scene.assert_nothing_is_lost()


def test_a_disk_that_hangs_for_good_ends_the_request_and_no_other(
    checkpoint: Path, tmp_path: Path, calls: FaultyCalls, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.streams.STALL_S", 0.5)
    with streaming(checkpoint, tmp_path / "cache", calls, tiers__fetch_deadline_s=0.1) as engine:
        scene = Scene(engine)
        calls.inject([Fault(Call.READ, calls.count(Call.READ) + 1, Effect.HANG, sticky=True)])
        scene.go_on()
        other = scene.ask_another()
        assert other.final().error is None and other.token_ids == expected[1]
        final = scene.sink.final()
        assert isinstance(final.error, Unavailable), final
        assert scene.sink.token_ids == expected[0][: len(scene.sink.token_ids)]
        assert engine.generate([SHORT], BRIEF)[0].token_ids == expected[1]
        calls.release()
        scene.assert_nothing_is_lost()


def test_a_disk_that_hangs_for_a_while_delays_the_request_and_no_other(
    checkpoint: Path, tmp_path: Path, calls: FaultyCalls, expected: Expected
) -> None:
    with streaming(checkpoint, tmp_path / "cache", calls, tiers__fetch_deadline_s=60) as engine:
        scene = Scene(engine)
        calls.inject([Fault(Call.READ, calls.count(Call.READ) + 1, Effect.HANG, sticky=True)])
        scene.go_on()
        for _ in range(3):
            other = scene.ask_another()
            assert other.final().error is None and other.token_ids == expected[1]
        tokens = len(scene.sink.token_ids)
        assert tokens < LONG.max_tokens and not scene.sink.done.is_set()  # residents had 36 tokens meanwhile
        calls.release()
        assert scene.sink.final().error is None and scene.sink.token_ids == expected[0]
        scene.assert_nothing_is_lost()


@pytest.mark.parametrize("at_layer", [0, 2])
def test_a_request_that_is_cancelled_in_mid_pass_leaves_nothing_behind(
    at_layer: int, checkpoint: Path, tmp_path: Path, calls: FaultyCalls, expected: Expected
) -> None:
    with streaming(checkpoint, tmp_path / "cache", calls) as engine:
        scene = Scene(engine, at_layer=at_layer)
        calls.inject([Fault(Call.READ, calls.count(Call.READ) + 1, Effect.HANG, sticky=True)])
        scene.handle.cancel()
        scene.go_on()
        assert scene.sink.final().finish_reason is FinishReason.CANCELLED
        assert scene.sink.token_ids == expected[0][: len(scene.sink.token_ids)]
        other = scene.ask_another()
        assert other.final().error is None and other.token_ids == expected[1]
        calls.release()
        scene.assert_nothing_is_lost()
        assert engine.generate([PROMPT], LONG)[0].token_ids == expected[0]
