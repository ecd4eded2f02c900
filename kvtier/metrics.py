"""What an engine counts: the `kvtier_*` metric families, with closed label sets, and their values in this process.

Updates are cheap and safe from any thread; label values are checked against the family's closed set. Does not know the
Triton server: a publisher (model.py) reads `snapshot()` and `take_observations()` and passes them on; `Engine.stats()`
and tests read the same numbers.
"""

from __future__ import annotations

import enum
import threading
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from kvtier.block import Tier

Labels = tuple[str, ...]

TIERS: tuple[Labels, ...] = (("hbm",), ("dram",), ("nvme",))
ORIGINS: tuple[Labels, ...] = (("hbm",), ("dram",), ("nvme",), ("computed",))
PROMOTIONS: tuple[Labels, ...] = (("dram", "hbm"), ("nvme", "hbm"), ("nvme", "dram"))
DEMOTIONS: tuple[Labels, ...] = (("hbm", "dram"), ("hbm", "nvme"), ("dram", "nvme"))
OUTCOMES: tuple[Labels, ...] = (("stop",), ("length",), ("cancelled",), ("error",))
REQUEST_FAILURES: tuple[Labels, ...] = (("invalid",), ("unavailable",), ("internal",))
FAILURE_REASONS = ("bad_row", "short_read", "io_error", "late", "no_space", "unanswered")
SHELF_FAILURES: tuple[Labels, ...] = tuple((tier, reason) for tier in ("dram", "nvme") for reason in FAILURE_REASONS)
SHELVES: tuple[Labels, ...] = (("dram",), ("nvme",))
LOAD_DECISIONS: tuple[Labels, ...] = tuple((tier, made) for tier in ("dram", "nvme") for made in ("load", "recompute"))
RATIO_BUCKETS = (0.125, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0, 8.0, 64.0)
TRANSFER_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Kind(enum.Enum):
    """The three kinds of metric, as Prometheus and the Triton server know them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric name with its kind, help text, label names and every combination of label values it can have."""

    name: str
    kind: Kind
    help: str
    label_names: Labels = ()
    label_values: tuple[Labels, ...] = ((),)
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, ascending; the bucket above the last is implied."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One series at one moment. A histogram has its sum as `value` and one more bucket count than it has bounds."""

    family: Family
    labels: Labels
    value: float
    bucket_counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """One value that went into a histogram since the last `take_observations`."""

    family: Family
    labels: Labels
    value: float


class Counter:
    """A family of sums that only grow."""

    def __init__(self, family: Family, lock: threading.Lock) -> None:
        self.family = family
        self._lock = lock
        self._values: dict[Labels, float] = dict.fromkeys(family.label_values, 0)

    def add(self, amount: float = 1, *labels: str) -> None:
        """Add `amount` >= 0 to the series of `labels` (values in the order of the family's label names)."""
        assert amount >= 0, (self.family.name, amount)
        with self._lock:
            self._values[labels] = self._values[labels] + amount

    def value(self, *labels: str) -> float:
        """The sum so far."""
        return self._values[labels]

    def _samples(self) -> list[Sample]:
        return [Sample(self.family, labels, value) for labels, value in self._values.items()]


class Gauge:
    """A family of values that go up and down."""

    def __init__(self, family: Family, lock: threading.Lock) -> None:
        self.family = family
        self._lock = lock
        self._values: dict[Labels, float] = dict.fromkeys(family.label_values, 0)

    def set(self, value: float, *labels: str) -> None:
        """Set the series of `labels`."""
        assert labels in self._values, (self.family.name, labels)
        with self._lock:
            self._values[labels] = value

    def value(self, *labels: str) -> float:
        """The value last set, 0 before."""
        return self._values[labels]

    def _samples(self) -> list[Sample]:
        return [Sample(self.family, labels, value) for labels, value in self._values.items()]


class Histogram:
    """A family of distributions over fixed buckets."""

    def __init__(self, family: Family, lock: threading.Lock, pending: _Pending) -> None:
        self.family = family
        self._lock = lock
        self._pending = pending
        self._sums: dict[Labels, float] = dict.fromkeys(family.label_values, 0.0)
        self._counts = {labels: [0] * (len(family.buckets) + 1) for labels in family.label_values}

    def observe(self, value: float, *labels: str) -> None:
        """Count one value, in the unit of the family's name."""
        bucket = bisect_left(self.family.buckets, value)
        with self._lock:
            self._counts[labels][bucket] += 1
            self._sums[labels] += value
            self._pending.append(Observation(self.family, labels, value))

    def count(self, *labels: str) -> int:
        """How many values were observed."""
        return sum(self._counts[labels])

    def _samples(self) -> list[Sample]:
        return [
            Sample(self.family, labels, self._sums[labels], tuple(counts)) for labels, counts in self._counts.items()
        ]


class _Pending:
    """Observations on their way to a publisher: bounded, the oldest give way and are counted. Guarded by the lock."""

    def __init__(self) -> None:
        self.queue: deque[Observation] = deque(maxlen=0)
        self.dropped = 0

    def append(self, observation: Observation) -> None:
        limit = self.queue.maxlen
        if limit:
            self.dropped += len(self.queue) == limit
            self.queue.append(observation)


class Metrics:
    """Every metric of one engine. Attributes are the families; `snapshot` reads them all at one moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending = _Pending()
        self._families: list[Counter | Gauge | Histogram] = []
        gauge, counter, histogram = self._gauge, self._counter, self._histogram

        self.engine_up = gauge("kvtier_engine_up", "1 while the engine takes requests, else 0")
        self.queued_requests = gauge("kvtier_queued_requests", "Requests waiting for their first pass")
        self.running_requests = gauge("kvtier_running_requests", "Requests admitted and not finished")
        tier = ("tier",)
        self.tier_used_blocks = gauge("kvtier_tier_used_blocks", "Blocks held by a tier", tier, TIERS)
        self.tier_capacity_blocks = gauge("kvtier_tier_capacity_blocks", "Blocks a tier can hold", tier, TIERS)
        self.tier_used_bytes = gauge("kvtier_tier_used_bytes", "Bytes of the blocks held by a tier", tier, TIERS)
        self.tier_capacity_bytes = gauge("kvtier_tier_capacity_bytes", "Bytes of blocks a tier can hold", tier, TIERS)

        self.prompt_tokens = counter("kvtier_prompt_tokens_total", "Prompt tokens by origin", ("origin",), ORIGINS)
        self.generated_tokens = counter("kvtier_generated_tokens_total", "Tokens generated")
        self.requests = counter("kvtier_requests_total", "Requests finished, by outcome", ("outcome",), OUTCOMES)
        self.request_failures = counter(
            "kvtier_request_failures_total", "Requests answered with an error", ("reason",), REQUEST_FAILURES
        )
        self.preemptions = counter("kvtier_preemptions_total", "Running requests that gave their blocks to older ones")

        pair = ("source", "target")
        self.promoted_blocks = counter("kvtier_promoted_blocks_total", "Blocks moved towards HBM", pair, PROMOTIONS)
        self.promoted_bytes = counter("kvtier_promoted_bytes_total", "Bytes moved towards HBM", pair, PROMOTIONS)
        self.demoted_blocks = counter("kvtier_demoted_blocks_total", "Blocks moved away from HBM", pair, DEMOTIONS)
        self.demoted_bytes = counter("kvtier_demoted_bytes_total", "Bytes moved away from HBM", pair, DEMOTIONS)
        self.evicted_blocks = counter(
            "kvtier_evicted_blocks_total", "Blocks a tier let go of to make room", tier, TIERS
        )
        self.pinned_blocks = gauge("kvtier_pinned_blocks", "Blocks of a shelf that are never evicted", tier, SHELVES)
        self.expired_blocks = counter(
            "kvtier_expired_blocks_total", "Blocks a tier let go of at their TTL", tier, TIERS
        )
        self.pins_refused = counter("kvtier_pins_refused_total", "Pins beyond tiers.pin_share", tier, SHELVES)
        self.quota_refused = counter(
            "kvtier_quota_refused_blocks_total",
            "Blocks a tenant's quota kept from a shelf, not counted again while they wait",
            tier,
            SHELVES,
        )
        self.write_budget_refused = counter(
            "kvtier_write_budget_refused_blocks_total",
            "Blocks tiers.nvme.write_bytes_day kept from a shelf, not counted again while they wait",
            tier,
            SHELVES,
        )
        self.evicted_bytes = counter("kvtier_evicted_bytes_total", "Bytes a tier let go of to make room", tier, TIERS)
        self.shelf_failures = counter(
            "kvtier_shelf_failures_total", "Shelf troubles that became misses", ("tier", "reason"), SHELF_FAILURES
        )

        self.streamed_bytes = counter(
            "kvtier_streamed_bytes_total", "KV bytes that contexts larger than HBM attended to elsewhere", tier, SHELVES
        )
        self.streamed_requests = gauge("kvtier_streamed_requests", "Requests whose context is larger than HBM")

        self.transfer_seconds = histogram(
            "kvtier_transfer_seconds", "Time of a transfer", TRANSFER_BUCKETS_S, pair, PROMOTIONS + DEMOTIONS
        )
        self.load_decisions = counter(
            "kvtier_load_decisions_total",
            "Blocks that a shelf had, by whether they were read or computed",
            ("tier", "decision"),
            LOAD_DECISIONS,
        )
        self.load_time_ratio = histogram(
            "kvtier_load_time_ratio", "Time of a batch of reads over its prediction", RATIO_BUCKETS, tier, SHELVES
        )
        self.tier_read_speed = gauge(
            "kvtier_tier_read_bytes_per_second", "Estimate of how fast a shelf is read", tier, SHELVES
        )
        self.prefill_speed = gauge("kvtier_prefill_tokens_per_second", "Estimate of how fast prompts are computed")
        self.dropped_observations = counter(
            "kvtier_dropped_observations_total", "Histogram observations that came too fast to be published"
        )
        self.ttft_seconds = histogram("kvtier_ttft_seconds", "Time from arrival to the first token", TTFT_BUCKETS_S)
        self.tpot_seconds = histogram("kvtier_tpot_seconds", "Time between two tokens of one request", TPOT_BUCKETS_S)

    def moved(self, source: Tier, target: Tier, blocks: int, moved_bytes: int) -> None:
        """Count blocks copied from one tier to another: a promotion towards HBM, a demotion away from it."""
        pair = (source.value, target.value)
        promotion = pair in PROMOTIONS
        (self.promoted_blocks if promotion else self.demoted_blocks).add(blocks, *pair)
        (self.promoted_bytes if promotion else self.demoted_bytes).add(moved_bytes, *pair)

    def snapshot(self) -> list[Sample]:
        """Every series of every family at one moment, zeros included; any thread."""
        with self._lock:
            return [sample for family in self._families for sample in family._samples()]

    @property
    def families(self) -> list[Family]:
        """Every family, in the order of `snapshot`."""
        return [item.family for item in self._families]

    def keep_observations(self, limit: int) -> None:
        """From now on keep up to `limit` histogram observations for `take_observations`; a publisher calls it once."""
        with self._lock:
            self._pending.queue = deque(maxlen=limit)

    def take_observations(self) -> list[Observation]:
        """The kept observations since the last call, oldest first; those that found no room are counted as dropped."""
        with self._lock:
            taken, dropped = list(self._pending.queue), self._pending.dropped
            self._pending.queue.clear()
            self._pending.dropped = 0
        self.dropped_observations.add(dropped)
        return taken

    def clear_gauges(self) -> None:
        """Set every gauge to 0: what a closed engine shows."""
        for family in self._families:
            if isinstance(family, Gauge):
                for labels in family.family.label_values:
                    family.set(0, *labels)

    def _gauge(self, name: str, text: str, names: Labels = (), values: tuple[Labels, ...] = ((),)) -> Gauge:
        gauge = Gauge(Family(name, Kind.GAUGE, text, names, values), self._lock)
        self._families.append(gauge)
        return gauge

    def _counter(self, name: str, text: str, names: Labels = (), values: tuple[Labels, ...] = ((),)) -> Counter:
        counter = Counter(Family(name, Kind.COUNTER, text, names, values), self._lock)
        self._families.append(counter)
        return counter

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], names: Labels = (), values: tuple[Labels, ...] = ((),)
    ) -> Histogram:
        family = Family(name, Kind.HISTOGRAM, text, names, values, buckets)
        histogram = Histogram(family, self._lock, self._pending)
        self._families.append(histogram)
        return histogram
