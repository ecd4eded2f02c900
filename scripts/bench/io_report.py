"""Results of bench_io.py as a table, as JSON and as a picture. Knows numbers only, not how they were measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.fio import FioPass
from bench.nvme_tier import Pass


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of everything."""

    load: Pass
    store: Pass
    plain_load: Pass
    """Without verification."""
    plain_store: Pass
    """With sums that were known."""
    dram_store: Pass
    """Likewise, out of a DRAM shelf's memory."""
    unregistered_store: Pass
    """Likewise, with its pages pinned anew for each row."""
    memory: Pass
    """The memory that rows are read into, read once."""
    busy_load: Pass
    """Beside a busy Python thread; its CPU time has that of the thread in it."""
    fio_load: FioPass | None
    fio_store: FioPass | None


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of one length through one engine at one depth."""

    row_bytes: int
    depth: int
    engine: str
    rounds: list[Round]

    def numbers(self) -> dict[str, float | None]:
        """Medians over the rounds: GB/s, shares of fio by pairs, CPU milliseconds per GB."""

        def middle(value: Callable[[Round], float]) -> float:
            return median(value(one) for one in self.rounds)

        found: dict[str, float | None] = {
            "load_gb_s": middle(lambda one: one.load.bytes_s / 1e9),
            "store_gb_s": middle(lambda one: one.store.bytes_s / 1e9),
            "load_of_fio": None,
            "store_of_fio": None,
            "fio_load_ms_gb": None,
            "fio_store_ms_gb": None,
            "load_io_ms_gb": middle(lambda one: one.plain_load.cpu_ms_gb),
            "load_verify_ms_gb": middle(lambda one: one.load.cpu_ms_gb - one.plain_load.cpu_ms_gb),
            "store_io_ms_gb": middle(lambda one: one.plain_store.cpu_ms_gb),
            "store_sums_ms_gb": middle(lambda one: one.store.cpu_ms_gb - one.plain_store.cpu_ms_gb),
            "dram_store_ms_gb": middle(lambda one: one.dram_store.cpu_ms_gb),
            "unregistered_store_ms_gb": middle(lambda one: one.unregistered_store.cpu_ms_gb),
            "memory_read_ms_gb": middle(lambda one: one.memory.cpu_ms_gb),
            "busy_of_load": middle(lambda one: one.busy_load.bytes_s / one.load.bytes_s),
        }
        pairs = [(one.load.bytes_s, one.fio_load.bytes_s) for one in self.rounds if one.fio_load is not None]
        if pairs:
            found["load_of_fio"] = median(ours / fio for ours, fio in pairs)
            found["fio_load_gb_s"] = median(fio / 1e9 for _, fio in pairs)
            found["fio_load_ms_gb"] = median(one.fio_load.cpu_ms_gb for one in self.rounds if one.fio_load is not None)
        pairs = [(one.store.bytes_s, one.fio_store.bytes_s) for one in self.rounds if one.fio_store is not None]
        if pairs:
            found["store_of_fio"] = median(ours / fio for ours, fio in pairs)
            found["fio_store_gb_s"] = median(fio / 1e9 for _, fio in pairs)
            found["fio_store_ms_gb"] = median(
                one.fio_store.cpu_ms_gb for one in self.rounds if one.fio_store is not None
            )
        return found


def print_report(cases: Sequence[Case], console: Console) -> None:
    """One line for each case."""
    table = Table(title="The NVMe tier alone, medians of rounds in turn; CPU in ms per GB")
    for name in ("rows", "depth", "engine", "load GB/s", "of fio", "store GB/s", "of fio"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for name in (
        "I/O: load",
        "of fio",
        "store",
        "of fio",
        "from DRAM",
        "unregistered",
        "verify: load",
        "store",
        "one read",
        "beside busy Python",
    ):
        table.add_column(name, justify="right")
    for case in cases:
        found = case.numbers()
        table.add_row(
            *(f"{case.row_bytes >> 10} KiB", str(case.depth), case.engine),
            *(_shown(found[key], 2) for key in ("load_gb_s", "load_of_fio", "store_gb_s", "store_of_fio")),
            *(_shown(found[key], 0) for key in ("load_io_ms_gb", "fio_load_ms_gb")),
            *(_shown(found[key], 0) for key in ("store_io_ms_gb", "fio_store_ms_gb")),
            *(_shown(found[key], 0) for key in ("dram_store_ms_gb", "unregistered_store_ms_gb")),
            *(_shown(found[key], 0) for key in ("load_verify_ms_gb", "store_sums_ms_gb", "memory_read_ms_gb")),
            _shown(found["busy_of_load"], 2),
        )
    console.print(table)


def to_json(cases: Sequence[Case]) -> str:
    """Every pass, and the medians."""
    return json.dumps([asdict(case) | {"medians": case.numbers()} for case in cases], indent=1) + "\n"


def plot(cases: Sequence[Case], file: Path) -> None:
    """Shares of fio on the left, CPU on the right, a bar for each case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    names = [f"{case.row_bytes >> 10} KiB\ndepth {case.depth}\n{case.engine}" for case in cases]
    numbers = [case.numbers() for case in cases]
    for place, (key, label) in enumerate((("load_of_fio", "load"), ("store_of_fio", "store"))):
        left.bar([x - 0.2 + 0.4 * place for x in range(len(cases))], [n[key] or 0 for n in numbers], 0.38, label=label)
    left.axhline(0.95, color="black", linestyle="dashed", label="goal")
    left.set(title="Share of what fio gets", ylabel="medians of pairs")
    bottom = [0.0] * len(cases)
    for key, label in (("load_io_ms_gb", "I/O"), ("load_verify_ms_gb", "verification")):
        heights = [n[key] or 0.0 for n in numbers]
        right.bar(range(len(cases)), heights, 0.6, bottom=bottom, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for x, n in enumerate(numbers):
        fio = n["fio_load_ms_gb"] or 0.0
        least = (fio, fio + (n["memory_read_ms_gb"] or 0.0))
        said = {} if x else {"label": "fio, and one read of the memory"}
        right.hlines(least, x - 0.4, x + 0.4, color="black", linestyle="dashed", **said)
    right.set(title="CPU of a load", ylabel="ms per GB")
    for axes in (left, right):
        axes.set_xticks(range(len(cases)), names)
        axes.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
