"""What the keeper tells engines without being asked: changes, snapshots, numbers, and who reports for all of them.

Queues only; the server writes. Everybody of a layout is told everything in the same order, so that mirrors agree.
Called by the server, on its thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.keeper.connection import Connection
from kvtier.keeper.fields import as_rows
from kvtier.keeper.frames import frame
from kvtier.keeper.house import House
from kvtier.keeper.wire import Reporter, Snapshot
from kvtier.record import Record

SNAPSHOT_ROWS = 512


class Teller:
    """See the module."""

    def __init__(self, house: House) -> None:
        self._house = house

    def tell(self, but: Connection | None = None) -> None:
        """Tell mirrors what has changed since the last call; `but`: who knows it already."""
        for name, kept in self._house.layouts.items():
            for tier, ledger in kept.ledgers.items():
                changes, numbers = ledger.take_changes(), ledger.numbers()
                joined = list(self._house.joined(name))
                others = [connection for connection in joined if connection is not but]
                for data in [frame(change) for change in changes] if others else ():
                    for connection in others:
                        connection.send_bytes(data)
                if kept.told.get(tier) != numbers:
                    kept.told[tier] = numbers
                    for connection in joined:
                        connection.send(numbers)

    def introduce(self, connection: Connection) -> None:
        """Tell one that has joined all there is. What changes meanwhile is told after it, in order."""
        for tier, ledger in self._house.layouts[connection.layout].ledgers.items():
            connection.send_lazily(_snapshot(tier, ledger.records()))
            connection.send(ledger.numbers())

    def name_reporters(self) -> None:
        """In each layout the engine with the lowest number reports what the shelves hold, and nobody else.

        Who has asked for no shelf is no engine, but an operator's guest.
        """
        for name in self._house.layouts:
            engines = [one for one in self._house.joined(name) if any(one.budgets)]
            joined = sorted(engines, key=lambda one: one.owner or 0)
            for connection in joined:
                reports = connection is joined[0]
                if connection.reports is not reports:
                    connection.reports = reports
                    connection.send(Reporter(reports))


def _snapshot(tier: int, records: Sequence[Record]) -> Iterator[bytes]:
    """All rows in pieces, each made when it is sent."""
    for start in range(0, len(records), SNAPSHOT_ROWS):
        rows = records[start : start + SNAPSHOT_ROWS]
        yield frame(Snapshot(tier, as_rows(rows), last=False))
    yield frame(Snapshot(tier, [], last=True))
