"""What the books of a shelf say about a slot: `Grant`, `Record`, `Lease`.

Shared words of directory, header, journal and shelf; values only, they know no file and no rule. They are named tuples
and no dataclasses because a long prompt makes thousands of them on the engine thread.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from kvtier.block import BlockHash

TENANT_BYTES = 16
NO_TENANT = bytes(TENANT_BYTES)
"""The tenant of unsalted blocks."""
GENERATION_END = 1 << 62
"""No generation that is read from anywhere is as high."""


class Grant(NamedTuple):
    """A reserved slot; the generation is the proof of ownership until it is published or abandoned."""

    slot: int
    generation: int


class Record(NamedTuple):
    """One readable row: where it is and everything that its header and bytes must agree with."""

    block_hash: BlockHash
    slot: int
    generation: int
    """Grows with every reservation of the shelf; never used twice."""
    depth: int
    """Place in its chain: 0 for the block that holds the first tokens."""
    sums: bytes
    """One xxh3_64 (8 bytes) per slice, in layer order."""
    priority: int = 0
    expiry_s: int = 0
    """Unix seconds; 0: never."""
    tenant: bytes = NO_TENANT
    pinned: bool = False


class Lease(NamedTuple):
    """A counted claim on the row of a record: while it is held the slot is neither evicted nor overwritten."""

    record: Record


def tenant_digest(tenant: str) -> bytes:
    """16-byte digest under which a tenant is accounted; the name itself is never written anywhere."""
    return hashlib.sha256(tenant.encode()).digest()[:TENANT_BYTES] if tenant else NO_TENANT
