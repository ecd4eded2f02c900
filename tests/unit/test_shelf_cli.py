"""`kvtier shelf` beside engines and their keeper: what it says is so, what it does is done, and nobody is disturbed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.block import KVLayout
from kvtier.cache_directory import layout_name
from kvtier.keeper.desk import Desk
from kvtier.keeper.warming import Warmed, hottest, warmed
from kvtier.record import tenant_digest
from kvtier.retention import Retention
from kvtier.shelf import WriteItem
from tests.rows import LAYOUT, SLOT_BYTES, aligned, block_hashes, nvme_user
from tests.shelf_desk import DRAM_SLOTS, SharingEngine, refusal, rows_of, shelf, shelf_json, spoil

BOTH = ("dram", "nvme")
ACME = Retention(tenant=tenant_digest("acme"))


@pytest.fixture(scope="module")
def engine_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharingEngine]:
    opened = SharingEngine(tmp_path_factory.mktemp("shelf") / "cache")
    yield opened
    opened.close()


@pytest.fixture
def engine(engine_of_all: SharingEngine) -> SharingEngine:
    """An engine beside its keeper, with both shelves empty."""
    assert shelf("clear", engine_of_all.path, "--pinned").exit_code == 0
    for tier in BOTH:
        engine_of_all.wait_for(tier, lambda tier=tier: "known=0" in repr(engine_of_all.users[tier].shelf))
    return engine_of_all


def tiers(report: dict[str, Any]) -> dict[str, Any]:
    [layout] = report["layouts"]
    found = layout["tiers"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("verb", ["ls", "stat", "verify", "clear", "warm", "pin", "unpin", "stop"])
def test_help_teaches_every_verb_with_examples(verb: str) -> None:
    assert f" {verb} " in shelf("--help").stdout
    text = shelf(verb, "--help").stdout
    assert "Examples:" in text and text.count(f"kvtier shelf {verb}") >= 2 and "PATH" in text


def test_ls_and_stat_say_what_was_written_by_whom(engine: SharingEngine) -> None:
    engine.write("nvme", block_hashes(20))
    engine.write("nvme", block_hashes(5, seed=1), ACME)
    engine.write("dram", block_hashes(7))
    report = shelf_json("stat", engine.path)
    assert [tiers(report)[tier]["blocks"] for tier in BOTH] == [7, 25]
    assert tiers(report)["nvme"]["tenants"][ACME.tenant.hex()] >= 5
    assert report["totals"]["dram"]["total_bytes"] == DRAM_SLOTS * SLOT_BYTES
    assert report["totals"]["nvme"]["used_bytes"] >= 25 * SLOT_BYTES
    assert report["keeper"]["pid"] == engine.shared.seat.keeper_process
    [owner] = report["owners"]
    assert (owner["pid"], owner["number"], owner["alive"], owner["joined"]) == (os.getpid(), 0, True, True)
    assert report["layouts"][0]["journal_bytes"] > 1000
    assert report == {**shelf_json("ls", engine.path), "keeper": report["keeper"]}
    text = shelf("ls", engine.path).stdout
    assert ACME.tenant.hex()[:12] in text and "DRAM" in text and "NVMe" in text
    assert f"process {os.getpid()}" in shelf("stat", engine.path).stdout


def test_ls_lists_every_block_with_what_it_is_kept_for(engine: SharingEngine) -> None:
    hashes = block_hashes(6)
    later_s = int(time.time()) + 1000
    engine.write("nvme", hashes[:5])
    engine.write("nvme", hashes[5:], Retention(7, later_s, False, ACME.tenant))
    engine.write("dram", hashes[:2])
    rows = rows_of(engine.path)
    assert sorted((row["tier"], row["hash"]) for row in rows) == sorted(
        [("nvme", h.hex()) for h in hashes] + [("dram", h.hex()) for h in hashes[:2]]
    )
    by_hash = {row["hash"]: row for row in rows if row["tier"] == "nvme"}
    [record] = engine.records("nvme", hashes[5:])
    row = by_hash[hashes[5].hex()]
    assert (row["slot"], row["generation"]) == (record.slot, record.generation)
    assert (row["priority"], row["expiry_s"], row["tenant"]) == (7, later_s, ACME.tenant.hex())
    assert {row["hash"] for row in rows_of(engine.path, "--tier", "dram")} == {h.hex() for h in hashes[:2]}
    text = shelf("ls", engine.path, "--blocks", "--tier", "nvme").stdout
    assert all(h.hex()[:16] in text for h in hashes)


def test_verify_finds_planted_damage_and_drops_exactly_that(engine: SharingEngine) -> None:
    hashes = block_hashes(20)
    for tier in BOTH:
        engine.write(tier, hashes)
    assert shelf_json("verify", engine.path)["good"] == 40
    spoiled = {"dram": [2, 11], "nvme": [0, 7, 19]}
    for tier, numbers in spoiled.items():
        for number, record in zip(numbers, engine.records(tier, [hashes[n] for n in numbers]), strict=True):
            engine.spoil(tier, record, place=(100, 4096 + 17, 4096 + 12287)[number % 3])
    planted = sorted((tier, hashes[n].hex()) for tier, numbers in spoiled.items() for n in numbers)
    for dropped, options in ((0, ["--dry-run"]), (5, [])):
        report: Any = shelf_json("verify", engine.path, *options, status=1)
        assert (report["rows"], report["good"], report["bad"], report["dropped"]) == (40, 35, 5, dropped)
        assert sorted((row["tier"], row["hash"]) for row in report["bad_rows"]) == planted
        assert {row["reason"] for row in report["bad_rows"]} <= {"header", "sums"} and report["changed"] == 0
    assert shelf_json("verify", engine.path)["good"] == 35
    for tier, numbers in spoiled.items():
        good = [h for number, h in enumerate(hashes) if number not in numbers]
        engine.wait_for(tier, lambda tier=tier, numbers=numbers: not engine.records(tier, [hashes[n] for n in numbers]))
        assert engine.hits(tier, good) == len(good)


def test_verify_reads_one_tier_alone_and_no_faster_than_it_may(engine: SharingEngine) -> None:
    for tier in BOTH:
        engine.write(tier, block_hashes(20))
    started = time.monotonic()
    report = shelf_json("verify", engine.path, "--tier", "nvme", "--rate", "1MiB")
    assert report["rows"] == 20 and time.monotonic() - started >= 19 * SLOT_BYTES / (1 << 20)
    assert "20 good, 0 bad" in shelf("verify", engine.path, "--tier", "dram").stdout


def test_clear_takes_what_was_named_and_nothing_else(engine: SharingEngine) -> None:
    plain, acme, pinned = block_hashes(6), block_hashes(5, seed=1), block_hashes(4, seed=2)
    engine.write("nvme", plain)
    engine.write("nvme", acme, ACME)
    engine.write("nvme", pinned, Retention(pinned=True))
    engine.write("dram", plain)
    none, kept = {"dram": 0, "nvme": 0}, {"dram": 0, "nvme": 4}
    words = "--tenant somebody: no block here is charged to it"
    assert words in refusal("clear", engine.path, "--tenant", "somebody"), "who mistypes a name is told"
    cleared = {"cleared": {"dram": 0, "nvme": 5}, "kept_pinned": none}
    assert shelf_json("clear", engine.path, "--tenant", "acme") == cleared
    cleared = {"cleared": {"dram": 0, "nvme": 6}, "kept_pinned": kept}
    assert shelf_json("clear", engine.path, "--tier", "nvme") == cleared
    assert engine.hits("nvme", pinned) == 4 and engine.hits("dram", plain) == 6
    assert "6 blocks of DRAM, 4 blocks of NVMe" in shelf("clear", engine.path, "--pinned").stdout
    engine.wait_for("nvme", lambda: not engine.records("nvme", pinned))
    engine.write("nvme", acme, ACME)
    assert shelf_json("clear", engine.path, "--tenant", ACME.tenant.hex()[:12])["cleared"] == {"dram": 0, "nvme": 5}


def test_pinned_blocks_outlast_what_evicts_all_others(engine: SharingEngine) -> None:
    kept, others = block_hashes(3), block_hashes(10, seed=1)
    engine.write("dram", kept)
    engine.write("dram", others)
    counts: Any = shelf_json("pin", engine.path, kept[0].hex()[:8], kept[1].hex(), kept[2].hex()[:5].upper())
    assert counts["dram"] == {"named": 3, "done": 3, "refused": 0} and counts["nvme"]["named"] == 0
    assert tiers(shelf_json("stat", engine.path))["dram"]["pinned"] == 3
    engine.write("dram", block_hashes(20, seed=3))
    for seed in range(4, 10):
        engine.write("dram", block_hashes(20, seed=seed))
    assert engine.hits("dram", kept) == 3 and engine.hits("dram", others) == 0
    assert {row["hash"] for row in rows_of(engine.path) if row["pinned"]} == {h.hex() for h in kept}
    assert "3 of 3 blocks unpinned" in shelf("unpin", engine.path, *[h.hex()[:8] for h in kept]).stdout
    assert tiers(shelf_json("stat", engine.path))["dram"]["pinned"] == 0


def test_pins_over_the_budget_are_refused_and_counted_those_of_first_blocks_last(engine: SharingEngine) -> None:
    hashes = block_hashes(20)
    for start in range(0, 20, 5):
        engine.write("dram", hashes[start : start + 5])
    counts: Any = shelf_json("pin", engine.path, "--all", status=1)
    assert counts["dram"] == {"named": 20, "done": DRAM_SLOTS // 4, "refused": 20 - DRAM_SLOTS // 4}
    depths = {row["hash"]: row["depth"] for row in rows_of(engine.path)}
    pinned = [row["depth"] for row in rows_of(engine.path) if row["pinned"]]
    assert sorted(pinned) == sorted(depths.values())[: DRAM_SLOTS // 4], "parents before their children"
    assert "4 refused" in shelf("pin", engine.path, "--all").stdout


def test_pin_and_unpin_take_a_tenants_blocks_or_all(engine: SharingEngine) -> None:
    engine.write("nvme", block_hashes(4))
    engine.write("nvme", block_hashes(3, seed=1), ACME)
    counts: Any = shelf_json("pin", engine.path, "--tenant", "acme")
    assert counts["nvme"] == {"named": 3, "done": 3, "refused": 0}
    counts = shelf_json("unpin", engine.path, "--all")
    assert counts["nvme"] == {"named": 7, "done": 3, "refused": 0}
    assert "no such block" in refusal("pin", engine.path, "00000000")
    assert "hexadecimal digits" in refusal("pin", engine.path, "everything")
    assert "one of the three" in refusal("pin", engine.path)
    assert "one of the three" in refusal("unpin", engine.path, "--all", "--tenant", "acme")


def test_warm_brings_the_hottest_rows_of_nvme_and_evicts_nothing(engine: SharingEngine) -> None:
    hashes, hot = block_hashes(30), block_hashes(4, seed=1)
    engine.write("nvme", hashes)
    engine.write("nvme", hot, Retention(priority=9))
    engine.write("dram", block_hashes(3, seed=2))
    report: Any = shelf_json("warm", engine.path, "--count", 4)
    assert (report["moved"], report["evicted"]) == (4, 0)
    engine.wait_for("dram", lambda: len(engine.records("dram", hot)) == 4)
    assert engine.hits("dram", hot) == 4 and engine.hits("dram", block_hashes(3, seed=2)) == 3
    assert [record.priority for record in engine.records("dram", hot)] == [9] * 4
    report = shelf_json("warm", engine.path)
    assert (report["moved"], report["evicted"], report["bad"]) == (30, 0, 0)
    engine.wait_for("dram", lambda: len(engine.records("dram", hashes)) == 30)
    assert engine.hits("dram", hashes) == 30
    assert [owner["pid"] for owner in shelf_json("stat", engine.path)["owners"]] == [os.getpid()]  # type: ignore[attr-defined]


def test_warm_fills_free_slots_only_unless_it_may_evict_and_brings_no_bad_row(engine: SharingEngine) -> None:
    cold, hashes = block_hashes(50, seed=1), block_hashes(20)
    engine.write("dram", cold)
    engine.write("nvme", hashes)
    free = DRAM_SLOTS - tiers(shelf_json("stat", engine.path))["dram"]["used_slots"]
    assert 0 < free < 14
    report: Any = shelf_json("warm", engine.path)
    assert (report["moved"], report["evicted"]) == (free, 0) and engine.hits("dram", cold) == 50
    engine.wait_for("dram", lambda: len(engine.records("dram", hashes)) == free)
    [bad, *_] = [block_hash for block_hash in hashes if not engine.records("dram", [block_hash])]
    engine.spoil("nvme", engine.records("nvme", [bad])[0])
    report = shelf_json("warm", engine.path, "--evict")
    assert (report["moved"], report["bad"]) == (19 - free, 1) and report["evicted"] > 0
    engine.wait_for("nvme", lambda: not engine.records("nvme", [bad]))
    engine.wait_for("dram", lambda: len(engine.records("dram", hashes)) == 19)
    assert engine.hits("dram", hashes) == 19 and not engine.records("dram", [bad])


def test_warming_stops_where_others_have_taken_the_free_slots(engine: SharingEngine) -> None:
    engine.write("dram", block_hashes(50, seed=1))
    engine.write("nvme", block_hashes(34))
    counts = Warmed()
    with Desk(engine.path) as desk:
        [layout] = desk.overview().layouts
        records = hottest(desk, layout.name, 34)
        assert sum(warmed(desk, layout, records, False, counts)) == 34
    assert counts.moved == 16 and counts.evicted > 0 and counts.refused == 18, "it went by what was free before"


def test_a_wrong_option_is_named_with_the_way_out(engine: SharingEngine) -> None:
    assert "is dram or nvme, got 'hbm'" in refusal("verify", engine.path, "--tier", "hbm")
    for verb, *options in (["ls"], ["ls", "--blocks"], ["verify"], ["clear"], ["warm"], ["pin", "--all"]):
        assert "no such layout here; there are:" in refusal(verb, engine.path, *options, "--layout", "0000ffff")
    assert "--rate" in refusal("verify", engine.path, "--rate", "fast")
    assert "--rate" in refusal("verify", engine.path, "--rate", "0")


def test_a_layout_that_the_keeper_has_not_opened_is_read_and_changed_in_its_files(tmp_path: Path) -> None:
    other, path = KVLayout(layers=2, kv_heads=1, head_dim=16, block_tokens=16, dtype="float32"), tmp_path / "cache"
    before = nvme_user(path, budget_bytes=1 << 19, layout=other)
    rows = [aligned(other.row_bytes) for _ in range(6)]
    items = [WriteItem(h, place, row) for place, (h, row) in enumerate(zip(block_hashes(6), rows, strict=True))]
    before.finish(before.shelf.write(items, before.now))
    before.shelf.close(60.0)
    engine = SharingEngine(path)
    engine.write("nvme", block_hashes(5))
    report: Any = shelf_json("stat", path)
    kept = {layout["name"]: layout["kept"] for layout in report["layouts"]}
    assert kept == {layout_name(other): False, layout_name(LAYOUT): True}
    assert report["totals"]["nvme"]["blocks"] == 11 and shelf_json("verify", path)["good"] == 11
    spoil(path / layout_name(other) / "nvme.slab", 4096 + 4096 + 9)
    found: Any = shelf_json("verify", path, "--layout", layout_name(other)[:6], status=1)
    assert (found["good"], found["bad"], found["dropped"]) == (5, 1, 1)
    assert shelf_json("clear", path, "--layout", layout_name(other)[:6])["cleared"] == {"dram": 0, "nvme": 5}
    assert engine.hits("nvme", block_hashes(5)) == 5
    for name, blocks in ((layout_name(other), 0), (layout_name(LAYOUT), 5)):
        of_one: Any = shelf_json("ls", path, "--layout", name[:6])
        assert [layout["name"] for layout in of_one["layouts"]] == [name]
        assert of_one["totals"]["nvme"]["blocks"] == blocks
        text = shelf("ls", path, "--layout", name[:6]).stdout
        assert [shown[:8] in text for shown in (name, layout_name(other), layout_name(LAYOUT))].count(True) == 2
    of_dram: Any = shelf_json("ls", path, "--tier", "dram")
    assert [list(layout["tiers"]) for layout in of_dram["layouts"]] == [["dram"]]
    engine.close()
