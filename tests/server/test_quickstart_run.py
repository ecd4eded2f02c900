"""The quickstart against the real server: each stage from its tier, report, clean stop, and the README's clients."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvtier.cli import quickstart
from kvtier.cli.main import app
from kvtier.serving import Ports, locate
from kvtier.serving.http import ControlClient

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    try:
        locate(ROOT / ".cache" / "triton")
    except quickstart.ServingError as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Kept:
    """What `quickstart --keep --report FILE` left behind."""

    ports: Ports
    output: str
    report: dict[str, object]
    process_id: int


def options(ports: Ports) -> list[str]:
    return [
        f"--root={ROOT}",
        f"--http-port={ports.http}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-port={ports.metrics}",
    ]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    ports, report = Ports.free(), tmp_path_factory.mktemp("quickstart") / "report.json"
    command = [sys.executable, "-m", "kvtier.cli.quickstart", "--keep", f"--report={report}", *options(ports)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    match = re.search(r"kill (\d+)", done.stdout)
    assert match is not None, done.stdout
    yield Kept(ports, done.stdout, json.loads(report.read_text()), int(match[1]))
    stop(int(match[1]))
    shutil.rmtree(ROOT / ".cache" / f"quickstart-{ports.grpc}", ignore_errors=True)


def stop(process_id: int) -> None:
    """End the server that was left running; its own log says whether it stopped in order."""
    descriptor = os.pidfd_open(process_id)
    signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    assert wait_readable(descriptor, 120), "the server that was kept did not stop"
    os.close(descriptor)


def wait_readable(descriptor: int, timeout_s: float) -> bool:
    import select

    return bool(select.select([descriptor], [], [], timeout_s)[0])


def test_each_stage_came_from_its_tier_with_the_same_answer(kept: Kept) -> None:
    runs = kept.report["runs"]
    assert isinstance(runs, list) and len(runs) == 4
    for run, origin in zip(runs, ("computed", "hbm", "dram", "nvme"), strict=True):
        assert run["origin"][origin] >= 0.9 * run["prompt_tokens"]
        assert sum(run["origin"].values()) == run["prompt_tokens"]
    assert {run["text"] for run in runs} == {runs[0]["text"]} and runs[0]["text"]
    assert 2900 < runs[0]["prompt_tokens"] < 3100
    for warm in runs[1:]:
        assert warm["ttft_s"] < runs[0]["ttft_s"]  # 25 times sooner and more, but not on a machine that is busy


def test_report_and_output_tell_the_same(kept: Kept) -> None:
    assert kept.report["server_version"] and kept.report["model"] == "smollm2"
    runs, metrics = kept.report["runs"], kept.report["metrics"]
    assert isinstance(metrics, dict) and isinstance(runs, list)
    counted = metrics["kvtier_prompt_tokens_total"].items()
    [from_nvme] = [value for labels, value in counted if 'origin="nvme"' in labels]
    assert from_nvme == sum(run["origin"]["nvme"] for run in runs)
    assert kept.output.count(runs[0]["text"].strip()) == 4
    assert f'kvtier_prompt_tokens_total{{model="smollm2",origin="nvme"}} {from_nvme:g}\n' in kept.output


def test_the_kept_server_answers_kvtier_smoke(kept: Kept) -> None:
    result = CliRunner().invoke(app, ["smoke", f"localhost:{kept.ports.grpc}"])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() and "prompt tokens" in result.stderr


def blocks(language: str, word: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return [block for block in found if word in block]


@pytest.mark.parametrize("word", ["kvtier.client", "tritonclient"])
def test_the_readmes_python_clients_run(kept: Kept, tmp_path: Path, word: str) -> None:
    [source] = blocks("python", word)
    script = tmp_path / "client.py"
    script.write_text(source.replace("localhost:8001", f"localhost:{kept.ports.grpc}"))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 3


def test_the_readmes_curl_line_streams(kept: Kept) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    [line] = blocks("bash", "generate_stream")
    line = line.replace("localhost:8000", f"localhost:{kept.ports.http}")
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False)
    events = [json.loads(text.removeprefix("data: ")) for text in done.stdout.splitlines() if text.startswith("data: ")]
    assert len(events) > 1 and all("error" not in event for event in events), done.stdout
    assert "".join(event["text_output"] for event in events).strip()


def test_the_readmes_engine_example_runs(tmp_path: Path) -> None:
    [source] = blocks("python", "with Engine(config)")
    script = tmp_path / "engine.py"
    script.write_text(source.replace(".cache/kv-python", str(tmp_path / "kv")).replace("2GiB", "64MiB"))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and "'computed': 5" in done.stdout


def test_a_server_that_is_not_kept_stops_cleanly_and_leaves_nothing() -> None:
    ports = Ports.free()
    settings = quickstart.parse(options(ports))
    console = Console(width=100)
    control = ControlClient("localhost", ports.http, ports.metrics)
    with console.capture() as captured, quickstart.served(settings, control, console) as process:
        assert control.ready() and process.poll() is None
    assert process.returncode == 0 and "stopped cleanly" in captured.get()
    assert not quickstart.folder_of(settings).exists()


def test_a_server_that_cannot_start_is_reported_with_its_own_words(tmp_path: Path) -> None:
    ports = Ports.free()
    settings = quickstart.parse([f"--root={tmp_path}", *options(ports)[1:]])
    control = ControlClient("localhost", ports.http, ports.metrics)
    with (
        pytest.raises(quickstart.ServingError, match="install_server"),
        quickstart.served(settings, control, Console()),
    ):
        pytest.fail("started from an empty folder")
