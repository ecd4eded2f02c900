"""Retention: what asks for something, and what a reuse makes of what a block has."""

from __future__ import annotations

import pytest

from kvtier.record import tenant_digest
from kvtier.retention import PLAIN, Retention

TENANT, OTHER = tenant_digest("one"), tenant_digest("other")


@pytest.mark.parametrize(
    ("retention", "asks"),
    [
        (PLAIN, False),
        (Retention(tenant=TENANT), False),
        (Retention(priority=-1), True),
        (Retention(expiry_s=5), True),
        (Retention(pinned=True), True),
    ],
)
def test_only_what_changes_how_long_a_block_stays_asks(retention: Retention, asks: bool) -> None:
    assert retention.asks == asks


@pytest.mark.parametrize(
    ("has", "asked", "then"),
    [
        (Retention(2, 50), PLAIN, Retention(2, 50)),
        (Retention(2, 50), Retention(tenant=OTHER), Retention(2, 50)),
        (Retention(-3), Retention(-7), Retention(-3)),
        (Retention(-7), Retention(-3, 9), Retention(-3)),
        (Retention(0, 50), Retention(0, 60), Retention(0, 60)),
        (Retention(0, 60), Retention(0, 50), Retention(0, 60)),
        (Retention(0, 60), Retention(1), Retention(1, 0)),
        (PLAIN, Retention(0, 50), PLAIN),
        (Retention(1, 5, True), Retention(0, 9), Retention(1, 9, True)),
        (PLAIN, Retention(pinned=True), Retention(pinned=True)),
        (PLAIN, Retention(0, 50, True), Retention(pinned=True)),  # for good, as the README says
    ],
)
def test_a_reuse_gives_the_longer_of_each_and_leaves_the_tenant(
    has: Retention, asked: Retention, then: Retention
) -> None:
    owned, asked = has._replace(tenant=TENANT), asked._replace(tenant=OTHER)
    assert owned.raised(asked) == then._replace(tenant=TENANT)
