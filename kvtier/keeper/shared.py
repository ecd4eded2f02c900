"""`Books` that engines share: a mirror to look things up in, a stock of reservations to write with, a keeper to ask.

Looking up, reserving and dropping cost no round trip; publishing is answered later, or not in time. While the keeper is
away finds go on from the mirror, writes from what is left of the stock, and on its return it is told what is held.
All on the engine thread. Owned by the shelves of one layout, by way of their `Link`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvtier.block import BlockHash
from kvtier.directory import PublishOutcome
from kvtier.keeper.link import Link
from kvtier.keeper.mirror import Mirror
from kvtier.keeper.slot_table import SlotTable
from kvtier.keeper.wire import (
    ROWS_MAX,
    Abandon,
    Acquire,
    Acquired,
    Drop,
    Gone,
    Granted,
    Here,
    Numbers,
    Publish,
    Published,
    Release,
    Reserve,
    Snapshot,
    Touch,
    as_claims,
    as_rows,
    pieces,
)
from kvtier.record import NO_TENANT, Grant, Lease, Record

ANSWER_S = 5.0
"""What the keeper gets to answer in."""
TOUCH_S = 0.1
"""Uses are sent in batches that far apart."""
IDLE_S = 1.0
"""A stock that was not used that long shrinks to its floor."""
STOCK_FLOOR_MAX = 64
USES_MAX = 65536
"""Blocks whose uses wait to be told; those of more are forgotten."""
BUSY_BACKLOG = 16
"""Uses are not told while so many messages wait already."""
_OUTCOMES = (PublishOutcome.PUBLISHED, PublishOutcome.DUPLICATE, PublishOutcome.STALE)


class SharedBooks:
    """`Books` over a link. See the module."""

    def __init__(self, tier_index: int, slot_count: int, table: SlotTable, link: Link, batch_max: int) -> None:
        """`batch_max`: slots that are wanted at once at most."""
        self.tier_index = tier_index
        self.used_slots = 0
        self.evictions = 0
        self._table = table
        self._link = link
        self._slot_count = slot_count
        self._batch_max = max(1, min(batch_max, slot_count // 4, ROWS_MAX))
        self._floor = max(1, min(STOCK_FLOOR_MAX, slot_count // 32))
        self._mirror = Mirror(slot_count)
        self._coming: Mirror | None = None
        self._stock: dict[bytes, list[Grant]] = {NO_TENANT: []}
        self._wanted: dict[bytes, int] = {}
        self._asked: dict[int, tuple[bytes, float]] = {}
        self._out: dict[int, Grant] = {}
        """By slot: granted and being written, or published and not answered for."""
        self._questions: dict[int, tuple[list[Record], float]] = {}
        """Published and not answered for, by the number of the question; each ends at its deadline."""
        self._leased: set[Grant] = set()
        self._lease_questions: dict[int, tuple[list[Record], float]] = {}
        self._lease_answers: dict[int, list[Lease | None]] = {}
        self._answers: list[tuple[Record, PublishOutcome | None]] = []
        self._uses: list[tuple[Sequence[BlockHash], float, bool]] = []
        self._uses_count = 0
        self._told_uses_at = 0.0
        self.whole = False
        """The mirror has been filled once."""
        self._reserved_at = 0.0
        link.add(self)

    def __repr__(self) -> str:
        return f"SharedBooks(known={len(self._mirror)}, stock={self._stock_count()}, line={self._link.line})"

    # ---- `Books` ---------------------------------------------------------------------------------------------------

    def find(self, hashes: Sequence[BlockHash]) -> list[Record]:
        """See `Books`."""
        return self._mirror.find(hashes)

    def holds(self, block_hash: BlockHash) -> bool:
        """See `Books`."""
        return self._mirror.get(block_hash) is not None

    def touch(self, hashes: Sequence[BlockHash], now: float) -> None:
        """See `Books`: noted here, sent in batches."""
        self._note(hashes, now, counts=True)

    def stamp(self, hashes: Sequence[BlockHash], now: float) -> None:
        """See `Books`: noted here, sent in batches."""
        self._note(hashes, now, counts=False)

    def reserve(self, count: int, tenant: bytes) -> list[Grant]:
        """See `Books`: from the stock. What it lacks is asked for, and there the next time."""
        stock = self._stock.setdefault(tenant, [])
        grants = stock[:count]
        del stock[:count]
        out = self._out
        for grant in grants:
            out[grant[0]] = grant
        self._reserved_at = time.monotonic()
        self._wanted[tenant] = max(self._wanted.get(tenant, 0), min(count, self._batch_max))
        self._top_up(self._reserved_at)
        return grants

    def publish(self, records: Sequence[Record], now: float) -> None:
        """See `Books`."""
        for piece in pieces(records):
            self._ask_to_publish(piece, now + ANSWER_S)

    def answers(self, now: float) -> list[tuple[Record, PublishOutcome | None]]:
        """See `Books`. Also what the books do by themselves: listen, top up, give back, tell of uses."""
        self._link.pump(now)
        self._expire(now)
        self._top_up(now)
        self._shrink()
        self._tell_uses(now)
        answers, self._answers = self._answers, []
        return answers

    def abandon(self, grants: Sequence[Grant]) -> None:
        """See `Books`. A keeper that is away learns of it when it greets."""
        for grant in grants:
            self._out.pop(grant.slot, None)
        for piece in pieces(grants):
            self._link.send(Abandon(self.tier_index, as_claims(piece)))

    def drop(self, records: Sequence[Record]) -> list[Record]:
        """See `Books`."""
        mine = [record for record in records if self._mirror.get(record.block_hash) == record]
        self._mirror.remove(record.slot for record in mine)
        there = [record for record in mine if self._table.is_ready(record.slot, record.generation)]
        for piece in pieces((record.slot, record.generation) for record in there):
            self._link.send(Drop(self.tier_index, as_claims(piece)))
        return there

    def acquire(self, records: Sequence[Record]) -> list[Lease | None]:
        """See `Books`: holds nothing; `intact` tells afterwards whether somebody else was granted the slot."""
        return [Lease(record) if self._table.is_ready(record.slot, record.generation) else None for record in records]

    def intact(self, lease: Lease) -> bool:
        """See `Books`. A slot's entry changes before anybody may write into it."""
        return self._table.is_ready(lease.record.slot, lease.record.generation)

    def release(self, leases: Sequence[Lease]) -> None:
        """See `Books`."""

    def coldest(self, count: int) -> list[Record]:
        """See `Books`, as far as this engine's own uses tell."""
        return self._mirror.oldest(count)

    def check(self) -> None:
        """See `Books`."""
        self._mirror.check()
        held = self.held()
        assert len(held) == len(set(held)), "a grant is held twice"

    def ask_leases(self, records: Sequence[Record], now: float) -> int:
        """Ask for leases that hold their rows in place; the number under which `leases` answers."""
        number = self._link.number()
        self._lease_questions[number] = (list(records), now + ANSWER_S)
        deadline_ns = time.monotonic_ns() + int(ANSWER_S * 1e9)
        claims = as_claims((record.slot, record.generation) for record in records)
        self._link.send(Acquire(number, self.tier_index, claims, deadline_ns))
        return number

    def leases(self, now: float) -> dict[int, list[Lease | None]]:
        """Answers to `ask_leases` since the last call; none of the rows is held if nobody has answered in time."""
        self._link.pump(now)
        for number in [number for number, (_, deadline) in self._lease_questions.items() if deadline <= now]:
            records, _ = self._lease_questions.pop(number)
            self._lease_answers[number] = [None] * len(records)
        answers, self._lease_answers = self._lease_answers, {}
        return answers

    def end_leases(self, leases: Sequence[Lease]) -> None:
        """Give leases back, once nothing uses their rows any more."""
        claims = [Grant(lease.record.slot, lease.record.generation) for lease in leases]
        self._leased.difference_update(claims)
        for piece in pieces(claims):
            self._link.send(Release(self.tier_index, as_claims(piece)))

    def close(self) -> None:
        """Give everything back."""
        self.abandon([grant for stock in self._stock.values() for grant in stock])
        self.abandon(list(self._out.values()))
        self._stock.clear()

    @property
    def current(self) -> bool:
        """The mirror is that of the keeper that is there."""
        return self.whole and self._coming is None

    # ---- from the link ---------------------------------------------------------------------------------------------

    def held(self) -> list[Grant]:
        """Every grant that this engine has."""
        return [*self._out.values(), *(grant for stock in self._stock.values() for grant in stock)]

    def held_leases(self) -> list[Grant]:
        """Every lease that this engine has."""
        return list(self._leased)

    def joined(self, now: float) -> None:
        """There is a keeper: ask again what was not answered."""
        self._coming = Mirror(self._slot_count)
        unanswered, self._questions = self._questions, {}
        for records, deadline in unanswered.values():
            self._ask_to_publish(records, deadline)
        self._wanted.setdefault(NO_TENANT, self._floor)
        self._top_up(now)

    def lost(self) -> None:
        """There is none: what was asked is not answered any more."""
        self._asked.clear()

    def end(self) -> None:
        """The shelf is gone with its directory."""
        self.lost()
        self._mirror = Mirror(self._slot_count)
        self._stock.clear()
        self._answers += [(record, None) for records, _ in self._questions.values() for record in records]
        self._questions.clear()

    def told(self, message: Gone | Here | Snapshot | Numbers) -> None:
        """An event of the keeper's."""
        if isinstance(message, Numbers):
            self.used_slots = message.used_slots
            return
        mirror = self._mirror if self._coming is None else self._coming
        if isinstance(message, Gone):
            mirror.remove(message.slots)
            return
        mirror.add(message.rows)
        if isinstance(message, Snapshot) and message.last:
            self._mirror, self._coming, self.whole = mirror, None, True

    def answered(self, message: Granted | Published | Acquired) -> bool:
        """An answer; whether the question was ours."""
        if isinstance(message, Acquired):
            return self._take_leases(message)
        if isinstance(message, Granted):
            asked = self._asked.pop(message.number, None)
            if asked is None:
                return False
            self._stock.setdefault(asked[0], []).extend(message.grants)
            self.evictions += message.evicted_count
            if not message.grants and asked[0] in self._wanted:
                del self._wanted[asked[0]]
            return True
        question = self._questions.pop(message.number, None)
        if question is None:
            return False
        records, _ = question
        outcomes = list(map(_OUTCOMES.__getitem__, message.outcomes))
        here = records
        if any(message.outcomes):
            here = [r for r, outcome in zip(records, outcomes, strict=False) if outcome is PublishOutcome.PUBLISHED]
        (self._mirror if self._coming is None else self._coming).add(here)
        for record in records:
            self._out.pop(record.slot, None)
        self._answers += zip(records, outcomes, strict=False)
        return True

    def _take_leases(self, message: Acquired) -> bool:
        asked = self._lease_questions.pop(message.number, None)
        if asked is None:
            return False
        leases = [Lease(record) if got else None for record, got in zip(asked[0], message.granted, strict=False)]
        self._leased.update(Grant(lease.record.slot, lease.record.generation) for lease in leases if lease is not None)
        self._lease_answers[message.number] = leases
        return True

    # ---- by itself -------------------------------------------------------------------------------------------------

    def _ask_to_publish(self, records: list[Record], deadline: float) -> None:
        number = self._link.number()
        self._questions[number] = (records, deadline)
        deadline_ns = time.monotonic_ns() + int(ANSWER_S * 1e9)
        self._link.send(Publish(number, self.tier_index, as_rows(records), deadline_ns))

    def _expire(self, now: float) -> None:
        """End what nobody has answered; the row is given back, which is void if it was published after all."""
        for number in [number for number, (_, deadline) in self._questions.items() if deadline <= now]:
            records, _ = self._questions.pop(number)
            self._answers += [(record, None) for record in records]
            self.abandon([Grant(record.slot, record.generation) for record in records])
        for number in [number for number, (_, deadline) in self._asked.items() if deadline <= now]:
            del self._asked[number]

    def _top_up(self, now: float) -> None:
        """Ask for reservations where fewer lie in stock than are wanted; one question a tenant at a time."""
        for tenant, wanted in self._wanted.items():
            missing = wanted - len(self._stock.get(tenant, ()))
            if missing <= 0 or any(asked == tenant for asked, _ in self._asked.values()):
                continue
            number = self._link.number()
            deadline_ns = time.monotonic_ns() + int(ANSWER_S * 1e9)
            if self._link.send(Reserve(number, self.tier_index, missing, tenant, deadline_ns)):
                self._asked[number] = (tenant, now + ANSWER_S)

    def _shrink(self) -> None:
        """Give back what lies idle beyond the floor."""
        if self._reserved_at == 0.0 or time.monotonic() - self._reserved_at < IDLE_S:
            return
        self._reserved_at = 0.0
        self._wanted = {NO_TENANT: self._floor}
        for tenant, stock in list(self._stock.items()):
            kept = self._floor if tenant == NO_TENANT else 0
            self.abandon([stock.pop() for _ in range(len(stock) - kept)])

    def _note(self, hashes: Sequence[BlockHash], now: float, counts: bool) -> None:
        self._mirror.touch(hashes)
        if self._uses_count + len(hashes) <= USES_MAX:
            self._uses.append((list(hashes), now, counts))
            self._uses_count += len(hashes)

    def _tell_uses(self, now: float) -> None:
        if not self._uses or now - self._told_uses_at < TOUCH_S or self._link.client.backlog > BUSY_BACKLOG:
            return
        self._told_uses_at = now
        uses, self._uses, self._uses_count = self._uses, [], 0
        for hashes, at, counts in uses:
            for piece in pieces(hashes):
                self._link.send(Touch(self.tier_index, at, counts, piece))

    def _stock_count(self) -> int:
        return sum(map(len, self._stock.values()))
