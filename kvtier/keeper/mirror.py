"""An engine's copy of what can be read on one shared shelf: hash to record, kept current by the keeper's events.

Good enough to look things up without asking: whatever it names proves itself when it is read. Outlives the keeper that
filled it. Bounded by the shelf's slots. Owned by shared.py, on the engine thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kvtier.block import BlockHash
from kvtier.record import Record


class Mirror:
    """Records by hash and by slot. The order of its records, oldest first, is that of their last known use."""

    def __init__(self, slot_count: int) -> None:
        self._slot_count = slot_count
        self._records: dict[BlockHash, Record] = {}
        self._at: dict[int, Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def find(self, hashes: Sequence[BlockHash]) -> list[Record]:
        """Records of the leading run of `hashes` that is here."""
        found: list[Record] = []
        get = self._records.get
        for block_hash in hashes:
            record = get(block_hash)
            if record is None:
                break
            found.append(record)
        return found

    def get(self, block_hash: BlockHash) -> Record | None:
        """The record of a block, if it is here."""
        return self._records.get(block_hash)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Make a chain's blocks the last ones of the order, its first the very last."""
        records = self._records
        for block_hash in reversed(hashes):
            record = records.pop(block_hash, None)
            if record is not None:
                records[block_hash] = record

    def add(self, records: Iterable[Record]) -> None:
        """These can be read now."""
        at, by_hash, slot_count = self._at, self._records, self._slot_count
        for record in records:
            slot = record.slot
            if slot >= slot_count:
                continue
            if slot in at:
                del by_hash[at[slot].block_hash]
            before = by_hash.get(record.block_hash)
            if before is not None:
                del at[before.slot]
            at[slot] = record
            by_hash[record.block_hash] = record

    def remove(self, slots: Iterable[int]) -> None:
        """What these held is gone."""
        at, by_hash = self._at, self._records
        for slot in slots:
            record = at.pop(slot, None)
            if record is not None:
                del by_hash[record.block_hash]

    def oldest(self, count: int) -> list[Record]:
        """Up to `count` records in order."""
        return list(itertools.islice(self._records.values(), count))

    def check(self) -> None:
        """Assert that both indexes agree."""
        assert len(self._records) == len(self._at) <= self._slot_count
        assert all(self._at[record.slot] is record for record in self._records.values())
