"""Runner: one token for each part that samples, in order, and the same tokens however a prompt is cut into parts."""

from __future__ import annotations

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
