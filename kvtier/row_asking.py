"""Asking the shelves for the rows that streamed sequences lack, and giving back what is over.

DRAM is asked first, for as many as it gives; NVMe for the rest, in one question, if what lies there can be staged:
first for the rows of the last blocks that it has, which would else go for rows that are not needed then. Owned by
`HandDown`, which passes the answers on.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.block import Tier
from kvtier.homes import RETRY_S, Homes, Question
from kvtier.lease_asking import LeaseAsking
from kvtier.record import Record
from kvtier.shelf import Shelf
from kvtier.ticket import Reply


class RowAsking:
    """See the module."""

    def __init__(self, shelves: Mapping[Tier, Shelf], leases: LeaseAsking) -> None:
        self.staged_max = 0
        """Blocks of one sequence that may lie on NVMe."""
        self._shelves = shelves
        self._leases = leases
        self._questions: dict[Question, Homes] = {}

    def awaits(self, tier: Tier) -> bool:
        """A question to a shelf is unanswered."""
        return any(where is tier for where, _ in self._questions)

    def may_stage(self, homes: Homes, more: int = 0) -> bool:
        """Whether another of its blocks may lie on NVMe besides `more`, perhaps instead of a row that it gives back."""
        return self.staged_max > 0 and (homes.lacking <= 0 or homes.count_of(Tier.NVME) + more < self.staged_max)

    def ask(self, homes: Homes, now: float) -> None:
        """Ask for what is lacking, one question at a time: of DRAM as much as it gives, of NVMe all the rest."""
        if homes.closed or homes.asking or now < homes.retry_at or homes.is_leasing:
            return
        lacking = homes.lacking
        if lacking <= 0:
            homes.dram_asked = False
            self._give_back(homes, -lacking)
            return
        dram, nvme = self._slot_count(Tier.DRAM), self._slot_count(Tier.NVME)
        room = max(0, min(nvme, self.staged_max) - homes.count_of(Tier.NVME))
        least = max(0, lacking - room)
        if not homes.dram_asked and max(1, least) <= dram:
            self._ask_for(homes, Tier.DRAM, min(lacking, dram), least)
        elif least == 0 and not self._lease_known(homes, lacking):
            self._ask_for(homes, Tier.NVME, lacking, lacking)
        elif least > 0:
            self._refuse(homes, now)

    def take(self, tier: Tier, reply: Reply, now: float) -> None:
        """An answer. What nobody wants any more goes back."""
        homes = self._questions.pop((tier, reply.number))
        homes.asking = False
        if homes.closed:
            if reply.grants:
                self._shelves[tier].holdings.give_rows(reply.grants)
        elif reply.grants is not None:
            homes.rows[tier] += reply.grants
            homes.dram_asked, homes.refused = True, False
        else:
            self._refuse(homes, now)

    def _slot_count(self, tier: Tier) -> int:
        shelf = self._shelves.get(tier)
        return 0 if shelf is None or shelf.is_lost else shelf.slot_count

    def _ask_for(self, homes: Homes, tier: Tier, count: int, least: int) -> None:
        homes.asking = True
        self._questions[(tier, self._shelves[tier].holdings.ask_rows(count, homes.tenant, least))] = homes

    def _lease_known(self, homes: Homes, count: int) -> bool:
        """Ask for NVMe's rows of up to `count` blocks that it knows, the last ones first; whether there are any.

        Those before them go to DRAM, in their order.
        """
        nvme, known = self._shelves[Tier.NVME], dict[int, Record]()
        for index in reversed(range(len(homes.prefix))):
            free = len(known) < count and index not in homes.found and index not in homes.moves
            if free and (records := nvme.find([homes.prefix[index]])):
                known[index] = records[0]
        homes.prefix = ()
        if known:
            self._leases.begin(homes, Tier.NVME, known)
        return len(known) > 0

    def _refuse(self, homes: Homes, now: float) -> None:
        homes.refused, homes.retry_at, homes.dram_asked = True, now + RETRY_S, False
        if not homes.begun:
            self._give_back(homes, sum(map(len, homes.rows.values())))

    def _give_back(self, homes: Homes, count: int) -> None:
        """Unused rows, those of NVMe first."""
        for tier in (Tier.NVME, Tier.DRAM):
            grants = homes.rows[tier]
            spare = grants[max(0, len(grants) - count) :]
            if count > 0 and spare:
                del grants[-len(spare) :]
                self._shelves[tier].holdings.give_rows(spare)
                count -= len(spare)
