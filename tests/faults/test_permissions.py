"""What engine and keeper leave in a cache directory is private, no link in it is followed, and no network is opened."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvtier.assembly
from kvtier import Engine, EngineConfig, SamplingParams
from kvtier.block import KVLayout
from kvtier.cache_directory import layout_name
from kvtier.digest_memory import DigestFile
from tests.engines import end_keepers, keepers, knows_shelves, wait_for
from tests.tiny import make_checkpoint

BLOCK, BLOCKS = 16, 6
LAYOUT = KVLayout(3, 2, 16, BLOCK, "float32")
FOLDER = layout_name(LAYOUT)
PROMPT = [(13 * token * token) % 290 + 3 for token in range(BLOCKS * BLOCK + 5)]
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
ALONE = {"keeper.lock", "digests", FOLDER, f"{FOLDER}/nvme.slab", f"{FOLDER}/journal"}
SHARED = ALONE | {"keeper.sock", "keeper.log", "owners.lock"}
SECRET = b"of somebody else"
WAIT_S = 0.3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def old_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the memory's clock the checkpoint is old enough for its digest to be kept."""
    later = time.time_ns() + 10**11
    monkeypatch.setattr(kvtier.assembly, "DigestFile", lambda path: DigestFile(path, lambda: later))


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def configured(model: Path, cache: Path | None, sharing: bool = True, wait_s: float = 60.0) -> EngineConfig:
    values: dict[str, object] = {
        "model": model,
        "dtype": "float32",
        "block_tokens": BLOCK,
        "threads": 1,
        "sharing": sharing,
        "tiers.hbm.bytes": 16 * LAYOUT.row_bytes,
        "tiers.dram.bytes": "1MiB" if cache else 0,
        "tiers.dram.staging_bytes": 0,
        "tiers.nvme.bytes": "2MiB" if cache else 0,
        "tiers.nvme.path": cache,
        "tiers.nvme.wait_s": wait_s,
        "tiers.linger_s": 0.1,
        "tiers.load": "always",
        "tiers.fetch_deadline_s": 60,
    }
    return EngineConfig.load(None, values)


def used(engine: Engine) -> list[int]:
    """The answer to the prompt, once it is in DRAM and on NVMe."""
    token_ids = engine.generate([PROMPT], GREEDY)[0].token_ids
    wait_for(lambda: engine.stats()["dram_writes"] >= BLOCKS and engine.stats()["nvme_writes"] >= BLOCKS)
    return token_ids


def contents(top: Path) -> dict[str, os.stat_result]:
    """Everything below a directory by its name, links not followed."""
    return {str(path.relative_to(top)): path.lstat() for path in top.rglob("*")}


def check_private(top: Path) -> None:
    for name, status in {".": top.lstat(), **contents(top)}.items():
        folder = stat.S_ISDIR(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == (0o700 if folder else 0o600), name
        assert folder or stat.S_ISSOCK(status.st_mode) or stat.S_ISREG(status.st_mode), name
        assert status.st_uid == os.geteuid()


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("sharing", [True, False], ids=["shared", "alone"])
def test_everything_in_the_cache_directory_is_private_under_umask_0(model: Path, tmp_path: Path, sharing: bool) -> None:
    (tmp_path / "control").touch()
    assert stat.S_IMODE((tmp_path / "control").stat().st_mode) == 0o666, "the umask is open"
    cache = tmp_path / "a" / "cache"
    with Engine(configured(model, cache, sharing)) as engine:
        used(engine)
        assert set(contents(cache)) == (SHARED if sharing else ALONE)
        check_private(tmp_path / "a")
    end_keepers(cache)
    left = set(contents(cache)) - {"keeper.sock"}
    for name in ["", *left]:  # whatever somebody made of it since, and with leftovers of a crash
        os.chmod(cache / name, 0o777 if (cache / name).is_dir() else 0o666)
    (cache / "digests").write_bytes(b"")
    for name in ("digests.new", f"{FOLDER}/journal.new"):
        (cache / name).touch()
    with Engine(configured(model, cache, sharing)) as engine:
        wait_for(lambda: knows_shelves(engine, "dram", "nvme"))
        assert engine.generate([PROMPT], GREEDY)[0].origin["nvme"] == BLOCKS * BLOCK
        wait_for(lambda: not (cache / FOLDER / "journal.new").exists())
        assert set(contents(cache)) == (SHARED if sharing else ALONE)
        check_private(cache)
    end_keepers(cache)


@pytest.fixture(scope="module")
def right(model: Path) -> list[int]:
    """What an engine without shelves answers."""
    with Engine(configured(model, None)) as engine:
        return engine.generate([PROMPT], GREEDY)[0].token_ids


def check_served(model: Path, cache: Path, right: list[int], sharing: bool) -> None:
    """An engine serves, with what shelves it has got, and waits for no others."""
    with Engine(configured(model, cache, sharing, WAIT_S)) as engine:
        for _ in range(2):
            assert engine.generate([PROMPT], GREEDY)[0].token_ids == right
            engine.evict("hbm")
    end_keepers(cache)


@pytest.mark.parametrize("there", [True, False], ids=["there", "dangling"])
@pytest.mark.parametrize(
    ("names", "sharing"),
    [
        (["keeper.lock"], True),
        (["owners.lock"], True),
        (["keeper.log"], True),
        (["keeper.lock", "digests"], False),
        ([f"{FOLDER}/nvme.slab", "digests.new"], False),
        ([f"{FOLDER}/journal", f"{FOLDER}/journal.new"], False),
    ],
    ids=lambda value: "+".join(map(os.path.basename, value)) if isinstance(value, list) else None,
)
def test_a_link_in_the_place_of_a_file_is_not_followed(
    model: Path, right: list[int], tmp_path: Path, names: list[str], sharing: bool, there: bool
) -> None:
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if there:
        (elsewhere / "file").write_bytes(SECRET)
        os.chmod(elsewhere / "file", 0o644)
    (cache / FOLDER).mkdir(parents=True)
    os.chmod(cache, 0o700)
    for name in names:
        (cache / name).symlink_to(elsewhere / "file")
    check_served(model, cache, right, sharing)
    assert os.listdir(elsewhere) == (["file"] if there else [])
    if there:
        assert (elsewhere / "file").read_bytes() == SECRET
        assert stat.S_IMODE((elsewhere / "file").stat().st_mode) == 0o644


def test_links_are_not_followed_by_the_keeper_either(model: Path, right: list[int], tmp_path: Path) -> None:
    """It opens the same files by the same functions: all of a layout's, then the journal's beside a good slab."""
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_bytes(SECRET)
    (cache / FOLDER).mkdir(parents=True)
    os.chmod(cache, 0o700)
    for name in ("nvme.slab", "journal", "journal.new"):
        (cache / FOLDER / name).symlink_to(elsewhere / "file")
    check_served(model, cache, right, sharing=True)
    (cache / FOLDER / "nvme.slab").unlink()
    check_served(model, cache, right, sharing=True)
    assert os.listdir(elsewhere) == ["file"] and (elsewhere / "file").read_bytes() == SECRET


@pytest.mark.parametrize("sharing", [True, False], ids=["shared", "alone"])
def test_a_link_in_the_place_of_the_layouts_folder_is_not_followed(
    model: Path, right: list[int], tmp_path: Path, sharing: bool
) -> None:
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    cache.mkdir(mode=0o700)
    elsewhere.mkdir(mode=0o755)
    (cache / FOLDER).symlink_to(elsewhere)
    check_served(model, cache, right, sharing)
    assert not os.listdir(elsewhere) and stat.S_IMODE(elsewhere.stat().st_mode) == 0o755


def test_a_link_in_the_place_of_the_socket_leads_to_nobody(model: Path, tmp_path: Path) -> None:
    """Neither engine nor keeper follows it; the keeper puts its own socket there."""
    cache, elsewhere = tmp_path / "cache", tmp_path / "listener"
    cache.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(elsewhere))
        listener.listen()
        listener.setblocking(False)
        (cache / "keeper.sock").symlink_to(elsewhere)
        with Engine(configured(model, cache)) as engine:
            used(engine)
            assert stat.S_ISSOCK((cache / "keeper.sock").lstat().st_mode)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert elsewhere.exists()
    end_keepers(cache)


def inet_sockets(process: int | str) -> set[tuple[str, int]]:
    """(protocol, inode) of every internet socket that a process has open."""
    inodes = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(int(target[8:-1]))
    found = set()
    for protocol in ("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6"):
        table = Path(f"/proc/{process}/net/{protocol}")
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            inode = int(line.split()[9])
            if inode in inodes:
                found.add((protocol, inode))
    return found


@pytest.mark.parametrize("make", [lambda: socket.create_server(("127.0.0.1", 0)), lambda: udp()], ids=["tcp", "udp"])
def test_an_open_port_would_be_seen(make: Callable[[], socket.socket]) -> None:
    before = inet_sockets("self")
    with make():
        assert len(inet_sockets("self") - before) == 1


def udp() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("127.0.0.1", 0))
    return made


def test_engine_and_keeper_open_no_network_socket(model: Path, tmp_path: Path) -> None:
    before = inet_sockets("self")
    with Engine(configured(model, tmp_path / "cache")) as engine:
        used(engine)
        (keeper,) = keepers(tmp_path / "cache")
        assert inet_sockets("self") == before
        assert inet_sockets(keeper) == set()
        links = [os.readlink(one) for one in Path(f"/proc/{keeper}/fd").iterdir()]
        assert sum(link.startswith("socket:[") for link in links) >= 2, "its Unix socket and this engine's end"
    end_keepers(tmp_path / "cache")
