"""Load, unload and reload: gauges follow, counters go on, and a bad model is refused with its reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import MODEL, REPOSITORY, StartServer, metrics, tiny_overrides, total, wait

from kvtier.client import Client, ServerError
from kvtier.serving import ServingError, TritonServer
from kvtier.serving.repository import overlay
from tests.tiny import make_checkpoint

INPUTS = {"text_input": "the sea", "max_tokens": 3}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """A repository with the good model; the bad ones join it as tests need them."""
    folder = tmp_path_factory.mktemp("lifecycle")
    return overlay(REPOSITORY, tiny_overrides(tiny_checkpoint, folder / "cache"), folder / "models")


@pytest.fixture(scope="module")
def server(start_server: StartServer, repository: Path) -> Iterator[TritonServer]:
    running = start_server({}, f"--load-model={MODEL}", repository=repository)
    yield running
    assert running.stop() == 0


def answer(server: TritonServer) -> str:
    with Client(server.grpc_url, MODEL, timeout_s=120) as client:
        return next(client.infer(INPUTS, timeout_s=120)).text


def test_unload_and_load(server: TritonServer) -> None:
    before = answer(server)
    server.control.unload(MODEL, 120)
    wait(lambda: not server.model_processes())
    counted = total(metrics(server)["kvtier_requests_total"])
    assert counted >= 1
    gauges = metrics(server)
    assert total(gauges["kvtier_engine_up"]) == total(gauges["kvtier_tier_capacity_bytes"]) == 0
    with pytest.raises(ServerError):
        answer(server)
    server.control.load(MODEL, 120)
    assert answer(server) == before
    wait(lambda: total(metrics(server)["kvtier_requests_total"]) == counted + 1)
    assert total(metrics(server)["kvtier_engine_up"]) == 1


def test_a_reload_comes_back_warm_from_nvme(server: TritonServer) -> None:
    with Client(server.grpc_url, MODEL) as client:
        inputs = {"text_input": "abcdefgh" * 30, "max_tokens": 2}
        cold = next(client.infer(inputs, timeout_s=120)).outputs
        server.reload(MODEL)
        warm = next(client.infer(inputs, timeout_s=120)).outputs
    assert cold["prompt_tokens_computed"] > 200
    assert warm["prompt_tokens_nvme"] > 200
    assert warm["output_ids"] == cold["output_ids"]


def half_written(folder: Path) -> dict[str, str]:
    make_checkpoint(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return {"model": str(folder)}


BAD: dict[str, tuple[Callable[[Path], dict[str, str]], list[str]]] = {
    "missing-folder": (lambda folder: {"model": str(folder / "nowhere")}, ["no such folder", "fetch_model.py"]),
    "half-written": (half_written, ["model.safetensors", "not a whole"]),
    "does-not-fit": (lambda _: {"tiers.hbm.bytes": "900TiB"}, ["tiers.hbm.bytes", "asked", "are free"]),
    "wrong-keys": (
        lambda _: {"dtype": "float8", "tiers.hbm.bites": "1MiB"},
        ["dtype", "float8", "tiers.hbm.bites: no such key; did you mean tiers.hbm.bytes?"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_model_is_refused_by_name_and_the_good_one_goes_on(
    server: TritonServer, repository: Path, tiny_checkpoint: Path, tmp_path: Path, name: str
) -> None:
    make, words = BAD[name]
    overrides = tiny_overrides(tiny_checkpoint, tmp_path / "cache") | make(tmp_path / "checkpoint")
    add_model(repository, name, overrides, tmp_path)
    with pytest.raises(ServingError) as caught:
        server.control.load(name, 120)
    for word in words:
        assert word in str(caught.value)
    assert answer(server)


def test_a_second_engine_on_the_same_cache_directory_serves_without_it(
    server: TritonServer, repository: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    overrides = tiny_overrides(tiny_checkpoint, repository.parent / "cache") | {"tiers.nvme.wait_s": "0.2"}
    add_model(repository, "neighbour", overrides, tmp_path)
    server.control.load("neighbour", 120)
    with Client(server.grpc_url, "neighbour") as client:
        assert next(client.infer(INPUTS, timeout_s=120)).text == answer(server)

    def capacity(model: str, tier: str) -> float:
        return total(metrics(server)["kvtier_tier_capacity_bytes"], model=model, tier=tier)

    wait(lambda: capacity("neighbour", "dram") > 0)
    assert capacity("neighbour", "nvme") == 0 < capacity(MODEL, "nvme")
    server.control.unload("neighbour", 120)


def test_chat_needs_a_model_with_a_template(server: TritonServer, repository: Path, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", tokenizer=True)
    settings = checkpoint / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": None}))
    add_model(repository, "no-template", tiny_overrides(checkpoint, tmp_path / "cache"), tmp_path)
    server.control.load("no-template", 120)
    with Client(server.grpc_url, "no-template") as client:
        with pytest.raises(ServerError, match="chat: this model has no chat template") as refused:
            list(client.infer({**INPUTS, "chat": "true"}, timeout_s=120))
        assert refused.value.status == "INVALID_ARGUMENT"
        assert list(client.infer(INPUTS, timeout_s=120))
    server.control.unload("no-template", 120)


def unwritable(folder: Path) -> dict[str, str]:
    folder.write_text("not a folder")  # which holds for root, too
    return {"tiers.nvme.path": str(folder)}


def too_full(folder: Path) -> dict[str, str]:
    return {"tiers.nvme.path": str(folder), "tiers.nvme.bytes": "100TiB"}


@pytest.mark.parametrize("make", [unwritable, too_full])
def test_a_cache_directory_that_cannot_be_used_is_a_clear_error_or_goes_unused(
    server: TritonServer,
    repository: Path,
    tiny_checkpoint: Path,
    tmp_path: Path,
    make: Callable[[Path], dict[str, str]],
) -> None:
    overrides = tiny_overrides(tiny_checkpoint, tmp_path) | make(tmp_path / "cache")
    add_model(repository, make.__name__, overrides, tmp_path)
    refusal = load(server, make.__name__)
    if refusal:
        assert "tiers.nvme" in refusal or "cache directory" in refusal
    else:
        with Client(server.grpc_url, make.__name__) as client:
            assert next(client.infer(INPUTS, timeout_s=120)).text == answer(server)
        assert total(metrics(server)["kvtier_tier_capacity_bytes"], model=make.__name__, tier="nvme") == 0
        server.control.unload(make.__name__, 120)
    assert answer(server)


def load(server: TritonServer, model: str) -> str:
    """Why the server refuses to load a model; empty if it does not."""
    try:
        server.control.load(model, 120)
    except ServingError as error:
        return str(error)
    return ""


def add_model(repository: Path, name: str, overrides: dict[str, str], scratch: Path) -> None:
    """Put the shipped model into a repository under another name, with overrides."""
    made = overlay(REPOSITORY, overrides, scratch / "models")
    shutil.copytree(made / MODEL, repository / name, symlinks=True)
