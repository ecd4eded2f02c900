"""Bad requests over the wire: a clear INVALID_ARG that names the field, and the server goes on answering."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import TINY_CONTEXT, post

from kvtier.client import Client, ServerError
from kvtier.serving import TritonServer

TEXT = {"text_input": "the"}


def sampling(**values: object) -> dict[str, object]:
    return {**TEXT, "sampling_parameters": json.dumps(values)}


CASES: dict[str, tuple[dict[str, object], list[str]]] = {
    "empty prompt": ({"text_input": ""}, ["text_input", "empty"]),
    "neither prompt": ({"max_tokens": 4}, ["text_input", "input_ids"]),
    "both prompts": ({**TEXT, "input_ids": [1, 2]}, ["text_input", "input_ids"]),
    "max_tokens 0": ({**TEXT, "max_tokens": 0}, ["max_tokens", "1", "0"]),
    "max_tokens negative": ({**TEXT, "max_tokens": -3}, ["max_tokens", "-3"]),
    "max_tokens no number": (sampling(max_tokens="many"), ["max_tokens", "many"]),
    "bad JSON": ({**TEXT, "sampling_parameters": '{"top_k": '}, ["sampling_parameters", "JSON"]),
    "JSON but no object": ({**TEXT, "sampling_parameters": "[1]"}, ["sampling_parameters"]),
    "unknown sampling key": (sampling(tempreature=1), ["tempreature"]),
    "NaN temperature": (sampling(temperature="NaN"), ["temperature", "NaN"]),
    "bare NaN temperature": ({**TEXT, "sampling_parameters": '{"temperature": NaN}'}, ["sampling_parameters", "NaN"]),
    "negative temperature": (sampling(temperature=-1), ["temperature", "-1"]),
    "top_p above 1": (sampling(top_p=1.5), ["top_p", "1.5"]),
    "negative token id": ({"input_ids": [1, -5]}, ["input_ids", "-5"]),
    "token id out of range": ({"input_ids": [1, 300]}, ["input_ids", "299", "300"]),
    "prompt longer than the context": (
        {"input_ids": [5] * (TINY_CONTEXT + 1)},
        [str(TINY_CONTEXT + 1), str(TINY_CONTEXT)],
    ),
    "text longer than any context": (
        {"text_input": "x" * (TINY_CONTEXT * 13 + 1)},
        ["text_input", f"{TINY_CONTEXT * 13:,} bytes", f"got {TINY_CONTEXT * 13 + 1:,}"],
    ),
    "two prompts in one request": ({"input_ids": np.full((2, 3), 5, np.int32)}, ["input_ids", "batch of 1", "2"]),
    "two lists of stops": (
        {"input_ids": np.full((2, 1), 5, np.int32), "stop": np.array([[b"a"], [b"b"]], np.object_)},
        ["batch of 1", "2"],
    ),
    "stop too long": ({**TEXT, "stop": ["x" * 257]}, ["stop", "256"]),
    "too many stops": ({**TEXT, "stop": [f"s{number}" for number in range(17)]}, ["stop", "16", "17"]),
    "tiny repetition penalty": (sampling(repetition_penalty=1e-300), ["repetition_penalty", "1e-300"]),
    "salt too long": ({**TEXT, "cache_salt": "x" * 300}, ["cache_salt", "256", "300"]),
    "a pin of nothing": (
        {**TEXT, "cache_pin": True, "cache_write": False},
        ["cache_pin", "got True with cache_write false", "leave one of them out"],
    ),
    "no seconds to live": ({**TEXT, "cache_ttl_s": 0}, ["cache_ttl_s", "from 1 to 31536000", "got 0", "leave it out"]),
}


@pytest.mark.parametrize(("inputs", "words"), CASES.values(), ids=CASES.keys())
def test_it_is_refused_with_field_limit_and_value(client: Client, inputs: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ServerError) as caught:
        list(client.infer(inputs, timeout_s=120))
    assert caught.value.status == "INVALID_ARGUMENT"
    for word in words:
        assert word in str(caught.value)
    assert "/" not in str(caught.value), "a path reached the client"


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({**TEXT, "max_tokens": np.array([[4.0]], np.float32)}, "'max_tokens' data-type is 'FP32', .*expects 'INT32'"),
        ({"input_ids": np.array([[1, 2]], np.int64)}, "'input_ids' data-type is 'INT64', .*expects 'INT32'"),
    ],
    ids=["max_tokens", "input_ids"],
)
def test_a_tensor_of_another_type_is_refused_by_the_server_itself(
    client: Client, inputs: dict[str, object], text: str
) -> None:
    with pytest.raises(ServerError, match=text) as caught:
        list(client.infer(inputs, timeout_s=120))
    assert caught.value.status == "UNKNOWN"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_tokens", 0),
        ("no_such_key", 1),
        ("min_p", "hot"),
        ("priority", 4),
        ("priority", 10**6),
        ("cache_ttl_s", 0),
        ("cache_priority", 101),
    ],
)
def test_http_answers_400(tiny: TritonServer, key: str, value: object) -> None:
    status, text = post(tiny, "generate", {**TEXT, key: value})
    assert status == 400
    assert key in text


@pytest.mark.parametrize("body", [{**TEXT, "max_tokens": "x"}, b'{"text_input": '], ids=["type", "bad JSON"])
def test_json_that_the_server_itself_cannot_read_is_an_error_too(tiny: TritonServer, body: object) -> None:
    status, text = post(tiny, "generate", body)
    assert status in (400, 500)
    assert "error" in json.loads(text)


def test_after_all_that_it_still_answers(tiny: TritonServer, client: Client) -> None:
    for inputs, _ in CASES.values():
        with pytest.raises(ServerError):
            list(client.infer(inputs, timeout_s=120))
        answer = list(
            client.infer({**TEXT, "max_tokens": 2, "sampling_parameters": '{"ignore_eos": true}'}, timeout_s=120)
        )
        assert len(answer[0].outputs["output_ids"]) == 2
    assert len(tiny.model_processes()) == 1
