"""Two instances of a model in one server, and an offline engine beside it, share what each of them computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import MODEL, REPOSITORY, StartServer, metrics, tiny_overrides, total, wait

from kvtier import Engine, EngineConfig, SamplingParams
from kvtier.client import Client
from kvtier.serving import TritonServer
from kvtier.serving.repository import overlay
from tests.engines import keepers, knows_shelves

BLOCKS = 25
TOKENS = BLOCKS * 16
"""Of each prompt, those in full blocks; ten such prompts fit the HBM of an instance."""
PROMPTS = [[(17 * token * token + 7 * number) % 250 + 3 for token in range(TOKENS + 5)] for number in range(10)]
ROW_BYTES = 3 * 4096
"""Of the tiny model's blocks: a slice for each layer."""
OUTPUT = 6
THREADS = 4
GREEDY = json.dumps({"temperature": 0, "ignore_eos": True})


def shared(checkpoint: Path, cache: Path) -> dict[str, str]:
    more = {"sharing": "true", "tiers.linger_s": "0.5", "tiers.hbm.bytes": "4MiB", "tiers.load": "always"}
    more["tiers.nvme.wait_s"] = "60"
    return tiny_overrides(checkpoint, cache) | more


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharing") / "cache"


@pytest.fixture(scope="module")
def server(start_server: StartServer, tiny_checkpoint: Path, cache: Path) -> Iterator[TritonServer]:
    """A server with two instances; once it has stopped nothing is left of engines and keeper."""
    repository = overlay(REPOSITORY, shared(tiny_checkpoint, cache), cache.parent / "models")
    path = repository / MODEL / "config.pbtxt"
    assert "kind: KIND_MODEL count: 1" in path.read_text()
    path.write_text(path.read_text().replace("kind: KIND_MODEL count: 1", "kind: KIND_MODEL count: 2"))
    running = start_server({}, repository=repository)
    assert len(running.model_processes()) == 2
    yield running
    assert len(running.model_processes()) == 2 and len(keepers(cache)) == 1
    assert running.stop() == 0
    wait(lambda: not keepers(cache))
    assert not running.model_processes() and not list(Path("/dev/shm").glob(f"{running.prefix}*"))
    assert not (cache / "keeper.sock").exists()


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What one engine that shares nothing answers."""
    values = tiny_overrides(tiny_checkpoint, tmp_path_factory.mktemp("alone"))
    with Engine(EngineConfig.load(None, values | {"tiers.hbm.bytes": "4MiB"})) as engine:
        done = engine.generate(PROMPTS, SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True))
    return [one.token_ids for one in done]


def ask(server: TritonServer, number: int) -> dict[str, Any]:
    with Client(server.grpc_url, MODEL) as client:
        inputs = {"input_ids": PROMPTS[number], "max_tokens": OUTPUT, "sampling_parameters": GREEDY}
        return next(client.infer(inputs, timeout_s=120)).outputs


def computed(outputs: dict[str, Any]) -> bool:
    return bool(outputs["prompt_tokens_computed"] >= TOKENS)


def from_another(outputs: dict[str, Any]) -> bool:
    """Found on a shelf and not in HBM, where whoever has computed or read it before has it still."""
    found = outputs["prompt_tokens_dram"] + outputs["prompt_tokens_nvme"]
    return bool(found == TOKENS and outputs["prompt_tokens_hbm"] == 0)


def ask_both_instances(server: TritonServer, number: int) -> list[dict[str, Any]]:
    """Answers to a prompt that one instance has in HBM, until one has come from the other, which has not."""
    answers: list[dict[str, Any]] = []
    while all(answer["prompt_tokens_hbm"] == TOKENS for answer in answers):
        assert len(answers) < 400, "all was answered by one instance"
        with ThreadPoolExecutor(THREADS) as pool:
            answers += pool.map(lambda _: ask(server, number), range(2 * THREADS))
    return answers


def test_what_one_instance_computes_the_other_finds(
    server: TritonServer, expected: list[list[int]], cache: Path
) -> None:
    """Once it is written: an instance that is asked sooner than it hears of the rows has to compute them, too."""
    assert len(keepers(cache)) == 1
    found, numbers = 0, range(6)
    for number in numbers:
        written = moved(server, "hbm", "dram")
        first = ask(server, number)
        assert computed(first) and first["output_ids"] == expected[number]
        wait(lambda written=written: moved(server, "hbm", "dram") >= written + BLOCKS)
        answers = ask_both_instances(server, number)
        assert all(answer["output_ids"] == expected[number] for answer in answers)
        if all(answer["prompt_tokens_computed"] == len(PROMPTS[number]) - TOKENS for answer in answers):
            found += 1
            # At once, there may be as many as there are threads: they wait for the same rows, which are read once.
            assert 1 <= sum(map(from_another, answers)) <= THREADS
    assert found >= 2
    wait(lambda: read_from_shelves(server) >= found * BLOCKS)
    assert read_from_shelves(server) < 2 * len(numbers) * BLOCKS, "rows were read for each request anew"
    wait(lambda: len(used := hbm_used(server)) == 2 and min(used) >= BLOCKS)


def moved(server: TritonServer, source: str, target: str) -> float:
    """Blocks that both instances have moved from one tier to another."""
    name = "kvtier_demoted_blocks_total" if source == "hbm" else "kvtier_promoted_blocks_total"
    return total(metrics(server)[name], source=source, target=target)


def read_from_shelves(server: TritonServer) -> float:
    return moved(server, "dram", "hbm") + moved(server, "nvme", "hbm")


def hbm_used(server: TritonServer) -> list[float]:
    """Blocks in HBM by instance."""
    return [value for labels, value in metrics(server)["kvtier_tier_used_blocks"].items() if 'tier="hbm"' in labels]


@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_what_a_shared_shelf_holds_is_told_by_one_instance(server: TritonServer, tier: str) -> None:
    ask(server, 0)
    names = [f"kvtier_tier_{what}" for what in ("capacity_blocks", "capacity_bytes", "used_blocks", "used_bytes")]

    def told() -> list[list[float]]:
        page = metrics(server)
        return [[value for labels, value in page[name].items() if f'tier="{tier}"' in labels] for name in names]

    wait(lambda: all(len(values) == 2 and min(values) == 0 < max(values) for values in told()))
    blocks, capacity_bytes, used, used_bytes = map(sum, told())
    assert used <= blocks and capacity_bytes <= 16 << 20, "more than was configured once"
    assert capacity_bytes // blocks == used_bytes // used == ROW_BYTES


def test_an_offline_engine_beside_the_server_finds_and_is_found(
    server: TritonServer, tiny_checkpoint: Path, cache: Path, expected: list[list[int]]
) -> None:
    written = moved(server, "hbm", "dram")
    answer = ask(server, 6)
    assert computed(answer)
    wait(lambda: moved(server, "hbm", "dram") >= written + BLOCKS)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    with Engine(EngineConfig.load(None, shared(tiny_checkpoint, cache))) as engine:
        wait(lambda: knows_shelves(engine, "dram", "nvme"))
        found = engine.generate([PROMPTS[6]], params)[0]
        assert found.token_ids == expected[6] == answer["output_ids"]
        assert found.origin["dram"] + found.origin["nvme"] == TOKENS
        for number in (7, 8, 9):
            before = read_from_shelves(server)
            made = engine.generate([PROMPTS[number]], params)[0]
            assert made.token_ids == expected[number] and made.origin["computed"] == len(PROMPTS[number])
            engine.evict("hbm")
            answer = ask(server, number)
            assert answer["output_ids"] == expected[number]
            if from_another(answer):
                break
    assert from_another(answer), "three times the server was asked sooner than it had heard of the rows"
    wait(lambda: read_from_shelves(server) >= before + BLOCKS)
