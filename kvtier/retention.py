"""What a request asks of the tiers for its blocks: how long they stay, and whose they are.

A value only, made at the door and carried with a block down to the row's header. Knows no tier and no rule; what it
means is decided by the directory of each shelf and by the index of HBM.
"""

from __future__ import annotations

from typing import NamedTuple

from kvtier.record import NO_TENANT, Record

PRIORITY_MIN, PRIORITY_MAX = -100, 100
EXPIRY_END_S = 1 << 40
"""No time of expiry that is read from anywhere is as late."""


class Retention(NamedTuple):
    """How long the blocks of a request stay, and who is charged for them."""

    priority: int = 0
    """Rows of a lower one are evicted first."""
    expiry_s: int = 0
    """Unix seconds after which a block is not found any more; 0: never."""
    pinned: bool = False
    """Never evicted from a shelf while the pins fit their budget; from HBM only after everything else."""
    tenant: bytes = NO_TENANT
    """Digest of the tenant."""

    @property
    def asks(self) -> bool:
        """Whether it asks for more than the policy alone would give; a tenant alone does not."""
        return self.priority != 0 or self.expiry_s != 0 or self.pinned

    def is_over(self, unix_s: float) -> bool:
        """Whether a block of it must not be found any more."""
        return 0 < self.expiry_s <= unix_s

    def raised(self, asked: Retention) -> Retention:
        """What a block has once it is reused by a request that asks: the longer of each; the tenant stays the first."""
        if not asked.asks:
            return self
        expiry_s = max(self.expiry_s, asked.expiry_s) if self.expiry_s and asked.expiry_s else 0
        return Retention(max(self.priority, asked.priority), expiry_s, self.pinned or asked.pinned, self.tenant)


def is_possible(priority: int, expiry_s: int) -> bool:
    """Whether numbers that were read from somewhere are within their bounds."""
    return PRIORITY_MIN <= priority <= PRIORITY_MAX and 0 <= expiry_s < EXPIRY_END_S


def retention_of(record: Record) -> Retention:
    """What was asked for the block of a row."""
    return Retention(record.priority, record.expiry_s, record.pinned, record.tenant)


PLAIN = Retention()
"""Nothing asked: the policy alone decides."""
