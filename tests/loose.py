"""A shelf whose books keep no row for who copies from it, as those of a shared one do not; its answers come at once."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.books import LocalBooks
from kvtier.directory import Directory
from kvtier.record import Lease, Record
from kvtier.shelf import Shelf
from tests.rows import directory_of


class LooseBooks(LocalBooks):
    """`acquire` keeps nothing: who copies asks afterwards if the row was there. Leases that are asked for keep it."""

    def __init__(self, directory: Directory) -> None:
        super().__init__(directory)
        self.acquire = self._known
        self.release = self._keeps_nothing

    def intact(self, lease: Lease) -> bool:
        return self._directory.find([lease.record.block_hash]) == [lease.record]

    def _keeps_nothing(self, leases: Sequence[Lease]) -> None:
        """There is nothing to release."""

    def _known(self, records: Sequence[Record]) -> list[Lease | None]:
        return [Lease(record) if self._directory.find([record.block_hash]) == [record] else None for record in records]


def share(shelf: Shelf) -> None:
    """Let a shelf have such books from now on."""
    books = LooseBooks(directory_of(shelf))
    for user in (shelf, shelf.holdings, shelf._writes, shelf._reads):
        user._books = books
