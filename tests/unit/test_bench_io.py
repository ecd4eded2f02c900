"""scripts/bench_io.py on a few rows: every byte is verified, medians are of pairs. No clock decides."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
ROW_BYTES = 128 << 10


@pytest.fixture(scope="module", autouse=True)
def scripts_on_path() -> Iterator[None]:
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


def test_all_rows_are_moved_and_a_wrong_one_is_no_result(tmp_path: Path) -> None:
    from bench.nvme_tier import NvmeTier

    from kvtier.config import IoConfig

    tier = NvmeTier(tmp_path, ROW_BYTES, 20 * ROW_BYTES)
    io = IoConfig(engine="threads")
    for verified in (True, False):
        assert tier.store_from_dram(io, 1, registered=verified).moved_bytes == 20 * ROW_BYTES
        assert tier.load(io, 1, verified).moved_bytes == tier.store(io, 2, verified).moved_bytes == 20 * ROW_BYTES
    [slab] = (tmp_path / f"rows-{ROW_BYTES}").iterdir()
    with open(slab, "r+b") as file:
        file.seek(tier._slab.offset(7) + 4096 + 5)
        file.write(b"not what was there")
        file.flush()
        os.fsync(file.fileno())
    assert tier.load(io, 3, verified=False).moved_bytes == 20 * ROW_BYTES
    with pytest.raises(RuntimeError, match=r"slot 7: .*SUMS"):
        tier.load(io, 3)
    tier.close()
    assert list(tmp_path.iterdir()) == []


def test_without_fio_it_says_how_to_get_one_and_measures_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import bench_io

    monkeypatch.setattr(bench_io, "has_fio", lambda: False)
    arguments = (
        f"bench_io --gib 0.002 --rows 128KiB --depths 2 --engines threads --rounds 1 --folder {tmp_path}".split()
    )
    monkeypatch.setattr(sys, "argv", [*arguments, "--json", str(tmp_path / "report.json")])
    assert bench_io.main() == 0
    assert "apt-get install fio" in capsys.readouterr().out
    [case] = json.loads((tmp_path / "report.json").read_text())
    assert case["medians"]["load_of_fio"] is None and case["medians"]["load_gb_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_ours_is_compared_with_fio_of_the_same_round() -> None:
    from bench.fio import FioPass
    from bench.io_report import Case, Round
    from bench.nvme_tier import Pass

    def one(rate: float, fio_rate: float) -> Round:
        moved, plain = Pass(10**9, 1 / rate, 0.07), Pass(10**9, 1 / rate, 0.03)
        dram = Pass(10**9, 1 / rate, 0.021), Pass(10**9, 1 / rate, 0.055)
        fios = FioPass(fio_rate * 1e9, 20.0), FioPass(fio_rate * 1e9, 25.0)
        return Round(moved, moved, plain, plain, *dram, Pass(10**9, 1.0, 0.035), Pass(10**9, 2 / rate, 1.0), *fios)

    found = Case(ROW_BYTES, 16, "uring", [one(1.0, 1.0), one(0.5, 0.25), one(3.0, 4.0)]).numbers()
    assert found["load_of_fio"] == found["store_of_fio"] == 1.0
    assert found["load_io_ms_gb"] == pytest.approx(30.0) and found["load_verify_ms_gb"] == pytest.approx(40.0)
    assert found["dram_store_ms_gb"] == pytest.approx(21.0)
    assert found["unregistered_store_ms_gb"] == pytest.approx(55.0)
    assert found["memory_read_ms_gb"] == pytest.approx(35.0)
    assert (found["fio_load_ms_gb"], found["fio_store_ms_gb"]) == (20.0, 25.0)
    assert found["busy_of_load"] == pytest.approx(0.5) and found["load_gb_s"] == pytest.approx(1.0)
