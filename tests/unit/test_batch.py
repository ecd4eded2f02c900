"""build_batch: tokens, positions, tables and append targets of a mixed pass, checked against plain loops."""

from __future__ import annotations

import random

import torch
from fakes import make_sequence

from kvtier.batch import build_batch
from kvtier.sequence import ScheduledSequence

BLOCK = 8


def test_a_mixed_pass_lists_every_token_with_its_own_row_and_offset() -> None:
    chance = random.Random(5)
    parts: list[ScheduledSequence] = []
    for number in range(6):
        sequence = make_sequence(number, [chance.randrange(1000) for _ in range(chance.randrange(1, 60))], 4)
        start = chance.randrange(0, len(sequence.tokens))
        count = chance.randrange(1, len(sequence.tokens) - start + 1)
        slots = chance.sample(range(1000), -(-(start + count) // BLOCK) + chance.randrange(2))
        sequence.table.extend(slots, [4096 * (slot + 1) for slot in slots])
        parts.append(ScheduledSequence(sequence, start, count, start + count == len(sequence.tokens)))
    batch = build_batch(parts, BLOCK)
    token = 0
    sampled: list[int] = []
    for index, part in enumerate(parts):
        table = part.sequence.table.addresses
        assert batch.attention.query_starts[index] == token
        assert batch.attention.lengths[index] == part.start + part.count
        row = batch.attention.tables[index]
        assert row[: len(table)].tolist() == table.tolist() and not row[len(table) :].any()
        for position in range(part.start, part.start + part.count):
            assert batch.token_ids[token] == part.sequence.tokens[position]
            assert batch.positions[token] == position
            assert batch.attention.append_rows[token] == table[position // BLOCK]
            assert batch.attention.append_offsets[token] == position % BLOCK
            token += 1
        if part.samples:
            sampled.append(token - 1)
    assert batch.attention.query_starts[-1] == token == len(batch.token_ids)
    assert batch.logits_rows.tolist() == sampled and sampled


def test_a_pass_that_samples_nothing_wants_no_logits() -> None:
    sequence = make_sequence(0, list(range(20)), 4)
    sequence.table.extend([1, 2, 3], [4096, 8192, 12288])
    batch = build_batch([ScheduledSequence(sequence, 8, 8, False)], BLOCK)
    assert batch.logits_rows.dtype == torch.int64 and batch.logits_rows.numel() == 0
    assert batch.attention.append_rows.tolist() == [8192] * 8


def test_the_batch_is_a_copy_so_that_later_growth_does_not_change_it() -> None:
    sequence = make_sequence(0, list(range(8)), 4)
    sequence.table.extend([1], [4096])
    batch = build_batch([ScheduledSequence(sequence, 0, 8, True)], BLOCK)
    sequence.table.replace(0, 2, 8192)
    sequence.tokens[0] = 77
    assert batch.attention.tables.tolist() == [[4096]] and batch.token_ids[0] == 0
