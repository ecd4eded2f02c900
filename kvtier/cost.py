"""The cost model: what of a cold prefix is sooner read than computed, and how long a read is worth waiting for.

Owns running estimates of the speed of each tier and of computing prompts: they start as guesses, and every read and
every pass corrects them. Pure: no clock, no I/O, no bytes. The promoter asks it and tells of reads, the loop of passes.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvtier.block import KVLayout, Tier

READ_GUESSES: dict[Tier, tuple[float, float]] = {Tier.DRAM: (0.0005, 4e9), Tier.NVME: (0.001, 1e9)}
"""Before any read: seconds until the first row is there, a tenth of which each row takes besides its bytes, and bytes a
second."""
COMPUTE_GUESS = (0.01, 0.0005, 2.5e-7)
"""Before any pass: seconds for a pass, for a token, and for a token's look at one earlier token. Rather slow: what
nobody has measured yet is read."""
FADING = 0.95
"""What an observation counts after the next one."""
NEWS = math.log(2.0)
"""How far off two observations in a row are, in the same direction, if they are news."""
OUTLIER = 4.0
"""An observation counts for no more than this many times what was expected, and for no less than its inverse."""
DRAW, FACTOR_MIN, TURNS = 0.005, 1e-6, 6
PRICE_MIN = 1e-3
"""Least share of its first guess, scaled by the first observation, that a price falls to: where all that was seen
speaks for another price alone, this one is not known, but it is not nothing."""
CUTS_MAX = 64
"""A chain that changes tiers more often is read up to one of so many changes, or whole."""
LATE_LOADS = 2.0
"""Rows that keep coming are waited for as long as computing them takes, or this many times what was foretold."""
SILENT_SHARE = 0.1
"""How long a tier may give nothing at all, as a share of the time that computing would take."""
SILENT_GAPS = 3.0
"""But it gets this many times what a row should take; before its first row, as long as reading pays."""
WAIT_MIN_S = 0.02
"""No wait is shorter: threads do not wake at once."""


class LoadPolicy(enum.Enum):
    """When blocks that a shelf has are read."""

    AUTO = "auto"
    """When that is sooner than computing them."""
    ALWAYS = "always"
    """Whenever they are there."""


class Work(NamedTuple):
    """What passes compute: tokens, and pairs of a token and an earlier one that it looks at."""

    tokens: int
    pairs: int

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int]]) -> Work:
        """Runs of tokens, each as (tokens before it, tokens of it)."""
        tokens = pairs = 0
        for before, count in runs:
            tokens += count
            pairs += count * before + count * count // 2
        return cls(tokens, pairs)


NO_WORK = Work(0, 0)


class Span(NamedTuple):
    """A run of blocks of a chain in one tier; `cold`: how many of them nobody has begun to read yet."""

    tier: Tier
    blocks: int
    cold: int


class Choice(NamedTuple):
    """What to do about a chain: take its leading `blocks`, compute the rest."""

    blocks: int
    limit_s: float
    """When what is not there by then had better been computed."""
    patience_s: float
    """How long a tier may give nothing at all."""


class Prices:
    """Seconds as a sum of amounts, each at a price, which every observation corrects.

    Least squares of the errors relative to what was expected, the past fading, prices never negative. A single outlier
    counts for little; a second one in the same direction is news: all prices change alike, and the past is forgotten.
    """

    def __init__(self, *guesses: float, fading: float = FADING) -> None:
        self._prices = list(guesses)
        self._fading = fading
        self._least = [0.0] * len(guesses)
        self._units = list(guesses)
        self._factors = [1.0] * len(guesses)
        """Prices in units: the first guesses, scaled by the first observation and by news."""
        self._products = [[0.0] * len(guesses) for _ in guesses]
        self._targets = [0.0] * len(guesses)
        self._surprise = 0.0
        self.count = 0
        """Observations so far."""

    def __repr__(self) -> str:
        return f"Prices({', '.join(f'{price:.3g}' for price in self._prices)}; {self.count} observations)"

    def __getitem__(self, index: int) -> float:
        return self._prices[index]

    def seconds(self, *amounts: float) -> float:
        """What these amounts should take."""
        return math.fsum(map(operator.mul, self._prices, amounts))

    def learn(self, seconds: float, *amounts: float) -> None:
        """These amounts took `seconds` > 0."""
        expected = self.seconds(*amounts)
        surprise = math.log(seconds / expected)
        if self.count == 0 or (abs(surprise) > NEWS and abs(self._surprise) > NEWS and surprise * self._surprise > 0):
            self._begin_anew(seconds / expected)
            expected = seconds
        self._surprise = surprise
        self.count += 1
        share = [unit * amount / expected for unit, amount in zip(self._units, amounts, strict=True)]
        target = min(max(seconds / expected, 1 / OUTLIER), OUTLIER)
        for i, row in enumerate(self._products):
            self._targets[i] = self._fading * self._targets[i] + share[i] * target
            for j, other in enumerate(share):
                row[j] = self._fading * row[j] + share[i] * other
        self._solve()

    def _begin_anew(self, ratio: float) -> None:
        self._units = [price * ratio for price in self._prices]
        if self.count == 0:
            self._least = [unit * PRICE_MIN for unit in self._units]
        self._factors = [1.0] * len(self._units)
        self._products = [[0.0] * len(self._units) for _ in self._units]
        self._targets = [0.0] * len(self._units)

    def _solve(self) -> None:
        """A few turns of Gauss and Seidel on the normal equations, drawn slightly towards factors of 1."""
        factors = self._factors
        for _ in range(TURNS):
            for i, row in enumerate(self._products):
                rest = self._targets[i] - sum(map(operator.mul, row, factors)) + row[i] * factors[i]
                factors[i] = max((rest + DRAW) / (row[i] + DRAW), FACTOR_MIN)
        self._prices = [max(u * f, least) for u, f, least in zip(self._units, factors, self._least, strict=True)]


class CostModel:
    """Decides over loading; see the module. One for each engine, on its thread."""

    def __init__(
        self,
        layout: KVLayout,
        deadline_s: float = 5.0,
        policy: LoadPolicy = LoadPolicy.ALWAYS,
        step_tokens: int = 512,
    ) -> None:
        """`deadline_s` bounds every wait; `step_tokens`: tokens of one pass."""
        self.deadline_s = deadline_s
        self.policy = policy
        self._row_bytes = layout.row_bytes
        self._block_tokens = layout.block_tokens
        self._step_tokens = step_tokens
        self._reads = {
            tier: Prices(first_s, first_s / 10 + layout.row_bytes / bytes_per_second)
            for tier, (first_s, bytes_per_second) in READ_GUESSES.items()
        }
        self._passes = Prices(*COMPUTE_GUESS)

    def __repr__(self) -> str:
        return f"CostModel({self.policy.value}, reads={self._reads}, passes={self._passes})"

    def read_s(self, tier: Tier, rows: int) -> float:
        """From now until the last of `rows` in the queue of a tier is there."""
        return self._reads[tier].seconds(1, rows)

    def compute_s(self, work: Work) -> float:
        """What computing takes, in passes of their full length."""
        return self._passes.seconds(work.tokens / self._step_tokens, *work)

    def learn_read(self, tier: Tier, rows: int, seconds: float) -> None:
        """The last of `rows` in the queue of a tier was there after `seconds`."""
        if seconds > 0:
            self._reads[tier].learn(seconds, 1, rows)

    def learn_pass(self, work: Work, seconds: float) -> None:
        """A pass that computed some of a prompt took `seconds`."""
        if seconds > 0:
            self._passes.learn(seconds, 1, *work)

    def choose(
        self, spans: Sequence[Span], queued: Mapping[Tier, int], backlog: Work = NO_WORK, first: int = 0
    ) -> Choice:
        """What gives the first token soonest: reading all, reading some leading spans, or none.

        `queued`: rows under way by tier; `backlog`: what is computed before this chain in any case; `first`: blocks of
        the chain before the spans. Computing begins once all that is read is there, so the time is that of the slowest
        tier or of the backlog, and then of computing the rest. Within a span an end is best: each block costs the same
        to read, later ones cost more to compute.
        """
        total = sum(span.blocks for span in spans)
        if self.policy is LoadPolicy.ALWAYS:
            return Choice(total, self.deadline_s, self.deadline_s)
        backlog_s = self.compute_s(backlog)
        rows, tiers = dict(queued), set[Tier]()
        blocks, first_cold = 0, total
        best, best_s = Choice(0, 0.0, 0.0), backlog_s + self._compute_blocks_s(first, first + total)
        for number, span in enumerate(spans, 1):
            if span.tier is not Tier.HBM:
                rows[span.tier] += span.cold
                tiers.add(span.tier)
                first_cold = min(first_cold, blocks)
            blocks += span.blocks
            if number > CUTS_MAX and number < len(spans):
                continue
            load_s = max((self.read_s(tier, rows[tier]) for tier in tiers), default=0.0)
            seconds = max(load_s, backlog_s) + self._compute_blocks_s(first + blocks, first + total)
            if seconds <= best_s:
                instead_s = backlog_s + self._compute_blocks_s(first + min(first_cold, blocks), first + blocks)
                gap_s = max(map(self._gap_s, tiers), default=0.0)
                best, best_s = self._choice(blocks, load_s, instead_s, gap_s), seconds
        return best

    def read_bytes_per_second(self, tier: Tier) -> float:
        """How fast a tier gives rows, many at once."""
        return self._row_bytes / self._reads[tier][1]

    def prefill_tokens_per_second(self) -> float:
        """How fast a prompt of one full pass is computed."""
        return self._step_tokens / self.compute_s(Work.of([(0, self._step_tokens)]))

    def _choice(self, blocks: int, load_s: float, instead_s: float, gap_s: float) -> Choice:
        """Wait no longer than computing `instead_s` would have taken, and in silence much shorter."""
        limit_s = min(self.deadline_s, max(instead_s, LATE_LOADS * load_s, WAIT_MIN_S))
        return Choice(blocks, limit_s, min(limit_s, max(SILENT_SHARE * instead_s, SILENT_GAPS * gap_s, WAIT_MIN_S)))

    def _gap_s(self, tier: Tier) -> float:
        """Until the next row is there."""
        return self.read_s(tier, 1) if self._reads[tier].count else math.inf

    def _compute_blocks_s(self, first: int, end: int) -> float:
        before, count = first * self._block_tokens, (end - first) * self._block_tokens
        return self.compute_s(Work.of([(before, count)]))
