"""Suspended passes: a tiny model over rows of a real NVMe shelf, in fp32 bit-equal to a pass over the same rows in HBM.

And the turns they get beside others, by a clock of the test's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fakes import flip_byte, make_sequence
from rows import ShelfUser, block_hashes, nvme_user
from tiny import make_checkpoint

from kvtier.allowance import RESERVE
from kvtier.attention import make_backend
from kvtier.block import Tier
from kvtier.cost import Work
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.metrics import Metrics
from kvtier.models.config import GenerationDefaults
from kvtier.models.decoder import Decoder, Hidden, load_decoder
from kvtier.models.ops import make_ops
from kvtier.record import Record
from kvtier.request import SamplingParams
from kvtier.runner import Runner
from kvtier.sampler import SampleRow, SamplerState, resolve
from kvtier.sequence import ScheduledSequence, Sequence, StagedPart
from kvtier.shelf import WriteItem
from kvtier.stager import Stager
from kvtier.suspended import Advance, SuspendedPass
from kvtier.tiers.hbm import HbmArena
from kvtier.tiers.staging import StagingMemory
from kvtier.turns import StreamedTurns

BLOCK, BLOCKS = 16, 6
NVME_BLOCKS = [0, 2, 3]
"""Blocks of the prefix whose rows lie on NVMe; the others lie in HBM, as if they had stayed or were in DRAM."""
POISON = b"\xff" * 4096
"""NaN in every dtype."""


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", num_hidden_layers=4)
    backend = make_backend("auto", 1)
    return load_decoder(folder, "float32", BLOCK, backend, make_ops(backend))


def greedy(sequence: Sequence) -> SampleRow:
    state = SamplerState([], resolve(SamplingParams(temperature=0.0), GenerationDefaults()), 300)
    return SampleRow(state, sequence.output_count)


class Scene:
    """A sequence of `BLOCKS` blocks whose prefix is computed, some of its rows on NVMe and nowhere else."""

    def __init__(self, decoder: Decoder, user: ShelfUser, units: int) -> None:
        layout = decoder.layout
        self.decoder, self.user = decoder, user
        self.runner = Runner(decoder, greedy)
        self.metrics = Metrics()
        memory = StagingMemory(units * layout.slice_bytes, layout.slice_bytes)
        self.stager = Stager(layout.layers, memory, {Tier.NVME: user.shelf}, 5.0, self.metrics)
        self.arena = HbmArena(layout, BLOCKS)
        self.logits: list[torch.Tensor] = []
        tokens = [(place * 11) % 290 + 3 for place in range(BLOCK * BLOCKS - 3)]
        self.start = BLOCK * (BLOCKS - 1) - 5
        self.sequence = make_sequence(1, tokens, 4)
        addresses = [self.arena.address(slot) for slot in range(BLOCKS)]
        self.sequence.table.extend(list(range(BLOCKS)), addresses)
        self.part = ScheduledSequence(self.sequence, self.start, len(tokens) - self.start, True)
        with torch.inference_mode():
            self.runner.logits([ScheduledSequence(self.sequence, 0, self.start, False)])
            self.expected = self.runner.logits([self.part])
        [self.token] = self.runner.run([self.part])
        hashes = block_hashes(BLOCKS)
        tickets = user.shelf.write([WriteItem(hashes[b], b, self.arena.view(b)) for b in NVME_BLOCKS], user.now)
        assert all(done is not None for done in user.finish(tickets))
        self.records: list[Record] = [user.shelf.find([hashes[b]])[0] for b in NVME_BLOCKS]
        for block in NVME_BLOCKS:
            self.arena.view(block)[:] = b"\xff" * layout.row_bytes
        self.sequence.table.clear()
        self.sequence.table.extend(
            list(range(BLOCKS)), [0 if b in NVME_BLOCKS else address for b, address in enumerate(addresses)]
        )
        self.staged = StagedPart(self.part, self.records, self.records)
        end = decoder.end

        def watched(hidden: Hidden, logits_rows: torch.Tensor) -> torch.Tensor:
            self.logits.append(end(hidden, logits_rows))
            return self.logits[-1].clone()

        decoder.end = watched  # type: ignore[method-assign]
        self.undo = lambda: setattr(decoder, "end", end)

    def poll(self) -> None:
        self.user._bell.wait(0.02)
        for done in self.user.shelf.poll(self.user.now):
            assert self.stager.completed(done, time.monotonic())
        self.stager.pump(time.monotonic())
        self.stager.check()

    def run(self, suspended: SuspendedPass) -> list[Advance]:
        """Advance to the end; what came of each layer, waits left out."""
        came: list[Advance] = []
        end = time.monotonic() + 60
        while not came or came[-1] is Advance.RAN:
            assert time.monotonic() < end, came
            advance = suspended.advance(time.monotonic())
            if advance is Advance.WAITS:
                self.poll()
            else:
                came.append(advance)
        return came


@pytest.fixture
def calls() -> Iterator[FaultyCalls]:
    faulty = FaultyCalls([])
    yield faulty
    faulty.release()


@pytest.fixture
def make_scene(decoder: Decoder, tmp_path: Path, calls: FaultyCalls) -> Iterator[Callable[[int], Scene]]:
    scenes: list[Scene] = []

    def made(units: int) -> Scene:
        user = nvme_user(tmp_path / "cache", layout=decoder.layout, calls=calls)
        scenes.append(Scene(decoder, user, units))
        return scenes[-1]

    yield made
    calls.release()
    for scene in scenes:
        scene.undo()
        scene.user.shelf.close(60.0)


MakeScene = Callable[[int], Scene]


@pytest.mark.parametrize("units", [6, 12, 18, 24, 100])
def test_logits_have_the_bits_of_a_pass_over_the_same_rows_in_hbm(make_scene: MakeScene, units: int) -> None:
    scene = make_scene(units)
    suspended = SuspendedPass(scene.runner, scene.stager, scene.staged, time.monotonic())
    came = scene.run(suspended)
    assert came == [Advance.RAN] * 3 + [Advance.ENDED]
    assert suspended.tokens == [scene.token] and suspended.error is None and suspended.busy_s > 0
    [logits] = scene.logits
    assert torch.equal(logits, scene.expected)
    assert scene.metrics.streamed_bytes.value("nvme") >= len(NVME_BLOCKS) * scene.decoder.layout.row_bytes


def test_a_second_pass_begins_with_what_was_read_ahead(make_scene: MakeScene) -> None:
    scene = make_scene(6)
    scene.run(SuspendedPass(scene.runner, scene.stager, scene.staged, time.monotonic()))
    while scene.stager.in_flight:
        scene.poll()
    again = SuspendedPass(scene.runner, scene.stager, scene.staged, time.monotonic())
    assert again.advance(time.monotonic()) is Advance.RAN
    scene.run(again)
    assert torch.equal(scene.logits[0], scene.logits[1])


def test_a_flipped_byte_in_a_later_layer_ends_the_pass_and_names_the_block(make_scene: MakeScene) -> None:
    scene = make_scene(6)
    slab, layout = scene.user.shelf._slab, scene.decoder.layout
    flip_byte(slab.descriptor, slab.offset(scene.records[1].slot) + 4096 + 3 * layout.slice_bytes, 9)
    suspended = SuspendedPass(scene.runner, scene.stager, scene.staged, time.monotonic())
    came = scene.run(suspended)
    assert came[-1] is Advance.LOST and 1 <= len(came) <= 4
    assert suspended.lost_block == NVME_BLOCKS[1] and not scene.logits
    while scene.stager.in_flight:
        scene.poll()
    assert scene.stager._memory.taken_count == 0


def test_one_abandoned_between_layers_leaves_nothing_but_its_reads(make_scene: MakeScene, calls: FaultyCalls) -> None:
    scene = make_scene(6)
    calls.inject([Fault(Call.READ, calls.count(Call.READ) + 4, Effect.HANG, sticky=True)])
    suspended = SuspendedPass(scene.runner, scene.stager, scene.staged, time.monotonic())
    while suspended.advance(time.monotonic()) is not Advance.RAN:
        scene.poll()
    suspended.abandon()
    scene.poll()
    assert scene.stager._memory.taken_count == scene.stager.in_flight == 6  # of the second and the third layer
    calls.release()
    again = SuspendedPass(scene.runner, scene.stager, scene.staged, time.monotonic())
    scene.run(again)
    assert torch.equal(scene.logits[0], scene.expected)


class Clock:
    """Time as the turns see it: every layer takes a second."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


class Desk:
    """A `StagedScheduler` that gives the same part again and again, and notes what becomes of it."""

    def __init__(self, staged: StagedPart | None) -> None:
        self.staged = staged
        self.given = 0
        self.abandoned: list[int] = []
        self.sound = True
        self.losses: list[tuple[int, int]] = []

    def schedule_staged(self, now: float) -> StagedPart | None:
        assert now >= 1000.0
        self.given += self.staged is not None
        return self.staged

    def abandon_staged(self, sequence: Sequence) -> None:
        self.abandoned.append(sequence.number)

    def lost(self, sequence: Sequence, block_index: int, now: float) -> None:
        assert now >= 1000.0
        self.losses.append((sequence.number, block_index))

    def is_sound(self, sequence: Sequence) -> bool:
        assert sequence.number == 1
        return self.sound


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("kvtier.turns.time", clock)
    return clock


def turns_of(
    scene: Scene, clock: Clock, desk: Desk, share: float = 0.25 / (1 - RESERVE)
) -> tuple[StreamedTurns, list[int]]:
    """Turns whose every layer takes a second of the clock, and that may have a quarter; also the layers as they run."""
    layers: list[int] = []
    run_layers = scene.runner.run_layers

    def ticking(resting: object, span: range, *rest: object) -> None:
        run_layers(resting, span, *rest)  # type: ignore[arg-type]
        layers.extend(span)
        clock.seconds += len(span)

    scene.runner.run_layers = ticking  # type: ignore[assignment, method-assign]
    return StreamedTurns(desk, scene.runner, scene.stager, share), layers


def test_alone_it_runs_one_layer_a_turn_and_hands_the_pass_over_when_it_has_ended(
    make_scene: MakeScene, clock: Clock
) -> None:
    scene = make_scene(24)
    turns, layers = turns_of(scene, clock, Desk(scene.staged))
    assert turns.turn(clock.seconds, alone=True) is None and not turns.moved
    assert turns.deadline == clock.seconds + 5.0
    while scene.stager.in_flight:
        scene.poll()
    ended = []
    for count in range(1, 5):
        ended.append(turns.turn(clock.seconds, alone=True))
        assert turns.moved and layers == list(range(count))
    assert ended[:3] == [None] * 3 and ended[3] is not None and ended[3].tokens == [scene.token]
    assert turns.deadline is None


def others(turns: StreamedTurns, clock: Clock, seconds: float) -> None:
    """A step of others."""
    clock.seconds += seconds
    turns.note_step(Work(1, 0), clock.seconds - seconds, clock.seconds)


def settle(scene: Scene, clock: Clock) -> None:
    """Until all reads have ended."""
    while scene.stager.in_flight:
        scene.user._bell.wait(0.02)
        for done in scene.user.shelf.poll(scene.user.now):
            scene.stager.completed(done, clock.seconds)
        scene.stager.pump(clock.seconds)


def test_beside_others_it_takes_its_share_of_their_time_and_saves_up_for_two_steps_at_most(
    make_scene: MakeScene, clock: Clock
) -> None:
    scene = make_scene(24)
    turns, layers = turns_of(scene, clock, Desk(scene.staged))
    assert turns.turn(clock.seconds, alone=False) is None and not layers
    others(turns, clock, 4.0)
    turns.turn(clock.seconds, alone=False)  # begins to read
    settle(scene, clock)
    for _ in range(9):
        others(turns, clock, 3.9)  # nine seconds of allowance in all, of which two count
    turns.turn(clock.seconds, alone=False)
    assert layers == [0, 1]
    turns.turn(clock.seconds, alone=False)
    assert layers == [0, 1]
    others(turns, clock, 3.9)
    turns.turn(clock.seconds, alone=False)
    assert layers == [0, 1, 2]
    others(turns, clock, 4.9)  # a second longer than alone: all that it might have had
    turns.turn(clock.seconds, alone=False)
    assert layers == [0, 1, 2]
    others(turns, clock, 3.9)
    ended = turns.turn(clock.seconds, alone=False)
    assert layers == [0, 1, 2, 3] and ended is not None


def test_what_it_did_alone_is_not_taken_from_the_first_step_of_others(make_scene: MakeScene, clock: Clock) -> None:
    scene = make_scene(24)
    desk = Desk(scene.staged)
    turns, layers = turns_of(scene, clock, desk)
    turns.turn(clock.seconds, alone=True)
    settle(scene, clock)
    while turns.turn(clock.seconds, alone=True) is None:
        assert turns.moved
    desk.staged = None
    turns.turn(clock.seconds, alone=True)
    assert layers == [0, 1, 2, 3] and not turns.moved
    settle(scene, clock)
    clock.seconds += 10.0
    others(turns, clock, 0.9)
    desk.staged = scene.staged
    turns.turn(clock.seconds, alone=False)
    assert turns.deadline is not None  # it has begun: what a step takes alone is known


def test_it_reads_ahead_only_while_it_has_something_left(make_scene: MakeScene, clock: Clock) -> None:
    scene = make_scene(6)
    turns, layers = turns_of(scene, clock, Desk(scene.staged))

    others(turns, clock, 3.9)
    turns.turn(clock.seconds, alone=False)
    settle(scene, clock)
    read_bytes = scene.metrics.streamed_bytes.value("nvme")
    assert read_bytes == 2 * len(NVME_BLOCKS) * scene.decoder.layout.slice_bytes
    others(turns, clock, 30.0)  # far longer than alone, for the reads' sake
    turns.turn(clock.seconds, alone=False)
    scene.stager.pump(clock.seconds)
    settle(scene, clock)
    assert not layers and scene.metrics.streamed_bytes.value("nvme") == read_bytes
    for _ in range(9):
        others(turns, clock, 3.9)
    turns.turn(clock.seconds, alone=False)
    assert layers == [0, 1] and scene.stager.in_flight  # longer ago than anything may wait for the disk, but it did not
    settle(scene, clock)
    others(turns, clock, 3.9)
    turns.turn(clock.seconds, alone=False)
    assert layers == [0, 1, 2]


def test_a_lost_block_is_told_once_and_nothing_is_under_way_then(make_scene: MakeScene, clock: Clock) -> None:
    scene = make_scene(24)
    slab = scene.user.shelf._slab
    flip_byte(slab.descriptor, slab.offset(scene.records[2].slot) + 4096, 9)
    desk = Desk(scene.staged)
    turns, layers = turns_of(scene, clock, desk)
    turns.turn(clock.seconds, alone=True)
    while scene.stager.in_flight:
        scene.poll()
    assert turns.turn(clock.seconds, alone=True) is None and turns.moved
    assert desk.losses == [(1, NVME_BLOCKS[2])] and not layers and turns.deadline is None


def test_a_sequence_that_ends_takes_its_pass_along_and_no_other(make_scene: MakeScene, clock: Clock) -> None:
    scene = make_scene(24)
    desk = Desk(scene.staged)
    turns, _ = turns_of(scene, clock, desk)
    turns.turn(clock.seconds, alone=True)
    turns.abandon(make_sequence(7, [1, 2, 3], 1))
    assert turns.deadline is not None and not desk.abandoned
    turns.abandon(scene.sequence)
    assert turns.deadline is None and desk.abandoned == [1]
    turns.abandon(scene.sequence)
    assert desk.abandoned == [1] and desk.given == 1
    desk.staged = None
    assert turns.turn(clock.seconds, alone=True) is None and not turns.moved


def test_a_pass_over_rows_that_are_no_longer_its_own_is_abandoned_before_another_layer_runs(
    make_scene: MakeScene, clock: Clock
) -> None:
    scene = make_scene(24)
    desk = Desk(scene.staged)
    turns, layers = turns_of(scene, clock, desk)
    turns.turn(clock.seconds, alone=True)
    while scene.stager.in_flight:
        scene.poll()
    turns.turn(clock.seconds, alone=True)
    assert layers == [0]
    desk.sound, desk.staged = False, None
    assert turns.turn(clock.seconds, alone=True) is None
    assert layers == [0] and desk.abandoned == [1] and turns.deadline is None


def test_the_device_has_finished_before_staged_memory_is_given_back(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make_scene(12)
    order: list[str] = []

    def note(owner: object, name: str) -> None:
        inner = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (order.append(name), inner(*given))[1])

    for owner, names in ((scene.runner, ("run_layers", "finish")), (scene.stager, ("use_up", "abandon"))):
        for name in names:
            note(owner, name)
    scene.run(SuspendedPass(scene.runner, scene.stager, scene.staged, time.monotonic()))
    again = SuspendedPass(scene.runner, scene.stager, scene.staged, time.monotonic())
    while again.advance(time.monotonic()) is Advance.WAITS:
        scene.poll()
    again.abandon()
    given = [place for place, name in enumerate(order) if name in ("use_up", "abandon")]
    assert order.count("use_up") > 1 and order.count("abandon") == 1
    assert all(order[place - 1] == "finish" for place in given), order
