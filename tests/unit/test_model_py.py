"""model.py on a small fake of `triton_python_backend_utils`: whatever fails, FINAL exactly once and threads that live.

The engine behind it is a real one on a tiny checkpoint, where one is needed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.door import OUTPUTS, DoorRequest
from kvtier.errors import InvalidRequest, Unavailable
from kvtier.metrics import Metrics
from kvtier.request import FinishReason, Origin, Request, TokenEvent, Usage
from tests.engines import CONTEXT, Gate, wait_for
from tests.tiny import make_checkpoint

MODEL_FILE = Path(__file__).parents[2] / "model_repository" / "smollm2" / "1" / "model.py"
REPOSITORY = MODEL_FILE.parents[2]
FINAL = 1
USAGE = Usage(3, 2, Origin(computed=3), 0, 1, 0.1)


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class TritonError:
    INVALID_ARG, UNAVAILABLE, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "INTERNAL"

    def __init__(self, message: str, code: str) -> None:
        self.message = message
        self.code = code


class InferenceResponse:
    def __init__(self, tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in tensors or []}
        self.error = error


class MetricFamily:
    """Keeps the numbers of all its series; `fail` decides which calls raise."""

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    made: dict[str, MetricFamily]
    fail: Callable[[str], bool]

    def __init__(self, name: str, description: str, kind: str) -> None:
        assert description and kind
        self.name = name
        self.value = 0.0
        self.observed: list[float] = []
        self.made[name] = self

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> MetricFamily:  # noqa: N802
        assert labels["model"] and buckets != []
        self._check()
        return self

    def set(self, value: float) -> None:
        self._check()
        self.value = value

    def increment(self, value: float) -> None:
        self._check()
        self.value += value

    def observe(self, value: float) -> None:
        self._check()
        self.observed.append(value)

    def _check(self) -> None:
        if type(self).fail(self.name):
            raise RuntimeError("the server takes no numbers")


class Sender:
    """A response sender that counts; `broken_sends` are the numbers of the calls that raise."""

    def __init__(self, broken_sends: frozenset[int] = frozenset()) -> None:
        self.responses: list[InferenceResponse] = []
        self.final_count = 0
        self.done = threading.Event()
        self._broken_sends = broken_sends
        self._calls = 0

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert self.final_count == 0, "a response after FINAL"
        self._calls += 1
        if self._calls - 1 in self._broken_sends:
            raise RuntimeError("the response cannot be sent")
        if response is not None:
            self.responses.append(response)
        if flags == FINAL:
            self.final_count += 1
            self.done.set()

    def is_cancelled(self) -> bool:
        return False

    def error(self) -> TritonError:
        """The error of the one response."""
        assert self.done.wait(60)
        [response] = self.responses
        assert response.error is not None
        return response.error


class FakeRequest:
    def __init__(self, parameters: dict[str, object] | None = None, **inputs: Any) -> None:
        self.sender = Sender()
        self._parameters = parameters
        self._inputs = [Tensor(name, array) for name, array in inputs.items()]

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> str:
        return json.dumps(self._parameters) if self._parameters else ""

    def get_response_sender(self) -> Sender:
        return self.sender


def numpy_type(data_type: str) -> type:
    return {"TYPE_STRING": np.object_, "TYPE_INT32": np.int32}[data_type]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """model.py as a module, on the fake."""
    fake = types.ModuleType("triton_python_backend_utils")
    fake.__dict__.update(
        Tensor=Tensor,
        TritonError=TritonError,
        InferenceResponse=InferenceResponse,
        MetricFamily=MetricFamily,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        triton_string_to_numpy=numpy_type,
    )
    spec = importlib.util.spec_from_file_location("served_model", MODEL_FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, fake.__name__, fake)
        spec.loader.exec_module(module)
        patch.setattr(module, "PUBLISH_S", 0.005)
        yield module


@pytest.fixture(autouse=True)
def _fresh_metrics() -> None:
    MetricFamily.made = {}
    MetricFamily.fail = staticmethod(lambda _: False)  # type: ignore[assignment]


# ---- the whole door, with an engine ----------------------------------------------------------------------------------


def arguments(folder: Path, checkpoint: Path, **model_config: object) -> dict[str, str]:
    (folder / "1").mkdir(parents=True)
    values = {"model": str(checkpoint), "dtype": "float32", "threads": "1", "block_tokens": "16"}
    sizes = {"tiers.hbm.bytes": "4MiB", "tiers.dram.bytes": "1MiB"}
    (folder / "1" / "engine.yaml").write_text("{}")
    config = {
        "max_batch_size": 64,
        "output": [{"name": name, "data_type": tensor.data_type} for name, tensor in OUTPUTS.items()],
        "parameters": {key: {"string_value": value} for key, value in {**values, **sizes}.items()},
        **model_config,
    }
    names = {"model_name": "m", "model_instance_name": "m_0_0", "model_version": "1"}
    return {"model_repository": str(folder), "model_config": json.dumps(config), **names}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served") / "model", tokenizer=True)


@pytest.fixture
def served(model: Any, checkpoint: Path, tmp_path: Path) -> Iterator[Any]:
    batching = {"priority_levels": 3, "default_priority_level": 2}
    loaded = model.TritonPythonModel()
    loaded.initialize(arguments(tmp_path, checkpoint, dynamic_batching=batching))
    yield loaded
    loaded.finalize()


def ids(rows: int, count: int) -> Any:
    return np.arange(3, 3 + rows * count, dtype=np.int32).reshape(rows, count)


def test_a_batch_of_two_prompts_is_refused_and_one_is_answered(served: Any) -> None:
    good = FakeRequest(input_ids=ids(1, 3), max_tokens=np.array([[2]], np.int32))
    prompts = FakeRequest(input_ids=ids(2, 3))
    stops = FakeRequest(input_ids=ids(1, 3), stop=np.array([[b"a"], [b"b"]], dtype=np.object_))
    served.execute([prompts, good, stops])
    for refused, name in ((prompts, "input_ids"), (stops, "stop")):
        error = refused.sender.error()
        text = f"INVALID_ARGUMENT: {name}: a request holds a batch of 1, got 2"
        assert (error.code, error.message) == ("INVALID_ARG", text)
    assert good.sender.done.wait(60)
    [response] = good.sender.responses
    assert response.error is None and response.tensors["output_ids"].shape == (1, 2)


def test_what_the_context_cannot_hold_is_refused_before_it_is_tokenized(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[str] = []
    encode = type(served._engine.tokenizer).encode
    monkeypatch.setattr(
        type(served._engine.tokenizer), "encode", lambda *a, **k: tokenized.append("") or encode(*a, **k)
    )
    longest = max(64 << 10, CONTEXT * len("<|endoftext|>"))
    text = FakeRequest(text_input=np.array([[b"x" * (longest + 1)]], dtype=np.object_))
    tokens = FakeRequest(input_ids=ids(1, CONTEXT + 1) % 250)
    served.execute([text, tokens])
    assert (
        text.sender.error().message == f"INVALID_ARGUMENT: text_input: at most {longest:,} bytes, got {longest + 1:,}"
    )
    assert tokens.sender.error().message == f"INVALID_ARGUMENT: input_ids: at most {CONTEXT} values, got {CONTEXT + 1}"
    assert tokenized == []


def test_a_level_beyond_those_of_the_model_is_refused(served: Any) -> None:
    wrong = FakeRequest({"priority": 10**6}, input_ids=ids(1, 3))
    right = FakeRequest({"priority": 3}, input_ids=ids(1, 3), max_tokens=np.array([[1]], np.int32))
    served.execute([wrong, right])
    assert wrong.sender.error().message == "INVALID_ARGUMENT: priority: must be from 0 to 3, got 1000000"
    assert right.sender.done.wait(60) and right.sender.responses[0].error is None


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (InvalidRequest("a"), "INVALID_ARG", "INVALID_ARGUMENT: a"),
        (Unavailable("b"), "UNAVAILABLE", "UNAVAILABLE: b"),
        (KeyError("/a/path"), "INTERNAL", "INTERNAL: the server's log tells more"),
    ],
)
def test_what_submit_raises_is_the_answer(
    served: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str, text: str
) -> None:
    def submit(*_: object) -> None:
        raise type(error)(*error.args)  # a new one: pytest keeps parameters, and so what their tracebacks hold

    monkeypatch.setattr(served._engine, "submit", submit)
    request = FakeRequest(input_ids=ids(1, 3))
    served.execute([request])
    answer = request.sender.error()
    assert (answer.code, answer.message) == (code, text)
    assert request.sender.final_count == 1


def test_what_runs_at_the_end_is_answered_as_cancelled_once(model: Any, checkpoint: Path, tmp_path: Path) -> None:
    loaded = model.TritonPythonModel()
    loaded.initialize(arguments(tmp_path, checkpoint))
    wanted = {"max_tokens": np.array([[400]], np.int32), "return_finish_reason": np.array([[True]])}
    sampling = np.array([[b'{"ignore_eos": true}']], dtype=np.object_)
    requests = [FakeRequest(input_ids=ids(1, 3), sampling_parameters=sampling, **wanted) for _ in range(8)]
    gate = Gate(loaded._engine)
    loaded.execute(requests)
    ending = threading.Thread(target=loaded.finalize)
    ending.start()
    wait_for(lambda: not loaded._engine.healthy)
    gate.open()
    ending.join(60)
    assert not ending.is_alive()
    reasons = set()
    for request in requests:
        assert request.sender.done.is_set(), "no FINAL"
        reasons.add(request.sender.responses[-1].tensors["finish_reason"].item())
    assert reasons == {b"cancelled"}
    assert MetricFamily.made["kvtier_engine_up"].value == 0


def test_a_config_without_a_batcher_loads_and_has_the_levels_of_the_model(
    model: Any, checkpoint: Path, tmp_path: Path
) -> None:
    loaded = model.TritonPythonModel()
    loaded.initialize(arguments(tmp_path, checkpoint))
    wrong = FakeRequest({"priority": 4}, input_ids=ids(1, 3))
    right = FakeRequest({"priority": 3}, input_ids=ids(1, 3), max_tokens=np.array([[1]], np.int32))
    loaded.execute([wrong, right])
    assert wrong.sender.error().message == "INVALID_ARGUMENT: priority: must be from 0 to 3, got 4"
    assert right.sender.done.wait(60) and right.sender.responses
    loaded.finalize()


def test_no_config_lets_the_server_batch_what_it_cannot_batch() -> None:
    """With max_batch_size 0 the batcher of Triton 2.51 lets some of the requests of a burst wait for half a second."""
    configs = [*REPOSITORY.rglob("*.pbtxt")]
    assert len(configs) >= 2
    for path in configs:
        text = path.read_text()
        assert ("max_batch_size: 0" in text) != ("\ndynamic_batching" in text), path


def test_a_server_that_takes_no_metrics_fails_the_load(
    model: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MetricFamily.fail = staticmethod(lambda name: name == "kvtier_requests_total")  # type: ignore[assignment]
    monkeypatch.setattr(model, "CLOSE_S", 5.0)
    closed: list[float] = []
    monkeypatch.setattr(model.Engine, "close", lambda engine, _: closed.append(engine._loop.close(5.0)))
    with pytest.raises(RuntimeError, match="metrics take no numbers"):
        model.TritonPythonModel().initialize(arguments(tmp_path, checkpoint))
    assert closed == [True], "the engine was left open"


# ---- one request's way back ------------------------------------------------------------------------------------------


def tensors(fields: dict[str, object]) -> list[Tensor]:
    return [Tensor(name, value) for name, value in fields.items()]


def unmakeable(_: dict[str, object]) -> list[Tensor]:
    raise ValueError("no tensor can be made of it")


LASTS = [
    TokenEvent("z", (9,), FinishReason.STOP, USAGE),
    TokenEvent("", (), FinishReason.CANCELLED, USAGE),
    TokenEvent("", (), FinishReason.ERROR, None, Unavailable("no")),
    TokenEvent("", (), FinishReason.ERROR, None, KeyError("bug")),
]


@settings(max_examples=200, deadline=None)
@given(
    stream=st.booleans(),
    before=st.integers(0, 4),
    after=st.integers(0, 2),
    last=st.sampled_from(LASTS),
    asked_at=st.sets(st.integers(0, 6)),
    broken_send=st.integers(0, 6) | st.none(),
    makes=st.booleans(),
)
def test_final_is_sent_exactly_once_in_every_order_of_events(
    model: Any,
    stream: bool,
    before: int,
    after: int,
    last: TokenEvent,
    asked_at: set[int],
    broken_send: int | None,
    makes: bool,
) -> None:
    sender = Sender(frozenset() if broken_send is None else frozenset([broken_send]))
    asked = DoorRequest(Request([1]), stream=stream)
    delivery = model.Delivery(sender, asked, tensors if makes else unmakeable)
    events = [TokenEvent("a", (number,)) for number in range(before)] + [last] * (1 + after)
    failures = 0
    for number, event in enumerate(events):
        if number in asked_at:
            assert delivery.gone() is (sender.final_count == 1 or failures > 0 or number > before)
        try:
            delivery(event)
        except (RuntimeError, ValueError):
            failures += 1
    assert sender.final_count == 1
    assert failures <= 1
    assert delivery.gone()


def test_a_whole_answer_is_one_response_of_all_its_events(model: Any) -> None:
    sender = Sender()
    delivery = model.Delivery(sender, DoorRequest(Request([1])), tensors)
    for event in (TokenEvent("a", (1,)), TokenEvent("b", (2,)), LASTS[0]):
        delivery(event)
    [response] = sender.responses
    assert response.tensors["text_output"] == "abz" and response.tensors["output_ids"] == [1, 2, 9]


# ---- the thread that asks whether clients have gone ------------------------------------------------------------------


class Handle:
    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class AskedSender(Sender):
    def __init__(self, answers: list[object]) -> None:
        super().__init__()
        self._answers = answers

    def is_cancelled(self) -> bool:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)


def watched(model: Any, answers: list[object]) -> tuple[Any, Handle]:
    delivery = model.Delivery(AskedSender(answers), DoorRequest(Request([1])), tensors)
    delivery.handle = Handle()
    return delivery, delivery.handle


def test_clients_are_still_seen_as_gone_after_one_could_not_be_asked(model: Any) -> None:
    watch = model.CancelWatch(poll_s=0.002)
    broken, broken_handle = watched(model, [RuntimeError("cannot be asked")])
    slow, slow_handle = watched(model, [False, False, False, True])
    for delivery in (broken, slow):
        watch.add(delivery)
    assert slow_handle.cancelled.wait(60), "the watch has died"
    late, late_handle = watched(model, [True])
    watch.add(late)
    assert late_handle.cancelled.wait(60)
    wait_for(lambda: not watch._watched)
    assert not broken_handle.cancelled.is_set(), "its client may well be there"
    watch.close(60.0)
    assert not watch._thread.is_alive()


# ---- the thread that publishes metrics -------------------------------------------------------------------------------


class FakeEngine:
    def __init__(self) -> None:
        self.metrics = Metrics()
        self.healthy = True


def published(name: str) -> float:
    return MetricFamily.made[name].value


def test_numbers_go_on_after_a_call_that_failed_and_none_is_counted_twice(model: Any) -> None:
    engine = FakeEngine()
    publisher = model.Publisher(engine, "m", "m_0_0")
    failures = iter([True, True])
    MetricFamily.fail = staticmethod(  # type: ignore[assignment]
        lambda name: name == "kvtier_generated_tokens_total" and next(failures, False)
    )
    engine.metrics.generated_tokens.add(5)
    wait_for(lambda: published("kvtier_generated_tokens_total") == 5)
    engine.metrics.generated_tokens.add(2)
    engine.metrics.ttft_seconds.observe(1.5)
    wait_for(lambda: MetricFamily.made["kvtier_ttft_seconds"].observed == [1.5])
    publisher.close()
    assert published("kvtier_generated_tokens_total") == 7
    assert not publisher._thread.is_alive()


def test_numbers_that_stand_still_report_the_engine_as_down_until_they_move_again(model: Any) -> None:
    engine = FakeEngine()
    publisher = model.Publisher(engine, "m", "m_0_0")
    assert published("kvtier_engine_up") == 1
    MetricFamily.fail = staticmethod(lambda name: name == "kvtier_generated_tokens_total")  # type: ignore[assignment]
    engine.metrics.generated_tokens.add(5)
    wait_for(lambda: published("kvtier_engine_up") == 0)
    MetricFamily.fail = staticmethod(lambda _: False)  # type: ignore[assignment]
    wait_for(lambda: published("kvtier_engine_up") == 1 and published("kvtier_generated_tokens_total") == 5)
    engine.healthy = False
    wait_for(lambda: published("kvtier_engine_up") == 0)
    publisher.close()


def test_a_server_whose_metrics_hang_fails_the_start(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "CLOSE_S", 0.02)
    let = threading.Event()
    MetricFamily.fail = staticmethod(lambda _: not let.wait(60))  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="metrics take no numbers"):
        model.Publisher(FakeEngine(), "m", "m_0_0")
    let.set()
