"""Who goes when a tier is full: policies, and the queue that keeps candidates in their order.

The HBM prefix index and the directory of every shelf own one queue each. Pure books: no I/O, no clock.
"""

from kvtier.eviction.base import BlockUse, EvictionPolicy, PolicyMaker
from kvtier.eviction.queue import EvictionQueue
from kvtier.eviction.reuse import ExpectedReuse
from kvtier.eviction.static import LeastRecentlyUsed, SmallQueueFirst

POLICIES: dict[str, PolicyMaker] = {
    LeastRecentlyUsed.name: LeastRecentlyUsed,
    SmallQueueFirst.name: SmallQueueFirst,
    ExpectedReuse.name: ExpectedReuse,
}

__all__ = [
    "POLICIES",
    "BlockUse",
    "EvictionPolicy",
    "EvictionQueue",
    "ExpectedReuse",
    "LeastRecentlyUsed",
    "PolicyMaker",
    "SmallQueueFirst",
]
