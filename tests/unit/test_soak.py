"""The command line of the soak: options, outcomes, report, exit status. Scenarios here prove nothing but that."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.soak.__main__ import main
from tests.soak.table import SCENARIOS, Scenario


def good(count: int, seed: int, scratch: Path) -> dict[str, object]:
    """All is well."""
    (scratch / "file").write_text("left behind")
    return {"count": count, "seed": seed, "share": 0.123456}


def bad(count: int, seed: int, scratch: Path) -> dict[str, object]:
    """Something is not."""
    raise AssertionError(f"a wrong row, {count} [seed {seed}] {scratch.is_dir()}")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(SCENARIOS):
        monkeypatch.delitem(SCENARIOS, name)
    monkeypatch.setitem(SCENARIOS, "good", Scenario(good, 2, 30))
    monkeypatch.setitem(SCENARIOS, "bad", Scenario(bad, 1, 1))
    monkeypatch.setitem(SCENARIOS, "elsewhere", Scenario(bad, 1, 1, lambda: "no such device"))


@pytest.mark.usefixtures("table")
def test_what_is_violated_fails_the_run_and_what_cannot_run_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--seed", "5", "--scratch", str(tmp_path), "--json", str(tmp_path / "report.json")]) == 1
    shown = capsys.readouterr().out
    assert "seed 5" in shown and "a wrong row, 1 [seed 5] True" in shown and "no such device" in shown
    assert "1 passed, 1 failed, 1 skipped" in shown and "share 0.1235" in shown
    report = json.loads((tmp_path / "report.json").read_text())
    assert [one["outcome"] for one in report["scenarios"]] == ["passed", "failed", "skipped"]
    assert report["seed"] == 5 and report["scenarios"][0]["numbers"]["count"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"], "scratch folders are removed"


@pytest.mark.usefixtures("table")
def test_one_scenario_runs_in_full_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "good", "--full", "--scratch", str(tmp_path)]) == 0
    assert "count 30" in capsys.readouterr().out


@pytest.mark.usefixtures("table")
def test_a_terminated_run_lets_its_scenario_clean_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned: list[bool] = []

    def terminated(_: int, __: int, scratch: Path) -> dict[str, object]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        finally:
            cleaned.append(scratch.is_dir())
        return {}

    monkeypatch.setitem(SCENARIOS, "good", Scenario(terminated, 1, 1))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert main(["--only", "good", "--scratch", str(tmp_path)]) == 130
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "the caller's own is back"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert cleaned == [True] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--scratch", "/nowhere"], ["--seed", "many"]])
def test_wrong_options_end_with_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_help_teaches_and_the_list_names_every_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "examples:" in capsys.readouterr().out
    assert all(scenario.about.endswith(".") for scenario in SCENARIOS.values())
    assert all(0 < scenario.short_count <= scenario.full_count for scenario in SCENARIOS.values())
