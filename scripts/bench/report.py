"""Results as tables on the terminal, as JSON and as a picture. Knows neither kvtier nor how anything was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.results import (
    API,
    GRPC,
    ORIGINS,
    TIERED,
    TRANSFORMERS,
    UNTIERED,
    Comparison,
    Results,
    Ttft,
    compare,
    cost_percent,
    speedup,
)

SYSTEMS = (TIERED, UNTIERED, TRANSFORMERS, GRPC)


def print_report(results: Results, console: Console) -> None:
    """Tables of everything, then the few lines that answer the questions asked."""
    machine = results.machine
    console.print(
        f"{machine.cpu}, {machine.threads} of {machine.cores} cores, load {machine.load_before:.1f}; "
        f"memory reads {machine.read_bytes_s / 1e9:.1f} GB/s, copies {machine.copy_bytes_s / 1e9:.1f} GB/s, "
        f"disk reads {machine.disk_bytes_s / 1e9:.2f} GB/s, products {machine.flops_s / 1e9:.0f} GFLOP/s"
    )
    if results.ttft:
        console.print(_ttft_table(results.ttft))
    if results.decode:
        console.print(_decode_table(results))
    for line in verdicts(results):
        console.print(line)


def verdicts(results: Results) -> list[str]:
    """One sentence for each ratio that matters."""
    lines = []
    for way in (API, GRPC):
        for origin in ORIGINS[1:]:
            factor = speedup(results.ttft, way, origin)
            if factor is not None:
                lines.append(f"{way}: first token {factor:.1f} times sooner from {origin} than computed")
    for item in compare(results.decode, TIERED, TRANSFORMERS):
        lines.append(f"{_case(item)}: {item.ratio:.2f} times transformers ({_range(item)})")
    for item in compare(results.decode, TIERED, UNTIERED):
        lines.append(f"{_case(item)}: tiering costs {cost_percent(item):.1f} % of decode (ratio {_range(item)})")
    return lines


def to_json(results: Results) -> str:
    """Everything, with the ratios."""
    pairs = ((TIERED, TRANSFORMERS), (TIERED, UNTIERED))
    speedups = {way: {origin: speedup(results.ttft, way, origin) for origin in ORIGINS[1:]} for way in (API, GRPC)}
    content = {
        **asdict(results),
        "comparisons": [asdict(item) for ours, other in pairs for item in compare(results.decode, ours, other)],
        "ttft_speedups": speedups,
    }
    return json.dumps(content, indent=1) + "\n"


def plot(results: Results, file: Path) -> None:
    """TTFT by origin on the left (logarithmic), decode by case on the right, each bar beside its limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    ways = [way for way in (API, GRPC) if any(item.way == way for item in results.ttft)]
    for place, way in enumerate(ways):
        medians = {item.origin: item for item in results.ttft if item.way == way}
        _bars(left, place, len(ways), way, [medians[o].median_s * 1e3 if o in medians else 0.0 for o in ORIGINS])
    limits = {item.origin: item.limit_s * 1e3 for item in results.ttft}
    _limits(left, [limits.get(origin, 0.0) for origin in ORIGINS])
    left.set(yscale="log", ylabel="ms", title="Time to the first token, by origin of the prefix")
    left.set_xticks(range(len(ORIGINS)), ORIGINS)

    cases = list(dict.fromkeys((item.batch, item.context) for item in results.decode))
    systems = [system for system in SYSTEMS if any(item.system == system for item in results.decode)]
    for place, system in enumerate(systems):
        found = {(item.batch, item.context): item.median_tokens_s for item in results.decode if item.system == system}
        _bars(right, place, len(systems), system, [found.get(case, 0.0) for case in cases])
    bounds = {(item.batch, item.context): item.limit_tokens_s for item in results.decode}
    _limits(right, [bounds[case] for case in cases])
    right.set(ylabel="tokens/s, all sequences", title="Decode")
    right.set_xticks(range(len(cases)), [f"batch {batch}\n{context} tokens" for batch, context in cases])
    for axes in (left, right):
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _ttft_table(ttft: Sequence[Ttft]) -> Table:
    table = Table("through", "prefix from", "median ms", "min", "max", "limit ms", "prompt tokens by origin")
    table.title = f"Time to the first token of {ttft[0].prompt_tokens} tokens"
    for item in ttft:
        values = (item.median_s, min(item.samples_s), max(item.samples_s), item.limit_s)
        tokens = ", ".join(f"{origin} {count}" for origin, count in item.origin_tokens.items() if count)
        table.add_row(item.way, item.origin, *(f"{value * 1e3:.1f}" for value in values), tokens)
    return table


def _decode_table(results: Results) -> Table:
    table = Table("batch", "context", "system", "tokens/s", "min", "max", "limit", "% of limit", "x transformers")
    table.title = "Decode, medians over rounds run in turns"
    for item in sorted(results.decode, key=lambda item: (item.context, item.batch, SYSTEMS.index(item.system))):
        against = [
            found.ratio
            for found in (
                compare(results.decode, item.system, TRANSFORMERS) if item.system in (TIERED, UNTIERED) else []
            )
            if (found.batch, found.context) == (item.batch, item.context)
        ]
        rates = (item.median_tokens_s, min(item.samples_tokens_s), max(item.samples_tokens_s), item.limit_tokens_s)
        share = f"{100 * item.median_tokens_s / item.limit_tokens_s:.0f}" if item.limit_tokens_s else ""
        ratio = f"{against[0]:.2f}" if against else ""
        name = (str(item.batch), str(item.context), item.system)
        table.add_row(*name, *(f"{rate:.1f}" for rate in rates), share, ratio)
    return table


def _bars(axes: Any, place: int, count: int, label: str, values: list[float]) -> None:
    width = 0.8 / count
    axes.bar([x - 0.4 + (place + 0.5) * width for x in range(len(values))], values, width * 0.95, label=label)


def _limits(axes: Any, values: list[float]) -> None:
    for x, value in enumerate(values):
        if value:
            label = "limit of this machine" if x == 0 else None
            axes.hlines(value, x - 0.42, x + 0.42, colors="black", linestyles="dashed", label=label)


def _case(item: Comparison) -> str:
    return f"batch {item.batch}, context {item.context}"


def _range(item: Comparison) -> str:
    return f"rounds {item.low:.2f} to {item.high:.2f}"
