"""What a shelf's books count, as metrics of the host: of the engines that share a shelf one reports, as with gauges.

A counter grows by what happens while this engine reports, not by what the books counted before. Owned by the store,
called on the engine thread.
"""

from __future__ import annotations

from kvtier.block import Tier
from kvtier.metrics import Counter, Metrics
from kvtier.shelf import Shelf


class HostCounts:
    """See the module."""

    def __init__(self, metrics: Metrics) -> None:
        self._pinned = metrics.pinned_blocks
        self._families: dict[str, Counter] = {
            "expired": metrics.expired_blocks,
            "pins_refused": metrics.pins_refused,
            "quota_refused": metrics.quota_refused,
            "write_budget_refused": metrics.write_budget_refused,
        }
        """By the key of `Shelf.stats`."""
        self._seen: dict[Tier, dict[str, int] | None] = {}
        """Totals when they were published last; None: this engine did not report then."""

    def begin(self, shelf: Shelf) -> None:
        """A shelf is used from now on."""
        self._seen[shelf.tier] = shelf.stats() if shelf.reports else None

    def publish(self, shelf: Shelf, stats: dict[str, int]) -> None:
        """Bring the metrics up to date with `Shelf.stats`."""
        tier, seen = shelf.tier, self._seen[shelf.tier]
        self._seen[tier] = stats if shelf.reports else None
        self._pinned.set(stats["pinned"] if shelf.reports else 0, tier.value)
        if seen is None or not shelf.reports:
            return
        for name, family in self._families.items():
            grown = stats[name] - seen[name]
            if grown > 0:
                family.add(grown, tier.value)

    def end(self, tier: Tier) -> None:
        """A shelf is used no more."""
        self._pinned.set(0, tier.value)
