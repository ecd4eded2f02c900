"""What the keeper has, and who is there: the cache directory, the owners' locks, the layouts, the connections.

Owns nothing that happens to them; the nouns beside it (openings, greeting, telling, tending) each do one thing to it.
Made by the server, on its thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtier.cache_directory import CacheDirectory
from kvtier.keeper.connection import Connection
from kvtier.keeper.fields import OWNERS_MAX
from kvtier.keeper.kept import KeptLayout
from kvtier.keeper.owners import is_locked


@dataclass(eq=False, slots=True)
class House:
    """See the module. `owners` is the descriptor of the owners' lock file."""

    cache: CacheDirectory
    owners: int
    layouts: dict[str, KeptLayout] = field(default_factory=dict)
    connections: dict[int, Connection] = field(default_factory=dict)
    """By descriptor."""

    def joined(self, layout: str) -> Iterator[Connection]:
        """Engines of a layout that are told of its changes."""
        return (one for one in self.connections.values() if one.joined and one.layout == layout and not one.closing)

    def present(self) -> set[int]:
        """Owners with a connection."""
        return {one.owner for one in self.connections.values() if one.owner is not None}

    def lives(self, owner: int) -> bool:
        """Whether an owner's liveness lock is held."""
        return is_locked(self.owners, owner)

    def living(self) -> set[int]:
        """All owners that live, connected or not."""
        return {owner for owner in range(OWNERS_MAX) if self.lives(owner)}

    def has_io(self, owner: int) -> bool:
        """Whether I/O of an owner through any slab may be under way."""
        return any(kept.has_io(owner) for kept in self.layouts.values())
