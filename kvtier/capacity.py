"""What one sequence could ever hold: in HBM alone, or streamed, with rows on the shelves.

Sums only, for intake: whether it can be had now is found out when the sequence asks. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.block import KVLayout, Tier
from kvtier.byte_text import free_text, needed_text
from kvtier.record import NO_TENANT
from kvtier.store import Store


@dataclass(frozen=True, slots=True)
class Capacity:
    """See the module."""

    store: Store
    slots_max: int
    """Slots of HBM that a streamed sequence may hold; 0: none is streamed."""
    configured: Mapping[Tier, int]
    """Rows of a shelf that may open later."""
    tenant_max: Mapping[Tier, int]
    """Rows that a tenant with a name may have; 0: any."""
    day_max: int
    """Rows that may be written to NVMe in a day; 0: any."""

    @property
    def layout(self) -> KVLayout:
        """Of a row."""
        return self.store.layout

    @property
    def hbm_tokens(self) -> int:
        """Of a sequence that is not streamed."""
        return self.store.usable_count * self.layout.block_tokens

    def tokens(self, tenant: bytes) -> int:
        """Of the longest sequence that a tenant can have, streamed or not."""
        if not self.slots_max:
            return self.hbm_tokens
        blocks = self.slots_max + sum(self._rows(tier, tenant) for tier in (Tier.DRAM, Tier.NVME))
        return max(self.hbm_tokens, blocks * self.layout.block_tokens)

    def shortage(self, tokens: int, tenant: bytes) -> str:
        """What so many tokens need and what there is, for an error."""
        row_bytes = self.layout.row_bytes
        needed, all_hbm = (count * row_bytes for count in (self.layout.block_count(tokens), self.store.usable_count))
        if not self.slots_max:
            return (
                f"tiers.hbm.bytes holds {self.hbm_tokens}: they need {needed_text(needed)} and there are "
                f"{free_text(all_hbm)}, and contexts larger than HBM are off"
            )
        hbm = self.slots_max * row_bytes
        dram, nvme = (self._rows(tier, tenant) * row_bytes for tier in (Tier.DRAM, Tier.NVME))
        streamed = hbm + dram + nvme
        text = f"they need {needed_text(needed)} and there are {free_text(max(streamed, all_hbm))}"
        if streamed < all_hbm:
            text += f" in HBM alone or, streamed, {free_text(streamed)}"
        return (
            f"{text}: of HBM {free_text(hbm)} for each of scheduler.streamed_max requests, of DRAM {free_text(dram)}, "
            f"of NVMe {free_text(nvme)}"
        )

    def _rows(self, tier: Tier, tenant: bytes) -> int:
        rows = self.store.capacities().get(tier.value, self.configured.get(tier, 0))
        if tier is Tier.NVME:
            rows = min(rows, self.store.hand_down.staged_max, self.day_max or rows)
        quota = self.tenant_max.get(tier, 0)
        return min(rows, quota) if quota and tenant != NO_TENANT else rows
