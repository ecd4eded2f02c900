"""Counts slots that were asked for and refused, each once: who waits asks again and again for the same.

Knows neither why they were refused nor what they were for. Owned by whatever bounds slots: quotas, the write budget.
"""

from __future__ import annotations

TENANTS_MAX = 1024
"""Of so many tenants it is known how many slots they wait for; the one that began first is forgotten."""


class Shortage:
    """See the module."""

    def __init__(self) -> None:
        self.refused = 0
        """Slots so far."""
        self._waiting: dict[bytes, int] = {}

    def note(self, tenant: bytes, missing: int) -> None:
        """A tenant has asked and got `missing` slots fewer. Until it gets all, only what goes beyond is counted."""
        if missing == 0:
            self._waiting.pop(tenant, None)
            return
        waiting = self._waiting.get(tenant, 0)
        self.refused += max(0, missing - waiting)
        self._waiting[tenant] = max(missing, waiting)
        if len(self._waiting) > TENANTS_MAX:
            del self._waiting[next(iter(self._waiting))]
