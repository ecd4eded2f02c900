"""What a benchmark found, as values, and the arithmetic on it: medians, rates, ratios and limits.

Knows neither kvtier nor transformers nor how anything was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

TIERED = "kvtier"
UNTIERED = "kvtier, HBM only"
TRANSFORMERS = "transformers"
GRPC = "kvtier, gRPC"
"""Systems whose decode is measured."""

API = "Python"
"""The other way in besides GRPC, for TTFT."""

ORIGINS = ("computed", "hbm", "dram", "nvme")

Arrival = tuple[float, int]
"""When an event came, in seconds of any clock, and how many tokens it brought."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it ran, and the rates that limit it. 0 means: not measured."""

    cpu: str
    cores: int
    threads: int
    load_before: float
    """Load average of the minute before the start: above 0.5 somebody else was busy."""
    read_bytes_s: float
    """Memory read, all threads."""
    copy_bytes_s: float
    """Memory copied (each byte read and written once), one thread."""
    disk_bytes_s: float
    """Direct reads of rows of the NVMe tier's directory, as many at once as the engine has readers."""
    flops_s: float
    """Of a large matrix product in the benchmark's dtype, all threads."""


@dataclass(frozen=True, slots=True)
class Ttft:
    """Time to the first token of one prompt whose prefix came from `origin`."""

    way: str
    origin: str
    prompt_tokens: int
    samples_s: tuple[float, ...]
    origin_tokens: dict[str, int]
    """Tokens by origin in the last sample: the proof that the prefix really came from there."""
    limit_s: float
    """What the slowest resource alone would need; 0: unknown."""

    @property
    def median_s(self) -> float:
        """Median of the samples."""
        return median(self.samples_s)


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode throughput of one system, all sequences together."""

    system: str
    batch: int
    context: int
    samples_tokens_s: tuple[float, ...]
    limit_tokens_s: float
    """Weights and KV once a step at the memory read rate; 0: unknown."""

    @property
    def median_tokens_s(self) -> float:
        """Median of the samples."""
        return median(self.samples_tokens_s)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two systems measured in turns on the same case. The ratio is that of each round, then the median."""

    batch: int
    context: int
    ours: str
    other: str
    ratio: float
    """Throughput of `ours` over that of `other`: above 1 is faster."""
    low: float
    high: float
    """Smallest and largest ratio of a round."""


@dataclass(frozen=True, slots=True)
class Results:
    """Everything a run found."""

    machine: Machine
    settings: dict[str, object]
    ttft: tuple[Ttft, ...]
    decode: tuple[Decode, ...]


def decode_rate(streams: Sequence[Sequence[Arrival]]) -> float:
    """Tokens a second of concurrent streams, over the time in which all of them were decoding.

    That time begins with the last stream's first token and ends with the first stream's last one; tokens that came at
    its beginning are not counted. Raises ValueError if there is no such time.
    """
    begin = max(stream[0][0] for stream in streams)
    end = min(stream[-1][0] for stream in streams)
    if end <= begin:
        raise ValueError("the streams did not overlap: ask for more tokens")
    count = sum(tokens for stream in streams for at, tokens in stream if begin < at <= end)
    return count / (end - begin)


def decode_limit(weights_bytes: int, kv_bytes: int, batch: int, read_bytes_s: float) -> float:
    """Tokens a second if a step only had to read the weights and every sequence's KV (`kv_bytes` each) once."""
    return batch * read_bytes_s / (weights_bytes + batch * kv_bytes) if read_bytes_s else 0.0


def compare(decode: Sequence[Decode], ours: str, other: str) -> list[Comparison]:
    """One comparison for each case that both systems ran, from rounds that were run in turns."""
    by_case = {(item.batch, item.context, item.system): item for item in decode}
    found: list[Comparison] = []
    for (batch, context, system), item in by_case.items():
        against = by_case.get((batch, context, other))
        if system != ours or against is None:
            continue
        ratios = [a / b for a, b in zip(item.samples_tokens_s, against.samples_tokens_s, strict=True)]
        found.append(Comparison(batch, context, ours, other, median(ratios), min(ratios), max(ratios)))
    return found


def cost_percent(comparison: Comparison) -> float:
    """How much slower the first system is than the second, in percent of the second; negative: faster."""
    return (1.0 - comparison.ratio) * 100.0


def speedup(ttft: Sequence[Ttft], way: str, origin: str) -> float | None:
    """How many times faster the first token comes with a prefix from `origin` than computed, by the medians."""
    medians = {item.origin: item.median_s for item in ttft if item.way == way}
    if "computed" not in medians or origin not in medians:
        return None
    return medians["computed"] / medians[origin]
