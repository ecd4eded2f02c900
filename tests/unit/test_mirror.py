"""An engine's mirror of a shared shelf: which rows it names, whatever it is told."""

from __future__ import annotations

import random

from kvtier.keeper.mirror import Mirror
from kvtier.record import Record
from tests.rows import block_hashes

SLOTS = 6
HASHES = block_hashes(9)


def row(number: int, slot: int, generation: int, expiry_s: int = 0, priority: int = 0) -> Record:
    return Record(HASHES[number], slot, generation, 0, bytes(8), priority, expiry_s)


def test_a_slot_and_a_block_are_in_the_mirror_once() -> None:
    mirror = Mirror(SLOTS)
    mirror.add([row(0, 1, 1), row(1, 2, 2)])
    mirror.add([row(2, 1, 3), row(1, 4, 4, expiry_s=9)])
    assert mirror.find(HASHES[:1]) == [] and mirror.find([HASHES[2], HASHES[1]]) == [row(2, 1, 3), row(1, 4, 4, 9)]
    mirror.check()
    mirror.remove([1, 2, 4, 4])
    assert len(mirror) == 0
    mirror.check()


def test_rows_of_one_s_own_do_not_undo_what_the_keeper_has_told_of_them() -> None:
    mirror = Mirror(SLOTS)
    mirror.add([row(0, 1, 1, priority=5)])
    mirror.add([row(0, 1, 1), row(1, 2, 2)], unless_known=True)
    assert mirror.find(HASHES[:2]) == [row(0, 1, 1, priority=5), row(1, 2, 2)]
    mirror.add([row(0, 1, 3)], unless_known=True)
    mirror.add([row(1, 2, 2, priority=7)])
    assert mirror.find(HASHES[:2]) == [row(0, 1, 3), row(1, 2, 2, priority=7)]
    mirror.check()


def test_slots_that_there_are_not_are_passed_over() -> None:
    mirror = Mirror(SLOTS)
    mirror.add([row(0, SLOTS, 1), row(1, SLOTS - 1, 2)])
    mirror.remove([SLOTS, 1 << 31])
    assert mirror.find([HASHES[0]]) == [] and mirror.find([HASHES[1]]) == [row(1, SLOTS - 1, 2)]
    mirror.check()


def test_random_events_leave_what_a_plain_list_of_rows_does() -> None:
    chance = random.Random(5)
    mirror, rows = Mirror(SLOTS), dict[int, Record]()
    for generation in range(400):
        if chance.random() < 0.6:
            told = row(chance.randrange(len(HASHES)), chance.randrange(SLOTS), generation, chance.choice([0, 0, 3]))
            rows = {slot: one for slot, one in rows.items() if one.block_hash != told.block_hash}
            rows[told.slot] = told
            mirror.add([told], unless_known=chance.random() < 0.5)
        else:
            gone = chance.sample(range(SLOTS), 2)
            rows = {slot: one for slot, one in rows.items() if slot not in gone}
            mirror.remove(gone)
        mirror.check()
        found = {one.slot: one for block_hash in HASHES for one in mirror.find([block_hash])}
        assert found == rows and sorted(mirror.oldest(SLOTS)) == sorted(rows.values())
