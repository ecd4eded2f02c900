"""Stop strings over text that comes in pieces.

Owns the text held back because a stop may have begun in it. Knows no tokens. One object per sequence, one thread.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through up to the first stop string; never lets the beginning of a stop out before it is known.

    The stop whose last character comes first wins, of several ending there the longest, so how the text is cut into
    pieces changes nothing.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` must not hold an empty string."""
        assert all(stops), "a stop string must not be empty"
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Return `(text that may be shown, stop found)`. After a stop nothing is ever shown again."""
        if self._stopped:
            return "", True
        if not self._patterns:
            return text, False
        text = self._held + text
        for position in range(len(self._held), len(text)):
            found = 0
            for pattern in self._patterns:
                if pattern.advance(text[position]):
                    found = max(found, len(pattern.stop))
            if found:
                self._stopped, self._held = True, ""
                return text[: position + 1 - found], True
        shown = len(text) - max(pattern.matched for pattern in self._patterns)
        self._held = text[shown:]
        return text[:shown], False

    def finish(self) -> str:
        """The text ended: return what was held back."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton; `matched` characters of it end the text so far."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = [0] * len(stop)  # longest proper prefix of stop[: i + 1] that is also its suffix
        for position in range(1, len(stop)):
            self._borders[position] = self._step(self._borders[position - 1], stop[position])

    def advance(self, character: str) -> bool:
        """Take the next character; True if the stop is complete with it. Must not be called after that."""
        self.matched = self._step(self.matched, character)
        return self.matched == len(self.stop)

    def _step(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._borders[matched - 1]
        return matched + 1 if self.stop[matched] == character else 0
