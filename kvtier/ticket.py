"""What callers of a shelf say and hear: items in, tickets out, and how each transfer ended.

Values only, shared by the shelf and the store; they know no file, no thread and no rule.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.block import BlockHash, Row
from kvtier.record import Grant, Lease, Record
from kvtier.retention import PLAIN, Retention


class ShelfOperation(enum.Enum):
    """What a ticket stands for."""

    READ = "read"
    WRITE = "write"
    VERIFY = "verify"
    """Judge a leased row where it lies."""


class ShelfOutcome(enum.Enum):
    """How a transfer ended; all but DONE and DUPLICATE are misses. `value` is the key in `Shelf.stats`."""

    DONE = "done"
    DUPLICATE = "duplicate"
    """Written, but the block was there by then."""
    STALE = "stale"
    """The row was replaced or dropped meanwhile."""
    BAD_ROW = "bad_row"
    """Header or sums do not match: the record has been dropped."""
    SHORT_READ = "short_read"
    """The slab ends before the row: the record has been dropped."""
    IO_ERROR = "io_error"
    """The row may still be there."""
    NO_SPACE = "no_space"
    """The disk is full or read-only: nothing is written for a while."""
    UNANSWERED = "unanswered"
    """Written, but the keeper of the books has not said by the deadline whether it counts."""
    REFUSED = "refused"
    """The breaker opened before the transfer had started."""


class WriteItem(NamedTuple):
    """A row to write. `source` (row_bytes, 4 KiB aligned) must not change until its ticket is done."""

    block_hash: BlockHash
    depth: int
    source: Row
    sums: bytes | None = None
    """The row's slice sums if they are known (it comes from another shelf); None: computed on the worker."""
    retention: Retention = PLAIN
    intact: Callable[[], bool] | None = None
    """Asked once it is written; False: the source changed meanwhile, so the row does not count."""
    grant: Grant | None = None
    """A row that was asked for, to be used for it: it is published and leased in one step. Of the same tenant."""
    leased: bool = False
    """Publish and lease it in one step though no row was asked for."""


class ReadItem(NamedTuple):
    """A row to read into `target` (4 KiB aligned), which belongs to the read until its ticket is done, however late.

    With `layers`, a run of them, only their slices are read: one I/O, each slice held to its sum in the record, the
    row's header left out. `target` is as long as what is read.
    """

    record: Record
    target: Row
    layers: range | None = None


class ShelfDone(NamedTuple):
    """A finished transfer. After anything but DONE the bytes of a read's target mean nothing."""

    ticket: int
    operation: ShelfOperation
    outcome: ShelfOutcome
    block_hash: BlockHash
    moved_bytes: int
    duration_ns: int
    ended_ns: int = 0
    """Monotonic; 0: not known, or it never began."""
    lease: Lease | None = None
    """On the row that was written, if it is DONE and was to be leased; a `WriteItem.grant` has gone back else."""


class Reply(NamedTuple):
    """The answer to a question for rows (`grants`) or for leases (`leases`)."""

    number: int
    """Of the question."""
    grants: list[Grant] | None
    """As many as were asked for; None: they cannot be had now."""
    leases: list[Lease | None] | None
    """One for each record, None where the row is not there any more; None: it was a question for rows."""

    def refused(self) -> Reply:
        """The same with nothing given."""
        return Reply(self.number, None, None if self.leases is None else [None] * len(self.leases))


@dataclass(frozen=True, slots=True)
class ShelfLimits:
    """What bounds a shelf's work."""

    in_flight_max: int = 256
    """Reads and, separately, writes handed to the I/O engine at once."""
    waiting_max: int = 65536
    """Reads that wait for their turn; they hold nothing but their target."""
    failures_max: int = 3
    """Failures in a row that open the breaker."""
    pause_s: float = 5.0
    """From the opening of the breaker to its probe."""
    late_s: float = 5.0
    """A transfer that is in flight longer counts as a failure, once."""
