"""Requests as others' clients send them: vllm_backend's `[1]` shapes, genai-perf's two backends, TensorRT-LLM's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import MODEL, StartServer, post, tiny_overrides

from kvtier.client import Client, Response, ServerError
from kvtier.serving import TritonServer

CONTEXT = 256


@pytest.fixture(scope="module")
def vllm(
    start_server: StartServer, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """The same model folder with `configs/vllm.pbtxt`, and a context that ends early."""
    overrides = tiny_overrides(tiny_checkpoint, tmp_path_factory.mktemp("vllm-cache")) | {"context": str(CONTEXT)}
    server = start_server(overrides, "--model-config-name=vllm")
    yield server
    assert server.stop() == 0


def answers(server: TritonServer, **inputs: object) -> list[Response]:
    with Client(server.grpc_url, MODEL) as client:
        return list(client.infer(inputs, timeout_s=120))


GENAI_PERF_VLLM = {
    "text_input": "the sea",
    "exclude_input_in_output": True,
    "sampling_parameters": json.dumps({"max_tokens": "12", "min_tokens": "12"}),
}
"""`genai-perf profile --backend vllm --output-tokens-mean 12 --output-tokens-mean-deterministic`."""
GENAI_PERF_TENSORRT_LLM = {"text_input": "the sea", "max_tokens": 12, "min_length": 12, "exclude_input_in_output": True}
"""The same with `--backend tensorrtllm`."""


@pytest.mark.parametrize("served", ["tiny", "vllm"])
@pytest.mark.parametrize("inputs", [GENAI_PERF_VLLM, GENAI_PERF_TENSORRT_LLM], ids=["vllm", "tensorrtllm"])
def test_what_genai_perf_sends_is_answered_in_both_shapes(
    request: pytest.FixtureRequest, served: str, inputs: dict[str, object]
) -> None:
    server: TritonServer = request.getfixturevalue(served)
    streamed = answers(server, stream=True, **inputs)
    whole = answers(server, stream=False, **inputs)
    assert sum(len_ids(response) for response in streamed) == len_ids(whole[0]) == 12
    assert len(streamed) > 1
    assert len(whole) == 1


def test_the_shapes_of_one_config_are_refused_by_the_other(tiny: TritonServer, vllm: TritonServer) -> None:
    for server, batched in ((tiny, False), (vllm, True)):
        with Client(server.grpc_url, MODEL) as client:
            assert client._batched is not batched
            client._batched = batched
            with pytest.raises(ServerError, match="shape"):
                list(client.infer({"text_input": "x"}, timeout_s=120))


def test_vllm_backends_outputs_are_there(vllm: TritonServer) -> None:
    wanted = {"return_finish_reason": True, "return_num_input_tokens": True, "return_num_output_tokens": True}
    whole = answers(vllm, text_input="the sea", stream=False, max_tokens=5, **wanted)[0].outputs
    assert whole["num_input_tokens"] > 0
    assert whole["num_output_tokens"] == len(whole["output_ids"])
    assert whole["finish_reason"] in ("stop", "length")
    echoed = answers(vllm, text_input="the sea", max_tokens=5, exclude_input_in_output=False)[0]
    assert echoed.text == "the sea" + whole["text_output"]


def test_tensorrt_llms_tensors_are_read(tiny: TritonServer) -> None:
    inputs = {
        "text_input": "the sea",
        "max_tokens": 6,
        "temperature": 0.8,
        "top_k": 5,
        "top_p": 0.9,
        "end_id": 7,
        "pad_id": 7,
    }
    first, second = (
        answers(tiny, random_seed=11, beam_width=1, stop_words=["zzz"], **inputs)[0].text for _ in range(2)
    )
    assert first == second, "the seed was not used"
    with pytest.raises(ServerError, match="beam_width"):
        answers(tiny, beam_width=4, **inputs)


def test_an_answer_that_meets_the_end_of_the_context_ends_with_length(vllm: TritonServer) -> None:
    ignore = json.dumps({"ignore_eos": True})
    whole = answers(vllm, input_ids=[5] * 200, max_tokens=10**6, return_finish_reason=True, sampling_parameters=ignore)[
        0
    ].outputs
    assert whole["finish_reason"] == "length"
    assert 200 + len(whole["output_ids"]) == CONTEXT


def test_generate_works_with_both(tiny: TritonServer, vllm: TritonServer) -> None:
    body = {"text_input": "the sea", "max_tokens": 5, "temperature": 0}
    texts = [json.loads(post(server, "generate", body)[1])["text_output"] for server in (tiny, vllm)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("contract", ["tiny", "vllm"])
def test_a_priority_level_is_accepted_over_both_protocols(contract: str, request: pytest.FixtureRequest) -> None:
    server: TritonServer = request.getfixturevalue(contract)
    with Client(server.grpc_url, MODEL) as client:
        assert list(client.infer({"text_input": "the sea", "max_tokens": 2}, priority=1, timeout_s=120))
    assert post(server, "generate", {"text_input": "the sea", "max_tokens": 2, "priority": 3})[0] == 200


KEPT = {
    "cache_salt": "of this test",
    "cache_tenant": "somebody",
    "cache_priority": 7,
    "cache_ttl_s": 3600,
    "cache_pin": True,
    "cache_read": True,
    "cache_write": True,
}
"""Every input that says what becomes of the blocks."""
REMEMBERED = {"text_input": "a prompt that is worth keeping " * 8, "max_tokens": 1}


def by_inputs(server: TritonServer, **cache: object) -> int:
    return int(answers(server, **REMEMBERED, **cache)[0].outputs["kv_cache_reused_blocks"])


def by_parameters(server: TritonServer, **cache: str | int | bool) -> int:
    with Client(server.grpc_url, MODEL) as client:
        [response] = client.infer(dict(REMEMBERED), timeout_s=120, parameters=cache)
    return int(response.outputs["kv_cache_reused_blocks"])


def by_json(server: TritonServer, **cache: object) -> int:
    status, body = post(server, "generate", {**REMEMBERED, **cache})
    if status != 200:
        raise ServerError(str(status), body)
    return int(json.loads(body)["kv_cache_reused_blocks"])


@pytest.mark.parametrize("served", ["tiny", "vllm"])
@pytest.mark.parametrize("said", [by_inputs, by_parameters, by_json])
def test_what_becomes_of_the_blocks_can_be_said_in_every_way(
    request: pytest.FixtureRequest, served: str, said: Callable[..., int]
) -> None:
    server: TritonServer = request.getfixturevalue(served)
    kept = {**KEPT, "cache_salt": f"{served} {said.__name__}"}
    hidden = {**dict.fromkeys(("cache_read", "cache_write"), True), "cache_salt": f"{served} {said.__name__} hidden"}
    assert said(server, **kept) == 0
    blocks = said(server, **kept)
    assert blocks >= 10
    assert said(server, **{**kept, "cache_read": False}) == 0
    assert said(server, **{**kept, "cache_tenant": "another"}) == blocks, "tenants of one salt share"
    assert [said(server, **{**hidden, "cache_write": False}) for _ in range(2)] == [0, 0]
    assert [said(server, **hidden) for _ in range(2)] == [0, blocks]
    with pytest.raises(ServerError, match="cache_pin: is for blocks that are kept, got True with cache_write false"):
        said(server, cache_pin=True, cache_write=False)
    with pytest.raises(ServerError, match="cache_ttl_s: must be from 1 to 31536000, got 0; leave it out"):
        said(server, **{**kept, "cache_ttl_s": 0})


@pytest.mark.parametrize("served", ["tiny", "vllm"])
def test_a_server_lives_through_200_refused_streams_in_a_row(request: pytest.FixtureRequest, served: str) -> None:
    server: TritonServer = request.getfixturevalue(served)
    with Client(server.grpc_url, MODEL) as client:
        for _ in range(200):
            with pytest.raises(ServerError, match=r"^max_tokens: ") as refused:
                list(client.infer({"text_input": "the sea", "max_tokens": 0}, timeout_s=120))
            assert refused.value.status == "INVALID_ARGUMENT"
        assert len_ids(next(client.infer({"text_input": "the sea", "max_tokens": 1}, timeout_s=120))) == 1
    assert server.options.log is not None
    log = server.options.log.read_text(errors="replace")
    assert "HandleCancellation called even" not in log, "what server 2.51 says before it crashes, once per such error"


def len_ids(response: Response) -> int:
    ids = response.outputs["output_ids"]
    return len(ids) if isinstance(ids, list) else 1


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("cache_ttl_s", "soon", "int"),
        ("cache_pin", "yes", "bool"),
        ("max_tokens", True, "int"),
        ("text_input", 3, "str"),
    ],
)
def test_the_client_names_an_input_of_another_type(tiny: TritonServer, name: str, value: object, kind: str) -> None:
    with Client(tiny.grpc_url, MODEL) as client, pytest.raises(ValueError, match=f"^{name}: must be {kind}"):
        next(client.infer({"text_input": "the sea", name: value}, timeout_s=120))


def test_the_client_names_an_input_that_there_is_not(tiny: TritonServer) -> None:
    with (
        Client(tiny.grpc_url, MODEL) as client,
        pytest.raises(ValueError, match=r"unknown key 'cache_tll_s'; did you mean cache_ttl_s"),
    ):
        next(client.infer({"text_input": "the sea", "cache_tll_s": 3}, timeout_s=120))
