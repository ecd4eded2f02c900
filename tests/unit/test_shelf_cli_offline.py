"""`kvtier shelf` where no keeper is: files alone, an engine that shares with nobody, and what is no cache directory."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kvtier.cache_directory import CacheDirectory, layout_name
from kvtier.cli.shelf.work import choose, clear, resolve
from kvtier.errors import ConfigError, ShelfError
from kvtier.keeper import client
from kvtier.keeper.desk import Desk
from kvtier.keeper.frames import Frames, frame
from kvtier.keeper.operator_line import KeeperTrouble
from kvtier.keeper.wire import KEEPER_DECODER, PROTOCOL_VERSION, Refused, Stop
from kvtier.terms import Terms
from tests.rows import LAYOUT, SLOT_BYTES, ShelfUser, block_hashes, nvme_user
from tests.shelf_desk import SharingEngine, refusal, rows_of, shelf, shelf_json, spoil

HASHES = block_hashes(20)
NAME = layout_name(LAYOUT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A cache directory with 20 blocks that its engine has left."""
    user = nvme_user(tmp_path / "cache")
    assert all(done is not None and done.outcome.value == "done" for done in user.write(HASHES))
    user.shelf.close(60.0)
    return tmp_path / "cache"


@pytest.fixture
def occupied(tmp_path: Path) -> Iterator[ShelfUser]:
    """An engine that has a cache directory for itself, with 20 blocks."""
    user = nvme_user(tmp_path / "cache")
    user.write(HASHES)
    yield user
    user.shelf.close(60.0)


def slot_of(path: Path, block_hash: bytes) -> int:
    [slot] = [row["slot"] for row in rows_of(path) if row["hash"] == block_hash.hex()]
    assert isinstance(slot, int)
    return slot


def spoil_row(path: Path, block_hash: bytes) -> None:
    spoil(path / NAME / "nvme.slab", 4096 + slot_of(path, block_hash) * SLOT_BYTES + 4096 + 77)


def test_files_alone_tell_what_an_engine_has_left(path: Path) -> None:
    report: Any = shelf_json("stat", path)
    assert (report["keeper"], report["in_use"], report["owners"]) == (None, False, [])
    [layout] = report["layouts"]
    assert (layout["name"], layout["row_bytes"], layout["slice_bytes"]) == (NAME, LAYOUT.row_bytes, LAYOUT.slice_bytes)
    assert layout["tiers"]["nvme"]["blocks"] == 20 and "dram" not in layout["tiers"]
    assert sorted(row["hash"] for row in rows_of(path)) == sorted(h.hex() for h in HASHES)
    assert "nobody uses the directory now" in shelf("stat", path).stdout and "20" in shelf("ls", path).stdout
    assert shelf_json("verify", path)["good"] == 20


@pytest.mark.parametrize("arguments", [["ls"], ["stat"], ["ls", "--blocks"], ["verify"]], ids=" ".join)
def test_looking_changes_nothing(path: Path, arguments: list[str]) -> None:
    def files() -> dict[str, tuple[int, ...]]:
        found = {file: os.stat(file) for file in path.rglob("*")}
        return {str(file): (one.st_ino, one.st_size, one.st_mtime_ns, one.st_mode) for file, one in found.items()}

    before = files()
    assert len(before) == 4, "lock, folder, slab and journal"
    assert shelf(arguments[0], path, *arguments[1:]).exit_code == 0
    assert files() == before


def test_verify_drops_what_is_bad_for_good(path: Path) -> None:
    for number in (3, 9):
        spoil_row(path, HASHES[number])
    report: Any = shelf_json("verify", path, "--dry-run", status=1)
    assert (report["bad"], report["dropped"], report["good"]) == (2, 0, 18)
    report = shelf_json("verify", path, status=1)
    assert (report["bad"], report["dropped"], report["notes"]) == (2, 2, [])
    assert {row["hash"] for row in report["bad_rows"]} == {HASHES[number].hex() for number in (3, 9)}
    assert shelf_json("verify", path)["rows"] == 18
    user = nvme_user(path)
    assert user.hits(HASHES) == 18 and not user.shelf.holds(HASHES[3])
    user.shelf.close(60.0)


def test_clear_and_pins_are_there_for_the_next_engine(path: Path) -> None:
    counts: Any = shelf_json("pin", path, HASHES[4].hex()[:10], HASHES[5].hex()[:10])
    assert counts["nvme"] == {"named": 2, "done": 2, "refused": 0}
    assert shelf_json("clear", path) == {"cleared": {"dram": 0, "nvme": 18}, "kept_pinned": {"dram": 0, "nvme": 2}}
    words = shelf("clear", path).stdout.splitlines()
    assert words[1] == "2 blocks stay, since they are pinned: clear --pinned takes them, too"
    user = nvme_user(path)
    found = [record for block_hash in HASHES for record in user.shelf.find([block_hash])]
    assert {record.block_hash for record in found} == set(HASHES[4:6]) and all(record.pinned for record in found)
    assert user.hits(HASHES) == 2
    user.shelf.close(60.0)
    assert shelf("unpin", path, "--all").exit_code == 0 and not any(row["pinned"] for row in rows_of(path))


def test_what_a_write_budget_has_counted_is_told(path: Path, tmp_path: Path) -> None:
    assert "written" not in shelf("stat", path).stdout, "nothing has counted it"
    user = nvme_user(tmp_path / "counted", terms=Terms(write_bytes_day=1 << 30))
    user.write(HASHES)
    user.shelf.close(60.0)
    report: Any = shelf_json("stat", tmp_path / "counted")
    assert report["layouts"][0]["tiers"]["nvme"]["written_bytes"] == 20 * SLOT_BYTES
    assert f"{20 * SLOT_BYTES / (1 << 10):.0f} KiB written within a day" in shelf("stat", tmp_path / "counted").stdout


def test_an_engine_that_shares_with_nobody_is_read_and_never_disturbed(occupied: ShelfUser, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    report: Any = shelf_json("stat", path)
    assert report["in_use"] and report["layouts"][0]["tiers"]["nvme"]["blocks"] == 20
    assert "an engine with sharing: false has the directory" in shelf("stat", path).stdout
    for verb in (["clear"], ["pin", "--all"]):
        assert "in use by an engine with sharing: false" in refusal(verb[0], path, *verb[1:])
    spoil_row(path, HASHES[7])
    report = shelf_json("verify", path, status=1)
    assert (report["good"], report["bad"], report["dropped"]) == (19, 1, 0)
    assert "stop that engine" in report["notes"][0]
    assert occupied.hits(HASHES) == 19, "and the engine drops it itself"
    assert "there is no keeper" in shelf("stop", path).stdout


def test_without_a_journal_the_headers_tell(path: Path) -> None:
    (path / NAME / "journal").unlink()
    assert shelf_json("verify", path)["good"] == 20
    assert sorted(row["hash"] for row in rows_of(path)) == sorted(h.hex() for h in HASHES)


def test_nothing_is_changed_behind_engines_whose_keeper_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SharingEngine(tmp_path / "cache")
    engine.write("nvme", HASHES)
    again, connect = threading.Event(), client.connect

    def connect_later(*arguments: Any) -> Any:
        assert again.wait(60)
        return connect(*arguments)

    monkeypatch.setattr(client, "connect", connect_later)
    os.kill(engine.shared.seat.keeper_process, signal.SIGKILL)
    with Desk(tmp_path / "cache", call=False) as desk:
        while desk.is_occupied():
            time.sleep(0.01)
        chosen = choose(desk.overview(), "", "nvme")
        with pytest.raises(ShelfError, match="engines are here, between two keepers"):
            clear(desk, chosen, lambda _: True, True, lambda _: None)
    again.set()
    assert engine.shared.try_open(60)
    engine.close()


def test_dram_and_warming_need_a_keeper_and_say_so(path: Path) -> None:
    for arguments in (["verify", path, "--tier", "dram"], ["warm", path]):
        assert "DRAM is shared only while engines and their keeper run" in refusal(*arguments)


def superblock(slots: int, slot_bytes: int = SLOT_BYTES, version: int = 1) -> bytes:
    body = struct.pack("<8sI4x16sQQ", b"kvtislab", version, bytes(16), slot_bytes, slots)
    return (body + xxh3_64_intdigest(body).to_bytes(8, "little")).ljust(4096, b"\0")


def link_away(slab: Path) -> None:
    slab.rename(slab.with_name("elsewhere"))
    slab.symlink_to(slab.with_name("elsewhere"))


def make_pipe(slab: Path) -> None:
    slab.unlink()
    os.mkfifo(slab, 0o600)


@pytest.mark.parametrize(
    ("spoil_slab", "words"),
    [
        (lambda slab: slab.unlink(), "No such file"),
        (link_away, "no plain file"),
        (make_pipe, "no plain file"),
        (lambda slab: slab.write_bytes(b""), "damaged superblock"),
        (lambda slab: slab.write_bytes(os.urandom(8192)), "damaged superblock"),
        (lambda slab: slab.write_bytes(superblock(1 << 62) + bytes(100_000)), "shorter than its superblock"),
        (lambda slab: slab.write_bytes(superblock(1, slot_bytes=1) + bytes(100_000)), "shorter than its superblock"),
        (lambda slab: slab.write_bytes(superblock(5, version=99) + bytes(100_000)), "of version 99"),
    ],
    ids=["gone", "symlink", "pipe", "empty", "noise", "huge", "tiny slots", "version"],
)
def test_a_slab_that_is_none_is_named_and_nothing_of_it_believed(
    path: Path, spoil_slab: Callable[[Path], None], words: str
) -> None:
    spoil_slab(path / NAME / "nvme.slab")
    report: Any = shelf_json("ls", path)
    [layout] = report["layouts"]
    assert layout["tiers"] == {} and words in layout["notes"][0]
    assert words in shelf("stat", path).stdout
    assert words in " ".join(shelf("ls", path).stdout.split())
    assert shelf_json("verify", path)["rows"] == 0


def test_what_is_no_cache_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir(mode=0o755)
    (tmp_path / "other" / "file").write_text("of someone")
    nvme_user(tmp_path / "real").shelf.close(60.0)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name, words in (
        ("nowhere", "is not there"),
        ("file", "is no directory"),
        ("other", "it has no keeper.lock"),
        ("link", "is a symlink"),
    ):
        for verb in ("ls", "verify", "stop"):
            assert words in refusal(verb, tmp_path / name)
    assert os.listdir(tmp_path / "other") == ["file"] and not (tmp_path / "nowhere").exists()
    assert os.stat(tmp_path / "other").st_mode & 0o777 == 0o755
    if os.geteuid() == 0:
        os.chown(tmp_path / "real", 12345, 12345)
        assert "belongs to user 12345" in refusal("ls", tmp_path / "real")


def test_a_models_folder_stands_for_its_cache_directory(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model" / "1"
    folder.mkdir(parents=True)
    (folder / "engine.yaml").write_text("model: weights\ntiers:\n  nvme: {bytes: 1GiB, path: ../../cache}\n")
    for given in (tmp_path / "model", folder, folder / "engine.yaml"):
        assert shelf_json("ls", given)["totals"]["nvme"]["blocks"] == 20  # type: ignore[index]
    assert resolve(path) == path
    (folder / "engine.yaml").write_text("model: weights\n")
    with pytest.raises(ShelfError, match=r"tiers\.nvme\.path is not set"):
        resolve(tmp_path / "model")
    (folder / "engine.yaml").write_text("modle: weights\n")
    with pytest.raises(ConfigError, match="did you mean model"):
        resolve(folder)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (frame(Refused("protocol 9, the keeper speaks 99")), "refuses: protocol"),
        (b"", "hung up on this command: it is leaving, or of another version"),
        (b"\xff\xff\xff\xff", "cannot read: a frame of"),
        (b"\x03\0\0\0\xc1\xc1\xc1", "cannot read"),
        (None, "does not answer within"),
    ],
    ids=["refused", "hung up", "too long", "nonsense", "silent"],
)
def test_a_keeper_that_cannot_be_worked_with_is_named_and_files_are_read_instead(
    path: Path, answer: bytes | None, words: str
) -> None:
    cache = CacheDirectory(path, 0.0)
    over, heard = threading.Event(), list[object]()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"/proc/self/fd/{cache.top}/keeper.sock")
        door.listen(8)
        door.settimeout(0.05)

        def serve() -> None:
            lines: list[socket.socket] = []
            while not over.is_set():
                try:
                    line, _ = door.accept()
                except TimeoutError:
                    continue
                heard.extend(Frames(KEEPER_DECODER).feed(line.recv(100)))
                lines.append(line)
                if answer is not None:
                    with contextlib.suppress(OSError):  # it only wanted to know who is there
                        line.sendall(answer)
                    lines.pop().close()
            for line in lines:
                line.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(KeeperTrouble) as error:
                Desk(path, answer_s=0.2 if answer is None else 60.0)
            assert words in str(error.value) and f"process {os.getpid()}" in str(error.value)
            if answer is not None:
                result = shelf("stat", path, "--json")
                assert result.exit_code == 0 and '"blocks": 20' in result.stdout
                assert words in " ".join(result.stderr.split())
                assert words in refusal("clear", path)
                assert words in refusal("stop", path, "--now") and "--now" in refusal("stop", path, "--now")
                assert shelf_json("stop", path, "--wait", 0, status=1)["keeper"] == os.getpid()
                end = time.monotonic() + 60
                while Stop(PROTOCOL_VERSION) not in heard:
                    assert time.monotonic() < end
                    time.sleep(0.01)
        finally:
            over.set()
            thread.join()
            cache.close()
