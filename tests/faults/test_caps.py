"""Bytes and quotas through churn and kills: the soak's scenario with its short count."""

from __future__ import annotations

from pathlib import Path

from tests.soak.proving import prove


def test_ten_times_the_capacity_written_under_kills_never_takes_more_than_was_configured(tmp_path: Path) -> None:
    numbers = prove("caps", tmp_path)
    assert numbers["tenant_share"] == 1.0, "no tenant has ever come to its quota"
