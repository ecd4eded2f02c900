"""Candidates for eviction in the order of a policy, those of a lower priority always first.

Heaps of entries, some of them stale: the stamps, which belong to the queue, tell which hold. The queue has one order of
all blocks and one of each owner who has a quota. Knows no hash but as a word to hand back.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from kvtier.block import BlockHash
from kvtier.eviction.base import BlockUse, EvictionPolicy

SLACK = 64
"""Stale entries and noted uses that are always allowed, so that small tiers are not cleaned at each step."""

Entry = tuple[float, int, int, BlockHash]
"""(last use, -depth, stamp, hash); the stamp is unique and tells whether the entry still holds."""


class Group:
    """Candidates of one group and priority: a heap of entries, some of them stale."""

    __slots__ = ("entries", "live_count")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.live_count = 0


class Order:
    """See the module."""

    def __init__(self, policy: EvictionPolicy, capacity: int, stamps: Mapping[BlockHash, int]) -> None:
        """`stamps`: of all candidates, the stamp of the entry that holds. `capacity` in blocks."""
        self._policy = policy
        self._capacity = capacity
        self._stamps = stamps
        self._ranks: dict[int, dict[int, Group]] = {}
        """By priority and group."""

    def add(self, use: BlockUse, entry: Entry) -> None:
        """One more candidate."""
        try:
            group = self._ranks[use.priority][use.group]
        except KeyError:
            group = self._ranks.setdefault(use.priority, {})[use.group] = Group()
        heapq.heappush(group.entries, entry)
        group.live_count += 1

    def loosen(self, use: BlockUse) -> None:
        """The entry of a candidate holds no longer; call `clean` after the last one."""
        self._ranks[use.priority][use.group].live_count -= 1

    def discard(self, use: BlockUse) -> None:
        """The entry of a candidate holds no longer."""
        group = self._ranks[use.priority][use.group]
        group.live_count -= 1
        self._clean(group)

    def clean(self) -> None:
        """Forget stale entries where there are many."""
        for groups in self._ranks.values():
            for group in groups.values():
                self._clean(group)

    def take(self, count: int, now: float) -> list[tuple[Group, Entry]]:
        """Take the first `count` entries out of their groups; their stamps still stand."""
        taken: list[tuple[Group, Entry]] = []
        for priority in sorted(self._ranks):
            groups = self._ranks[priority]
            heads = [head for number, group in groups.items() if (head := self._head(number, group, now)) is not None]
            if not heads:
                del self._ranks[priority]
            heapq.heapify(heads)
            while heads and len(taken) < count:
                number = heads[0][3]
                group = groups[number]
                if len(heads) == 1:
                    taken += self._run(group, count - len(taken))
                    break
                taken.append((group, heapq.heappop(group.entries)))
                group.live_count -= 1
                head = self._head(number, group, now)
                if head is None:
                    heapq.heappop(heads)
                else:
                    heapq.heapreplace(heads, head)
            if len(taken) == count:
                break
        return taken

    def _run(self, group: Group, count: int) -> list[tuple[Group, Entry]]:
        """Take the first `count` entries out of a group that nothing competes with."""
        entries, stamps, pop = group.entries, self._stamps.get, heapq.heappop
        taken: list[tuple[Group, Entry]] = []
        while entries and len(taken) < count:
            entry = pop(entries)
            if stamps(entry[3]) == entry[2]:
                taken.append((group, entry))
        group.live_count -= len(taken)
        return taken

    def taken_out(self, taken: list[tuple[Group, Entry]]) -> None:
        """The stamps of what `take` gave are gone now."""
        for group in {id(group): group for group, _ in taken}.values():
            self._clean(group)

    def put_back(self, taken: list[tuple[Group, Entry]]) -> None:
        """Undo a `take`."""
        for group, entry in taken:
            heapq.heappush(group.entries, entry)
            group.live_count += 1

    def check(self, uses: Mapping[BlockHash, BlockUse]) -> list[BlockHash]:
        """Assert every invariant; returns the candidates. Costs a walk over all entries."""
        live: list[BlockHash] = []
        for priority, groups in self._ranks.items():
            for number, group in groups.items():
                held = [entry for entry in group.entries if self._stamps.get(entry[3]) == entry[2]]
                assert len(held) == group.live_count, (priority, number)
                assert len(group.entries) <= 2 * group.live_count + SLACK, (priority, number)
                for last_use, depth, _, block_hash in held:
                    use = uses[block_hash]
                    assert (use.priority, use.group) == (priority, number), use
                    assert (use.last_use, -use.depth) == (last_use, depth), use
                live += [entry[3] for entry in held]
        return live

    def _clean(self, group: Group) -> None:
        if len(group.entries) > SLACK + 2 * group.live_count:
            group.entries = [entry for entry in group.entries if self._stamps.get(entry[3]) == entry[2]]
            heapq.heapify(group.entries)

    def _head(self, number: int, group: Group, now: float) -> tuple[float, float, int, int] | None:
        """(value, last use, -depth, group) of a group's first candidate."""
        entries = group.entries
        while entries and self._stamps.get(entries[0][3]) != entries[0][2]:
            heapq.heappop(entries)
        if not entries:
            return None
        last_use, depth, _, _ = entries[0]
        share = group.live_count / self._capacity
        return self._policy.value(number, max(now - last_use, 0.0), share), last_use, depth, number
