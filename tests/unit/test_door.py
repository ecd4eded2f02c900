"""The door: every input, every sampling key and every kind of nonsense, without a server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.door import INPUTS, OUTPUTS, SAMPLING_KEYS, DoorLimits, DoorRequest, Tensor, parse_request, response_fields
from kvtier.errors import InvalidRequest
from kvtier.request import FinishReason, Origin, Request, SamplingParams, TokenEvent, Usage


def parse(parameters: dict[str, object] | None = None, **fields: object) -> DoorRequest:
    return parse_request(fields, parameters or {})


def params(parameters: dict[str, object] | None = None, **fields: object) -> SamplingParams:
    return parse(parameters, text_input="hi", **fields).request.params


def refusal(parameters: dict[str, object] | None = None, limits: DoorLimits | None = None, **fields: object) -> str:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(fields, parameters or {}, limits)
    return str(caught.value)


def test_a_bare_prompt_gets_the_plain_defaults() -> None:
    asked = parse(text_input="héllo".encode())
    assert asked == DoorRequest(Request("héllo"))
    assert not asked.stream and asked.echo == ""


def test_arrays_of_both_wire_shapes_are_read() -> None:
    text = np.array([[b"hi"]], dtype=np.object_)
    stream, ids = np.array([[True]]), np.array([[5, 6, 7]], dtype=np.int32)
    assert (
        parse(text_input=text, stream=stream, max_tokens=np.array([4], dtype=np.int32)).request.params.max_tokens == 4
    )
    assert parse(input_ids=ids).request.prompt == [5, 6, 7]
    assert parse(input_ids=ids[0]).request.prompt == [5, 6, 7]
    assert refusal(input_ids=np.zeros((2, 3), dtype=np.int32)) == "input_ids: a request holds a batch of 1, got 2"
    stops = np.array([[b"a"], [b"b"]], dtype=np.object_)
    assert refusal(text_input=text, stop=stops) == "stop: a request holds a batch of 1, got 2"
    assert refusal(text_input=np.array([], dtype=np.object_)) == "text_input: must be one value, got 0"


def test_exactly_one_prompt_is_needed() -> None:
    assert "exactly one must be given, got none" in refusal()
    assert "got text_input and input_ids" in refusal(text_input="a", input_ids=[1])
    assert refusal(text_input="") == "text_input: must not be empty"
    assert refusal(input_ids=[]) == "input_ids: must not be empty"


@pytest.mark.parametrize("ids", [[1, -5], [True], ["1"], [1.0], [None]])
def test_bad_token_ids_are_refused(ids: list[object]) -> None:
    assert refusal(input_ids=ids).startswith("input_ids: must be ")


def test_text_must_be_utf8_and_bounded() -> None:
    assert refusal(text_input=b"\xff") == "text_input: is not valid UTF-8: invalid start byte"
    assert refusal({"cache_salt": "\ud800"}, text_input="a").startswith("cache_salt: is not valid UTF-8")
    limits = DoorLimits(text_bytes_max=4, input_ids_max=2, json_bytes_max=10)
    assert refusal(limits=limits, text_input="héll") == "text_input: at most 4 bytes, got 5"
    assert refusal(limits=limits, input_ids=[1, 2, 3]) == "input_ids: at most 2 ids, got 3"
    assert refusal(limits=limits, input_ids=np.zeros((1, 3), np.int32)) == "input_ids: at most 2 values, got 3"
    assert refusal(limits=limits, chat="[   ]").startswith("chat: at most 4 bytes")
    assert refusal(limits=limits, text_input="a", sampling_parameters='{"seed": 123}').startswith(
        "sampling_parameters: at"
    )


def test_chat_wraps_a_text_or_takes_messages() -> None:
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
    user = [{"role": "user", "content": "hi"}]
    assert parse(text_input="hi", chat=True).request.prompt == user
    assert parse(text_input="hi", chat=b"true").request.prompt == user
    assert parse(text_input="hi", chat=False).request.prompt == "hi"
    assert parse(text_input=json.dumps(messages), chat=True).request.prompt == messages
    assert parse(chat=json.dumps(messages)).request.prompt == messages
    odd = '[1] says: "role"'
    assert parse(text_input=odd, chat=True).request.prompt == [{"role": "user", "content": odd}]
    assert "must not be given" in refusal(text_input="hi", chat=json.dumps(messages))
    assert refusal(input_ids=[1], chat=True) == "chat: needs text_input, got input_ids"
    assert refusal(chat="[1]").startswith("chat: must be true, false, or a JSON list")
    assert refusal(chat="[" * 100_000) == "chat: nested deeper than 16"
    assert refusal(chat=json.dumps([{"role": "user", "content": json.loads("[" * 20 + "]" * 20)}])).endswith("than 16")


def test_genai_perf_requests_of_both_backends_are_understood() -> None:
    vllm = parse(
        text_input=np.array([b"hi"], dtype=np.object_),
        stream=np.array([True]),
        exclude_input_in_output=np.array([True]),
        sampling_parameters=np.array([b'{"max_tokens": "64", "min_tokens": "64"}'], dtype=np.object_),
    )
    assert vllm.stream and vllm.request.params == SamplingParams(max_tokens=64, ignore_eos=True)
    tensorrt = parse(text_input="hi", max_tokens=np.array([[64]], dtype=np.int32), stream=np.array([[True]]))
    assert tensorrt.request.params == SamplingParams(max_tokens=64)


def test_sampling_json_may_write_numbers_and_booleans_as_text() -> None:
    text = json.dumps(
        {"max_tokens": "64", "temperature": "0.5", "top_k": 5.0, "top_p": 1, "min_p": ".1",
         "seed": "18446744073709551615",
         "repetition_penalty": "1e0", "presence_penalty": -1, "ignore_eos": "True",
         "stop": ["a", ""], "n": "1",
         "stop_token_ids": [7], "frequency_penalty": None, "logprobs": None, "use_beam_search": "false"}
    )  # fmt: skip
    assert params(sampling_parameters=text) == SamplingParams(
        max_tokens=64, temperature=0.5, top_k=5, top_p=1.0, min_p=0.1, seed=2**64 - 1, repetition_penalty=1.0,
        presence_penalty=-1.0, ignore_eos=True, stop=("a",), stop_token_ids=(7,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"max_tokens": NaN}', "sampling_parameters: is not valid JSON: NaN is no number"),
        ('{"temperature": -Infinity}', "sampling_parameters: is not valid JSON: -Infinity is no number"),
        ('{"temperature": 1e999}', "temperature: must be a finite number, got inf"),
        ('{"temperature": "nan"}', "temperature: must be a number, got 'nan'"),
        ('{"temperature": true}', "temperature: must be a number, got True"),
        ('{"temperature": 1%s}' % ("0" * 400), "temperature: must be a finite number, got inf"),
        ('{"max_tokens": true}', "max_tokens: must be a whole number, got True"),
        ('{"max_tokens": "6_4"}', "max_tokens: must be a whole number, got '6_4'"),
        ('{"max_tokens": 1.5}', "max_tokens: must be a whole number, got 1.5"),
        ('{"max_tokens": 0}', "max_tokens: must be from 1 to 2147483647, got 0"),
        ('{"max_tokens": 2147483648}', "max_tokens: must be from 1 to 2147483647, got 2147483648"),
        ('{"max_tokens": [1, 2]}', "max_tokens: must be one value, got 2"),
        ('{"seed": 1%s}' % ("0" * 5000), "sampling_parameters: is not valid JSON"),
        ('{"ignore_eos": 1}', "ignore_eos: must be true or false, got 1"),
        ('{"top_p": 0}', "top_p: must be above 0, at most 1, got 0.0"),
        ('{"stop": [3]}', "stop: must be text, got 3"),
        ('{"stop_token_ids": ["3"]}', "stop_token_ids: must be whole numbers, got '3' at position 0"),
        ('{"seed": 1, "seed": 2}', "sampling_parameters: is not valid JSON: key 'seed' is given twice"),
        ("[1]", "sampling_parameters: must be a JSON object, got [1]"),
        ("{", "sampling_parameters: is not valid JSON"),
        ("[" * 60_000, "sampling_parameters: nested deeper than 16"),
        ('{"temprature": 1}', "sampling_parameters: unknown key 'temprature'; did you mean temperature?"),
        ('{"zzz": 1}', "sampling_parameters: unknown key 'zzz'; known are max_tokens, "),
        ('{"%s": 1}' % ("z" * 60_000), "sampling_parameters: unknown key 'zzzz"),
        ('{"n": 2}', "n: is not supported beyond 1, got 2"),
        ('{"n": true}', "n: is not supported beyond 1, got True"),
        ('{"logprobs": 5}', "logprobs: is not supported beyond null, got 5"),
        ('{"logit_bias": {"5": 1}}', "logit_bias: is not supported beyond {}, got {'5': 1}"),
        ('{"skip_special_tokens": false}', "skip_special_tokens: is not supported beyond True, got False"),
        ('{"min_tokens": 5}', "min_tokens: is not supported beyond 0, 1, or max_tokens"),
    ],
)  # fmt: skip
def test_bad_sampling_json_is_refused_by_name(text: str, message: str) -> None:
    assert refusal(text_input="hi", sampling_parameters=text).startswith(message)


def test_tensors_of_tensorrtllm_clients_are_read() -> None:
    asked = params(
        temperature=np.array([[0.5]], dtype=np.float32), top_k=3, random_seed=np.array([[2**63]], dtype=np.uint64),
        stop_words=[b"x", b""], bad_words=[b""], end_id=-1, pad_id=2, beam_width=1, length_penalty=1.0,
        return_log_probs=False, repetition_penalty=1.5,
    )  # fmt: skip
    assert asked == SamplingParams(temperature=0.5, top_k=3, seed=2**63, stop=("x",), repetition_penalty=1.5)
    assert params(end_id=9).stop_token_ids == (9,)
    assert refusal(text_input="a", beam_width=4) == "beam_width: is not supported beyond 0 or 1, got 4"
    assert refusal(text_input="a", bad_words=[b"no"]).startswith("bad_words: is not supported")
    assert refusal(text_input="a", return_log_probs=True).startswith("return_log_probs: is not supported")


def test_a_wrapped_int32_is_noticed() -> None:
    wrapped = np.array([3_000_000_000], dtype=np.int64).astype(np.int32)
    assert refusal(text_input="a", max_tokens=wrapped).startswith(
        "max_tokens: must be from 1 to 2147483647, got -1294967296"
    )


def test_stop_is_a_text_a_list_or_a_json_list() -> None:
    assert params(stop="END").stop == ("END",)
    assert params(stop=[b"a", b"b"]).stop == ("a", "b")
    assert params(stop='["a", "b"]').stop == ("a", "b")
    assert params(stop="[INST]").stop == ("[INST]",)
    assert params(stop="a", sampling_parameters='{"stop": ["b", "a"]}').stop == ("a", "b")
    assert refusal(text_input="a", stop=[f"s{i}" for i in range(17)]) == "stop: at most 16 strings, got 17"
    assert refusal(text_input="a", stop="x" * 257).startswith("stop: each must be a string of 1 to 256")


def test_request_parameters_stand_in_for_inputs_and_sampling() -> None:
    asked = parse(
        {"temperature": 0.5, "seed": 4, "stream": True, "cache_salt": "t1", "triton_x": 1, "timeout": 3},
        text_input="a",
    )
    assert asked.stream and asked.request.cache_salt == "t1"
    assert asked.request.params == SamplingParams(temperature=0.5, seed=4)
    for wrong, hint in (("temprature", "did you mean temperature?"), ("cache_slat", "did you mean cache_salt?")):
        assert refusal({wrong: 1}, text_input="a") == f"parameters: unknown key '{wrong}'; {hint}"
    assert refusal({"zzz": 1}, text_input="a").startswith("parameters: unknown key 'zzz'; known are text_input")
    assert refusal({"stream": True}, text_input="a", stream=True).startswith("stream: given twice")


def test_a_priority_is_a_level_of_the_model_counted_from_its_default() -> None:
    limits = DoorLimits(priority_levels=3, default_priority_level=2)

    def priority(value: object) -> int:
        return parse_request({"text_input": "a"}, {"priority": value}, limits).request.priority

    assert [priority(level) for level in (0, 1, 2, 3, "3")] == [0, -1, 0, 1, 1]
    assert parse(text_input="a").request.priority == 0
    for level in (4, 10**6, -1, 10**400):
        assert refusal({"priority": level}, limits, text_input="a").startswith("priority: must be from 0 to 3, got ")
    assert refusal({"priority": 1}, text_input="a") == "priority: must be from 0 to 0, got 1"
    assert refusal({"priority": True}, limits, text_input="a") == "priority: must be a whole number, got True"


def test_a_value_given_twice_must_agree() -> None:
    assert params(max_tokens=5, sampling_parameters='{"max_tokens": "5"}').max_tokens == 5
    message = refusal(text_input="a", max_tokens=5, sampling_parameters='{"max_tokens": 6}')
    assert message == "max_tokens: given twice, as 5 and as 6"


def test_the_prompt_comes_back_only_when_asked_for() -> None:
    assert parse(text_input="hi", exclude_input_in_output=False).echo == "hi"
    assert parse(text_input="hi", exclude_input_in_output=True).echo == ""
    for fields in ({"input_ids": [1]}, {"text_input": "a", "stream": True}, {"text_input": "a", "chat": True}):
        assert refusal(exclude_input_in_output=False, **fields).startswith("exclude_input_in_output: false needs plain")


def test_flags_and_salt_are_checked() -> None:
    assert refusal(text_input="a", stream="yes") == "stream: must be true or false, got 'yes'"
    assert refusal(text_input="a", stream=1) == "stream: must be true or false, got 1"
    assert refusal(text_input="a", cache_salt="x" * 257).startswith("cache_salt: at most 256 characters, got 257")
    assert refusal(text_input="a", image="x") == "input 'image': is unknown"


CACHE = {
    "cache_salt": "s",
    "cache_tenant": "t",
    "cache_priority": -5,
    "cache_ttl_s": 60,
    "cache_pin": True,
    "cache_read": False,
    "cache_write": True,
}


def test_what_becomes_of_the_blocks_is_said_by_inputs_or_by_parameters() -> None:
    wire = {"TYPE_STRING": np.object_, "TYPE_INT32": np.int32, "TYPE_BOOL": np.bool_}
    tensors = {
        name: np.array([[value.encode() if isinstance(value, str) else value]], dtype=wire[INPUTS[name].data_type])
        for name, value in CACHE.items()
    }
    expected = Request("hi", **CACHE)  # type: ignore[arg-type]
    assert parse(text_input="hi", **tensors).request == expected
    assert parse(CACHE, text_input="hi").request == expected
    assert parse({"cache_ttl_s": "60", "cache_pin": "true"}, text_input="hi").request.cache_ttl_s == 60
    assert {name: getattr(Request("hi"), name) for name in CACHE} == {
        "cache_salt": "", "cache_tenant": "", "cache_priority": 0, "cache_ttl_s": None, "cache_pin": False,
        "cache_read": True, "cache_write": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache_priority": 101}, "cache_priority: must be from -100 to 100, got 101"),
        ({"cache_ttl_s": 0}, "cache_ttl_s: must be from 1 to 31536000, got 0; leave it out for blocks that stay"),
        ({"cache_ttl_s": "1e3"}, "cache_ttl_s: must be a whole number, got '1e3'"),
        ({"cache_pin": 1}, "cache_pin: must be true or false, got 1"),
        ({"cache_tenant": b"\xff"}, "cache_tenant: is not valid UTF-8"),
        ({"cache_tenant": "t" * 257}, "cache_tenant: at most 256 characters, got 257"),
        ({"cache_pin": True, "cache_write": False}, "cache_pin: is for blocks that are kept, got True with"),
    ],
)
def test_bad_wishes_for_the_cache_are_refused_by_name(fields: dict[str, object], message: str) -> None:
    assert refusal(text_input="a", **fields).startswith(message)
    assert refusal(fields, text_input="a").startswith(message)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(sorted({*INPUTS, *SAMPLING_KEYS, "n", "logprobs", "bad_words"}))


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(
    fields=st.dictionaries(KEYS, ANYTHING, max_size=4),
    parameters=st.dictionaries(KEYS, ANYTHING, max_size=3),
    text=ANYTHING,
)
def test_any_nonsense_is_refused_or_understood(
    fields: dict[str, object], parameters: dict[str, object], text: object
) -> None:
    sampling = json.dumps(text, default=str)
    for given_fields in (fields, {"text_input": "a", "sampling_parameters": sampling}, {"text_input": "a", **fields}):
        answer = ""
        try:
            assert parse_request(given_fields, parameters).request.prompt
        except InvalidRequest as error:
            answer = str(error)
        assert len(answer) < 2000


USAGE = Usage(10, 3, Origin(hbm=4, dram=3, nvme=2, computed=1), reused_blocks=2, allocated_blocks=5, ttft_s=0.1)


def test_an_event_before_the_last_has_text_and_ids_only() -> None:
    asked = parse(text_input="a", stream=True, return_num_output_tokens=True, return_finish_reason=True)
    event = TokenEvent("he", (1, 2))
    assert response_fields(asked, event) == {"text_output": "he", "output_ids": [1, 2], "num_output_tokens": 2}


def test_the_last_event_tells_all_that_was_asked_for() -> None:
    asked = parse(
        text_input="a", exclude_input_in_output=False, return_num_output_tokens=True, return_finish_reason=True,
        return_num_input_tokens=True,
    )  # fmt: skip
    fields = response_fields(asked, TokenEvent("lo", (3,), FinishReason.LENGTH, USAGE))
    assert fields == {
        "text_output": "alo", "output_ids": [3], "num_output_tokens": 1, "finish_reason": "length",
        "num_input_tokens": 10,
        "kv_cache_reused_blocks": 2, "kv_cache_alloc_new_blocks": 5, "kv_cache_alloc_total_blocks": 7,
        "prompt_tokens_hbm": 4, "prompt_tokens_dram": 3, "prompt_tokens_nvme": 2, "prompt_tokens_computed": 1,
    }  # fmt: skip
    assert set(fields) == set(OUTPUTS)
    plain = parse(text_input="a", return_kv_cache_reuse_stats=False)
    assert set(response_fields(plain, TokenEvent("", (), FinishReason.STOP, USAGE))) == {"text_output", "output_ids"}


@pytest.mark.parametrize("name", ["config.pbtxt", "configs/vllm.pbtxt"])
def test_the_served_contract_declares_what_the_door_knows(name: str) -> None:
    text = (Path(__file__).parents[2] / "model_repository" / "smollm2" / name).read_text()
    declared = re.findall(r'name: "(\w+)"\s+data_type: (\w+)\s+dims: \[ (-?\d+) \]', text)
    assert {name: Tensor(data_type, int(dims)) for name, data_type, dims in declared} == {**INPUTS, **OUTPUTS}
