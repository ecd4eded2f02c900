"""Whether this is the process that made an engine, or a forked child with a copy of it that has none of its threads.

Takes no lock, since somebody may have held any of them at the fork. Used by the engine and its loop.
"""

from __future__ import annotations

import os

from kvtier.errors import Unavailable


class OwnProcess:
    """The process that it was made in. Any thread."""

    def __init__(self) -> None:
        self._number = os.getpid()

    @property
    def is_here(self) -> bool:
        """This is that process."""
        return os.getpid() == self._number

    def refuse_elsewhere(self) -> None:
        """Raise Unavailable in any other: nothing would ever be answered there."""
        if not self.is_here:
            raise Unavailable(
                f"the engine runs in process {self._number}, which made it, and not in its forked child {os.getpid()}; "
                "fork before an engine is made, or start processes anew (multiprocessing: spawn)"
            )
