"""The parts of the quickstart that need no server: prompts, verdict, report, command lines, setting up `.venv`."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from kvtier.byte_text import parse_bytes
from kvtier.cli import demonstration, quickstart
from kvtier.cli.demonstration import FILLERS, OVERRIDES, PROMPT, STAGES, Run, failures
from kvtier.cli.ledger import NOTE, QUESTION, ledger
from kvtier.config import EngineConfig
from kvtier.serving import Ports
from kvtier.serving.http import ControlClient
from kvtier.tiers.header import HEADER_BYTES
from kvtier.tokens import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = ROOT / ".cache" / "models" / "smollm2"
ROW_BYTES = 30 * 2 * 3 * 32 * 64 * 4
"""Of SmolLM2 in float32: layers x (K, V) x KV heads x block tokens x head dim x bytes."""

PAGE = """\
# HELP kvtier_prompt_tokens_total Prompt tokens by origin
# TYPE kvtier_prompt_tokens_total counter
kvtier_prompt_tokens_total{model="smollm2",origin="nvme"} 2976
kvtier_ttft_seconds_bucket{model="smollm2",le="0.1"} 3
kvtier_ttft_seconds_count{model="smollm2"} 3
nv_inference_count{model="smollm2",version="1"} 3
"""


def good_runs() -> list[Run]:
    origins = [{"hbm": 0, "dram": 0, "nvme": 0, "computed": 0} for _ in STAGES]
    for stage, origin in zip(STAGES, origins, strict=True):
        origin["computed"] = 3
        origin[stage.origin] = 100 if stage.origin == "computed" else 97
    return [Run(stage.name, 1.0, 100, origin, "Oskar.") for stage, origin in zip(STAGES, origins, strict=True)]


def test_prompts_are_the_same_every_time_and_differ_from_the_first_word() -> None:
    assert ledger("Northgate", 107) == PROMPT
    assert len({text.split()[0] for text in [PROMPT, *FILLERS]}) == 1 + len(FILLERS)
    assert PROMPT.endswith(QUESTION) and PROMPT.count(NOTE) == 1


@pytest.mark.smollm2
def test_prompts_fill_the_tiers_as_the_demonstration_says() -> None:
    if not (SMOLLM2 / "tokenizer.json").exists():
        pytest.skip("no SmolLM2 weights: run scripts/fetch_model.py")
    tokenizer = Tokenizer.load(SMOLLM2)
    assert tokenizer is not None
    chats = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in [PROMPT, *FILLERS]]
    prompt, *fillers = [len(tokens) // 32 for tokens in chats]
    hbm_slots = int(parse_bytes(OVERRIDES["tiers.hbm.bytes"])) // ROW_BYTES
    dram_slots = int(parse_bytes(OVERRIDES["tiers.dram.bytes"])) // (ROW_BYTES + HEADER_BYTES)
    assert 2900 < len(chats[0]) < 3100
    assert len(chats[0]) + demonstration.ANSWER_TOKENS <= 32 * hbm_slots, "the prompt does not fit HBM"
    assert sum(fillers[:2]) >= hbm_slots, "two prompts do not push it out of HBM"
    assert prompt + sum(fillers[:2]) <= dram_slots, "it is not in DRAM any more when it is asked for"
    assert sum(fillers[2:]) >= dram_slots, "four prompts do not push it out of DRAM"
    assert len({tuple(tokens[:32]) for tokens in chats}) == len(chats), "two prompts share their first block"


def test_the_verdict_is_silent_when_all_holds() -> None:
    assert failures(good_runs()) == []


def test_another_text_or_another_origin_is_found() -> None:
    runs = good_runs()
    runs[2] = replace(runs[2], text="Olaf.")
    runs[3] = replace(runs[3], origin={"hbm": 0, "dram": 97, "nvme": 0, "computed": 3})
    different, elsewhere = failures(runs)
    assert "from DRAM" in different and "Olaf" in different
    assert "0 of 100 prompt tokens are from NVMe" in elsewhere


def test_the_report_has_the_documented_shape(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    quickstart.write_report(path, "2.51.0", good_runs(), PAGE)
    report = json.loads(path.read_text())
    assert set(report) == {"server_version", "model", "runs", "metrics"}
    assert [set(run) for run in report["runs"]] == [{"name", "ttft_s", "prompt_tokens", "origin", "text"}] * 4
    assert report["metrics"]["kvtier_prompt_tokens_total"] == {'model="smollm2",origin="nvme"': 2976}
    assert not any(name.startswith("nv_") for name in report["metrics"])


def test_metrics_are_shown_that_tell_of_tiers_and_are_not_zero() -> None:
    zero = 'kvtier_prompt_tokens_total{model="smollm2",origin="dram"} 0\n'
    shown, rest = quickstart.shown_metrics(PAGE + zero)
    assert shown.startswith("kvtier_prompt_tokens_total{") and 'origin="nvme"' in shown
    left_out = sum(line.startswith("kvtier_") for line in PAGE.splitlines())
    assert rest == f"and {left_out} lines more, histograms among them"


def test_the_table_fits_a_narrow_terminal() -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(demonstration.table(good_runs()))
    assert "again, from NVMe" in captured.get() and "…" not in captured.get()


def test_the_servers_overrides_are_a_valid_configuration(tmp_path: Path) -> None:
    settings = quickstart.parse(["--root", str(tmp_path), "--grpc-port", "9001"])
    command = quickstart.serve_command(settings, quickstart.folder_of(settings))
    overrides = dict(item.removeprefix("--set=").split("=", 1) for item in command if item.startswith("--set="))
    config = EngineConfig.load(ROOT / "model_repository" / "smollm2" / "1" / "engine.yaml", overrides)
    assert config.dtype == "float32" and config.tiers.nvme.path == tmp_path / ".cache" / "quickstart-9001" / "kv"
    assert "--grpc-port=9001" in command


def test_a_taken_port_is_reported_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "prepare", lambda *_: pytest.fail("went on"))
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        port = held.getsockname()[1]
        free = Ports.free()
        arguments = [f"--http-port={port}", f"--grpc-port={free.grpc}", f"--metrics-port={free.metrics}"]
        assert quickstart.main(["--root", str(tmp_path), *arguments]) == 1
    assert str(port) in capsys.readouterr().out


def test_an_interrupted_quickstart_stops_its_server_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(quickstart, "serve_command", lambda *_: command)
    monkeypatch.setattr(quickstart, "wait_ready", lambda *_: 0.0)
    monkeypatch.setattr(ControlClient, "version", lambda _: "of a test")
    settings = quickstart.parse([f"--root={tmp_path}"])
    stopped: list[subprocess.Popen[bytes]] = []

    def interrupted() -> None:
        with quickstart.served(settings, ControlClient("localhost", 1, 1), Console(quiet=True)) as process:
            assert (quickstart.folder_of(settings) / quickstart.LOG).exists() and process.poll() is None
            stopped.append(process)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert stopped[0].returncode is not None and not quickstart.folder_of(settings).exists()


@pytest.mark.parametrize("script", ["quickstart", "test", "check"])
def test_every_script_explains_itself_without_a_venv(script: str) -> None:
    command = [str(ROOT / "scripts" / script), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, check=True)
    assert result.stdout.startswith(f"usage: scripts/{script}") and not result.stderr


def test_the_quickstarts_help_names_every_option() -> None:
    result = subprocess.run([str(ROOT / "scripts" / "quickstart"), "-h"], capture_output=True, text=True, check=True)
    for option in ("--keep", "--report FILE", "--http-port N", "--grpc-port N", "--metrics-port N"):
        assert f"\n  {option}  " in result.stdout
        quickstart.parse([option.split()[0], *(["1"] if " " in option else [])])


@pytest.fixture
def make_venv() -> ModuleType:
    path = ROOT / "scripts" / "make_venv.py"
    spec = importlib.util.spec_from_file_location("make_venv", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_the_machine_lacks_is_named_as_packages(
    make_venv: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    monkeypatch.setattr(make_venv.shutil, "which", lambda _: None)
    monkeypatch.setattr(make_venv.sysconfig, "get_path", lambda _: str(tmp_path))
    assert make_venv.missing_packages()[0] == "g++"
    assert f"{name}-dev" in make_venv.missing_packages()


def test_a_venv_is_left_alone_until_the_lock_or_the_native_sources_change(
    make_venv: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root, calls = tmp_path / "clone", []
    (root / "kvtier" / "native").mkdir(parents=True)
    (root / ".venv").mkdir()
    for file in ("requirements.lock", "pyproject.toml", "kvtier/native/pool.cpp"):
        (root / file).write_text("one")
    monkeypatch.setattr(make_venv, "ROOT", root)
    monkeypatch.setattr(make_venv, "_runs", lambda *_: True)
    monkeypatch.setattr(make_venv.subprocess, "run", lambda command, **_: calls.append(command))

    def installs() -> int:
        calls.clear()
        make_venv.update(root / ".venv")
        return len(calls)

    assert installs() == 2
    assert installs() == 0
    (root / "kvtier" / "native" / "pool.cpp").write_text("two")
    assert installs() == 1
    (root / "requirements.lock").write_text("two")
    assert installs() == 2
    assert installs() == 0


@pytest.mark.parametrize(
    "command",
    [
        ["scripts/quickstart"],
        ["scripts/test"],
        ["scripts/prove_streaming"],
        [sys.executable, "-m", "kvtier.cli.serve"],
        [sys.executable, "-m", "tests.soak"],
        [sys.executable, "scripts/fetch_model.py"],
    ],
    ids=lambda command: command[-1],
)
def test_the_help_of_scripts_fits_80_columns(command: list[str]) -> None:
    done = subprocess.run(
        [*command, "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("usage: ") and max(map(len, done.stdout.splitlines())) <= 80
