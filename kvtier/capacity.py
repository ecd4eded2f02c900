"""What one sequence could ever hold: in HBM alone, or streamed, with rows on the shelves.

Sums only, for intake: whether it can be had now is found out when the sequence asks. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.block import KVLayout, Tier
from kvtier.byte_text import free_text, needed_text
from kvtier.config import EngineConfig
from kvtier.record import NO_TENANT
from kvtier.store import Store


@dataclass(frozen=True, slots=True)
class Capacity:
    """See the module."""

    config: EngineConfig
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
        """What so many tokens need, what there is, and the keys that would let them in, for an error."""
        row_bytes = self.layout.row_bytes
        needed, all_hbm = (count * row_bytes for count in (self.layout.block_count(tokens), self.store.usable_count))
        if not self.slots_max:
            return (
                f"tiers.hbm.bytes holds {self.hbm_tokens}: they need {needed_text(needed)} and there are "
                f"{free_text(all_hbm)}; {way_out(self.config, 0, True)}"
            )
        hbm = self.slots_max * row_bytes
        dram, nvme = (self._rows(tier, tenant) * row_bytes for tier in (Tier.DRAM, Tier.NVME))
        streamed = hbm + dram + nvme
        text = f"they need {needed_text(needed)} and there are {free_text(max(streamed, all_hbm))}"
        if streamed < all_hbm:
            text += f" in HBM alone or, streamed, {free_text(streamed)}"
        quotas = [f"tiers.{tier.value}.tenant_bytes" for tier in self.tenant_max if self._is_at_quota(tier, tenant)]
        nvme_is_short = nvme == self._all_rows(Tier.NVME) * row_bytes
        remedy = f"raise {' and '.join(quotas)}" if quotas else way_out(self.config, self.slots_max, nvme_is_short)
        return (
            f"{text}: of HBM {free_text(hbm)} for each of scheduler.streamed_max requests, of DRAM {free_text(dram)}, "
            f"of NVMe {free_text(nvme)}; {remedy}"
        )

    def _all_rows(self, tier: Tier) -> int:
        return self.store.capacities().get(tier.value, self.configured.get(tier, 0))

    def _usable_rows(self, tier: Tier) -> int:
        """Those of all that one sequence can have, if no quota bounds it."""
        rows = self._all_rows(tier)
        return min(rows, self.store.hand_down.staged_max, self.day_max or rows) if tier is Tier.NVME else rows

    def _is_at_quota(self, tier: Tier, tenant: bytes) -> bool:
        """Whether it is the tenant's quota that bounds it there."""
        return self._rows(tier, tenant) < self._usable_rows(tier)

    def _rows(self, tier: Tier, tenant: bytes) -> int:
        rows, quota = self._usable_rows(tier), self.tenant_max.get(tier, 0)
        return min(rows, quota) if quota and tenant != NO_TENANT else rows


def way_out(config: EngineConfig, working_set: int, nvme_is_short: bool) -> str:
    """What to change so that a context that is refused finds a place.

    `working_set`: slots of HBM for a streamed one. `nvme_is_short`: it could have all rows of NVMe that there are.
    """
    if not config.tiers.dram.bytes:
        return "raise tiers.hbm.bytes, or give tiers.dram.bytes: contexts larger than HBM need DRAM"
    if not config.scheduler.streamed_max:
        return "raise tiers.hbm.bytes, or scheduler.streamed_max above 0: contexts larger than HBM are off"
    if not working_set:
        return "raise tiers.hbm.bytes: it is too small for contexts larger than it"
    if nvme_is_short:
        return "raise tiers.dram.bytes or tiers.nvme.bytes"
    day = " tiers.nvme.write_bytes_day and" if config.tiers.nvme.write_bytes_day else ""
    return (
        f"raise tiers.dram.bytes, or what bounds what can lie on NVMe:{day} tiers.dram.staging_bytes, at most half of "
        "DRAM"
    )
