"""The order of eviction of one tier: uses of the blocks that are here, and those of them that may go.

Keyed by block hash; knows no slot and no bytes. Single-threaded, reads no clock: its time is the latest it was told.
Used by the HBM prefix index and by the directory of every shelf.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvtier.block import BlockHash
from kvtier.eviction.base import BlockUse, EvictionPolicy, PolicyMaker
from kvtier.eviction.ghosts import Ghosts

_SLACK = 64
"""Stale entries and noted uses that are always allowed, so that small tiers are not cleaned at each step."""

_Entry = tuple[float, int, int, BlockHash]
"""(last use, -depth, stamp, hash); the stamp is unique and tells whether the entry still holds."""


class _Group:
    """Candidates of one group and priority: a heap of entries, some of them stale."""

    __slots__ = ("entries", "live_count")

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.live_count = 0


class EvictionQueue:
    """Blocks of a tier in the order of its policy, those of a lower priority always first.

    A use costs O(log n) and O(1) when noted, an eviction O(log n), a call that evicts O(groups) besides.
    """

    def __init__(self, policy: PolicyMaker, capacity: int) -> None:
        """`capacity` in blocks: more are never here at once."""
        self._policy: EvictionPolicy = policy(capacity)
        self._capacity = capacity
        self._ghosts = Ghosts(int(self._policy.ghost_share * capacity))
        self._uses: dict[BlockHash, BlockUse] = {}
        self._stamps: dict[BlockHash, int] = {}
        """Of the candidates: the stamp of the entry that holds."""
        self._ranks: dict[int, dict[int, _Group]] = {}
        """By priority and group."""
        self._stamp = 0
        self._notes: list[tuple[tuple[BlockHash, ...], float, int]] = []
        """(chain, when, uses to count) not applied yet."""
        self._noted_count = 0
        self._now = 0.0

    def __len__(self) -> int:
        """Candidates."""
        return len(self._stamps)

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Whether a block is a candidate."""
        return block_hash in self._stamps

    def insert(self, block_hash: BlockHash, depth: int, now: float, priority: int = 0) -> None:
        """A block is here from now on, used once more than was known; no candidate yet."""
        assert block_hash not in self._uses and len(self._uses) < self._capacity
        self._apply_notes()
        self._now = max(self._now, now)
        ghost = self._ghosts.take(block_hash)
        if ghost is None:
            use = BlockUse(depth, now, 1, priority)
            use.group = self._policy.group(use)
            self._policy.learn(None, 0.0, use.group)
        else:
            use = BlockUse(depth, *ghost, priority)
            use.group = self._policy.group(use)
            self._count(use, use.uses + 1, now)
            use.last_use = now
        self._uses[block_hash] = use

    def touch(self, hashes: Sequence[BlockHash], now: float) -> None:
        """Note a use of a chain, or of its first blocks; those that are not here are passed over."""
        self._note(hashes, now, 1)

    def stamp(self, hashes: Sequence[BlockHash], now: float) -> None:
        """Note when a chain was last used, which is no further use of it: when it is let go, or written late."""
        self._note(hashes, now, 0)

    def use_of(self, block_hash: BlockHash) -> BlockUse:
        """The record of a block that is here; not to be changed."""
        self._apply_notes()
        return self._uses[block_hash]

    def set_idle(self, hashes: Sequence[BlockHash]) -> None:
        """These blocks are candidates from now on."""
        for block_hash in hashes:
            use = self._uses[block_hash]
            if block_hash not in self._stamps:
                self._add(block_hash, use)

    def set_busy(self, hashes: Sequence[BlockHash]) -> None:
        """These blocks are no candidates any more."""
        for block_hash in hashes:
            self._discard(block_hash, self._uses[block_hash])

    def remove(self, block_hash: BlockHash) -> None:
        """A block is gone, candidate or not. What is known of it is remembered for a while."""
        self._apply_notes()
        use = self._uses.pop(block_hash)
        self._discard(block_hash, use)
        self._ghosts.put(block_hash, use.last_use, use.uses)

    def pop(self, count: int) -> list[BlockHash]:
        """Remove up to `count` candidates, first to go first; fewer if there are not as many."""
        taken = self._take(count)
        for group, (_, _, _, block_hash) in taken:
            del self._stamps[block_hash]
            use = self._uses.pop(block_hash)
            self._ghosts.put(block_hash, use.last_use, use.uses)
            self._clean(group)
        return [entry[3] for _, entry in taken]

    def coldest(self, count: int) -> list[BlockHash]:
        """What `pop` would remove now, left in place."""
        taken = self._take(count)
        for group, entry in taken:
            heapq.heappush(group.entries, entry)
            group.live_count += 1
        return [entry[3] for _, entry in taken]

    def check(self) -> None:
        """Assert every invariant; costs a walk over all entries."""
        assert self._stamps.keys() <= self._uses.keys() and len(self._uses) <= self._capacity
        assert self._noted_count == sum(len(chain) for chain, _, _ in self._notes) <= self._capacity + _SLACK
        live: list[BlockHash] = []
        for priority, groups in self._ranks.items():
            for number, group in groups.items():
                held = [entry for entry in group.entries if self._stamps.get(entry[3]) == entry[2]]
                assert len(held) == group.live_count, (priority, number)
                assert len(group.entries) <= 2 * group.live_count + _SLACK, (priority, number)
                for last_use, depth, _, block_hash in held:
                    use = self._uses[block_hash]
                    assert (use.priority, use.group) == (priority, number), use
                    assert (use.last_use, -use.depth) == (last_use, depth), use
                live += [entry[3] for entry in held]
        assert len(live) == len(self._stamps) and set(live) == self._stamps.keys()

    def _note(self, hashes: Sequence[BlockHash], now: float, uses: int) -> None:
        if self._noted_count + len(hashes) > self._capacity:
            self._apply_notes()
        self._notes.append((tuple(hashes), now, uses))
        self._noted_count += len(hashes)
        self._now = max(self._now, now)

    def _apply_notes(self) -> None:
        """Bring uses and order up to date. A block counts as used at least as often as those behind it.

        It was, and only forgetting can have hidden it: without this rule one such block would go early, and with it
        all that stand on it.
        """
        if not self._notes:
            return
        find, stamps = self._uses.get, self._stamps
        for chain, now, uses in self._notes:
            most = 0
            for block_hash in reversed(chain):
                use = find(block_hash)
                if use is None:
                    continue
                candidate = block_hash in stamps
                if candidate:
                    self._ranks[use.priority][use.group].live_count -= 1
                most = max(most, use.uses + uses)
                if most != use.uses:
                    self._count(use, most, now if uses else use.last_use)
                use.last_use = now
                if candidate:
                    self._add(block_hash, use)
        self._notes.clear()
        for groups in self._ranks.values():
            for group in groups.values():
                self._clean(group)
        self._noted_count = 0

    def _count(self, use: BlockUse, uses: int, now: float) -> None:
        """A use at `now` after which a block has `uses`."""
        left = use.group
        use.uses = uses
        use.group = self._policy.group(use)
        self._policy.learn(left, max(now - use.last_use, 0.0), use.group)

    def _add(self, block_hash: BlockHash, use: BlockUse) -> None:
        try:
            group = self._ranks[use.priority][use.group]
        except KeyError:
            group = self._ranks.setdefault(use.priority, {})[use.group] = _Group()
        self._stamp += 1
        self._stamps[block_hash] = self._stamp
        heapq.heappush(group.entries, (use.last_use, -use.depth, self._stamp, block_hash))
        group.live_count += 1

    def _discard(self, block_hash: BlockHash, use: BlockUse) -> None:
        if self._stamps.pop(block_hash, None) is not None:
            group = self._ranks[use.priority][use.group]
            group.live_count -= 1
            self._clean(group)

    def _clean(self, group: _Group) -> None:
        if len(group.entries) > _SLACK + 2 * group.live_count:
            group.entries = [entry for entry in group.entries if self._stamps.get(entry[3]) == entry[2]]
            heapq.heapify(group.entries)

    def _take(self, count: int) -> list[tuple[_Group, _Entry]]:
        """Take the first `count` entries out of their groups; the candidates stay what they are."""
        if count <= 0:
            return []
        self._apply_notes()
        taken: list[tuple[_Group, _Entry]] = []
        for priority in sorted(self._ranks):
            groups = self._ranks[priority]
            heads = [head for number, group in groups.items() if (head := self._head(number, group)) is not None]
            if not heads:
                del self._ranks[priority]
            heapq.heapify(heads)
            while heads and len(taken) < count:
                number = heads[0][3]
                group = groups[number]
                taken.append((group, heapq.heappop(group.entries)))
                group.live_count -= 1
                head = self._head(number, group)
                if head is None:
                    heapq.heappop(heads)
                else:
                    heapq.heapreplace(heads, head)
            if len(taken) == count:
                break
        return taken

    def _head(self, number: int, group: _Group) -> tuple[float, float, int, int] | None:
        """(value, last use, -depth, group) of a group's first candidate."""
        entries = group.entries
        while entries and self._stamps.get(entries[0][3]) != entries[0][2]:
            heapq.heappop(entries)
        if not entries:
            return None
        last_use, depth, _, _ = entries[0]
        share = group.live_count / self._capacity
        return self._policy.value(number, max(self._now - last_use, 0.0), share), last_use, depth, number
