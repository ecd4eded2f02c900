"""Decode passes in graphs give what they give without, on a device that does what it is given when it likes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from fakes import make_sequence
from late import LateDevice, LateLauncher
from test_attention import Chat, batch_of, scale_of
from test_runner import BLOCK, greedy
from tiny import make_checkpoint

from kvtier.attention import AttentionBatch
from kvtier.attention.reference import ReferenceAttention
from kvtier.batch import PassBatch
from kvtier.block import KVLayout
from kvtier.device.decode_graph import DecodeGraph, Side
from kvtier.device.launcher import CudaLauncher, Launcher
from kvtier.models.decoder import NonFiniteError, load_decoder
from kvtier.runner import Runner
from kvtier.sequence import ScheduledSequence, Sequence
from kvtier.tiers.hbm import HbmArena

CPU = torch.device("cpu")
LAYOUT = KVLayout(2, 1, 32, 16, "float32")
LAUNCHERS = [CudaLauncher(CPU), LateLauncher(1)]
"""The first does all at once."""


def decoding(attention: AttentionBatch, base: int = 0) -> PassBatch:
    """A pass with a token for each sequence, which are told apart by numbers from `base` on."""
    numbers = torch.arange(base, base + len(attention.lengths))
    return PassBatch(numbers, 2 * numbers, torch.arange(len(numbers)), attention)


def numbered(chance: random.Random, base: int) -> PassBatch:
    """A pass of any shape that fits 4 sequences of 6 blocks; every number in it is one of its own."""
    count, width = chance.randrange(1, 5), chance.randrange(1, 7)
    ids = torch.arange(base, base + count)
    attention = AttentionBatch(
        torch.arange(base, base + count * width).view(count, width),
        torch.arange(count + 1, dtype=torch.int32),
        ids.int(),
        ids + 1,
        ids.int() + 2,
    )
    return decoding(attention, base)


def flattened(batch: PassBatch) -> torch.Tensor:
    attention = batch.attention
    parts = [batch.token_ids, batch.positions, attention.tables.flatten(), attention.lengths]
    return torch.cat([*parts, attention.append_rows, attention.append_offsets, attention.query_starts])


@pytest.mark.parametrize("seed", range(10))
def test_a_pass_that_is_replayed_late_has_its_own_inputs(seed: int) -> None:
    """Three times as many passes are started as there are buffers before anybody looks at what they gave."""
    launcher, found = LateLauncher(seed), list[torch.Tensor]()

    def work(batch: PassBatch) -> tuple[torch.Tensor, torch.Tensor]:
        found.append(flattened(batch))
        return torch.ones(4, dtype=torch.bool), found[-1]

    graph, chance = DecodeGraph(work, 4, 6, 77, CPU, launcher), random.Random(seed)
    batches = [numbered(chance, 1000 * (number + 1)) for number in range(6)]
    sides = [graph.start(batch) for batch in batches]
    launcher.catch_up()
    assert launcher.late_count > 0
    del found[1], found[2]  # each of the two sides has run once more, when it was recorded
    assert len(found) == len(batches)
    for given, batch in zip(found, batches, strict=True):
        assert torch.equal(given, flattened(padded(batch)))
    assert [side.result[1] for side in sides[-2:] if side.result] == found[-2:]


def padded(batch: PassBatch) -> PassBatch:
    given = batch.attention
    count, width = given.tables.shape

    def filled(values: torch.Tensor, absent: int) -> torch.Tensor:
        return torch.cat([values, torch.full((4 - count,), absent, dtype=values.dtype)])

    tables = torch.zeros(4, 6, dtype=torch.int64)
    tables[:count, :width], tables[count:, 0] = given.tables, 77
    attention = AttentionBatch(
        tables,
        torch.arange(5, dtype=torch.int32),
        filled(given.lengths, 1),
        filled(given.append_rows, 77),
        filled(given.append_offsets, 0),
    )
    return PassBatch(filled(batch.token_ids, 0), filled(batch.positions, 0), torch.arange(4), attention)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_decode_passes_in_fixed_buffers_are_those_of_their_batches(launcher: Launcher) -> None:
    """Two chats decode in a graph for three; the missing sequence writes to the spare row alone."""
    chats = [Chat(LAYOUT, 2, length, seed=length) for length in (40, 20)]
    spare = torch.zeros(LAYOUT.row_bytes // 4)
    backend, expected, sides = ReferenceAttention(), [], list[Side]()
    for chat in chats:
        backend.append(chat.k[:-4], chat.v[:-4], batch_of([(chat, 0, chat.length - 4)]), LAYOUT, 1)

    def work(batch: PassBatch) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = torch.zeros(3, 2, 32), torch.zeros(3, 1, 32), torch.zeros(3, 1, 32)
        for number, chat in enumerate(chats):
            place = int(batch.attention.lengths[number]) - 1
            q[number], k[number], v[number] = chat.q[place], chat.k[place], chat.v[place]
        backend.append(k, v, batch.attention, LAYOUT, 1)
        out = backend.attend(q, batch.attention, LAYOUT, 1, scale_of(LAYOUT), None)[0]
        return torch.ones(3, dtype=torch.bool), out

    graph, found = DecodeGraph(work, 3, 4, spare.data_ptr(), CPU, launcher), []
    for back in range(4, 0, -1):
        places = [chat.length - back for chat in chats]
        pieces = [(chat, place, place + 1) for chat, place in zip(chats, places, strict=True)]
        sides.append(graph.start(decoding(batch_of(pieces))))
        sides[-1].done.synchronize()
        assert sides[-1].result is not None
        found.append(sides[-1].result[1][:2])
        expected.append(torch.stack([chat.dense(None)[0][place] for chat, place in zip(chats, places, strict=True)]))
    torch.testing.assert_close(torch.stack(found).double(), torch.stack(expected), rtol=1e-5, atol=1e-5)
    assert sides[0] is sides[2] and sides[1] is sides[3] and sides[0] is not sides[1]


def test_a_batch_that_the_graph_was_not_made_for_is_a_bug() -> None:
    chat = Chat(LAYOUT, 2, 40, seed=1)
    graph = DecodeGraph(lambda _: (torch.ones(1), torch.ones(1)), 1, 2, 4096, CPU, CudaLauncher(CPU))
    with pytest.raises(AssertionError, match="wider"):
        graph.start(decoding(batch_of([(chat, 39, 40)])))
    with pytest.raises(AssertionError, match="one token"):
        graph.start(decoding(batch_of([(chat, 38, 40)])))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


class Crowd:
    """Sequences in an arena of their own, and a runner on a device."""

    def __init__(self, model: Path, device: LateDevice | None) -> None:
        maker = device if device is not None else LateDevice(0)
        self.decoder = load_decoder(model, "float32", BLOCK, *maker.kernels("auto", 1, 16))
        self.runner = Runner(self.decoder, greedy, device)
        self.arena = HbmArena(self.decoder.layout, 64)
        self.slots = list(range(64))

    def sequence(self, number: int, length: int) -> Sequence:
        sequence = make_sequence(number, [(number * 37 + place * 5) % 290 + 3 for place in range(length)], 4)
        slots = [self.slots.pop() for _ in range(-(-length // BLOCK))]
        sequence.table.extend(slots, [self.arena.address(slot) for slot in slots])
        return sequence

    @torch.inference_mode()
    def logits(self, parts: list[tuple[Sequence, int, int]], samples: bool = True) -> torch.Tensor:
        return self.runner.logits([ScheduledSequence(s, start, count, samples) for s, start, count in parts]).clone()


def test_which_passes_are_replayed_and_which_shapes_are_recorded(model: Path) -> None:
    device = LateDevice(3)
    eager, late = Crowd(model, None), Crowd(model, device)
    lengths = (20, 40, 3, 300)
    pairs = [(eager.sequence(n, length), late.sequence(n, length)) for n, length in enumerate(lengths)]

    def both(parts: list[tuple[int, int, int]]) -> bool:
        """The same bits; whether the pass was replayed."""
        before = device.launcher.replayed_count
        expected, found = (
            crowd.logits([(pairs[n][i], a, c) for n, a, c in parts]) for i, crowd in enumerate((eager, late))
        )
        assert torch.equal(found, expected)
        return device.launcher.replayed_count > before

    assert not both([(n, 0, length - 4) for n, length in enumerate(lengths) if length > 4]), "prefill"
    assert both([(0, 16, 1)]) and both([(1, 36, 1)]) and both([(0, 17, 1)])
    assert late.runner.decodes is not None and late.runner.decodes.graph_count == 1
    assert device.launcher.recorded_count == 2, "one for each set of buffers"
    assert not both([(0, 18, 1), (1, 37, 2)]), "a chunk among them"
    assert not both([(2, 0, 1), (1, 37, 3)])
    replayed = device.launcher.replayed_count
    assert late.logits([(pairs[1][1], 37, 1)], samples=False).shape == (0, 300), "a chunk of one token, not the last"
    assert device.launcher.replayed_count == replayed
    assert both([(0, 18, 1), (1, 39, 1), (2, 1, 1)]), "three go where four do"
    assert both([(0, 19, 1), (2, 2, 1), (1, 39, 1)])
    assert late.runner.decodes.graph_count == 2 and device.launcher.recorded_count == 4
    assert both([(3, 296, 1)]), "a wider table"
    assert late.runner.decodes.graph_count == 3
    assert both([(3, 297, 1)]) and both([(3, 298, 1)]) and device.launcher.recorded_count == 6


def test_a_token_without_a_usable_result_is_named_in_a_pass_that_is_replayed(model: Path) -> None:
    device = LateDevice(1)
    crowd = Crowd(model, device)
    sequences = [crowd.sequence(n, 20) for n in range(3)]
    crowd.logits([(sequence, 0, 19) for sequence in sequences])
    crowd.decoder._weights.embedding[0] = torch.nan  # the token of the sequence that is not there
    crowd.arena.view(sequences[1].table.held[0])[:] = b"\xff" * crowd.decoder.layout.row_bytes
    with pytest.raises(NonFiniteError) as caught:
        crowd.logits([(sequence, 19, 1) for sequence in sequences])
    assert caught.value.tokens == (1,) and device.launcher.replayed_count == 1


class FakeGraph:
    """What torch.cuda has for recordings, on a machine without a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
        self.fails, self.log = fails, list[str]()
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the pass's")
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: self._scope(f"stream {stream}"))
        monkeypatch.setattr(
            torch.cuda, "graph", lambda _, **how: self._scope(f"{how['capture_error_mode']} {how['pool']}")
        )

    def replay(self) -> None:
        self.log.append("replay")

    def _scope(self, name: str) -> FakeScope:
        return FakeScope(self, name)


class FakeScope:
    def __init__(self, graph: FakeGraph, name: str) -> None:
        self.graph, self.name = graph, name

    def __enter__(self) -> None:
        self.graph.log.append(f"begin {self.name}")

    def __exit__(self, *_: object) -> None:
        self.graph.log.append(f"end {self.name}")
        if self.graph.fails and not self.name.startswith("stream"):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")


@pytest.mark.parametrize("fails", [False, True])
def test_what_cannot_be_recorded_is_called(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graph = FakeGraph(monkeypatch, fails)
    monkeypatch.setattr("kvtier.device.launcher.make_lane", lambda _: None)
    launcher = CudaLauncher(torch.device("cuda", 0))
    replay = launcher.record(lambda: graph.log.append("work"))
    recorded = ["begin stream the pass's", "begin thread_local (0, 1)", "work", "end thread_local (0, 1)"]
    assert graph.log == ["work", *recorded, "end stream the pass's"], "the stream is the pass's again"
    replay()
    assert graph.log[-1] == ("work" if fails else "replay")
    said = "decode passes of one shape run without a CUDA graph: operation not permitted when stream is capturing"
    assert caplog.messages == ([said] if fails else [])
