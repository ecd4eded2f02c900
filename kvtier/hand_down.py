"""Hand-down: finding and making homes on the shelves for the blocks of streamed sequences.

Asks shelves for rows and leases, writes blocks from HBM into those rows, has rows of others judged, and sees what is
lost. Everything is asynchronous: an answer is taken in `pump`, the end of a transfer in `completed`. Knows no sequence.
Owned by the store, on the engine thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.block import BlockHash, Tier
from kvtier.demotion import Demoter
from kvtier.homes import RETRY_S, Home, Homes, Move
from kvtier.lease_asking import LeaseAsking
from kvtier.metrics import Metrics
from kvtier.record import Lease, Record
from kvtier.resident import ResidentBlocks
from kvtier.retention import Retention
from kvtier.row_asking import RowAsking
from kvtier.row_writing import RowWriting
from kvtier.shelf import Shelf, ShelfDone, ShelfOutcome
from kvtier.tiers.arena import Arena

ROUNDS_MAX = 64
"""Questions and answers in one call, where the books answer at once."""


class HandDown:
    """See the module."""

    def __init__(
        self,
        resident: ResidentBlocks,
        arena: Arena,
        shelves: Mapping[Tier, Shelf],
        metrics: Metrics,
        demoter: Demoter,
    ) -> None:
        self._resident = resident
        self._shelves = shelves
        self._demoter = demoter
        self._homes: list[Homes] = []
        self._writes = RowWriting(shelves, arena, metrics)
        self._leases = LeaseAsking(shelves, self._settle, self._try_again)
        self._rows = RowAsking(shelves, self._leases)
        self._pumped_at = 0.0

    @property
    def staged_max(self) -> int:
        """Blocks of one sequence that may lie on NVMe."""
        return self._rows.staged_max

    def allow_nvme(self, blocks_max: int) -> None:
        """So many blocks of one sequence may lie on NVMe; 0, at first: none, they could not be staged."""
        self._rows.staged_max = blocks_max

    def awaits(self, tier: Tier) -> bool:
        """A question to a shelf is unanswered."""
        return self._rows.awaits(tier) or self._leases.awaits(tier)

    @property
    def moving_count(self) -> int:
        """Blocks being written or judged."""
        return len(self._writes) + self._leases.judging_count

    def open(self, needed: int, tenant: bytes, private: bool) -> Homes:
        """Homes for a sequence whose first `needed` blocks must find one."""
        self._homes.append(homes := Homes(needed, tenant, private))
        return homes

    def find(self, hashes: Sequence[BlockHash]) -> list[Record]:
        """What of the leading run of `hashes` could be attended in place."""
        return dram.find(hashes) if (dram := self._shelf(Tier.DRAM)) is not None else []

    def knows(self, block_hash: BlockHash) -> bool:
        """Whether a block need not be computed."""
        return self._resident.find(block_hash) is not None or any(s.holds(block_hash) for s in self._shelves.values())

    def lease_prefix(self, homes: Homes, hashes: Sequence[BlockHash]) -> None:
        """Let DRAM's rows of a prompt's blocks become their homes, and NVMe's of the last ones if other rows lack."""
        homes.prefix = hashes = hashes[: homes.needed]  # leases on others would not count for it, and take rows
        records = {index: rows[0] for index, block_hash in enumerate(hashes) if (rows := self.find([block_hash]))}
        if records:
            self._leases.begin(homes, Tier.DRAM, records)

    def lease(self, homes: Homes, first: int, records: Sequence[Record]) -> None:
        """Let DRAM's rows of blocks `first ..` become their homes, unless one has gone or is bad."""
        self._leases.begin(homes, Tier.DRAM, {first + place: record for place, record in enumerate(records)})

    def hand_down(
        self,
        homes: Homes,
        index: int,
        block_hash: BlockHash,
        slot: int,
        retention: Retention,
        now: float,
        private_hash: BlockHash | None = None,
    ) -> None:
        """Find a home for a full block in HBM, or make it one; its slot is held until then.

        In private homes nobody else finds its row, unless there is a `private_hash`: then only if others have the block
        already is that the row's name.
        """
        assert index < homes.needed and not homes.closed
        if index not in homes.found and index not in homes.moves:
            self._resident.hold([slot])
            homes.moves[index] = Move(homes, index, block_hash, slot, retention, now, private_hash=private_hash)

    def disown(self, homes: Homes, index: int) -> None:
        """The row of this block cannot be read: it is lost to all."""
        home = homes.found[index]
        self._shelves[home.tier].drop([home.lease.record], "unreadable")
        homes.lost.add(index)
        homes.unreadable.append(home)

    def give_up(self, homes: Homes, index: int) -> None:
        """Nothing uses the home of this block any more."""
        home = homes.take(index)
        if home not in homes.unreadable:
            self._part_with(home)

    def close(self, homes: Homes, now: float) -> None:
        """The sequence is over: all goes back, what is under way or waits for NVMe once that has ended."""
        homes.closed = True
        self._leases.leave(homes)
        for tier, grants in homes.rows.items():
            if grants:
                self._shelves[tier].holdings.give_rows(grants)
                homes.rows[tier] = []
        for index in sorted(homes.found, reverse=True):  # the last ones are those that DRAM would evict first
            home, lost = homes.found[index], index in homes.lost
            taken = home.tier is Tier.DRAM and not (home.private or lost) and self._demoter.take_over(home.lease, now)
            homes.take(index) if taken else self.give_up(homes, index)
        self._part_with_unreadable(homes)
        for move in list(homes.waiting()):
            self._forget(move)
        self._retire(homes)
        self._demoter.room_came()

    def completed(self, tier: Tier, done: ShelfDone, now: float) -> bool:
        """A transfer has ended; False if it was none of its own."""
        if self._leases.completed(tier, done, now):
            return True
        move = self._writes.completed(tier, done)
        if move is None:
            return False
        if done.lease is None:
            if done.outcome is ShelfOutcome.DUPLICATE and move.private_hash is not None:
                move.hide()
            self._try_again(move, now if done.outcome is ShelfOutcome.DUPLICATE else now + RETRY_S)
            return True
        self._settle(move, tier, done.lease)
        if tier is Tier.DRAM and not move.private:  # on NVMe only since DRAM had no more rows: no copy there, either
            self._demoter.sealed(move.block_hash, move.index)
        return True

    def pump(self, now: float) -> bool:
        """Take answers, ask for what is lacking, start what can move; whether anything was answered."""
        self._pumped_at = now
        self._note_losses()
        answered = False
        for _ in range(ROUNDS_MAX):
            for homes in self._homes:
                self._rows.ask(homes, now)
                if not (homes.asking or homes.is_leasing) and homes.lacking <= 0:
                    self._leases.judge(homes, now)
            self._start_moves(now)
            replies = [(tier, reply) for tier, shelf in self._shelves.items() for reply in shelf.holdings.replies()]
            if not replies:
                break
            answered = True
            for tier, reply in replies:
                if not self._leases.take(tier, reply, now):
                    self._rows.take(tier, reply, now)
            for homes in list(self._homes):
                self._retire(homes)
        if any(homes.refused and homes.lacking > 0 for homes in self._homes):
            if not any(homes.begun for homes in self._homes):
                self._demoter.copy_leases.lacking(now)
            for homes in self._homes:  # rather the same places once more than none
                self._part_with_unreadable(homes)
        return answered

    def retries(self) -> list[float]:
        """When what was refused is to be tried again."""
        times = [homes.retry_at for homes in self._homes if homes.lacking > 0]
        times += [move.retry_at for homes in self._homes for move in homes.waiting()]
        return [time for time in times if time > self._pumped_at]

    def frees_slots(self, since: float) -> bool:
        """A write started after `since` is all that holds some slot of HBM."""
        slots = self._writes.slots(since)
        return any(self._resident.holds(slot) == 1 for slot in slots)

    def holds(self) -> list[int]:
        """One entry for each hold on a slot of HBM (for `Store.check`)."""
        return [move.slot for homes in self._homes for move in homes.moves.values() if move.slot is not None]

    def check(self) -> None:
        """Assert that no row and no lease is lost or forgotten."""
        for homes in self._homes:
            homes.check()
        for tier, shelf in self._shelves.items():
            held = sum(homes.held(tier) for homes in self._homes)
            held += self._leases.held(tier) + self._demoter.copy_leases.held(tier)
            assert held == len(shelf.holdings), (tier, held, len(shelf.holdings))

    def _shelf(self, tier: Tier) -> Shelf | None:
        shelf = self._shelves.get(tier)
        return None if shelf is None or shelf.is_lost else shelf

    def _start_moves(self, now: float) -> None:
        for homes in self._homes:
            found: dict[Tier, list[tuple[Move, Record]]] = {Tier.DRAM: [], Tier.NVME: []}
            writes: dict[Tier, list[Move]] = {Tier.DRAM: [], Tier.NVME: []}
            for move in homes.waiting():
                if now < move.retry_at:
                    continue
                there = None if homes.private else self._there(homes, move.block_hash, len(found[Tier.NVME]))
                if there is not None:
                    self._shelves[there[0]].retain([move.block_hash], move.retention)
                    found[there[0]].append((move, there[1]))
                    continue
                tier = next((t for t, grants in homes.rows.items() if len(grants) > len(writes[t])), None)
                if tier is not None and (shelf := self._shelf(tier)) is not None:
                    if move.private_hash is not None and shelf.holds(move.block_hash):
                        move.hide()
                    writes[tier].append(move)
            for tier, pairs in found.items():
                if pairs:
                    self._leases.ask(tier, [move for move, _ in pairs], [record for _, record in pairs])
            for tier, moves in writes.items():
                if moves:
                    self._writes.start(homes, tier, moves, now)

    def _there(self, homes: Homes, block_hash: BlockHash, staged: int) -> tuple[Tier, Record] | None:
        """A row that has the block already: in DRAM, or on NVMe if it would go there anyway, beside `staged` others."""
        for tier in (Tier.DRAM, Tier.NVME):
            if tier is Tier.NVME and (homes.rows[Tier.DRAM] or not self._rows.may_stage(homes, staged)):
                break
            shelf = self._shelf(tier)
            if shelf is not None and (records := shelf.find([block_hash])):
                return tier, records[0]
        return None

    def _try_again(self, move: Move, at: float) -> None:
        """A block has found no home yet; what is only looked for is let go of."""
        move.retry_at = at
        if move.slot is None or move.homes.closed:
            self._forget(move)

    def _settle(self, move: Move, tier: Tier, lease: Lease) -> None:
        """A block has a row under lease; without a sequence, or on a lost shelf, that goes back at once."""
        shelf, homes = self._shelves[tier], move.homes
        home = Home(tier, lease, shelf.address(lease) if tier is Tier.DRAM else 0, move.private)
        if shelf.is_lost and not homes.closed:
            shelf.holdings.end_leases([lease])
            self._try_again(move, 0.0)
            return
        self._part_with(home) if homes.closed else homes.put(move.index, home)
        self._forget(move)

    def _part_with(self, home: Home) -> None:
        shelf = self._shelves[home.tier]
        if home.private:
            shelf.drop([home.lease.record], "private")
        shelf.holdings.end_leases([home.lease])

    def _part_with_unreadable(self, homes: Homes) -> None:
        kept = [home for home in homes.unreadable if home in homes.found.values()]
        for home in (one for one in homes.unreadable if one not in kept):
            self._part_with(home)
        homes.unreadable = kept

    def _forget(self, move: Move) -> None:
        del move.homes.moves[move.index]
        if move.slot is not None:
            self._resident.release([move.slot])
        self._retire(move.homes)

    def _retire(self, homes: Homes) -> None:
        """Closed, and nothing is under way any more."""
        if homes.closed and not homes.moves and not homes.asking and homes in self._homes:
            self._homes.remove(homes)

    def _note_losses(self) -> None:
        """Leases that hold no more, and rows of shelves that are lost."""
        for tier, shelf in self._shelves.items():
            lost = set(shelf.holdings.lost_leases())
            for homes in self._homes:
                if lost:
                    homes.lost |= {i for i, home in homes.found.items() if home.tier is tier and home.lease in lost}
                if shelf.is_lost and any(home.tier is tier for home in homes.unreadable):
                    self._part_with_unreadable(homes)
                if shelf.is_lost and homes.rows[tier]:
                    shelf.holdings.give_rows(homes.rows[tier])
                    homes.rows[tier] = []
            self._leases.lose(tier, lost)
