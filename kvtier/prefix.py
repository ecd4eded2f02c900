"""The index of sealed blocks in HBM: hash -> slot, with the idle ones in eviction order.

Pure books, single-threaded, owned by the store, time is an argument. Knows nothing of holds or bytes: the store says
when a slot becomes idle (nobody holds it) and busy again.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.block import BlockHash
from kvtier.eviction import EvictionQueue, PolicyMaker
from kvtier.expiry import Expiries
from kvtier.retention import PLAIN, PRIORITY_MAX, PRIORITY_MIN, Retention

PIN_RANK = PRIORITY_MAX - PRIORITY_MIN + 1
"""Lifts a pinned block over all that are not."""


class PrefixIndex:
    """Sealed blocks by content. Each hash has one slot and each slot one hash."""

    def __init__(self, policy: PolicyMaker, slot_count: int) -> None:
        self._slots: dict[BlockHash, int] = {}
        self._hashes: dict[int, BlockHash] = {}
        self._queue = EvictionQueue(policy, slot_count)
        self._retentions: dict[BlockHash, Retention] = {}
        """Of the blocks for which anything is asked."""
        self._expiries = Expiries()

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def idle_count(self) -> int:
        """Sealed blocks that nobody holds."""
        return len(self._queue)

    def find(self, block_hash: BlockHash) -> int | None:
        """Slot of a sealed block."""
        return self._slots.get(block_hash)

    def hash_of(self, slot: int) -> BlockHash | None:
        """Hash of a slot's block, None if it is not sealed."""
        return self._hashes.get(slot)

    def depth_of(self, slot: int) -> int:
        """Place of a sealed block in its chain."""
        return self._queue.use_of(self._hashes[slot]).depth

    def last_use(self, slot: int) -> float:
        """When a sealed block was last used, in monotonic seconds."""
        return self._queue.use_of(self._hashes[slot]).last_use

    def retention_of(self, slot: int) -> Retention:
        """What is asked for a slot's sealed block."""
        return self._retentions.get(self._hashes[slot], PLAIN)

    def insert(self, block_hash: BlockHash, slot: int, depth: int, now: float, retention: Retention = PLAIN) -> None:
        """Index a sealed block that somebody holds. The hash must be new: see `find`."""
        assert block_hash not in self._slots and slot not in self._hashes
        self._slots[block_hash] = slot
        self._hashes[slot] = block_hash
        self._queue.insert(block_hash, depth, now, _rank(retention))
        if retention != PLAIN:
            self._retentions[block_hash] = retention
            self._expiries.put(slot, retention.expiry_s)

    def retain(self, hashes: Sequence[BlockHash], retention: Retention) -> None:
        """Raise what is asked for those of these blocks that are here."""
        for block_hash in hashes:
            slot = self._slots.get(block_hash)
            if slot is None:
                continue
            old = self._retentions.get(block_hash, PLAIN)
            new = old.raised(retention)
            if new != old:
                self._retentions[block_hash] = new
                self._expiries.put(slot, new.expiry_s)
                self._queue.prioritize(block_hash, _rank(new))

    def expire(self, unix_s: float) -> list[int]:
        """Forget what must not be found any more, held or not; returns the slots."""
        return [self.remove(slot) for slot in self._expiries.take(unix_s)]

    def touch(self, slots: Sequence[int], now: float) -> None:
        """Note a use of sealed blocks: a chain, or its first blocks."""
        self._queue.touch([self._hashes[slot] for slot in slots], now)

    def stamp(self, slots: Sequence[int], now: float) -> None:
        """Note when a chain was last used; no further use of it."""
        self._queue.stamp([self._hashes[slot] for slot in slots], now)

    def set_idle(self, slots: Sequence[int]) -> None:
        """These sealed blocks may be evicted from now on."""
        self._queue.set_idle([self._hashes[slot] for slot in slots])

    def set_busy(self, slots: Sequence[int]) -> None:
        """These sealed blocks are held again. Unsealed slots are passed over."""
        self._queue.set_busy([self._hashes[slot] for slot in slots if slot in self._hashes])

    def coldest(self, count: int) -> list[int]:
        """The first idle slots in eviction order."""
        return [self._slots[block_hash] for block_hash in self._queue.coldest(count)]

    def remove(self, slot: int) -> int:
        """Forget a sealed block; its slot, returned, is the caller's to free."""
        self._queue.remove(self._hashes[slot])
        self._forget(slot)
        return slot

    def evict(self, count: int) -> list[int]:
        """Forget the coldest idle blocks and return their slots; fewer if there are not as many."""
        slots = [self._slots[block_hash] for block_hash in self._queue.pop(count)]
        for slot in slots:
            self._forget(slot)
        return slots

    def check(self) -> None:
        """Assert that both directions agree, and the order of eviction."""
        assert len(self._slots) == len(self._hashes)
        for slot, block_hash in self._hashes.items():
            assert self._slots[block_hash] == slot
            assert self._queue.use_of(block_hash).priority >= _rank(self.retention_of(slot))
        assert self._retentions.keys() <= self._slots.keys()
        assert all(self._expiries.at(slot) == self.retention_of(slot).expiry_s for slot in self._hashes)
        assert len(self._expiries) == sum(retention.expiry_s > 0 for retention in self._retentions.values())
        self._queue.check()
        self._expiries.check()

    def _forget(self, slot: int) -> None:
        block_hash = self._hashes.pop(slot)
        del self._slots[block_hash]
        if self._retentions.pop(block_hash, None) is not None:
            self._expiries.put(slot, 0)


def _rank(retention: Retention) -> int:
    """The priority in the order of eviction: what is pinned goes after everything else."""
    return retention.priority + PIN_RANK * retention.pinned
