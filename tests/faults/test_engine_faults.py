"""A whole engine over failing shelves: requests never fail, and logits have the bits of an engine without shelves.

Faults come through the system calls below both shelves, by corrupting their bytes behind the engine's back, and from
cache directories that cannot be used, are used by another engine, or hold another model's blocks.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from engines import wait_for
from fakes import flip_byte
from tiny import make_checkpoint
from workloads import Collector, Recorder, Round, check_each_step, make_workload

from kvtier import Engine, EngineConfig, SamplingParams
from kvtier.block import KVLayout, Tier
from kvtier.cache_directory import free_disk_bytes
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.shelf import Shelf, ShelfLimits
from kvtier.shelves import open_dram_shelf, open_nvme_shelf
from tests.own_time import OwnTime, own_time

BLOCK = 16
LAYOUT = KVLayout(3, 2, 16, BLOCK, "float32")
SLOT_BYTES = LAYOUT.row_bytes + 4096
HBM_BLOCKS, DRAM_BLOCKS = 11, 24
DEADLINE_S = 0.15


@dataclass(frozen=True)
class Answer:
    """Tokens of a request, the logits [token, vocab] they were sampled from, and how long it took."""

    token_ids: list[int]
    logits: torch.Tensor
    seconds: float


Workload = tuple[list[Round], list[Answer]]
"""Rounds of requests, none of them cancelled, and the answers of an engine that has HBM alone."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def workloads(checkpoint: Path) -> list[Workload]:
    made: list[Workload] = []
    for seed in range(3):
        rounds = make_workload(seed, BLOCK, 300, 9 * BLOCK, outputs=8)
        rounds = [replace(turn, asks=tuple(replace(ask, cancel_after=None) for ask in turn.asks)) for turn in rounds]
        with Engine(config(checkpoint, None, 512, 0)) as engine:
            made.append((rounds, serve(engine, rounds)))
    return made


@pytest.fixture(autouse=True)
def _persistent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shelf that is away is asked for often."""
    monkeypatch.setattr("kvtier.reopening.RETRY_S", 0.05)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain into a shelf that takes nothing is given up soon."""
    monkeypatch.setattr("kvtier.drains.DRAIN_S", 0.5)


def config(
    model: Path, cache: Path | None, hbm: int = HBM_BLOCKS, dram: int = DRAM_BLOCKS, **more: object
) -> EngineConfig:
    values: dict[str, object] = {
        "model": model,
        "dtype": "float32",
        "block_tokens": BLOCK,
        "threads": 1,
        "tiers.hbm.bytes": hbm * LAYOUT.row_bytes,
        "tiers.dram.bytes": dram * SLOT_BYTES,
        "tiers.dram.staging_bytes": 0,
        "tiers.nvme.bytes": "4MiB" if cache else 0,
        "sharing": False,
        "tiers.nvme.path": cache,
        "tiers.nvme.wait_s": 0,
        "tiers.fetch_deadline_s": 60,  # a crowded machine is not late, but for who asks for less
        "tiers.load": "always",
        "tiers.pin_share": 0,  # what is pinned in DRAM is not read from NVMe
        "io.readers": 1,
        "io.writers": 1,
    }
    return EngineConfig.load(None, values | {name.replace("__", "."): value for name, value in more.items()})


def inject(
    monkeypatch: pytest.MonkeyPatch, tiers: Sequence[Tier], faults: Sequence[Fault], limits: ShelfLimits | None = None
) -> FaultyCalls:
    """The next engines' shelves of `tiers` make their system calls by this script, each for itself; the last one's."""
    openers: dict[Tier, tuple[str, Callable[..., Shelf]]] = {
        Tier.DRAM: ("kvtier.assembly.open_dram_shelf", open_dram_shelf),
        Tier.NVME: ("kvtier.assembly.open_nvme_shelf", open_nvme_shelf),
    }
    for tier in tiers:
        name, opener = openers[tier]
        calls = FaultyCalls(faults)
        monkeypatch.setattr(name, functools.partial(opener, calls=calls, limits=limits))
    return calls


def serve(engine: Engine, rounds: Sequence[Round]) -> list[Answer]:
    """Answers to all requests, in order; none may fail. The books are checked after every step."""
    check_each_step(engine)
    recorder = Recorder(engine)
    with own_time() as clock:
        answers = [answer for turn in rounds for answer in serve_round(engine, turn, recorder, clock)]
    assert engine.healthy
    return answers


def serve_round(engine: Engine, turn: Round, recorder: Recorder, clock: OwnTime) -> list[Answer]:
    """Answers to the requests of a round, which come together."""
    answers: list[Answer] = []
    for tier in turn.evict:
        engine.evict(tier)
    collectors = [Collector(engine, ask, lambda: clock.seconds) for ask in turn.asks]
    for collector in collectors:
        event = collector.wait()
        assert event.error is None, event.error
        assert event.usage is not None and sum(event.usage.origin.as_dict().values()) == len(collector.ask.prompt)
        number = collector._handle.number
        rows = [recorder.rows[number, index] for index in range(len(collector.token_ids))]
        seconds = collector.ended_at - collector.submitted_at
        answers.append(Answer(collector.token_ids, torch.stack(rows), seconds))
    return answers


def assert_same(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Same tokens, and the same bits of every logits row."""
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(ours.logits, theirs.logits), f"logits of request {number} differ"


def failures(engine: Engine, reason: str) -> dict[Tier, int]:
    """Shelf failures of one reason by tier, from the metrics, once they are published."""
    end = time.monotonic() + 60
    tiers = [tier for tier in (Tier.DRAM, Tier.NVME) if f"{tier.value}_slots_total" in engine.stats()]
    late = engine._store._promoter.late_counts if reason == "late" else dict.fromkeys(Tier, 0)
    while time.monotonic() < end:
        counted = {tier: int(engine.metrics.shelf_failures.value(tier.value, reason)) for tier in tiers}
        if counted == {tier: engine.stats()[f"{tier.value}_{reason}"] + late[tier] for tier in tiers}:
            return counted
        engine.generate([[3]], SamplingParams(max_tokens=1))
    raise AssertionError("the metrics never agree with the stats")


def every(call: Call, step: int, effect: Effect, value: float, first: int = 3, last: int = 400) -> list[Fault]:
    return [Fault(call, nth, effect, value) for nth in range(first, last, step)]


SCRIPTS: dict[str, tuple[list[Fault], str]] = {
    "reads fail now and then": (every(Call.READ, 4, Effect.ERROR, errno.EIO), "io_error"),
    "reads fail for good": ([Fault(Call.READ, 4, Effect.ERROR, errno.EIO, sticky=True)], "io_error"),
    "reads come short": (every(Call.READ, 3, Effect.SHORT, 0), "short_read"),
    "reads come in pieces": (every(Call.READ, 2, Effect.SHORT, 4096), ""),
    "writes fail now and then": (every(Call.WRITE, 4, Effect.ERROR, errno.EIO), "io_error"),
    "writes are torn": (every(Call.WRITE, 3, Effect.SHORT, 0), "io_error"),
    "the disk is full now and then": (every(Call.WRITE, 9, Effect.ERROR, errno.ENOSPC), "no_space"),
    "the disk is full for good": ([Fault(Call.WRITE, 6, Effect.ERROR, errno.ENOSPC, sticky=True)], "no_space"),
    "some reads are late": (every(Call.READ, 5, Effect.DELAY, 3 * DEADLINE_S, last=60), "late"),
}


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("tiers", [(Tier.DRAM,), (Tier.NVME,), (Tier.DRAM, Tier.NVME)], ids=["dram", "nvme", "both"])
def test_faults_below_the_shelves_change_no_token_and_are_counted(
    script: str,
    tiers: tuple[Tier, ...],
    checkpoint: Path,
    workloads: list[Workload],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults, reason = SCRIPTS[script]
    rounds, expected = workloads[len(tiers) - 1]
    inject(monkeypatch, tiers, faults)
    deadline_s = DEADLINE_S if reason == "late" else 60
    with Engine(config(checkpoint, tmp_path / "cache", tiers__fetch_deadline_s=deadline_s)) as engine:
        assert_same(serve(engine, rounds), expected)
        if reason:
            counted = failures(engine, reason)
            assert all(counted[tier] > 0 for tier in tiers), counted
            assert reason == "late" or not any(counted[tier] for tier in counted if tier not in tiers), counted
        else:
            assert engine.stats()["dram_reads"] + engine.stats()["nvme_reads"] > 5


LATE = {"tiers__fetch_deadline_s": DEADLINE_S}
HUNG = ShelfLimits(late_s=0.3, pause_s=0.5)
ANSWER_S = 6.0
"""Much less than the 30 s after which a request is given up, much more than deadlines and a crowded machine cost."""


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("call", [Call.READ, Call.WRITE])
@pytest.mark.parametrize("first", [1, 5], ids=["from the start", "later"])
@pytest.mark.parametrize("dram", [DRAM_BLOCKS, 0], ids=["with DRAM", "without DRAM"])
def test_a_disk_that_hangs_for_good_costs_a_deadline_and_no_request_though_hbm_is_tight(
    call: Call,
    first: int,
    dram: int,
    checkpoint: Path,
    workloads: list[Workload],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = inject(monkeypatch, (Tier.NVME,), [], HUNG)
    engine = Engine(config(checkpoint, tmp_path / "cache", hbm=HBM_BLOCKS + (dram == 0), dram=dram, **LATE))
    first += calls.count(call)
    calls.inject([Fault(call, first, Effect.HANG, sticky=True)])
    try:
        for rounds, expected in workloads[:2]:
            answers = serve(engine, rounds)
            assert_same(answers, expected)
            assert max(answer.seconds for answer in answers) < ANSWER_S, [answer.seconds for answer in answers]
        assert failures(engine, "late")[Tier.NVME] > 0 and calls.count(call) >= first
        store = engine._store
        kept_max = 0 if dram and call is Call.WRITE else store.slot_count - store.usable_count
        wait_for(lambda: store.slot_count - store.available_count <= kept_max)  # with DRAM a hung write keeps no HBM
        with own_time() as clock:
            engine.close(0.5)
            assert clock.seconds < 5
    finally:
        calls.release()
        engine.close()


@pytest.mark.usefixtures("_impatient")
def test_a_disk_that_hangs_and_comes_back_is_used_again(
    checkpoint: Path, workloads: list[Workload], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, expected = workloads[0]
    script = [Fault(call, 6, Effect.HANG, sticky=True) for call in (Call.READ, Call.WRITE)]
    calls = inject(monkeypatch, (Tier.NVME,), script, HUNG)
    with Engine(config(checkpoint, tmp_path / "cache", **LATE)) as engine:
        assert_same(serve(engine, rounds), expected)
        calls.inject([])
        calls.release()
        writes, end = engine.stats()["nvme_writes"], time.monotonic() + 60
        seed = 0
        while engine.stats()["nvme_writes"] < writes + 10:
            assert time.monotonic() < end, "nothing is written to the disk that works again"
            engine.generate([[(seed + place) % 250 + 3 for place in range(3 * BLOCK)]], SamplingParams(max_tokens=2))
            seed += 1
        assert_same(serve(engine, rounds), expected)


def corrupt_dram(engine: Engine, _: Path) -> int:
    shelf = engine._store._shelves[Tier.DRAM]
    records = shelf.coldest(shelf.slot_count)
    for number, record in enumerate(records):
        place = number * 997 % SLOT_BYTES
        flip_byte(shelf._slab.descriptor, shelf._slab.offset(record.slot) + place // 4096 * 4096, place % 4096)
    return len(records)


def corrupt_nvme(_: Engine, cache: Path) -> int:
    """Every slot gets one wrong byte, somewhere in its header or row."""
    (slab,) = cache.glob("*/nvme.slab")
    with slab.open("r+b") as file:
        count = (slab.stat().st_size - 4096) // SLOT_BYTES
        for slot in range(count):
            place = slot * 997 % SLOT_BYTES
            flip_byte(file.fileno(), 4096 + slot * SLOT_BYTES + place // 4096 * 4096, place % 4096)
    return count


@pytest.mark.parametrize("corrupt", [corrupt_dram, corrupt_nvme])
def test_rows_corrupted_behind_the_engine_s_back_are_misses(
    corrupt: Callable[[Engine, Path], int],
    checkpoint: Path,
    workloads: list[Workload],
    tmp_path: Path,
) -> None:
    rounds, expected = workloads[0]
    with Engine(config(checkpoint, tmp_path / "cache")) as engine:
        first = serve(engine, rounds[:2])
        engine.evict("hbm")
        if corrupt is corrupt_nvme:
            engine.evict("dram")
        assert corrupt(engine, tmp_path / "cache") > 5
        again = [replace(turn, evict=()) for turn in rounds[2:]]
        assert_same([*first, *serve(engine, again)], expected)
        assert sum(failures(engine, "bad_row").values()) > 0


def test_a_slab_truncated_underneath_is_a_miss(
    checkpoint: Path, workloads: list[Workload], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.file_watch.WATCH_S", 600.0)  # who is noticed is opened anew, and counts from 0
    rounds, expected = workloads[1]
    with Engine(config(checkpoint, tmp_path / "cache")) as engine:
        first = serve(engine, rounds[:2])
        engine.evict("hbm")
        engine.evict("dram")
        (slab,) = (tmp_path / "cache").glob("*/nvme.slab")
        with slab.open("r+b") as file:
            file.truncate(4096 + SLOT_BYTES)
        assert_same([*first, *serve(engine, [replace(turn, evict=()) for turn in rounds[2:]])], expected)
        assert failures(engine, "short_read")[Tier.NVME] > 0


# ---- cache directories -----------------------------------------------------------------------------------------------


def below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("not a folder")
    return folder / "file" / "cache"


def shared_with_others(folder: Path) -> Path:
    (folder / "cache").mkdir(mode=0o755)
    (folder / "cache" / "mine.txt").write_text("somebody else's")
    return folder / "cache"


def through_a_link(folder: Path) -> Path:
    (folder / "real").mkdir(mode=0o700)
    (folder / "cache").symlink_to(folder / "real")
    return folder / "cache"


@pytest.mark.parametrize("make", [below_a_file, shared_with_others, through_a_link])
def test_an_unusable_cache_directory_is_said_and_served_without(
    make: Callable[[Path], Path],
    checkpoint: Path,
    workloads: list[Workload],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds, expected = workloads[0]
    with Engine(config(checkpoint, make(tmp_path))) as engine:
        assert "nvme_slots_total" not in engine.stats()
        assert_same(serve(engine, rounds), expected)
    assert "serving without the NVMe shelf" in caplog.text


def test_any_trouble_of_the_disk_while_opening_is_said_once_and_served_without(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[float] = []

    def failing(*_: object, **__: object) -> None:
        tries.append(time.monotonic())
        raise OSError(errno.EIO, "the disk is ill")

    monkeypatch.setattr("kvtier.assembly.open_nvme_shelf", failing)
    with Engine(config(checkpoint, tmp_path / "cache")) as engine:
        while len(tries) < 4:
            assert len(engine.generate([[5]], SamplingParams(max_tokens=1))[0].token_ids) == 1
    assert caplog.text.count("serving without the NVMe shelf") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may read nothing")
def test_a_cache_directory_that_may_not_even_be_looked_at_has_no_bytes(tmp_path: Path) -> None:
    (tmp_path / "closed" / "cache").mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    os.seteuid(65534)
    try:
        assert free_disk_bytes(tmp_path / "closed" / "cache") > 0
    finally:
        os.seteuid(0)


def test_a_full_disk_is_said_and_the_shelf_comes_once_there_is_room(
    checkpoint: Path,
    workloads: list[Workload],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds, expected = workloads[0]
    calls = inject(monkeypatch, (Tier.NVME,), [Fault(Call.ALLOCATE, 1, Effect.ERROR, errno.ENOSPC, sticky=True)])
    with Engine(config(checkpoint, tmp_path / "cache")) as engine:
        assert "tiers.nvme.bytes" in caplog.text and "nvme_slots_total" not in engine.stats()
        assert_same(serve(engine, rounds[:2]), expected[: sum(len(turn.asks) for turn in rounds[:2])])
        calls.inject([])
        wait_for_nvme(engine)
        assert_same(serve(engine, rounds), expected)
        assert engine.stats()["nvme_writes"] > 0


def wait_for_nvme(engine: Engine) -> None:
    end = time.monotonic() + 60
    while "nvme_slots_total" not in engine.stats():
        assert time.monotonic() < end, "the shelf is never tried again"
        engine.generate([[5]], SamplingParams(max_tokens=1))
        time.sleep(0.01)


def test_a_second_engine_serves_without_nvme_until_the_first_one_leaves_and_then_finds_it_warm(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, params = [token % 200 + 3 for token in range(5 * BLOCK + 1)], SamplingParams(max_tokens=3, temperature=0)
    first = Engine(config(checkpoint, tmp_path / "cache"))
    try:
        expected = first.generate([prompt], params)[0].token_ids
        first.evict("hbm")
        first.evict("dram")
        with Engine(config(checkpoint, tmp_path / "cache")) as second:
            assert "in use by another engine" in caplog.text
            found = second.generate([prompt], params)[0]
            assert found.token_ids == expected and found.origin["computed"] == len(prompt)
            second.evict("hbm")
            second.evict("dram")
            first.close()
            wait_for_nvme(second)
            found = second.generate([prompt], params)[0]
            assert found.token_ids == expected and found.origin["nvme"] == 5 * BLOCK
    finally:
        first.close()


def test_blocks_of_another_model_of_the_same_shape_are_never_mixed(
    checkpoint: Path, tmp_path: Path, workloads: list[Workload]
) -> None:
    rounds, expected = workloads[0]
    other = make_checkpoint(tmp_path / "other", "llama", seed=1)
    with Engine(config(other, None, 512, 0)) as engine:
        other_expected = serve(engine, rounds)
    assert [item.token_ids for item in other_expected] != [item.token_ids for item in expected]
    for turn, (model, answers) in enumerate([(checkpoint, expected), (other, other_expected)] * 2):
        with Engine(config(model, tmp_path / "cache")) as engine:
            (folder,) = [item for item in (tmp_path / "cache").iterdir() if item.is_dir()]
            assert_same(serve(engine, rounds), answers)
            if turn >= 2:
                assert engine.stats()["promoted_nvme_hbm"] > 0, "the second turn of a model finds its first"
            assert not any(failures(engine, "bad_row").values())
        assert folder.is_dir()


def test_a_cache_directory_full_of_rubbish_is_served_around(
    checkpoint: Path, tmp_path: Path, workloads: list[Workload]
) -> None:
    rounds, expected = workloads[2]
    with Engine(config(checkpoint, tmp_path / "cache")) as engine:
        assert_same(serve(engine, rounds), expected)
    for file in (tmp_path / "cache").glob("*/*"):
        file.write_bytes(b"rubbish" * 1000)
    with Engine(config(checkpoint, tmp_path / "cache")) as engine:
        assert engine.stats()["nvme_slots_used"] == 0
        assert_same(serve(engine, rounds), expected)


@pytest.fixture(autouse=True)
def _all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
