"""Stands in for the package beside it until the editable install is renewed; to be deleted then."""

from pathlib import Path

__path__ = [str(Path(__file__).with_suffix(""))]

from kvtier.eviction.base import BlockUse, EvictionPolicy, PolicyMaker  # noqa: E402
from kvtier.eviction.queue import EvictionQueue  # noqa: E402
from kvtier.eviction.reuse import ExpectedReuse  # noqa: E402
from kvtier.eviction.static import LeastRecentlyUsed, SmallQueueFirst  # noqa: E402

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
