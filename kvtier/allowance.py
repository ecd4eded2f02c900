"""What streaming may cost those that run beside it: a share of the time that their steps take alone.

Owns an estimate of that time, and the balance. A step beside streaming is charged with all that it took longer: layers
of suspended passes, but also what reading and checking rows takes of the same cores and caches, which nobody measures
by itself, and the step after, which finds the last cache full of others' rows. Steps left in peace now and then correct
the estimate. What is owed is bounded, so that streaming goes on before long whatever a busy machine lays to its charge.
Pure: no clock, no I/O. Asked by the turns.
"""

from __future__ import annotations

from kvtier.cost import COMPUTE_GUESS, Prices, Work

FADING = 0.85
"""What a step that was learned from counts after the next one: machines change their speed within a second."""
PEACE_STEPS = 8
"""After so many steps from which nothing was learned, two are left in peace: the second tells what one takes alone."""
RESERVE = 0.2
"""Of the share, what is not given away: steps left in peace between others still take some 5 % longer than alone."""
SAVED_STEPS = 2
"""What a step leaves of the allowance is kept for so many: one in peace costs streaming nothing in the mean."""
OWED_MAX = 16.0
"""More than so many steps take alone is never owed: a turn that something else held up for a minute costs no hour."""
OUTLIER = 3.0
"""A step that took more than this many times as long as alone has been held up by something else."""


class Allowance:
    """See the module. `share`: by what part of the time that it takes alone a step may grow, in the mean."""

    def __init__(self, share: float) -> None:
        self._share = share * (1 - RESERVE)
        self._alone = Prices(*COMPUTE_GUESS, fading=FADING)
        self._balance_s = 0.0
        self._steps = PEACE_STEPS
        """Since one was learned from."""
        self._was_in_peace = True
        """The last step."""

    def __repr__(self) -> str:
        return f"Allowance({self._balance_s:.4f} s, alone={self._alone})"

    @property
    def left(self) -> bool:
        """Whether streaming may go on now."""
        return self._balance_s > 0 and self._steps < PEACE_STEPS

    def note_step(self, work: Work, seconds: float, in_peace: bool) -> None:
        """The others' step took so long, turns of streaming left out; `in_peace`: nothing was streamed beside it.

        After `OWED_MAX` / what a step leaves of the share + 2 steps in peace something is left, whatever was before.
        """
        self._steps += 1
        alone = in_peace and self._was_in_peace
        self._was_in_peace = in_peace
        if alone and (self._balance_s <= 0 or self._steps >= PEACE_STEPS):
            self._steps = 0
            self._alone.learn(seconds, 1, *work)
        if self._alone.count == 0:
            return
        alone_s = self._alone.seconds(1, *work)
        longer_s = 0.0 if alone else min(seconds, OUTLIER * alone_s) - alone_s
        earned_s = self._share * alone_s
        balance_s = max(self._balance_s, -OWED_MAX * alone_s) + earned_s - longer_s
        self._balance_s = min(balance_s, SAVED_STEPS * earned_s)

    def spend(self, seconds: float) -> None:
        """A turn of streaming took so long."""
        self._balance_s -= seconds

    def forgive(self) -> None:
        """Nobody runs beside it: nothing is owed, and nothing saved."""
        self._balance_s = 0.0
