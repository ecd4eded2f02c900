"""The keeper's log: a disk that takes nothing keeps nobody waiting, and costs records beyond a bound."""

from __future__ import annotations

import logging
import threading

from kvtier.keeper.log_file import RECORDS_MAX, LateLog


class HungDisk(logging.Handler):
    """Takes records once it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.released.wait()
        self.texts.append(record.getMessage())


def test_whoever_logs_waits_for_no_disk_and_what_it_takes_later_is_bounded() -> None:
    disk = HungDisk()
    late, log = LateLog(disk), logging.getLogger("kvtier.test.keeper_log")
    log.propagate = False
    log.addHandler(late)
    for number in range(2 * RECORDS_MAX):
        log.warning("record %d", number)
    assert disk.texts == [] and not late.end(0.01)
    disk.released.set()
    log.warning("later")
    while not late.end(0.1):
        pass
    assert disk.texts[:RECORDS_MAX] == [f"record {number}" for number in range(RECORDS_MAX)]
    assert RECORDS_MAX <= len(disk.texts) <= RECORDS_MAX + 2
