"""Trouble with the transfers of one shelf: errors in a row, transfers that hang, and what may be tried meanwhile.

Owns a breaker for reads and one for writes; where one opens, what has not started is let go of. Knows no books. Owned
by the shelf, on its thread.
"""

from __future__ import annotations

import errno
import logging

from kvtier.block import Tier
from kvtier.breaker import Breaker
from kvtier.ticket import ShelfLimits, ShelfOperation
from kvtier.transfers import RowTransfers

log = logging.getLogger(__name__)


class TransferWatch:
    """See the module."""

    def __init__(self, tier: Tier, transfers: RowTransfers, limits: ShelfLimits) -> None:
        self._tier = tier
        self._transfers = transfers
        self._late_s = limits.late_s
        self._breakers = {operation: Breaker(limits.failures_max, limits.pause_s) for operation in ShelfOperation}

    @property
    def openings(self) -> int:
        """How often a breaker has opened."""
        return sum(breaker.openings for breaker in self._breakers.values())

    def is_open(self, operation: ShelfOperation) -> bool:
        """Whether nothing but probes is tried."""
        return self._breakers[operation].is_open

    def allowed(self, operation: ShelfOperation, count: int, now: float) -> int:
        """How many transfers may start. One that hangs is the probe itself: another would only hang beside it."""
        breaker = self._breakers[operation]
        hung = (flight.late and flight.operation is operation for flight in self._transfers.flights())
        return 0 if breaker.is_open and any(hung) else breaker.allow(count, now)

    def spared(self, operation: ShelfOperation, now: float) -> None:
        """None of those that were allowed has started, for want of something else."""
        self._breakers[operation].spare(now)

    def succeeded(self, operation: ShelfOperation) -> None:
        """A transfer went well."""
        self._breakers[operation].succeeded()

    def trouble(self, operation: ShelfOperation, error_number: int, now: float, at_once: bool = False) -> None:
        """A transfer failed; `at_once`: the next would meet the same."""
        breaker = self._breakers[operation]
        openings = breaker.openings
        if at_once:
            breaker.trip(now)
        else:
            breaker.failed(now)
        if breaker.openings > openings:
            name = errno.errorcode.get(error_number, str(error_number))
            log.warning("%s shelf: no more %ss for now: %s", self._tier.value, operation.value, name)
            self._transfers.cancel(operation)

    def notice_late(self, now: float) -> int:
        """A transfer that hangs counts as a failure once; returns how many more do. Flights are in order of start."""
        count = 0
        for flight in self._transfers.flights():
            if flight.seen_at is None:
                flight.seen_at = now
            if not flight.late and now - flight.seen_at > self._late_s:
                flight.late = True
                count += 1
                self.trouble(flight.operation, errno.ETIMEDOUT, now)
        return count
