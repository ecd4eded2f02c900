"""An engine's stock of reservations on one shared shelf, so that writing needs no round trip.

Blocks without a tenant have a stock that follows what they need. A tenant with a name has none, since all of it counts
against its quota: what it lacks is asked for once, and given back if it is not used soon. Knows no socket and no clock.
Owned by shared.py, on the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.record import NO_TENANT, Grant

IDLE_S = 1.0
"""What was not used that long is given back, down to the floor."""
FLOOR_MAX = 64
DAY_SHARE = 1 / 64
"""Of what may be written in a day, that may lie here idle: it counts as written."""


class Stock:
    """See the module. `supplied`: grants have come since the last `take`."""

    def __init__(self, slot_count: int, batch_max: int, day_slots: int | None = None) -> None:
        """`batch_max`: slots that are wanted at once at most; fewer if the shelf is small.

        `day_slots`: how many may be written in a day, None for any number.
        """
        self.supplied = False
        self._batch_max = max(1, min(batch_max, slot_count // 4))
        day_share = FLOOR_MAX if day_slots is None else int(DAY_SHARE * day_slots)
        self._floor = max(1, min(FLOOR_MAX, slot_count // 32, day_share))
        self._grants: dict[bytes, list[Grant]] = {}
        self._wanted: dict[bytes, int] = {}
        self._used_at: dict[bytes, float] = {}
        self._asked: dict[int, tuple[bytes, int, float]] = {}
        """Tenant, count and deadline of each question."""
        self._late: dict[int, bytes] = {}
        """Tenants of questions that nobody has answered in time, and may yet."""

    def __len__(self) -> int:
        return sum(map(len, self._grants.values()))

    def count(self, tenant: bytes) -> int:
        """Reservations that lie here for a tenant."""
        return len(self._grants.get(tenant, ()))

    def take(self, count: int, tenant: bytes, now: float) -> list[Grant]:
        """Up to `count` reservations; what is missing is wanted from now on."""
        stock = self._grants.get(tenant, [])
        grants = stock[:count]
        del stock[:count]
        self.supplied = False
        self._used_at[tenant] = now
        if tenant == NO_TENANT:
            self.want(count)
        elif len(grants) < count:
            self._wanted[tenant] = count - len(grants)
        return grants

    def want(self, count: int) -> None:
        """At least so many shall lie here for blocks without a tenant."""
        self._wanted[NO_TENANT] = max(self._wanted.get(NO_TENANT, self._floor), min(count, self._batch_max))

    def missing(self) -> list[tuple[bytes, int]]:
        """What to ask for: (tenant, count); one question a tenant at a time, and all with a name within one batch."""
        lacking = [(tenant, wanted) for tenant, wanted in self._wanted.items() if wanted > self.count(tenant)]
        if not lacking:
            return []
        asking = {tenant: count for tenant, count, _ in self._asked.values()}
        named = [len(stock) for tenant, stock in self._grants.items() if tenant != NO_TENANT]
        room = self._batch_max - sum(named) - sum(count for tenant, count in asking.items() if tenant != NO_TENANT)
        missing: list[tuple[bytes, int]] = []
        for tenant, wanted in lacking:
            count = wanted - self.count(tenant)
            if tenant != NO_TENANT:
                count = min(count, room)
            if count > 0 and tenant not in asking:
                missing.append((tenant, count))
                room -= count if tenant != NO_TENANT else 0
        return missing

    def asked(self, number: int, tenant: bytes, count: int, deadline: float) -> None:
        """A question is on its way."""
        self._asked[number] = tenant, count, deadline

    def answered(self, number: int, grants: Sequence[Grant], now: float) -> bool:
        """Reservations have come, in time or late; False if nobody here has asked for them."""
        tenant = self._asked.pop(number)[0] if number in self._asked else self._late.pop(number, None)
        if tenant is None:
            return False
        if grants:
            self._grants.setdefault(tenant, []).extend(grants)
            self.supplied = True
        if tenant != NO_TENANT:
            self._used_at[tenant] = now
        if tenant != NO_TENANT or not grants:
            self._wanted.pop(tenant, None)
        return True

    def expire(self, now: float) -> None:
        """Give up on questions whose deadline has passed."""
        for number in [number for number, (_, _, deadline) in self._asked.items() if deadline <= now]:
            self._late[number] = self._asked.pop(number)[0]

    def idle(self, now: float) -> list[Grant]:
        """Take out what lies idle, to be given back."""
        idle: list[Grant] = []
        for tenant in [tenant for tenant, used_at in self._used_at.items() if now - used_at >= IDLE_S]:
            del self._used_at[tenant]
            self._wanted.pop(tenant, None)
            stock = self._grants.get(tenant, [])
            if tenant == NO_TENANT:
                self.want(0)
            kept = self._floor if tenant == NO_TENANT else 0
            idle += stock[kept:]
            del stock[kept:]
            if not stock:
                self._grants.pop(tenant, None)
        return idle

    def line_lost(self) -> None:
        """Nothing that was asked will be answered."""
        self._asked.clear()
        self._late.clear()

    def held(self) -> list[Grant]:
        """All that lies here."""
        return [grant for stock in self._grants.values() for grant in stock]

    def part_with(self) -> list[Grant]:
        """Take all out, to be given back; what is wanted stays so."""
        grants = self.held()
        self._grants.clear()
        return grants

    def clear(self) -> None:
        """None of it is ours any more."""
        self._grants.clear()
        self._wanted.clear()
