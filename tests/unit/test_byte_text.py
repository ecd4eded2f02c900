"""Bytes as people read them: the same three digits everywhere, and never a message that contradicts itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvtier.byte_text import bytes_text, free_text, needed_text, parse_whole_bytes
from kvtier.errors import ConfigError
from kvtier.tiers.memory import check_memory


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (64 << 20, "64.0 MiB"),
        (512 << 20, "512 MiB"),
        (900 << 30, "900 GiB"),
        ((900 << 30) - 1, "900 GiB"),
        (3 << 40, "3.0 TiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit_with_about_three_digits(count: int, text: str) -> None:
    assert bytes_text(count) == text
    if not count % 1024:
        assert needed_text(count) == free_text(count) == text


def test_what_is_needed_reads_as_more_than_what_is_free_however_close_they_are() -> None:
    assert (needed_text((16 << 30) + 1), free_text((16 << 30) - 1)) == ("16.1 GiB", "15.9 GiB")
    rng = random.Random(1)
    for _ in range(2000):
        free = rng.randrange(1, 1 << rng.randrange(1, 51))
        needed = free + rng.choice([1, 1000, free // 1000 + 1])
        shown = [parse_whole_bytes(needed_text(needed)), parse_whole_bytes(free_text(free))]
        assert shown[0] > shown[1] and shown[1] <= free, (needed, free)
        assert shown[0] >= needed, "what a message says is enough is enough"


def test_memory_that_is_not_there_is_told_in_units(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 943718399 kB\n")
    with pytest.raises(ConfigError) as error:
        check_memory("tiers.hbm.bytes", (900 << 30) + 1, tmp_path)
    told = "tiers.hbm.bytes: 901 GiB of memory asked, 899 GiB are free on this machine or in its cgroup; lower "
    assert str(error.value) == told + "tiers.hbm.bytes"
