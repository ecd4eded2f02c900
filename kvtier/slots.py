"""The slots of one shelf: state, generation, tenant and leases of each, and which are free.

Knows no row and no rule: the directory says what happens to a slot, this keeps the numbers together. Called by the
directory alone.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable

from kvtier.record import Grant


class SlotState(enum.IntEnum):
    """Life of a slot: FREE, reserved for WRITING, READY to read, DROPPED but still leased."""

    FREE = 0
    WRITING = 1
    READY = 2
    DROPPED = 3


class Slots:
    """See the module."""

    def __init__(self, count: int, generation_floor: int) -> None:
        """All free; generations start above the floor."""
        assert count > 0 and generation_floor >= 0
        self.count = count
        self.generation = generation_floor
        """The highest given out."""
        self.states = bytearray(count)
        """`SlotState` of each; the caller changes WRITING to READY to DROPPED."""
        self.lease_counts = array("L", bytes(array("L").itemsize * count))
        """Of each; the caller counts."""
        self._generations = array("Q", bytes(8 * count))
        self._tenants = [b""] * count
        self._used_by: dict[bytes, int] = {}
        self._free = list(range(count - 1, -1, -1))

    @property
    def free_count(self) -> int:
        """Slots that could be granted at once."""
        return len(self._free)

    def used_by(self, tenant: bytes) -> int:
        """Slots that are not free and charged to a tenant."""
        return self._used_by.get(tenant, 0)

    def tenants(self) -> list[bytes]:
        """All that are charged for a slot."""
        return list(self._used_by)

    def fits(self, slot: int, generation: int, state: SlotState) -> bool:
        """Whether there is such a slot, in that generation and state."""
        return 0 <= slot < self.count and self._generations[slot] == generation and self.states[slot] == state

    def grant(self, count: int, tenant: bytes) -> list[Grant]:
        """Take up to `count` free slots, those last freed first."""
        count = max(0, min(count, len(self._free)))
        slots = self._free[len(self._free) - count :]
        slots.reverse()
        del self._free[len(self._free) - count :]
        first = self.generation + 1
        self.generation += count
        grants = list(map(Grant, slots, range(first, first + count)))
        states, generations, tenants, writing = self.states, self._generations, self._tenants, int(SlotState.WRITING)
        for slot, generation in grants:
            states[slot] = writing
            generations[slot] = generation
            tenants[slot] = tenant
        if grants:
            self._used_by[tenant] = self._used_by.get(tenant, 0) + len(grants)
        return grants

    def restore(self, claims: list[tuple[Grant, bytes]]) -> None:
        """Take these slots for their tenants in fresh books."""
        for (slot, generation), tenant in claims:
            assert self.states[slot] == SlotState.FREE and generation <= self.generation, (slot, generation)
            self.states[slot] = SlotState.WRITING
            self._generations[slot] = generation
            self._tenants[slot] = tenant
            self._used_by[tenant] = self._used_by.get(tenant, 0) + 1
        self._free = [slot for slot in reversed(range(self.count)) if self.states[slot] == SlotState.FREE]

    def free(self, slots: Iterable[int]) -> None:
        """Nobody has a claim on these slots any more."""
        states, free, tenants, used_by = self.states, self._free.append, self._tenants, self._used_by
        for slot in slots:
            states[slot] = 0  # SlotState.FREE
            free(slot)
            tenant = tenants[slot]
            left = used_by[tenant] - 1
            if left:
                used_by[tenant] = left
            else:
                del used_by[tenant]

    def tenant_of(self, slot: int) -> bytes:
        """Whose a slot is, or was last."""
        return self._tenants[slot]

    def of(self, slot: int) -> tuple[SlotState, int, bytes]:
        """State, generation and tenant of a slot."""
        return SlotState(self.states[slot]), self._generations[slot], self._tenants[slot]

    def check(self) -> None:
        """Assert every invariant; costs a walk over all slots."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is twice in the free list"
        used_by: dict[bytes, int] = {}
        for slot in range(self.count):
            state, leases = self.states[slot], self.lease_counts[slot]
            assert (slot in free) == (state == SlotState.FREE), (slot, state)
            assert leases == 0 or state in (SlotState.READY, SlotState.DROPPED), (slot, state, leases)
            assert leases > 0 or state != SlotState.DROPPED, slot
            assert self._generations[slot] <= self.generation, slot
            if state != SlotState.FREE:
                used_by[self._tenants[slot]] = used_by.get(self._tenants[slot], 0) + 1
        assert used_by == self._used_by, (used_by, self._used_by)
