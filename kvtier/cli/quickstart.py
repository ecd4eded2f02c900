"""`scripts/quickstart` once `.venv` is there: server, weights, start, a chat, the tiers at work, clean stop.

Owns the order of the steps, what they print and the report. Uses what a user would: scripts, `scripts/serve`, the gRPC
client. Knows no engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from kvtier.cli import demonstration
from kvtier.client import Client
from kvtier.errors import KvtierError
from kvtier.serving import Ports, ServingError
from kvtier.serving.http import ControlClient, label, parse_metrics

MODEL = "smollm2"
QUESTION = "In one or two sentences: why does a cache make a computer faster?"
LOG = "server.log"
START_S = 300.0
STOP_S = 180.0
SETTLE_S = 10.0
SHOWN_METRICS = {
    "kvtier_prompt_tokens_total",
    "kvtier_promoted_blocks_total",
    "kvtier_demoted_blocks_total",
    "kvtier_evicted_blocks_total",
    "kvtier_tier_used_blocks",
    "kvtier_tier_capacity_blocks",
}
CURL_BODY = '{"text_input": "Name a river.", "chat": "true", "stream": true, "max_tokens": 40}'


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says."""

    root: Path
    ports: Ports
    keep: bool
    report: Path | None


def main(arguments: list[str] | None = None) -> int:
    """Run it all. Status 0: everything held; 1: something did not, and the message says what."""
    settings = parse(arguments)
    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the server, a session of its own, is stopped
    try:
        settings.ports.check_free()
        prepare(settings, console)
        quickstart(settings, console)
    except (KvtierError, OSError) as error:
        console.print(f"[bold red]quickstart:[/] {escape(str(error))}")
        return 1
    except subprocess.CalledProcessError as error:
        console.print(f"[bold red]quickstart:[/] {error.cmd[1]} ended with status {error.returncode}, see above")
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    return 0


def parse(arguments: list[str] | None) -> Settings:
    """The command line; `scripts/quickstart --help` explains it."""
    parser = argparse.ArgumentParser(prog="scripts/quickstart", allow_abbrev=False)
    parser.add_argument("--root", type=Path, default=Path(), help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--report", type=Path, metavar="FILE")
    parser.add_argument("--http-port", type=int, metavar="N", default=Ports().http)
    parser.add_argument("--grpc-port", type=int, metavar="N", default=Ports().grpc)
    parser.add_argument("--metrics-port", type=int, metavar="N", default=Ports().metrics)
    known = parser.parse_args(arguments)
    ports = Ports(known.http_port, known.grpc_port, known.metrics_port)
    return Settings(known.root.resolve(), ports, known.keep, known.report)


def prepare(settings: Settings, console: Console) -> None:
    """Get server and weights; both scripts show their own progress and leave alone what is there."""
    for title, script in (("Triton server", "install_server.py"), ("weights", "fetch_model.py")):
        console.rule(f"[bold]{title}", align="left")
        subprocess.run([sys.executable, str(settings.root / "scripts" / script)], check=True)


def quickstart(settings: Settings, console: Console) -> None:
    """Serve, chat, demonstrate, report. Raises KvtierError if something does not hold."""
    ports = settings.ports
    control = ControlClient("localhost", ports.http, ports.metrics)
    with served(settings, control, console) as process, Client(f"localhost:{ports.grpc}", MODEL) as client:
        console.rule("[bold]a chat answer over gRPC", align="left")
        console.print(f"> {QUESTION}")
        chat = demonstration.ask(client, "chat", QUESTION, 80, lambda text: console.print(text, end="", markup=False))
        console.print(f"\n[dim]first token after {chat.ttft_s:.2f} s[/]")

        console.rule("[bold]the tiers at work", align="left")
        console.print(demonstration.DESCRIPTION)
        with console.status("") as status:
            runs = demonstration.demonstrate(client, status.update if console.is_terminal else console.print)
        console.print(demonstration.table(runs))
        for run in runs:
            console.print(f"{run.name:16} {run.text.strip()}", markup=False)

        console.rule("[bold]metrics", align="left")
        page = settled_metrics(control, demonstration.tokens_from(runs))
        console.print("\n".join(shown_metrics(page)), markup=False, style="dim", soft_wrap=True)
        if settings.report is not None:
            write_report(settings.report, control.version(), runs, page)
            console.print(f"report: {settings.report}")
        found = demonstration.failures(runs)
        if found:
            raise ServingError("\n".join([*found, f"the server's log: {folder_of(settings) / LOG}"]))
        if settings.keep:
            tell_how_to_use(settings, process.pid, console)


@contextlib.contextmanager
def served(settings: Settings, control: ControlClient, console: Console) -> Iterator[subprocess.Popen[bytes]]:
    """A `scripts/serve` with the demonstration's sizes and an empty cache directory, ready to answer.

    Stopped afterwards, unless it is to be kept and nothing went wrong. Raises ServingError with the log's last lines if
    it does not come up or does not stop cleanly.
    """
    folder = folder_of(settings)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = serve_command(settings, folder)
    console.rule("[bold]starting the server", align="left")
    console.print(" ".join(["scripts/serve", *command[5:]]), markup=False, style="dim", soft_wrap=True)
    with (folder / LOG).open("wb") as log:
        # Its own session: a Ctrl-C reaches us alone, and we stop the server in order.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=settings.root, start_new_session=True
        )
    kept = False
    try:
        with console.status("loading the model"):
            seconds = wait_ready(process, control, folder / LOG)
        console.print(f"Triton server {control.version()} ready after {seconds:.1f} s")
        yield process
        kept = settings.keep
    except KeyboardInterrupt:
        stop(process)
        shutil.rmtree(folder, ignore_errors=True)  # nothing went wrong that its log could tell
        raise
    finally:
        if not kept:
            status = stop(process)
    if not kept:
        if status != 0:
            raise ServingError(f"the server stopped with status {status}:\n{last_lines(folder / LOG)}")
        shutil.rmtree(folder)
        console.print("server stopped cleanly")


def folder_of(settings: Settings) -> Path:
    """Log and cache directory of this quickstart's server. The port in its name is free, so nobody uses it."""
    return settings.root / ".cache" / f"quickstart-{settings.ports.grpc}"


def serve_command(settings: Settings, folder: Path) -> list[str]:
    """The command line of the server: what `scripts/serve` runs, with the demonstration's sizes."""
    ports = settings.ports
    overrides = {**demonstration.OVERRIDES, "tiers.nvme.path": str(folder / "kv")}
    options = [f"--http-port={ports.http}", f"--grpc-port={ports.grpc}", f"--metrics-port={ports.metrics}"]
    options += [f"--set={key}={value}" for key, value in overrides.items()]
    return [sys.executable, "-m", "kvtier.cli.serve", "--root", str(settings.root), *options]


def wait_ready(process: subprocess.Popen[bytes], control: ControlClient, log: Path) -> float:
    """Wait until the server answers; returns the seconds it took. Raises ServingError."""
    started = time.monotonic()
    while time.monotonic() - started < START_S:
        if process.poll() is not None:
            raise ServingError(f"the server ended with status {process.returncode}:\n{last_lines(log)}")
        with contextlib.suppress(OSError):
            if control.ready():
                return time.monotonic() - started
        time.sleep(0.1)
    raise ServingError(f"the server was not ready after {START_S:.0f} s:\n{last_lines(log)}")


def stop(process: subprocess.Popen[bytes]) -> int:
    """Ask the server to stop and wait; returns its status."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the second one ends it at once
        return process.wait(STOP_S)


def last_lines(log: Path, count: int = 12) -> str:
    """The end of the server's log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


def settled_metrics(control: ControlClient, tokens: dict[str, int]) -> str:
    """The metrics page once it has caught up with the responses: `tokens` is what they said, by origin.

    Raises ServingError if it does not within a few seconds: then the two disagree.
    """
    deadline = time.monotonic() + SETTLE_S
    while True:
        page = control.metrics()
        series = parse_metrics(page).get("kvtier_prompt_tokens_total", {})
        counted = {label(labels, "origin"): int(value) for labels, value in series.items()}
        if all(counted.get(origin, 0) == count for origin, count in tokens.items()):
            return page
        if time.monotonic() > deadline:
            raise ServingError(f"metrics and responses disagree about prompt tokens by origin: {counted} and {tokens}")
        time.sleep(0.1)


def shown_metrics(page: str) -> list[str]:
    """The lines of a metrics page that tell what the tiers did, and how many of kvtier's are left out."""
    lines = [line for line in page.splitlines() if line.startswith("kvtier_")]
    shown = [line for line in lines if line.partition("{")[0] in SHOWN_METRICS and not line.endswith(" 0")]
    return [*shown, f"and {len(lines) - len(shown)} lines more, histograms among them"]


def write_report(path: Path, server_version: str, runs: list[demonstration.Run], page: str) -> None:
    """Write the results as JSON; `metrics` is `{name: {labels: value}}` of every kvtier line."""
    metrics = {name: series for name, series in parse_metrics(page).items() if name.startswith("kvtier_")}
    report = {
        "server_version": server_version,
        "model": MODEL,
        "runs": [run.as_json() for run in runs],
        "metrics": metrics,
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def tell_how_to_use(settings: Settings, process_id: int, console: Console) -> None:
    """What to do with a server that is left running."""
    ports = settings.ports
    console.rule("[bold]the server goes on", align="left")
    lines = [
        f"gRPC localhost:{ports.grpc}, HTTP localhost:{ports.http}, metrics localhost:{ports.metrics}/metrics",
        f"try   .venv/bin/kvtier smoke localhost:{ports.grpc}",
        f"or    curl -N localhost:{ports.http}/v2/models/{MODEL}/generate_stream -d '{CURL_BODY}'",
        f"stop  kill {process_id}        (its log: {folder_of(settings) / LOG})",
        "Its tiers are as small as the demonstration wants them; scripts/serve starts one with those of engine.yaml.",
    ]
    console.print("\n".join(lines), markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
