"""Bit rot and worse over slab and journal: every bad row is a counted miss, every other row a hit, nothing ever dies.

Rows are a keystream of their hash, so that each read is judged byte by byte. Called with small counts by the fault
tests and with large ones by `scripts/soak`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

from kvtier import file_watch
from kvtier.cache_directory import layout_name
from kvtier.record import Record
from kvtier.replay import JOURNAL_NAME, JournalShape, Replay, ReplayState, replay
from kvtier.shelf import ShelfOutcome
from kvtier.tiers.slab import SLAB_NAME
from kvtier.tiers.superblock import SUPERBLOCK_BYTES
from tests.rows import LAYOUT, SLOT_BYTES, ShelfUser, block_hashes, nvme_user
from tests.soak.damage import DAMAGES, Scene, SlabFile, damaged, region

ROWS = 120
SPARED = 10
"""Rows that nothing is done to in a batch; they must be hits."""
NVME_BYTES = ROWS * (SLOT_BYTES + 512) + (1 << 19)
KINDS = [*DAMAGES, "truncated"]
TAIL_ROWS = {"flipped": 1, "zeroed": 7}
"""Rows that a journal damaged like this may lose, at its end; damage before the end is noticed and costs none."""
SLICED_EVERY = 2
"""Of so many rows one is read by slices first, as staged passes read; that judges no header."""
MISSES = {ShelfOutcome.BAD_ROW, ShelfOutcome.SHORT_READ}


class Log(logging.Handler):
    """Counts the shelf's own words."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.rebuilt = self.made_anew = self.refused = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count one."""
        text = record.getMessage()
        self.rebuilt += "found again from row headers" in text
        self.made_anew += "damaged superblock is made anew" in text
        if "row headers are damaged" in text:
            assert isinstance(record.args, tuple)
            self.refused += int(str(record.args[0]))


@contextlib.contextmanager
def watched() -> Iterator[Log]:
    """Listen to the log; nobody looks after the files meanwhile, so that what is done to them is met by reads."""
    handler = Log()
    kvtier = logging.getLogger("kvtier")
    kvtier.addHandler(handler)
    try:
        with mock.patch.object(file_watch, "WATCH_S", 3600.0):
            yield handler
    finally:
        kvtier.removeHandler(handler)


def corrupt_rows(count: int, seed: int, scratch: Path) -> dict[str, object]:
    """Flip `count` bits, and damage a tenth as many rows in each other way: all are counted misses, all else hits."""
    tenth = max(1, count // 10)
    return {kind: damage_rows(kind, count if kind == "flipped" else tenth, seed, scratch) for kind in KINDS}


def damage_rows(kind: str, count: int, seed: int, scratch: Path) -> dict[str, object]:
    """Damage `count` rows in one way, some while the shelf is open, some while it is closed or its journal lost."""
    chance = random.Random(f"{kind} {seed}")
    cache, hashes = scratch / kind, block_hashes(ROWS, seed)
    numbers: Counter[str] = Counter()
    with watched() as log:
        user = nvme_user(cache, NVME_BYTES)
        assert user.shelf.slot_count >= ROWS
        user.write(block_hashes(ROWS, seed + 1))
        before = {
            record.slot: SlabFile(cache).slot(record.slot) for record in records_of(user, block_hashes(ROWS, seed + 1))
        }
        user.shelf.drop(records_of(user, block_hashes(ROWS, seed + 1)), "evicted")
        user.write(hashes)
        while numbers["damaged"] < count:
            records = records_of(user, hashes)
            assert len(records) == ROWS
            way = chance.choices(["open", "closed", "journal lost"], [8, 1, 1])[0]
            if way == "journal lost" and kind == "stale":
                way = "closed"  # headers of before are sound: what they say is right again
            if way != "open":
                user.shelf.close(10.0)
            wanted = min(ROWS - SPARED, count - numbers["damaged"])
            now = {record.slot: SlabFile(cache).slot(record.slot) for record in records}
            bad = strike(kind, cache, records, before, chance, wanted)
            if kind == "flipped":
                numbers.update(flipped_regions(cache, now))
            if way == "journal lost":
                (cache / layout_name(LAYOUT) / JOURNAL_NAME).unlink()
            if way != "open":
                user = nvme_user(cache, NVME_BYTES)
            judge(user, records, bad, sound_headers=way != "journal lost", numbers=numbers)
            numbers["damaged"] += len(bad)
            numbers[way] += 1
            user.write(hashes)
        assert user.hits(hashes) == ROWS, "what was lost can be written again"
        user.shelf.check()
        user.shelf.close(10.0)
    assert numbers["caught"] == numbers["damaged"] >= count and numbers["hits"] > 0
    assert numbers["caught by slices"] > 0 or count < 100
    assert log.rebuilt == numbers["journal lost"]
    blank = kind in ("zeroed", "truncated")  # a header of zeros is that of a slot never written
    assert log.refused == numbers["not found by the rebuild"] or (blank and log.refused < numbers["damaged"])
    return {**numbers, "headers refused": log.refused, "seed": seed}


def records_of(user: ShelfUser, hashes: Sequence[bytes]) -> list[Record]:
    """Records of those that are there, each looked up on its own."""
    return [record for block_hash in hashes for record in user.shelf.find([block_hash])]


def strike(
    kind: str, cache: Path, records: Sequence[Record], before: dict[int, bytes], chance: random.Random, count: int
) -> set[bytes]:
    """Damage about `count` rows; returns the hashes of all that are bad now. `before`: what slots held earlier."""
    slab = SlabFile(cache)
    now = {record.slot: slab.slot(record.slot) for record in records}
    if kind == "truncated":
        last = sorted(now)[chance.randrange(ROWS - count, ROWS)]
        left = chance.choice([place for place in range(0, SLOT_BYTES, 7) if any(now[last][place:])])
        os.truncate(slab.path, SUPERBLOCK_BYTES + last * SLOT_BYTES + left)
        return {record.block_hash for record in records if record.slot >= last}
    victims = chance.sample(list(records), count)
    for number, victim in enumerate(victims):
        other = victims[(number + 1) % count] if count > 1 else next(one for one in records if one is not victim)
        earlier = before.get(victim.slot, bytes(SLOT_BYTES))
        slab.put(victim.slot, damaged(DAMAGES[kind], Scene(now[victim.slot], now[other.slot], earlier, chance)))
        before[victim.slot] = now[victim.slot]
    return {victim.block_hash for victim in victims}


def flipped_regions(cache: Path, before: dict[int, bytes]) -> list[str]:
    """Where in their slots the flipped bits lie, in words."""
    slab = SlabFile(cache)
    pairs = [(old, slab.slot(slot)) for slot, old in before.items()]
    return [f"in {region(next(i for i in range(SLOT_BYTES) if old[i] != new[i]))}" for old, new in pairs if old != new]


def judge(
    user: ShelfUser, records: Sequence[Record], bad: set[bytes], sound_headers: bool, numbers: Counter[str]
) -> None:
    """Read all rows, some of them by slices before: those of `bad` must be misses with a reason, the others hits."""
    counted = user.shelf.stats()
    found = records_of(user, [record.block_hash for record in records])
    outcomes: dict[bytes, ShelfOutcome | None] = dict.fromkeys([record.block_hash for record in records])
    by_slices = {one.block_hash: user.read_slices(one, range(LAYOUT.layers)) for one in found[::SLICED_EVERY]}
    lost = {block_hash: outcome for block_hash, outcome in by_slices.items() if outcome is not ShelfOutcome.DONE}
    rest = [record for record in found if record.block_hash not in lost]
    ended = [None if end is None else end.outcome for end in user.read(rest)]  # wrong bytes are an error here
    outcomes |= {**lost, **dict(zip([record.block_hash for record in rest], ended, strict=True))}
    for block_hash, outcome in outcomes.items():
        if block_hash not in bad:
            assert outcome is ShelfOutcome.DONE, (outcome, "a row that is whole was lost")
            numbers["hits"] += 1
        elif outcome is None:
            assert not sound_headers, "a row was lost and nobody has said why"
            numbers["caught"] += 1
            numbers["not found by the rebuild"] += 1
        else:
            assert outcome in MISSES, (outcome, "a bad row was handed out")
            numbers["caught"] += 1
            numbers["caught by slices"] += block_hash in lost
            numbers[outcome.value] += 1
    grown = {outcome: user.shelf.stats()[outcome.value] - counted[outcome.value] for outcome in MISSES}
    missed = Counter(outcomes.values())
    assert grown == {outcome: missed[outcome] for outcome in MISSES}, "each miss is counted under its reason"


def damage_journal(count: int, seed: int, scratch: Path) -> dict[str, object]:
    """Damage the journal or the superblock `count` times: what is left is believed or made again, and logged."""
    chance = random.Random(f"journal {seed}")
    hashes = block_hashes(30, seed)
    numbers: Counter[str] = Counter()
    cache = scratch / "journal"
    with watched() as log:
        other = journal_of(scratch / "other", block_hashes(30, seed + 1))
        old = journal_of(cache, hashes[:20])
        whole = journal_of(cache, hashes)
        folder = cache / layout_name(LAYOUT)
        slab = (folder / SLAB_NAME).read_bytes()
        truth = set(replayed(folder, slab).records)
        assert len(truth) == len(hashes)
        for number in range(count):
            kind = list(JOURNAL_DAMAGES)[number % len(JOURNAL_DAMAGES)]
            page = slab[:SUPERBLOCK_BYTES]
            if kind == "superblock":
                page = flip(page, chance.randrange(chance.choice([64, SUPERBLOCK_BYTES])), chance)
            (folder / SLAB_NAME).write_bytes(page + slab[SUPERBLOCK_BYTES:])
            (folder / JOURNAL_NAME).write_bytes(JOURNAL_DAMAGES[kind](whole, old, other, chance))
            found = replayed(folder, slab)
            assert set(found.records) <= truth, "a record that nobody has written"
            numbers[f"{kind}: {found.state.value}"] += 1
            rebuilt, anew = log.rebuilt, log.made_anew
            user = nvme_user(cache)
            hits = user.hits(hashes)
            numbers["hits"] += hits
            user.shelf.check()
            if log.made_anew > anew:
                assert hits == 0 and page != slab[:SUPERBLOCK_BYTES]
                numbers["slabs made anew"] += 1
            elif found.state is not ReplayState.WHOLE:
                assert log.rebuilt == rebuilt + 1 and hits == len(hashes), (found.state, hits)
                numbers["rebuilt from headers"] += 1
            else:
                assert hits == len(found.records), "what the journal still says is there"
                assert hits >= len(hashes) - TAIL_ROWS.get(kind, len(hashes)), "damage passed for a torn end"
            assert user.shelf.stats()["bad_row"] == 0
            user.shelf.close(10.0)
    assert numbers["hits"] > 0 and (numbers["rebuilt from headers"] > 0 or count < len(JOURNAL_DAMAGES))
    return {**dict(sorted(numbers.items())), "damaged": count, "seed": seed}


def journal_of(cache: Path, hashes: Sequence[bytes]) -> bytes:
    """The journal of a shelf that was closed with these rows."""
    user = nvme_user(cache)
    user.write(hashes)
    assert user.hits(hashes) == len(hashes)
    user.shelf.close(10.0)
    return (cache / layout_name(LAYOUT) / JOURNAL_NAME).read_bytes()


def replayed(folder: Path, slab: bytes) -> Replay:
    """What the journal in the folder says of that slab."""
    epoch, _, slot_count = struct.unpack_from("<16sQQ", slab, 16)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return replay(descriptor, JournalShape(epoch, slot_count, LAYOUT.layers))
    finally:
        os.close(descriptor)


def flip(data: bytes, place: int, chance: random.Random) -> bytes:
    """One bit of that byte."""
    flipped = bytearray(data)
    flipped[place] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def _swap(whole: bytes, chance: random.Random) -> bytes:
    length = chance.randrange(1, len(whole) // 2)
    one = chance.randrange(len(whole) - 2 * length + 1)
    two = chance.randrange(one + length, len(whole) - length + 1)
    return (
        whole[:one]
        + whole[two : two + length]
        + whole[one + length : two]
        + whole[one : one + length]
        + whole[two + length :]
    )


def _zero(whole: bytes, chance: random.Random) -> bytes:
    length = chance.randrange(1, 600)
    place = chance.randrange(len(whole) - length)
    return whole[:place] + bytes(length) + whole[place + length :]


def _copy(whole: bytes, chance: random.Random) -> bytes:
    length = chance.randrange(1, 600)
    source, target = chance.randrange(len(whole) - length), chance.randrange(len(whole) - length)
    return whole[:target] + whole[source : source + length] + whole[target + length :]


def _tear(whole: bytes, other: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(whole))
    return whole[:place] + other[place:]


JOURNAL_DAMAGES: dict[str, Callable[[bytes, bytes, bytes, random.Random], bytes]] = {
    "flipped": lambda whole, _, __, chance: flip(whole, chance.randrange(len(whole)), chance),
    "torn": lambda whole, _, other, chance: _tear(whole, other, chance),
    "zeroed": lambda whole, _, __, chance: _zero(whole, chance),
    "truncated": lambda whole, _, __, chance: whole[: chance.randrange(len(whole))],
    "swapped": lambda whole, _, __, chance: _swap(whole, chance),
    "stale": lambda _, old, __, ___: old,
    "misdirected": lambda whole, _, other, chance: chance.choice([other, _copy(whole, chance)]),
    "superblock": lambda whole, _, __, ___: whole,
}
"""By kind: the journal after it, from the whole one, an older one, that of another slab."""
