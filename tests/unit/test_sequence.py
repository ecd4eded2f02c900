"""Sequence and BlockTable: addresses follow slots, and each prompt token is attributed exactly once."""

from __future__ import annotations

import random

from fakes import make_sequence

from kvtier.block import Tier
from kvtier.request import Origin
from kvtier.sequence import BlockTable


def test_addresses_stay_with_their_slots_as_the_table_grows() -> None:
    table, chance = BlockTable(), random.Random(3)
    expected: list[int] = []
    while len(expected) < 100:
        count = chance.randrange(0, 20)
        slots = [chance.randrange(1000) for _ in range(count)]
        table.extend(slots, [slot * 4096 for slot in slots])
        expected += slots
        assert table.slots == expected and table.addresses.tolist() == [slot * 4096 for slot in expected]
    table.replace(17, 5, 5 * 4096)
    assert table.slots[17] == 5 and table.addresses[17] == 5 * 4096 and table.addresses[16] == expected[16] * 4096


def test_a_cleared_table_gives_its_slots_back_and_starts_anew() -> None:
    table = BlockTable()
    table.extend([3, 4], [30, 40])
    assert table.clear() == [3, 4]
    assert table.slots == [] and len(table.addresses) == 0
    table.extend([9], [90])
    assert table.addresses.tolist() == [90]


def test_prompt_tokens_are_attributed_once_even_if_preemption_makes_them_come_twice() -> None:
    sequence = make_sequence(0, list(range(20)), 10)
    sequence.attribute(8, Tier.DRAM)
    sequence.attribute(5, None)
    sequence.computed_count = 0  # preempted
    sequence.attribute(8, Tier.HBM)
    sequence.attribute(8, Tier.NVME)
    assert sequence.origin == Origin(hbm=0, dram=8, nvme=3, computed=5)
    sequence.attribute(4, None)
    assert sequence.origin == Origin(hbm=0, dram=8, nvme=3, computed=9)
    sequence.tokens += [1, 2]
    sequence.attribute(2, None)
    assert sum(sequence.origin.as_dict().values()) == 20 and sequence.computed_count == 22


def test_counts_and_rank() -> None:
    sequence = make_sequence(4, [1, 2, 3], 10, priority=2)
    assert (sequence.remaining_count, sequence.output_count, sequence.rank) == (3, 0, (2, 4))
    sequence.computed_count = 3
    sequence.tokens.append(9)
    assert (sequence.remaining_count, sequence.output_count) == (1, 1)
