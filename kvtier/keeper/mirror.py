"""An engine's copy of what can be read on one shared shelf: hash to record, kept current by the keeper's events.

Good enough to look things up without asking: whatever it names proves itself when it is read. Outlives the keeper that
filled it. Bounded by the shelf's slots. Owned by shared.py, on the engine thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kvtier.block import BlockHash
from kvtier.expiry import Expiries
from kvtier.record import Record
from kvtier.retention import Retention


class Mirror:
    """Records by hash and by slot. The order of its records, oldest first, is that of their last known use."""

    def __init__(self, slot_count: int) -> None:
        self._slot_count = slot_count
        self._records: dict[BlockHash, Record] = {}
        self._at: list[Record | None] = [None] * slot_count
        self._expiries = Expiries()

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

    def has(self, record: Record) -> bool:
        """Whether this row is here, whatever its priority, expiry and pin are by now."""
        known = self._records.get(record.block_hash)
        return known is not None and (known.slot, known.generation) == (record.slot, record.generation)

    def lacks(self, block_hash: BlockHash, asked: Retention) -> bool:
        """Whether a block may have less than is asked: it has, or is not here."""
        record = self._records.get(block_hash)
        if record is None:
            return True
        has = Retention(record.priority, record.expiry_s, record.pinned)
        return has.raised(asked) != has

    def expire(self, unix_s: float) -> None:
        """Forget the rows whose time has come."""
        due = self._expiries.take(unix_s)
        if due:
            self.remove(due)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Make a chain's blocks the last ones of the order, its first the very last."""
        records = self._records
        for block_hash in reversed(hashes):
            record = records.pop(block_hash, None)
            if record is not None:
                records[block_hash] = record

    def add(self, records: Iterable[Record], *, unless_known: bool = False) -> None:
        """These can be read now. `unless_known`: rows that are here already stay as they are."""
        at, by_hash, slot_count = self._at, self._records, self._slot_count
        for record in records:
            slot = record.slot
            if slot >= slot_count:
                continue
            before = at[slot]
            if before is not None:
                if unless_known and before.generation == record.generation:
                    continue
                self.remove([slot])
            twin = by_hash.setdefault(record.block_hash, record)
            if twin is not record:
                self.remove([twin.slot])
                by_hash[record.block_hash] = record
            at[slot] = record
            if record.expiry_s:
                self._expiries.put(slot, record.expiry_s)

    def remove(self, slots: Iterable[int]) -> None:
        """What these held is gone."""
        at, by_hash, slot_count = self._at, self._records, self._slot_count
        for slot in slots:
            record = at[slot] if slot < slot_count else None
            if record is not None:
                at[slot] = None
                del by_hash[record.block_hash]
                if record.expiry_s:
                    self._expiries.put(slot, 0)

    def oldest(self, count: int) -> list[Record]:
        """Up to `count` records in order."""
        return list(itertools.islice(self._records.values(), count))

    def check(self) -> None:
        """Assert that both indexes agree."""
        assert len(self._at) == self._slot_count
        assert len(self._records) == self._slot_count - self._at.count(None)
        assert all(self._at[record.slot] is record for record in self._records.values())
        assert all(self._expiries.at(record.slot) == record.expiry_s for record in self._records.values())
        assert len(self._expiries) == sum(record.expiry_s > 0 for record in self._records.values())
        self._expiries.check()
