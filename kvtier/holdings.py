"""What an engine holds of one shelf for longer than a transfer: rows that it has asked for, and leases in place.

Asks the books, and counts what they have given and what was given back, so that nothing is given back twice and nobody
closes a shelf under a row that is attended in place. Knows no slab and no sequence. Owned by the shelf, on its thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtier.books import Books
from kvtier.record import Grant, Lease, Record
from kvtier.ticket import Reply


class ShelfHoldings:
    """See the module. Its length is that of all rows and leases that are held."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._rows: set[Grant] = set()
        self._leases: Counter[Lease] = Counter()
        self._lost: list[Lease] = []
        self._over = False

    def __len__(self) -> int:
        return len(self._rows) + self._leases.total()

    def ask_rows(self, count: int, tenant: bytes, least: int | None = None) -> int:
        """Ask for `count` rows to hold and write to later, all or none; the number that `replies` answers.

        With `least` there may be fewer, but that many. Nothing is evicted for what is refused. They count against the
        tenant's quota; what is written into one (`WriteItem.grant`) is leased at once.
        """
        assert 0 <= (count if least is None else least) <= count > 0, (count, least)
        return self._books.ask_rows(count, tenant, count if least is None else least)

    def ask_leases(self, records: Sequence[Record]) -> int:
        """Ask for leases that keep rows in place, unchanged until they end; the number that `replies` answers.

        Unlike `Shelf.acquire` they do so whoever shares the shelf. Have a DRAM row judged by `Shelf.verify` before use.
        """
        return self._books.ask_leases(records)

    def replies(self) -> list[Reply]:
        """What was answered since the last call; call it after `Shelf.poll`. Each question is answered in time."""
        replies: list[Reply] = []
        for reply in self._books.replies():
            grants, leases = reply.grants or [], [lease for lease in reply.leases or () if lease is not None]
            if self._over:
                self._books.give_rows(grants)
                self._books.end_leases(leases)
                reply = reply.refused()
            else:
                self._rows.update(grants)
                self._leases.update(leases)
            replies.append(reply)
        return replies

    def give_rows(self, grants: Sequence[Grant]) -> None:
        """Give rows back that were asked for and never written to."""
        assert self._rows.issuperset(grants), "a row is given back twice, or while it is written"
        self._rows.difference_update(grants)
        self._books.give_rows(grants)

    def end_leases(self, leases: Sequence[Lease]) -> None:
        """Give leases back, each as often as it was given, once nothing uses their rows any more."""
        given = Counter(leases)
        assert given <= self._leases, "a lease is given back twice"
        self._leases -= given
        self._books.end_leases(leases)

    def lost_leases(self) -> list[Lease]:
        """Leases that have ceased to keep their rows since the last call; all of them when the shelf is lost.

        They are to be ended all the same. A row that was asked for and not written yet is void when the shelf is lost.
        """
        if gone := set(self._books.lost_claims()):
            self._lost += [one for one in self._leases if Grant(one.record.slot, one.record.generation) in gone]
        lost, self._lost = self._lost, []
        return lost

    # ---- from the shelf --------------------------------------------------------------------------------------------

    def use(self, grant: Grant) -> None:
        """A row that was asked for is the shelf's own from now on: it is being written."""
        self._rows.remove(grant)

    def lease(self, record: Record) -> Lease:
        """The lease that has come with a row that was written into such a slot."""
        lease = Lease(record)
        self._leases[lease] += 1
        return lease

    def lose(self) -> None:
        """The shelf is lost or closed: nothing is given from now on, and all leases are lost."""
        if not self._over:
            self._over = True
            self._lost += self._leases
