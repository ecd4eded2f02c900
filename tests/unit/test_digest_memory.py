"""Digests of weights are remembered by what the files look like, and nothing that looks alike fools the memory."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvtier.digest_memory import ENTRIES_MAX, MEMORY_NAME, SETTLED_NS, SPARE_NAME, DigestFile
from kvtier.io.files import lock_exclusively
from kvtier.models.config import ModelConfig
from kvtier.models.fingerprint import DigestMemory
from kvtier.models.weights import load_weights
from tests.tiny import make_checkpoint, write_weights

KEY, DIGEST = bytes(range(32)), bytes(range(32, 64))
LONG_AGO = 0


def later() -> int:
    """A clock by which files just made are old."""
    return time.time_ns() + 2 * SETTLED_NS


@pytest.fixture
def memory(tmp_path: Path) -> DigestFile:
    return DigestFile(tmp_path / "cache", later)


class Marked:
    """A memory that answers every look that it was told of with a mark instead of the digest."""

    MARK = bytes(32)

    def __init__(self) -> None:
        self.known: set[bytes] = set()

    def recall(self, fingerprint: bytes) -> bytes | None:
        return self.MARK if fingerprint in self.known else None

    def remember(self, fingerprint: bytes, digest: bytes, changed_ns: int) -> None:
        assert digest != self.MARK and changed_ns <= time.time_ns()
        self.known.add(fingerprint)


def digest(folder: Path, memory: DigestMemory | None = None) -> bytes:
    return load_weights(folder, ModelConfig.from_folder(folder), None, None, memory)[1]


def test_what_was_hashed_once_is_remembered_by_the_next_process(tmp_path: Path, memory: DigestFile) -> None:
    folder = make_checkpoint(tmp_path / "model", shards=2)
    hashed = digest(folder, memory)
    assert hashed == digest(folder)
    data = (tmp_path / "cache" / MEMORY_NAME).read_bytes()
    assert data.count(hashed) == 1
    fingerprint = data[16:48]
    again = DigestFile(tmp_path / "cache", later)
    assert again.recall(fingerprint) == hashed == digest(folder, again)


@pytest.fixture
def known(tmp_path: Path) -> tuple[Path, Marked]:
    """A checkpoint whose digest is remembered as a mark."""
    folder, marked = make_checkpoint(tmp_path / "model"), Marked()
    assert digest(folder, marked) != Marked.MARK
    assert digest(folder, marked) == Marked.MARK, "not hashed again"
    return folder, marked


def test_moved_or_linked_it_is_still_known(tmp_path: Path, known: tuple[Path, Marked]) -> None:
    folder, marked = known
    other = tmp_path / "other name"
    other.mkdir()
    for name in ("config.json", "model.safetensors"):
        (other / name).symlink_to(folder / name)
    assert digest(other, marked) == Marked.MARK


def test_a_file_that_was_replaced_is_hashed_again(known: tuple[Path, Marked]) -> None:
    folder, marked = known
    path = folder / "model.safetensors"
    before, content = path.stat(), path.read_bytes()
    path.rename(folder / "old")
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns
    assert digest(folder, marked) == digest(folder) != Marked.MARK


def test_a_file_that_was_changed_in_place_and_whose_mtime_was_set_back_is_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.models.fingerprint.SAMPLE_BYTES", 1)  # so that only ctime tells
    folder, marked = make_checkpoint(tmp_path / "model"), Marked()
    digest(folder, marked)
    assert digest(folder, marked) == Marked.MARK
    path = folder / "model.safetensors"
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(before.st_size // 64 * 60 + 8)
        file.write(b"four")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_ino == before.st_ino and path.stat().st_mtime_ns == before.st_mtime_ns
    assert digest(folder, marked) == digest(folder) != Marked.MARK


def test_other_content_behind_frozen_stamps_is_seen_in_its_pages(
    tmp_path: Path, known: tuple[Path, Marked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when images of read-only file systems are mounted one after the other: same device, inode and stamps."""
    folder, _ = known
    statuses = [os.stat(folder / "model.safetensors")]
    monkeypatch.setattr("kvtier.models.fingerprint.os.fstat", lambda _: statuses[0])
    marked = Marked()
    digest(folder, marked)
    assert digest(folder, marked) == Marked.MARK
    other = make_checkpoint(tmp_path / "other", seed=1)
    assert digest(other, marked) != Marked.MARK


def test_which_tensors_are_used_from_which_file_is_part_of_what_is_known(
    tmp_path: Path, known: tuple[Path, Marked]
) -> None:
    folder, marked = known
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert digest(folder, marked) == digest(folder) != Marked.MARK, "the head is not digested"
    two = tmp_path / "two"
    two.mkdir()
    (two / "config.json").write_text(json.dumps(config))
    for number in (0, 1):  # both files have a final norm, the index says which one counts
        write_weights(two, weights | {"model.norm.weight": torch.full((64,), 1.0 + number)})
        (two / "model.safetensors").rename(two / f"{number}.safetensors")
    digests = []
    for number in (0, 1):
        places = dict.fromkeys(weights, "0.safetensors") | {
            "model.norm.weight": f"{number}.safetensors",
            "lm_head.weight": "1.safetensors",
        }
        (two / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        digests.append(digest(two, marked))
    assert digests[0] != digests[1] and Marked.MARK not in digests


def test_weights_that_change_while_they_are_loaded_are_not_taken_for_what_was_there(
    known: tuple[Path, Marked],
) -> None:
    folder, marked = known
    replaced = make_checkpoint(folder.parent / "new", seed=1)

    class Replacing(Marked):
        def recall(self, fingerprint: bytes) -> bytes | None:
            os.replace(replaced / "model.safetensors", folder / "model.safetensors")
            return marked.recall(fingerprint)

    assert digest(folder, Replacing()) == digest(folder) != Marked.MARK


def test_what_changes_while_it_is_hashed_is_not_remembered(tmp_path: Path) -> None:
    folder, marked = make_checkpoint(tmp_path / "model"), Marked()

    class Touching(Marked):
        def recall(self, fingerprint: bytes) -> bytes | None:
            os.utime(folder / "model.safetensors")
            return marked.recall(fingerprint)

    touching = Touching()
    assert digest(folder, touching) == digest(folder) and not touching.known


@pytest.mark.parametrize("age_ns", [-10 * SETTLED_NS, 0, SETTLED_NS - 1])
def test_files_that_may_change_within_their_time_stamp_are_not_remembered(tmp_path: Path, age_ns: int) -> None:
    memory = DigestFile(tmp_path / "cache", lambda: 10**18)
    memory.remember(KEY, DIGEST, 10**18 - age_ns)
    assert memory.recall(KEY) is None
    memory.remember(KEY, DIGEST, 10**18 - SETTLED_NS)
    assert memory.recall(KEY) == DIGEST


def test_a_fresh_checkpoint_is_not_remembered(tmp_path: Path) -> None:
    digest(make_checkpoint(tmp_path / "model"), DigestFile(tmp_path / "cache"))
    assert not (tmp_path / "cache" / MEMORY_NAME).exists()


def test_the_latest_are_kept_in_a_bounded_file(tmp_path: Path, memory: DigestFile) -> None:
    keys = [number.to_bytes(32, "little") for number in range(ENTRIES_MAX + 3)]
    for key in [*keys, keys[5]]:
        memory.remember(key, key[::-1], LONG_AGO)
    memory.remember(b"x" * 32, DIGEST, LONG_AGO)
    assert [key for key in keys if memory.recall(key) != key[::-1]] == [*keys[:4]]
    assert (tmp_path / "cache" / MEMORY_NAME).stat().st_size == 16 + 64 * ENTRIES_MAX + 32


def test_a_damaged_file_is_ignored_and_made_anew(tmp_path: Path, memory: DigestFile) -> None:
    memory.remember(KEY, DIGEST, LONG_AGO)
    path = tmp_path / "cache" / MEMORY_NAME
    whole = path.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(len(whole))]
    cut = [whole[:length] for length in range(0, len(whole), 7)]
    for damaged in [*flipped, *cut, whole + b"x", whole * 100, bytes(1 << 20), b"\xff" * 5000]:
        path.write_bytes(damaged)
        assert memory.recall(KEY) is None
    memory.remember(KEY, DIGEST, LONG_AGO)
    assert path.read_bytes() == whole


def test_the_file_is_private_and_leaves_nothing_behind(tmp_path: Path, memory: DigestFile) -> None:
    before = os.umask(0)
    try:
        memory.remember(KEY, DIGEST, LONG_AGO)
    finally:
        os.umask(before)
    assert os.listdir(tmp_path / "cache") == [MEMORY_NAME]
    assert stat.S_IMODE(os.stat(tmp_path / "cache").st_mode) == 0o700
    assert stat.S_IMODE(os.stat(tmp_path / "cache" / MEMORY_NAME).st_mode) == 0o600
    (tmp_path / "cache" / SPARE_NAME).write_bytes(b"left by a crash" * 1000)
    memory.remember(DIGEST, KEY, LONG_AGO)
    assert memory.recall(DIGEST) == KEY and memory.recall(KEY) == DIGEST


@pytest.mark.parametrize("name", [MEMORY_NAME, SPARE_NAME])
def test_links_and_pipes_in_its_place_are_no_memory(tmp_path: Path, memory: DigestFile, name: str) -> None:
    memory.remember(KEY, DIGEST, LONG_AGO)
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    (cache / MEMORY_NAME).rename(elsewhere)
    content = elsewhere.read_bytes()
    for make in (Path.symlink_to, Path.hardlink_to):
        make(cache / name, elsewhere)
        memory.remember(DIGEST, KEY, LONG_AGO)
        assert memory.recall(DIGEST) is None and elsewhere.read_bytes() == content
        (cache / name).unlink()
    os.mkfifo(cache / name)
    memory.remember(DIGEST, KEY, LONG_AGO)
    assert memory.recall(DIGEST) is None


def test_who_finds_another_engine_writing_goes_on_without(tmp_path: Path, memory: DigestFile) -> None:
    memory.remember(KEY, DIGEST, LONG_AGO)
    with open(tmp_path / "cache" / SPARE_NAME, "w") as other:
        os.chmod(other.fileno(), 0o600)
        assert lock_exclusively(other.fileno(), 0.0)
        memory.remember(DIGEST, KEY, LONG_AGO)
        assert memory.recall(DIGEST) is None and memory.recall(KEY) == DIGEST


def test_without_a_usable_directory_there_is_no_memory_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    memory = DigestFile(tmp_path / "file", later)
    memory.remember(KEY, DIGEST, LONG_AGO)
    assert memory.recall(KEY) is None
