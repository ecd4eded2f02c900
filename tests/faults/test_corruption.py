"""Bit rot and worse, in small counts; `scripts/soak --full` runs the same with large ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.tiers.header import Verdict
from tests.soak.corruption import KINDS, damage_rows
from tests.soak.damage import DAMAGES
from tests.soak.proving import prove


def test_every_kind_of_damage_to_a_row_is_a_counted_miss(tmp_path: Path) -> None:
    assert list(prove("corruption", tmp_path)) == KINDS


def test_a_damaged_journal_costs_warmth_at_most(tmp_path: Path) -> None:
    assert prove("journal-corruption", tmp_path)["hits"] != 0


@pytest.mark.parametrize(("check", "seen"), [("check_row", "handed out"), ("check_slices", "wrong slices")])
@pytest.mark.parametrize("kind", DAMAGES)
def test_the_proof_sees_what_is_bad_and_handed_out(
    kind: str, check: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"kvtier.transfers.{check}", lambda *_: Verdict.GOOD)
    with pytest.raises(AssertionError, match=seen):
        damage_rows(kind, 30, 2, tmp_path)
