"""Power cuts, in small counts; `scripts/soak --full` runs the same with large ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.power import cut_off_ext4, ext4_reason, forget_unsynced
from tests.soak.proving import prove


def test_what_was_synced_survives_a_power_cut_of_ext4(tmp_path: Path) -> None:
    prove("power-cut", tmp_path)


@pytest.mark.skipif(ext4_reason() != "", reason=ext4_reason())
def test_without_the_sync_it_does_not(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="has survived"):
        cut_off_ext4(4, 5, tmp_path, syncs=False)


def test_what_was_synced_survives_the_loss_of_any_subset_of_unsynced_writes(tmp_path: Path) -> None:
    prove("unsynced-writes", tmp_path)


def test_on_a_disk_that_only_says_it_has_synced_it_does_not(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="has survived"):
        forget_unsynced(4, 5, tmp_path, syncs=False)
