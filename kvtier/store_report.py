"""What the store tells of its tiers: gauges and counters of the metrics, and the plain numbers of `Engine.stats`.

Owns what was published last, so that sums which a shelf keeps become growth. Changes nothing, decides nothing. Owned by
the store, on the engine thread.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.block import KVLayout, Tier
from kvtier.cost import CostModel
from kvtier.host_counts import HostCounts
from kvtier.metrics import Metrics
from kvtier.resident import ResidentBlocks
from kvtier.shelf import Shelf

SHELF_REASONS = ("bad_row", "short_read", "io_error", "no_space", "unanswered")


class StoreReport:
    """See the module."""

    def __init__(
        self, layout: KVLayout, resident: ResidentBlocks, shelves: Mapping[Tier, Shelf], metrics: Metrics
    ) -> None:
        self._row_bytes = layout.row_bytes
        self._resident = resident
        self._shelves = shelves
        self._metrics = metrics
        self._totals: dict[tuple[str, str], int] = {}
        self._host_counts = HostCounts(metrics)

    def begin(self, shelf: Shelf) -> None:
        """A shelf is used from now on."""
        self._host_counts.begin(shelf)

    def end(self, tier: Tier, late: int) -> None:
        """A shelf is used no more; reads of it came late so often until now."""
        self._host_counts.end(tier)
        self._metrics.tier_used_blocks.set(0, tier.value)
        self._metrics.tier_used_bytes.set(0, tier.value)
        self._totals = {key: total for key, total in self._totals.items() if key[0] != tier.value}
        self._totals[(tier.value, "late")] = late

    def publish(self, costs: CostModel, late_counts: Mapping[Tier, int]) -> None:
        """Bring gauges and shelf counters up to date; `late_counts`: reads that came too late, by tier."""
        metrics = self._metrics
        used = dict.fromkeys(Tier, (0, 0))
        used[Tier.HBM] = self._resident.used_count, self._resident.slot_count
        for tier, shelf in self._shelves.items():
            if shelf.reports:  # else another engine does: the sum over engines is what the host holds
                used[tier] = shelf.used_count, shelf.slot_count
        for tier, (used_blocks, capacity_blocks) in used.items():
            metrics.tier_used_blocks.set(used_blocks, tier.value)
            metrics.tier_capacity_blocks.set(capacity_blocks, tier.value)
            metrics.tier_used_bytes.set(used_blocks * self._row_bytes, tier.value)
            metrics.tier_capacity_bytes.set(capacity_blocks * self._row_bytes, tier.value)
        metrics.prefill_speed.set(costs.prefill_tokens_per_second())
        self._count_evictions(Tier.HBM, self._resident.evicted_count)
        metrics.expired_blocks.add(self._growth(("hbm", "expired"), self._resident.expired_count), Tier.HBM.value)
        for tier, shelf in self._shelves.items():
            stats = shelf.stats()
            metrics.tier_read_speed.set(costs.read_bytes_per_second(tier), tier.value)
            self._count_evictions(tier, stats["evictions"])
            self._host_counts.publish(shelf, stats)
            for reason in SHELF_REASONS:
                grown = self._growth((tier.value, reason), stats[reason])
                if grown:
                    metrics.shelf_failures.add(grown, tier.value, reason)
            late = self._growth((tier.value, "late"), stats["late"] + late_counts[tier])
            if late:
                metrics.shelf_failures.add(late, tier.value, "late")

    def stats(self, costs: CostModel) -> dict[str, int]:
        """Plain numbers of the moment. Any thread."""
        values = {
            "hbm_blocks_used": self._resident.used_count,
            "hbm_blocks_total": self._resident.slot_count,
            "hbm_blocks_sealed": self._resident.sealed_count,
            "hbm_evictions": self._resident.evicted_count,
            "hbm_expired": self._resident.expired_count,
            "prefill_tokens_per_second": int(costs.prefill_tokens_per_second()),
        }
        for tier, shelf in list(self._shelves.items()):
            values |= {f"{tier.value}_{name}": value for name, value in shelf.stats().items()}
            values[f"{tier.value}_read_bytes_per_second"] = int(costs.read_bytes_per_second(tier))
        return values

    def _growth(self, key: tuple[str, str], total: int) -> int:
        grown = total - self._totals.get(key, 0)
        self._totals[key] = total
        return grown

    def _count_evictions(self, tier: Tier, total: int) -> None:
        grown = self._growth((tier.value, "evictions"), total)
        if grown:
            self._metrics.evicted_blocks.add(grown, tier.value)
            self._metrics.evicted_bytes.add(grown * self._row_bytes, tier.value)
