"""What the operator of a shelf allows: a share of pins, bytes for each tenant, bytes written in a day.

Values only. Made from the configuration, sent to the keeper with the greeting, and turned into slots where a shelf is
opened.
"""

from __future__ import annotations

from typing import NamedTuple


class SlotLimits(NamedTuple):
    """The same for the slots of one shelf."""

    pins_max: int
    tenant_max: int | None
    """Slots that a tenant with a name may have; None: any."""


class Terms(NamedTuple):
    """Of one shelf."""

    pin_share: float = 0.25
    """Of the slots, that may hold pinned rows."""
    tenant_bytes: int = 0
    """Bytes that a tenant with a name may take, headers and all; 0: any."""
    write_bytes_day: int = 0
    """Bytes that may be written within 24 hours; 0: any."""

    def limits(self, slot_count: int, slot_bytes: int) -> SlotLimits:
        """In slots of a shelf that has so many, of so many bytes each."""
        tenant_max = self.tenant_bytes // slot_bytes
        bounded = self.tenant_bytes > 0 and tenant_max < slot_count
        return SlotLimits(int(self.pin_share * slot_count), tenant_max if bounded else None)

    def day_slots(self, slot_bytes: int) -> int | None:
        """Slots of so many bytes that may be written within 24 hours; None: any number."""
        return self.write_bytes_day // slot_bytes if self.write_bytes_day else None


STANDARD = Terms()
