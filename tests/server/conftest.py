"""The real Triton server for the tests of this folder: on free ports, one a session where possible.

`smollm2` serves the real checkpoint, `tiny` a random one in fp32 that answers in milliseconds and whose HBM is small.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.client import Client
from kvtier.serving import Ports, ServerOptions, ServingError, TritonServer, locate
from kvtier.serving.http import parse_metrics
from tests.tiny import make_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SERVER_DIRECTORY = ROOT / ".cache" / "triton"
REPOSITORY = ROOT / "model_repository"
MODEL = "smollm2"
"""The name both models are served under: that of the shipped folder."""
TINY_CONTEXT = 8192
TINY_HBM = "1MiB"
"""85 blocks of 3 layers x 4 KiB, 16 tokens each: 1,360 tokens, of which one request may use nearly all."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    return make_checkpoint(folder, tokenizer=True, max_position_embeddings=TINY_CONTEXT)


def tiny_overrides(checkpoint: Path, cache: Path, hbm: str = TINY_HBM) -> dict[str, str]:
    """What points the shipped model folder at a tiny checkpoint with little memory."""
    return {
        "model": str(checkpoint),
        "dtype": "float32",
        "block_tokens": "16",
        "threads": "1",
        "tiers.hbm.bytes": hbm,
        "tiers.dram.bytes": "16MiB",
        "tiers.nvme.bytes": "16MiB",
        "tiers.nvme.path": str(cache),
        "tiers.load": "always",
        "sharing": "false",
    }


StartServer = Callable[..., TritonServer]


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Start servers that end with the session: `start_server(overrides, *extra_arguments, repository=...)`."""
    try:
        locate(SERVER_DIRECTORY)
    except ServingError as error:
        pytest.skip(str(error))
    servers: list[TritonServer] = []

    def start(overrides: dict[str, str], *extra: str, repository: Path = REPOSITORY) -> TritonServer:
        options = ServerOptions(
            repository=repository,
            ports=Ports.free(),
            overrides=overrides,
            server_directory=SERVER_DIRECTORY,
            log=tmp_path_factory.mktemp("server") / "log",
            start_timeout_s=120,
            exit_timeout_s=30,
            extra_arguments=extra,
        )
        server = TritonServer(options)
        servers.append(server)
        server.start()
        return server

    yield start
    statuses = [server.stop() for server in servers]
    assert set(statuses) <= {0, None}, f"{statuses}: a server did not stop cleanly; did a request never get its FINAL?"


@pytest.fixture(scope="session")
def smollm2(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> TritonServer:
    """The shipped model repository as it is, but for a small cache in a place of its own."""
    if not (ROOT / ".cache" / "models" / "smollm2" / "config.json").exists():
        pytest.skip("no SmolLM2 checkpoint: run scripts/fetch_model.py")
    cache = tmp_path_factory.mktemp("smollm2-cache")
    return start_server({"tiers.hbm.bytes": "256MiB", "tiers.nvme.path": str(cache), "tiers.load": "always"})


@pytest.fixture(scope="session")
def tiny(start_server: StartServer, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> TritonServer:
    """A tiny model whose HBM holds 1,360 tokens."""
    return start_server(tiny_overrides(tiny_checkpoint, tmp_path_factory.mktemp("tiny-cache")))


@pytest.fixture(scope="session")
def client(tiny: TritonServer) -> Iterator[Client]:
    """A gRPC client of the tiny model."""
    with Client(tiny.grpc_url, MODEL) as connected:
        yield connected


def post(server: TritonServer, verb: str, body: object, timeout_s: float = 120) -> tuple[int, str]:
    """POST JSON to `generate` or `generate_stream`; returns status and body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.http_url}/v2/models/{MODEL}/{verb}", data)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metrics(server: TritonServer) -> dict[str, dict[str, float]]:
    """The kvtier metrics of a server: `{name: {label text: value}}`."""
    page = parse_metrics(server.control.metrics())
    return {name: series for name, series in page.items() if name.startswith("kvtier_")}


def total(series: dict[str, float], **labels: str) -> float:
    """Sum of the series that have all these labels."""
    wanted = [f'{name}="{value}"' for name, value in labels.items()]
    return sum(value for text, value in series.items() if all(label in text for label in wanted))


def handed_over(server: TritonServer) -> int:
    """Requests that `execute` has returned from: they are with the engine, have ended, or were refused."""
    return int(statistics(server)["inference_stats"]["compute_infer"]["count"])


def lists_handed_over(server: TritonServer) -> Counter[int]:
    """How many lists of each length those came in."""
    return Counter({one["batch_size"]: one["compute_infer"]["count"] for one in statistics(server)["batch_stats"]})


def statistics(server: TritonServer) -> dict[str, Any]:
    """What the server itself counts of the model."""
    _, body = server.control._call("GET", f"/v2/models/{MODEL}/stats")
    [found] = json.loads(body)["model_stats"]
    return dict(found)


def wait(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    """For what is sure to come, but nobody knows when: metrics are published twice a second if the machine allows."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never comes to that"
        time.sleep(0.05)


def settled(server: TritonServer, handed: int = 0) -> dict[str, dict[str, float]]:
    """The metrics once they tell of the end of every request that `execute` got; of so many at least."""

    def all_is_told() -> bool:
        values = metrics(server)
        ended = total(values["kvtier_requests_total"]) + total(
            values["kvtier_request_failures_total"], reason="invalid"
        )
        left = total(values["kvtier_running_requests"]) + total(values["kvtier_queued_requests"])
        return left == 0 and ended == handed_over(server) >= handed

    wait(all_is_told)
    return metrics(server)  # again: a page of metrics is not of one moment
