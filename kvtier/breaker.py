"""A breaker for one direction of one shelf: after trouble nothing is tried for a while, then one probe at a time.

Counts failures in a row; reads no clock (time is an argument). Called by the shelf on the engine thread.
"""

from __future__ import annotations


class Breaker:
    """Closed: all goes. Open: nothing until `pause_s` has passed, then one probe; its success closes, else again."""

    def __init__(self, failures_max: int = 3, pause_s: float = 5.0) -> None:
        self._failures_max = failures_max
        self._pause_s = pause_s
        self._failures = 0
        self._probe_at: float | None = None
        self.openings = 0

    def __repr__(self) -> str:
        return f"Breaker(open={self.is_open}, failures={self._failures})"

    @property
    def is_open(self) -> bool:
        """Whether trouble was seen and no probe has succeeded since."""
        return self._probe_at is not None

    def allow(self, count: int, now: float) -> int:
        """How many of `count` attempts may start: all, none, or one probe."""
        if self._probe_at is None:
            return count
        if count == 0 or now < self._probe_at:
            return 0
        self._probe_at = now + self._pause_s
        return 1

    def spare(self, now: float) -> None:
        """What was allowed last has not been tried: the next probe need not wait."""
        if self._probe_at is not None:
            self._probe_at = now

    def failed(self, now: float) -> None:
        """An attempt failed; the last of `failures_max` in a row opens, a failed probe keeps it open."""
        self._failures += 1
        if self.is_open or self._failures >= self._failures_max:
            self.trip(now)

    def trip(self, now: float) -> None:
        """Open at once, whatever was counted (no space: the next attempt would fail as well)."""
        if not self.is_open:
            self.openings += 1
        self._probe_at = now + self._pause_s

    def succeeded(self) -> None:
        """An attempt went well: close and forget."""
        self._failures = 0
        self._probe_at = None
