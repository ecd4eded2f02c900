"""Runner: one token for each part that samples, in order, and the same tokens however a prompt is cut into parts.

A pass that rests between layers has the bits of one that does not, though its rows lie elsewhere for each few layers.
"""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from fakes import make_sequence
from tiny import make_checkpoint

from kvtier.attention import make_backend
from kvtier.models.config import GenerationDefaults
from kvtier.models.decoder import Decoder, load_decoder
from kvtier.models.ops import make_ops
from kvtier.request import SamplingParams
from kvtier.runner import Runner
from kvtier.sampler import SampleRow, SamplerState, resolve
from kvtier.sequence import ScheduledSequence, Sequence
from kvtier.tiers.hbm import HbmArena
from kvtier.tiers.memory import address_of

BLOCK = 16


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")
    backend = make_backend("reference", 1)
    return load_decoder(folder, "float32", BLOCK, backend, make_ops(backend))


def greedy(sequence: Sequence) -> SampleRow:
    state = SamplerState([], resolve(SamplingParams(temperature=0.0), GenerationDefaults()), 300)
    return SampleRow(state, sequence.output_count)


def placed(arena: HbmArena, number: int, length: int, slots: list[int]) -> Sequence:
    sequence = make_sequence(number, [(number * 37 + place * 5) % 290 + 3 for place in range(length)], 4)
    sequence.table.extend(slots, [arena.address(slot) for slot in slots])
    return sequence


def test_parts_that_do_not_sample_give_no_token_and_the_others_give_theirs_in_order(decoder: Decoder) -> None:
    arena = HbmArena(decoder.layout, 12)
    runner = Runner(decoder, greedy)
    first, second, third = (placed(arena, n, 20, [3 * n, 3 * n + 2]) for n in range(3))
    alone = [runner.run([ScheduledSequence(sequence, 0, 20, True)])[0] for sequence in (first, second, third)]
    assert len(set(alone)) > 1
    cut = [ScheduledSequence(first, 0, 7, False), ScheduledSequence(second, 0, 20, True)]
    assert runner.run([*cut, ScheduledSequence(third, 0, 16, False)]) == [alone[1]]
    rest = [ScheduledSequence(third, 16, 4, True), ScheduledSequence(first, 7, 13, True)]
    assert runner.run(rest) == [alone[2], alone[0]]
    assert runner.run([ScheduledSequence(first, 0, 7, False)]) == []


def test_logits_are_fp32_rows_of_the_parts_that_sample(decoder: Decoder) -> None:
    arena = HbmArena(decoder.layout, 4)
    sequence = placed(arena, 1, 20, [2, 0])
    logits = Runner(decoder, greedy).logits([ScheduledSequence(sequence, 0, 20, True)])
    assert logits.shape == (1, 300) and logits.dtype == torch.float32


def test_a_resting_pass_gives_the_same_token_as_one_that_runs_at_once(decoder: Decoder) -> None:
    arena = HbmArena(decoder.layout, 2)
    runner = Runner(decoder, greedy)
    sequence = placed(arena, 1, 20, [1, 0])
    part = ScheduledSequence(sequence, 0, 20, True)
    [token] = runner.run([part])
    resting = runner.begin(part)
    none = np.zeros(0, np.int64)
    for layer in range(decoder.layout.layers):
        assert resting.layer == layer
        runner.run_layers(resting, range(layer, layer + 1), none, none)
    assert runner.end(resting) == [token]


@pytest.mark.parametrize("group_layers", [1, 2, 3])
def test_rows_may_lie_elsewhere_for_each_few_layers_and_logits_have_the_same_bits(
    decoder: Decoder, group_layers: int
) -> None:
    layout = decoder.layout
    arena = HbmArena(layout, 4)
    runner = Runner(decoder, greedy)
    sequence = placed(arena, 1, 50, [2, 0, 3, 1])
    with torch.inference_mode():
        runner.logits([ScheduledSequence(sequence, 0, 40, False)])
        part = ScheduledSequence(sequence, 40, 10, True)
        expected = runner.logits([part])
        rows = [bytes(arena.view(slot)) for slot in (2, 0)]
        for slot in (2, 0):
            arena.view(slot)[:] = b"\xff" * layout.row_bytes  # NaN: whoever reads the old place is seen
        resting = runner.begin(part)
        for first in range(0, layout.layers, group_layers):
            layers = range(first, min(first + group_layers, layout.layers))
            staged = mmap.mmap(-1, 2 * len(layers) * layout.slice_bytes)
            for place, row in enumerate(rows):
                slices = row[layers.start * layout.slice_bytes : layers.stop * layout.slice_bytes]
                staged[place * len(slices) : (place + 1) * len(slices)] = slices
            step = len(layers) * layout.slice_bytes
            addresses = address_of(staged) - layers.start * layout.slice_bytes + np.arange(2) * step
            runner.run_layers(resting, layers, np.arange(2), addresses)
        assert torch.equal(decoder.end(resting.hidden, resting.batch.logits_rows), expected)
