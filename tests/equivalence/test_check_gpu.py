"""scripts/check_gpu without a GPU: it says so and ends well, and all of it runs on the CPU for a rehearsal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run scripts/check_gpu")
def test_without_a_gpu_it_is_skipped_and_says_so() -> None:
    done = run()
    assert done.returncode == 0 and done.stdout.startswith("skipped: no GPU: it needs a "), done.stderr
    assert "torch" in done.stdout


def test_a_rehearsal_runs_every_check_and_measurement(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = run("--rehearse", "--folder", str(tmp_path), "--json", str(tmp_path / "numbers.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "numbers.json").read_text())
    assert found["rehearsal"] and len(found["checks"]) == 10 and all(check["right"] for check in found["checks"])
    assert len(found["speeds"]) == 14 and all(speed["gb_s"] > 0 for speed in found["speeds"])
    assert done.stdout.splitlines()[-15].startswith("what "), "the table comes last"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["numbers.json"], "the file of rows is gone"
