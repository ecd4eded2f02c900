"""`scripts/serve` as an operator runs it: ports, a model process that dies, an engine that fails, a clean stop."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import MODEL, REPOSITORY, ROOT, SERVER_DIRECTORY, tiny_overrides

from kvtier.client import Client, ServerError
from kvtier.serving import Ports, ServingError, locate
from kvtier.serving.http import ControlClient, label, parse_metrics
from kvtier.serving.processes import SHARED_MEMORY, clean_up, model_processes
from kvtier.serving.repository import overlay
from tests.stopped import stopped

SHORT = {"text_input": "the sea", "max_tokens": 3}
ENDLESS_TOKENS = 8000
LONG = {
    "text_input": "the sea",
    "stream": True,
    "max_tokens": 1200,
    "sampling_parameters": json.dumps({"temperature": 0, "ignore_eos": True}),
}
BREAK = "break the engine thread"
"""A text that makes the model below break its engine, as a bug would."""
BREAKABLE_MODEL = f"""
import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("shipped", Path({str(REPOSITORY / MODEL / "1" / "model.py")!r}))
shipped = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shipped)


class TritonPythonModel(shipped.TritonPythonModel):
    def execute(self, requests):
        for request in requests:
            tensors = {{tensor.name(): tensor for tensor in request.inputs()}}
            if tensors["text_input"].as_numpy().reshape(-1)[0] == {BREAK.encode()!r}:
                self._engine._loop._scheduler = None
        super().execute(requests)
"""


class Served:
    """A running `scripts/serve`."""

    def __init__(self, arguments: list[str], log: Path, ports: Ports) -> None:
        self.ports = ports
        self.log = log
        command = [str(ROOT / "scripts" / "serve"), *arguments]
        # A supervisor that is killed leaves its run folder behind.
        environment = {**os.environ, "PYTHON": sys.executable, "TMPDIR": str(log.parent)}
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        self.control = ControlClient("localhost", ports.http, ports.metrics)

    def lines(self) -> list[str]:
        """What the supervisor itself reported."""
        return [line for line in self.log.read_text().splitlines() if line.startswith("kvtier serve: ")]

    def wait_for(self, word: str, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(word in line for line in self.lines()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def server_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def prefix(self) -> str:
        """The prefix of this server's shared memory, from its command line."""
        words = Path(f"/proc/{self.server_pid()}/cmdline").read_text().split("\0")
        return next(word.rpartition("=")[2] for word in words if "shm-region-prefix-name" in word)

    def client(self) -> Client:
        return Client(f"localhost:{self.ports.grpc}", MODEL, timeout_s=120)


StartServed = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path, tiny_checkpoint: Path) -> Iterator[StartServed]:
    try:
        locate(SERVER_DIRECTORY)
    except ServingError as error:
        pytest.skip(str(error))
    started: list[Served] = []

    def start(*extra: str) -> Served:
        ports = Ports.free()
        overrides = tiny_overrides(tiny_checkpoint, tmp_path / "cache")
        settings = [f"--set={key}={value}" for key, value in overrides.items()]
        served = Served([*ports.arguments(), *settings, *extra], tmp_path / "log", ports)
        started.append(served)
        return served

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.send_signal(signal.SIGCONT)
        for _ in range(2):  # the second one does not wait for streams
            if served.process.poll() is None:
                served.process.terminate()
                time.sleep(0.1)
        served.process.wait(120)


def answers(served: Served, inputs: dict[str, object]) -> str:
    with served.client() as client:
        return "".join(response.text for response in client.infer(inputs, timeout_s=120))


def test_a_killed_model_process_comes_back_and_sigterm_lets_a_stream_finish(serve: StartServed) -> None:
    served = serve("--exit-timeout-secs=300")
    served.wait_for("ready: ")
    prefix = served.prefix()
    before = answers(served, SHORT)

    [stub] = model_processes(prefix)
    with served.client() as client:
        lost = client.infer(LONG, timeout_s=120)
        next(lost)
        stub.kill()
        served.wait_for("; reloaded in ")  # at once, or on a crowded machine by the second try
        lost.close()
    assert answers(served, SHORT) == before
    assert [process.pid for process in model_processes(prefix)] != [stub.pid]

    with served.client() as client:
        stream = client.infer(LONG, timeout_s=120)
        texts = [next(stream).outputs["output_ids"]]
        served.process.send_signal(signal.SIGTERM)
        texts += [response.outputs["output_ids"] for response in stream]
    tokens = sum(len(ids) if isinstance(ids, list) else 1 for ids in texts)
    assert tokens == LONG["max_tokens"], "the stream was cut"
    assert served.process.wait(120) == 0, "it waited for the answer that was lost"
    assert model_processes(prefix) == []
    assert list(SHARED_MEMORY.glob(f"{prefix}*")) == []
    assert "model smollm2: its model process died" in "".join(served.lines())
    assert sum("reloaded" in line for line in served.lines()) == 1


def test_an_engine_that_failed_answers_unavailable_and_is_reloaded(serve: StartServed, tmp_path: Path) -> None:
    repository = overlay(REPOSITORY, {}, tmp_path / "repository")
    version = repository / MODEL / "1"
    original = version.resolve()
    version.unlink()
    version.mkdir()
    (version / "engine.yaml").symlink_to(original / "engine.yaml")
    (version / "model.py").write_text(BREAKABLE_MODEL)
    served = serve(f"--model-repository={repository}", "--set=tiers.hbm.bytes=8MiB")
    served.wait_for("ready: ")
    before = answers(served, SHORT)
    with served.client() as client:
        running = client.infer({**LONG, "max_tokens": ENDLESS_TOKENS}, timeout_s=120)
        next(running)
        with stopped(served.process.pid):  # it would reload the engine sooner or later
            with pytest.raises(ServerError):
                list(client.infer({**SHORT, "text_input": BREAK}, timeout_s=120))
            with pytest.raises(ServerError):  # and not a stream that hangs
                list(running)
            with pytest.raises(ServerError) as refused:
                list(client.infer(SHORT, timeout_s=120))
    assert refused.value.status == "UNAVAILABLE"
    served.wait_for("; reloaded in ")
    assert "model smollm2: kvtier_engine_up is 0" in "".join(served.lines()) and answers(served, SHORT) == before
    ups = parse_metrics(served.control.metrics())["kvtier_engine_up"]
    assert [value for text, value in ups.items() if label(text, "model") == MODEL] == [1]
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(120) == 0


def test_a_stream_that_outlasts_the_exit_timeout_is_cut_with_an_error(serve: StartServed) -> None:
    served = serve("--exit-timeout-secs=1", "--set=tiers.hbm.bytes=8MiB")
    served.wait_for("ready: ")
    prefix = served.prefix()
    with served.client() as client:
        stream = client.infer({**LONG, "max_tokens": ENDLESS_TOKENS}, timeout_s=120)
        next(stream)
        served.process.send_signal(signal.SIGTERM)
        texts = []
        reason = ""
        try:
            for response in stream:
                texts.append(response.text)
                reason = response.outputs.get("finish_reason", "")
        except ServerError as error:
            reason = error.status
    assert reason in ("UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN", "cancelled"), "nobody told the client"
    assert len(texts) < ENDLESS_TOKENS
    assert served.process.wait(120) in (0, 1)
    assert model_processes(prefix) == []
    assert list(SHARED_MEMORY.glob(f"{prefix}*")) == []


def test_a_large_form_is_refused_and_a_server_that_crashes_comes_back(serve: StartServed) -> None:
    served = serve()
    served.wait_for("ready: ")
    before, prefix, server = answers(served, SHORT), served.prefix(), served.server_pid()
    body = json.dumps({"text_input": "a" * 9_000_000}).encode()
    url = f"http://localhost:{served.ports.http}/v2/models/{MODEL}/generate"
    with pytest.raises(urllib.error.HTTPError) as refused:  # the type is what urllib and `curl -d` say of it
        urllib.request.urlopen(url, body, timeout=120)
    assert refused.value.code == 400 and b"text_input: at most" in refused.value.read()
    assert served.server_pid() == server, "8 MiB of stack were not enough for it"
    os.kill(server, signal.SIGSEGV)
    served.wait_for("tritonserver crashed (SIGSEGV); starting it again in 0 s")
    while sum("ready: " in line for line in served.lines()) < 2:
        served.wait_for("ready: ")
        time.sleep(0.1)
    assert served.server_pid() != server and answers(served, SHORT) == before
    served.process.terminate()
    assert served.process.wait(120) == 0
    assert model_processes(prefix) == [] and list(SHARED_MEMORY.glob(f"{prefix}*")) == []


def test_sigkill_of_the_supervisor_ends_the_server_too(serve: StartServed) -> None:
    served = serve()
    served.wait_for("ready: ")
    prefix = served.prefix()
    server = os.pidfd_open(served.server_pid())
    served.process.kill()
    try:
        assert select.select([server], [], [], 60)[0], "tritonserver runs on without a supervisor"
    finally:
        if not select.select([server], [], [], 0)[0]:
            signal.pidfd_send_signal(server, signal.SIGKILL)
            clean_up(prefix)
        os.close(server)
    assert model_processes(prefix) == []
    assert list(SHARED_MEMORY.glob(f"{prefix}*")) == []
    served.ports.check_free()


def test_a_taken_port_is_named_before_the_start(serve: StartServed) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        served = serve(f"--grpc-port={port}")
        assert served.process.wait(120) == 1
    assert served.lines() == [
        f"kvtier serve: already in use: --grpc-port {port}; stop what listens there or choose other ports"
    ]


def test_a_bad_key_ends_the_start_and_is_named_in_the_last_line(serve: StartServed) -> None:
    served = serve("--set=tiers.hbm.bites=1MiB")
    assert served.process.wait(120) == 1
    reason = "ConfigError: tiers.hbm.bites: no such key; did you mean tiers.hbm.bytes?"
    assert served.log.read_text().splitlines()[-1] == f"kvtier serve: {MODEL} cannot be loaded: {reason}"
