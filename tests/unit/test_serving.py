"""What the supervisor decides without a server: remedies, overlays, ports, and which models it calls dead."""

from __future__ import annotations

import http.client
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from kvtier.cli import serve as serve_command
from kvtier.cli.serve import parse
from kvtier.serving import Ports, ServerOptions, ServingError, Watch
from kvtier.serving.http import ControlClient, label, parse_metrics
from kvtier.serving.locate import arguments_without_gpu, check_numpy, package_of
from kvtier.serving.processes import ModelProcess, server_setup
from kvtier.serving.repository import models_of, overlay


def test_numpy_2_is_refused_with_the_remedy() -> None:
    check_numpy("1.26.4")
    with pytest.raises(ServingError, match=r"numpy 2\.1\.0 .*pip install 'numpy<2'"):
        check_numpy("2.1.0")


def test_a_server_is_told_not_to_look_for_a_gpu_where_there_is_none(tmp_path: Path) -> None:
    nowhere, device = tmp_path / "nowhere", tmp_path / "nvidiactl"
    device.touch()
    metrics, pool = "--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0"
    assert arguments_without_gpu([], [nowhere]) == [metrics, pool]
    assert arguments_without_gpu(["--allow-gpu-metrics=true"], [nowhere]) == [pool], "what somebody asks for stays"
    assert arguments_without_gpu([], [nowhere, device]) == []


def test_a_missing_library_names_its_package() -> None:
    assert package_of("libpython3.11.so.1.0") == "libpython3.11"
    assert package_of("libarchive.so.13") == "libarchive13"


def test_a_taken_port_is_named_with_its_option() -> None:
    free = Ports.free()
    free.check_free()
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServingError, match=rf"already in use: --metrics-port {port};"):
            Ports(free.http, free.grpc, port).check_free()


def test_options_we_do_not_know_go_to_the_server() -> None:
    options = parse(
        ["--grpc-port", "9001", "--set=tiers.hbm.bytes=1GiB", "--model-config-name=vllm", "--log-verbose=1"]
    )
    assert options.ports == Ports(grpc=9001)
    assert options.overrides == {"tiers.hbm.bytes": "1GiB"}
    assert options.extra_arguments == ("--model-config-name=vllm", "--log-verbose=1")


def test_a_malformed_override_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--set", "tiers.hbm.bytes"])
    assert "KEY=VALUE" in capsys.readouterr().err


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("ours", "other"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text("max_batch_size: 1\n")
    (tmp_path / "ours" / "1" / "engine.yaml").write_text("model: x\n")
    (tmp_path / "ours" / "configs").mkdir()
    (tmp_path / "ours" / "configs" / "vllm.pbtxt").write_text("max_batch_size: 0\n")
    return tmp_path


def test_an_overlay_adds_parameters_to_our_models_alone(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert models_of(repository) == ["ours"]
    target = overlay(repository, {"dtype": 'a"b', "model": "weights"}, tmp_path_factory.mktemp("overlay"))
    for config, first in (("config.pbtxt", "max_batch_size: 1"), ("configs/vllm.pbtxt", "max_batch_size: 0")):
        text = (target / "ours" / config).read_text()
        assert text.startswith(first)
        assert 'parameters { key: "dtype" value { string_value: "a\\"b" } }' in text
        assert f'string_value: "{Path.cwd() / "weights"}"' in text
    assert (target / "ours" / "1").resolve() == repository / "ours" / "1"
    assert (target / "other").resolve() == repository / "other"


@pytest.mark.parametrize("make", [False, True])
def test_a_repository_without_models_is_refused(tmp_path: Path, make: bool) -> None:
    folder = tmp_path / "models"
    if make:
        folder.mkdir()
    with pytest.raises(ServingError, match="--model-repository"):
        models_of(folder)


def test_a_metrics_page_is_read() -> None:
    page = '# HELP a x\na{model="m",instance="m_0"} 1\nb 2.5\n<html> </html>\nc none\n'
    parsed = parse_metrics(page)
    assert parsed == {"a": {'model="m",instance="m_0"': 1.0}, "b": {"": 2.5}}
    assert label('model="m",instance="m_0"', "instance") == "m_0"
    assert label('model="m"', "el") == ""


class Answer:
    """What the server says to any HTTP request."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self._body = body

    def read(self) -> bytes:
        return self._body


@pytest.mark.parametrize(
    ("status", "body"),
    [(503, b'{"error": "unavailable"}'), (200, b""), (200, b"[1]"), (200, b"{}"), (200, b"null"), (200, b"\xff[{")],
)
def test_an_odd_answer_is_an_oserror_whatever_was_asked(status: int, body: bytes) -> None:
    control = ControlClient("localhost", 1, 1)
    connection = mock.Mock(spec=http.client.HTTPConnection)
    connection.getresponse.return_value = Answer(status, body)
    with mock.patch("http.client.HTTPConnection", return_value=connection):
        if body != b"{}":  # an empty object: no model, and a model that the Python backend does not run
            with pytest.raises(ConnectionError):
                control.ready_models()
            with pytest.raises(ConnectionError):
                control.process_count("m")
        with pytest.raises(ConnectionError):
            control.version()
        if status != 200:
            with pytest.raises(ConnectionError):
                control.metrics()
            assert not control.ready()
            with pytest.raises(ServingError, match="load of m was refused"):
                control.load("m", 1.0)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ([{"name": "m", "version": "1", "state": "READY"}], ""),
        ([{"name": "m", "state": "LOADING"}, {"name": "n", "state": "UNAVAILABLE", "reason": "unloaded"}], ""),
        ([{"name": "m", "state": "READY"}, {"name": "n"}], "not loaded: n; the server's own lines say why"),
        (
            [{"name": "n"}, {"name": "m", "state": "UNAVAILABLE", "reason": "Internal: ConfigError: a: b\n\nAt:\n  c"}],
            "m cannot be loaded: ConfigError: a: b",
        ),
    ],
)
def test_what_a_server_could_not_load_is_said_once_with_the_reason(index: list[dict[str, str]], said: str) -> None:
    connection = mock.Mock(spec=http.client.HTTPConnection)
    connection.getresponse.return_value = Answer(200, json.dumps(index).encode())
    with mock.patch("http.client.HTTPConnection", return_value=connection):
        if not said:
            ControlClient("localhost", 1, 1).check_loaded()
            return
        with pytest.raises(ServingError) as refused:
            ControlClient("localhost", 1, 1).check_loaded()
    assert str(refused.value) == said


PARENT = """
import subprocess, sys, time
from kvtier.serving.processes import end_with_parent
command = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(command, preexec_fn=end_with_parent(), start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_supervisor_takes_its_server_with_it() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            assert not select.select([child], [], [], 0)[0]
            parent.kill()
            assert select.select([child], [], [], 60)[0], "the child outlived its parent"
        finally:
            if not select.select([child], [], [], 0)[0]:
                signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)


def test_the_exit_timeout_covers_a_long_answer_and_is_an_option() -> None:
    context, tokens_per_second, unload_s = 8192, 14, 10
    assert ServerOptions().exit_timeout_s >= context / tokens_per_second + unload_s
    assert parse([]).exit_timeout_s == ServerOptions().exit_timeout_s
    assert parse(["--exit-timeout-secs=7"]).exit_timeout_s == 7


class CrashingServer:
    """Stands for a server that ends as it was told, time after time; the last time it is asked to stop."""

    def __init__(self, statuses: list[int]) -> None:
        self.statuses = statuses
        self.waits: list[float] = []
        self.stop_requested = self
        self.grpc_url = self.http_url = self.metrics_url = ""

    def start(self) -> None:
        pass

    def stop(self) -> int:
        return self.statuses.pop(0)

    def is_set(self) -> bool:
        return not self.statuses

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return self.is_set()


@pytest.mark.parametrize(
    ("statuses", "result", "waits"),
    [
        ([0], 0, []),
        ([1, 0], 1, []),
        ([-signal.SIGSEGV, 0], 0, [0]),
        ([-signal.SIGSEGV] * 7 + [0], 0, [0, 1, 2, 5, 10, 30, 30]),
        ([-signal.SIGKILL, 1, 0], 1, [0]),
        ([-signal.SIGKILL], 1, []),
    ],
    ids=["asked", "gave up", "crashed once", "crashes all the time", "gave up later", "killed when asked again"],
)
def test_a_server_that_crashes_is_started_again_more_and_more_slowly(
    monkeypatch: pytest.MonkeyPatch, statuses: list[int], result: int, waits: list[float]
) -> None:
    server = CrashingServer(list(statuses))
    monkeypatch.setattr(serve_command, "TritonServer", lambda _: server)
    monkeypatch.setattr(serve_command, "Watch", mock.Mock())
    with mock.patch("signal.signal"):
        assert serve_command.main([]) == result
    assert server.waits == waits


@pytest.mark.parametrize(
    ("soft", "hard", "stack_bytes"),
    [(8 << 20, -1, 64 << 20), (-1, -1, 64 << 20), (128 << 20, -1, 128 << 20), (8 << 20, 16 << 20, 16 << 20)],
)
def test_threads_of_a_server_get_stacks_for_large_bodies_as_far_as_is_allowed(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, stack_bytes: int
) -> None:
    assert resource.RLIM_INFINITY == -1
    calls = mock.Mock(getrlimit=mock.Mock(return_value=(soft, hard)))
    monkeypatch.setattr("resource.getrlimit", calls.getrlimit)
    monkeypatch.setattr("resource.setrlimit", calls.setrlimit)
    monkeypatch.setattr("kvtier.serving.processes.end_with_parent", lambda: calls.follow)
    server_setup()()
    assert calls.mock_calls[1:] == [mock.call.setrlimit(resource.RLIMIT_STACK, (stack_bytes, hard)), mock.call.follow()]


class FakeServer:
    """Stands for server and control client; what a test sets is what the watch sees."""

    def __init__(self) -> None:
        self.control = self
        self.ready = {"m"}
        self.alive = 1
        self.up = 1
        self.reloads = 0
        self.refuse = False
        self.now = 0.0

    def metrics(self) -> str:
        return f'kvtier_engine_up{{model="m",instance="m_0_0"}} {self.up}\n'

    def ready_models(self) -> set[str]:
        return self.ready

    def process_count(self, _: str) -> int:
        return 1

    def model_processes(self) -> list[ModelProcess]:
        return [ModelProcess(1, "m")] * self.alive

    def reload(self, _: str) -> None:
        self.reloads += 1
        if self.refuse:
            self.ready = set()
            raise ServingError("no memory")
        self.ready, self.alive, self.up = {"m"}, 1, 1

    def clock(self) -> float:
        return self.now


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def watch(fake: FakeServer, lines: list[str]) -> Watch:
    return Watch(fake, lines.append, fake.clock)  # type: ignore[arg-type]


def poll(watch: Watch, fake: FakeServer, until: float) -> None:
    """Poll twice a second from now on."""
    while fake.now < until:
        watch.poll()
        fake.now += 0.5


def test_a_healthy_model_is_left_alone(fake: FakeServer, watch: Watch) -> None:
    poll(watch, fake, 5.0)
    assert fake.reloads == 0


@pytest.mark.parametrize(("field", "reason"), [("alive", "its model process died"), ("up", "kvtier_engine_up is 0")])
def test_a_dead_model_is_reloaded_once_two_polls_agree(
    fake: FakeServer, watch: Watch, lines: list[str], field: str, reason: str
) -> None:
    setattr(fake, field, 0)
    poll(watch, fake, 0.5)
    assert fake.reloads == 0
    poll(watch, fake, 5.0)
    assert fake.reloads == 1
    assert lines == [f"model m: {reason}; reloaded in 0.0 s"]


def test_a_moments_doubt_is_forgotten(fake: FakeServer, watch: Watch) -> None:
    for step in range(6):
        fake.up = step % 2
        watch.poll()
    assert fake.reloads == 0


def test_a_model_somebody_unloaded_stays_unloaded(fake: FakeServer, watch: Watch) -> None:
    fake.ready, fake.alive, fake.up = set(), 0, 0
    poll(watch, fake, 5.0)
    assert fake.reloads == 0


def test_a_server_that_answers_nonsense_is_asked_again(fake: FakeServer, watch: Watch) -> None:
    fake.alive = 0
    with mock.patch.object(FakeServer, "ready_models", side_effect=ConnectionError("broken answer")):
        poll(watch, fake, 5.0)
    assert fake.reloads == 0
    poll(watch, fake, 10.0)
    assert fake.reloads == 1


def test_a_refused_reload_is_tried_again_more_and_more_slowly(fake: FakeServer, watch: Watch, lines: list[str]) -> None:
    fake.alive, fake.refuse = 0, True
    poll(watch, fake, 10.0)
    assert fake.reloads == 4, "after 0.5, 1.5, 3.5 and 8.5 s"
    assert "again in 5 s: no memory" in lines[2]
    fake.refuse = False
    poll(watch, fake, 120.0)
    assert fake.reloads == 5
    assert "reloaded" in lines[-1]


def test_a_model_that_dies_again_and_again_is_reloaded_more_and_more_slowly(
    fake: FakeServer, watch: Watch, lines: list[str]
) -> None:
    while fake.now < 300.0:  # it lives for two seconds each time
        poll(watch, fake, fake.now + 2.0)
        fake.up = 0
        count = fake.reloads
        while fake.reloads == count:
            poll(watch, fake, fake.now + 0.5)
    assert fake.reloads < 20, "without waits it is more than 100"
    assert "kvtier_engine_up is 0, within 60 s of its last reload (3 in a row); the next one in 5 s" in "".join(lines)
    assert lines[-2].endswith("the next one in 30 s")


def test_a_model_that_was_steady_is_reloaded_at_once_again(fake: FakeServer, watch: Watch, lines: list[str]) -> None:
    for _ in range(3):
        fake.up = 0
        poll(watch, fake, fake.now + 70.0)
    assert fake.reloads == 3
    assert all("reloaded in" in line for line in lines), lines
