"""The command line of `scripts/soak`: runs scenarios one after another with a bar, prints a table, writes JSON.

Owns options, scratch folders and the report; what is run comes from table.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvtier.cli.paragraphs import Paragraphs
from tests.soak.table import SCENARIOS

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
WIDTH = 140
"""Of the table where there is no terminal."""
ERROR_LINES = 12
DESCRIPTION = """\
Prove the shared shelves: kill, freeze, fill and damage them for as long as it takes, judging every byte that is read.

Every block's payload is a keystream of its hash, so any process can tell a right row from a wrong one: a read is a miss
or exactly that payload. Engines and keeper are real processes on a real cache directory below --scratch.

Without --full each scenario runs with the short count that the tests use, some minutes in all; with it, for an hour or
so. A run can be repeated: give it the seed that it has printed. The order of two processes is never the same, though.
"""
EPILOG = """\
examples:
  scripts/soak                                   everything, short
  scripts/soak --list                            what there is
  scripts/soak --only kills --seed 7             one scenario, the same victims
  scripts/soak --full --json soak.json           everything, in full; a report

exit status: 0 nothing was violated (what was skipped is listed with its reason), 1 something was, 2 wrong options,
130 interrupted or terminated.
"""


@dataclass(frozen=True, slots=True)
class Result:
    """How one scenario ended."""

    name: str
    outcome: str
    count: int
    seconds: float
    text: str
    """Why it was skipped, or what was violated."""
    numbers: dict[str, object]


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; the exit status."""
    options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    if options.list:
        show_list(console)
        return 0
    console.print(f"seed {options.seed}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    results: list[Result] = []
    terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)  # else disks stay mounted, and even frozen
    try:
        with Progress(
            TextColumn("{task.description:60}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        ) as progress:
            task = progress.add_task("", total=len(options.only))
            for name in options.only:
                scenario = SCENARIOS[name]
                count = scenario.full_count if options.full else scenario.short_count
                progress.update(task, description=f"{name}: {count} times")
                results.append(run(name, count, options.seed, options.scratch))
                progress.advance(task)
                if results[-1].outcome is FAILED:
                    progress.console.print(f"{name} failed: {results[-1].text}", markup=False)
            progress.update(task, description="done")
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, terminate)
    if options.json is not None:
        options.json.write_text(report(options, results))
    show(console, results)
    return 1 if any(result.outcome is FAILED for result in results) else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line; exits with status 2 and a message if they are wrong."""
    parser = argparse.ArgumentParser("scripts/soak", description=DESCRIPTION, epilog=EPILOG, formatter_class=Paragraphs)
    add = parser.add_argument
    add("--full", action="store_true", help="the full counts: about an hour")
    add("--only", action="append", choices=sorted(SCENARIOS), metavar="NAME", help="this scenario; may be repeated")
    add("--list", action="store_true", help="name every scenario with its counts, and whether it can run here")
    add("--json", type=Path, metavar="FILE", help="write what was measured as JSON")
    add("--seed", type=int, default=random.SystemRandom().randrange(1 << 31), metavar="N", help="default: a new one")
    add("--scratch", type=Path, metavar="DIR", help="where cache directories are made (default: TMPDIR or /tmp)")
    options = parser.parse_args(arguments)
    options.only = options.only or list(SCENARIOS)
    if options.scratch is not None and not options.scratch.is_dir():
        parser.error(f"argument --scratch: {options.scratch} is no directory")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"argument --json: {options.json.absolute().parent} is no directory")
    return options


def run(name: str, count: int, seed: int, below: Path | None) -> Result:
    """One scenario in a scratch folder of its own."""
    scenario, begun = SCENARIOS[name], time.monotonic()
    reason = scenario.skip_reason()
    if reason:
        return Result(name, SKIPPED, 0, 0.0, reason, {})
    scratch = Path(tempfile.mkdtemp(prefix="kvtier-soak-", dir=below))
    outcome, text, numbers = PASSED, "", dict[str, object]()
    try:
        numbers = scenario.run(count, seed, scratch)
    except Exception as error:  # a violation, or a scenario that cannot go on: either way it is not proved
        outcome = FAILED
        text = str(error) if isinstance(error, AssertionError) and str(error) else _last_lines(error)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Result(name, outcome, count, time.monotonic() - begun, text, numbers)


def report(options: argparse.Namespace, results: Iterable[Result]) -> str:
    """Everything as JSON."""
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    machine |= {"kernel": platform.release(), "load": os.getloadavg()[0]}
    found = {"seed": options.seed, "full": options.full, "machine": machine, "scenarios": [asdict(r) for r in results]}
    return json.dumps(found, indent=2) + "\n"


def show(console: Console, results: list[Result]) -> None:
    """The table, and the sum of it."""
    table = Table("scenario", "outcome", "count", "seconds", "what was seen")
    for result in results:
        seen = result.text or ", ".join(f"{key} {_short(value)}" for key, value in result.numbers.items())
        style = {PASSED: "green", FAILED: "bold red", SKIPPED: "yellow"}[result.outcome]
        outcome = f"[{style}]{result.outcome}[/]"
        table.add_row(result.name, outcome, str(result.count), f"{result.seconds:.1f}", seen.replace("[", r"\["))
    console.print(table)
    counts = {outcome: sum(result.outcome is outcome for result in results) for outcome in (PASSED, FAILED, SKIPPED)}
    console.print(", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count))


def show_list(console: Console) -> None:
    """Every scenario, and whether it can run here."""
    table = Table("scenario", "short", "full", "what it shows")
    for name, scenario in SCENARIOS.items():
        reason = scenario.skip_reason()
        about = scenario.about + (f" (not here: {reason})" if reason else "")
        table.add_row(name, str(scenario.short_count), str(scenario.full_count), about)
    console.print(table)


def _short(value: object) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_short(one)}" for key, one in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _last_lines(error: Exception) -> str:
    return "\n".join("".join(traceback.format_exception(error)).splitlines()[-ERROR_LINES:])


if __name__ == "__main__":
    sys.exit(main())
