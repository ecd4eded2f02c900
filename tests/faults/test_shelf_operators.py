"""`kvtier shelf` while engines write, keepers come and go, and who stands in for whom meanwhile."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvtier.keeper.desk import Desk
from kvtier.keeper.operator_line import KeeperTrouble, ask_to_stop, call_keeper
from kvtier.keeper.operator_wire import Survey
from kvtier.keeper.server import TICK_S
from kvtier.keeper.warming import Guest
from kvtier.keeper.wire import Numbers, Reporter
from tests.rows import block_hashes, nvme_user
from tests.shelf_desk import SharingEngine, shelf, shelf_json


def test_verify_takes_no_row_for_bad_while_an_engine_evicts_and_writes(tmp_path: Path) -> None:
    engine = SharingEngine(tmp_path / "cache")
    over = threading.Event()
    written = hit = 0

    def live() -> None:
        nonlocal written, hit
        while not over.is_set():
            hashes = block_hashes(32, seed=100 + written)
            engine.write("dram", hashes)
            hit += engine.hits("dram", hashes)
            written += 32

    thread = threading.Thread(target=live)
    thread.start()
    try:
        while written < 64:
            time.sleep(0.01)
        reports: list[Any] = [shelf_json("verify", engine.path) for _ in range(20)]
        while written <= 100 and thread.is_alive():
            time.sleep(0.01)
    finally:
        over.set()
        thread.join()
    assert written > 100 and hit > 0.9 * written, "the engine kept its speed"
    assert sum(report["good"] for report in reports) > 100
    assert not any(report["bad"] or report["dropped"] or report["unreadable"] for report in reports)
    engine.close()


def test_rows_that_are_replaced_while_they_are_verified_are_not_bad(tmp_path: Path) -> None:
    occupied = nvme_user(tmp_path / "cache")
    occupied.write(block_hashes(20))
    over = threading.Event()
    written = 0

    def live() -> None:
        nonlocal written
        while not over.is_set():
            occupied.write(block_hashes(40, seed=1000 + written))
            written += 40

    thread = threading.Thread(target=live)
    thread.start()
    try:
        reports: list[Any] = [shelf_json("verify", tmp_path / "cache") for _ in range(3)]
        while written < 80 and thread.is_alive():
            reports.append(shelf_json("verify", tmp_path / "cache"))
    finally:
        over.set()
        thread.join()
    assert written >= 80 and sum(report["good"] for report in reports) > 0
    assert not any(report["bad"] for report in reports)
    occupied.shelf.close(60.0)


def test_stop_says_who_is_there_and_then_the_keeper_goes(tmp_path: Path) -> None:
    engine = SharingEngine(tmp_path / "cache", linger_s=60.0)
    hashes = block_hashes(10)
    engine.write("dram", hashes)
    before = engine.shared.seat.keeper_process
    report: Any = shelf_json("stop", engine.path, "--now", "--wait", 60)
    assert report == {"keeper": before, "gone": True, "owners": []}
    link, seat = engine.shared.link, engine.shared.seat
    engine.wait_for("dram", lambda: link.line is not None and seat.keeper_process != before)
    assert engine.hits("dram", hashes) == 10, "DRAM was handed on"
    report = shelf_json("stop", engine.path, status=1)
    assert report["owners"] == [{"number": 0, "pid": os.getpid()}] and not report["gone"]
    assert f"process {os.getpid()}" in shelf("stop", engine.path).stdout
    after = engine.shared.seat.keeper_process
    engine.close()
    assert shelf("stop", engine.path, "--wait", 60).exit_code == 0
    assert not os.path.exists(f"/proc/{after}") or not (engine.path / "keeper.sock").exists()
    assert "there is no keeper" in shelf("stop", engine.path).stdout


def test_who_warms_a_shelf_never_reports_for_its_engines(tmp_path: Path) -> None:
    first = SharingEngine(tmp_path / "cache")
    second = SharingEngine(tmp_path / "cache")
    first.close()
    with Desk(tmp_path / "cache") as desk:
        [view] = desk.overview().layouts
        guest = Guest(desk, view)
        assert guest._seat.owner == 0 and second.shared.seat.owner == 1
        guest._line._answer_s = 60.0
        told: list[object] = [guest._line.hear()]
        while not isinstance(told[-1], Numbers):
            told.append(guest._line.hear())
        guest._line._answer_s = 3 * TICK_S
        with pytest.raises(KeeperTrouble, match="does not answer"):
            told.extend(iter(guest._line.hear, None))
        guest.close()
    assert not any(isinstance(message, Reporter) for message in told)
    second.close()


def test_an_operator_does_not_keep_a_keeper_from_leaving(tmp_path: Path) -> None:
    alone = SharingEngine(tmp_path / "cache", linger_s=60.0)
    line = call_keeper(alone.shared.seat.cache.top, 60.0)
    assert line is not None
    pid = line.pid
    ask_to_stop(alone.shared.seat.cache.top)
    alone.close()
    end = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < end
        time.sleep(0.02)
    with pytest.raises(KeeperTrouble, match="has hung up"):
        line.ask(Survey())
    line.close()
