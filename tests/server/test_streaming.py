"""SmolLM2 behind the real server: gRPC and HTTP, streamed and not, many at once, and metrics that agree with it all."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import MODEL, handed_over, lists_handed_over, post, settled, total, wait

from kvtier.client import Client, Response, ServerError
from kvtier.serving import TritonServer

PROMPT = "The capital of France is"
ASKED = {"return_finish_reason": True, "return_num_input_tokens": True, "return_num_output_tokens": True}
ORIGINS = ("hbm", "dram", "nvme", "computed")
GREEDY = json.dumps({"temperature": 0})


@pytest.fixture(scope="module")
def grpc(smollm2: TritonServer) -> Client:
    return Client(smollm2.grpc_url, MODEL)


def ask(client: Client, prompt: str = PROMPT, stream: bool = True, **inputs: object) -> list[Response]:
    """All responses to a greedy request of 24 tokens."""
    wanted = {
        "text_input": prompt,
        "stream": stream,
        "max_tokens": 24,
        "sampling_parameters": GREEDY,
        **ASKED,
        **inputs,
    }
    return list(client.infer(wanted, timeout_s=120))


def origins(response: Response) -> dict[str, int]:
    return {origin: response.outputs[f"prompt_tokens_{origin}"] for origin in ORIGINS}


def test_a_streamed_answer_is_many_responses_and_the_same_text_as_a_whole_one(grpc: Client) -> None:
    streamed = ask(grpc)
    whole = ask(grpc, stream=False)
    assert len(streamed) > 5
    assert len(whole) == 1
    assert "".join(response.text for response in streamed) == whole[0].text
    assert "Paris" in whole[0].text
    assert [response.outputs.get("finish_reason") for response in streamed[:-1]] == [None] * (len(streamed) - 1)
    assert streamed[-1].outputs["finish_reason"] == whole[0].outputs["finish_reason"] == "length"
    assert whole[0].outputs["num_output_tokens"] == len(whole[0].outputs["output_ids"]) == 24
    assert whole[0].outputs["num_input_tokens"] == sum(origins(whole[0]).values())


def test_generate_and_generate_stream_agree_with_grpc(smollm2: TritonServer, grpc: Client) -> None:
    expected = ask(grpc, stream=False)[0].text
    body = {"text_input": PROMPT, "max_tokens": 24, "temperature": 0}
    status, answer = post(smollm2, "generate", body)
    assert (status, json.loads(answer)["text_output"]) == (200, expected)
    status, answer = post(smollm2, "generate_stream", {**body, "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.startswith("data: ")]
    assert status == 200
    assert len(events) > 5
    assert "".join(event["text_output"] for event in events) == expected


def test_token_ids_and_chat_reach_the_model(grpc: Client) -> None:
    by_text = ask(grpc, stream=False)[0].outputs["output_ids"]
    inputs = {"input_ids": by_text[:8], "max_tokens": 4, "sampling_parameters": GREEDY}
    assert len(next(iter(grpc.infer(inputs, timeout_s=120))).outputs["output_ids"]) == 4
    question = "What is the capital of France?"
    plain = ask(grpc, question, stream=False)[0]
    wrapped = ask(grpc, question, stream=False, chat="true")[0]
    messages = json.dumps([{"role": "user", "content": question}])
    listed = next(
        grpc.infer({"chat": messages, "max_tokens": 24, "sampling_parameters": GREEDY, **ASKED}, timeout_s=120)
    )
    assert plain.outputs["num_input_tokens"] < 10 < wrapped.outputs["num_input_tokens"], "no chat template was applied"
    assert listed.outputs["output_ids"] == wrapped.outputs["output_ids"] != plain.outputs["output_ids"]


def test_a_repeated_prompt_comes_from_hbm(grpc: Client) -> None:
    prompt = "A story about tides. " * 40
    cold, warm = (ask(grpc, prompt, stream=False)[0] for _ in range(2))
    assert origins(cold)["computed"] == cold.outputs["num_input_tokens"]
    assert origins(warm)["hbm"] > 100
    assert sum(origins(warm).values()) == warm.outputs["num_input_tokens"]
    assert warm.outputs["kv_cache_reused_blocks"] > 2
    assert warm.text == cold.text


def test_the_batcher_hands_over_single_requests_and_lists(smollm2: TritonServer, grpc: Client) -> None:
    before = lists_handed_over(smollm2)
    ask(grpc, "alone", stream=False)
    wait(lambda: lists_handed_over(smollm2) != before)
    assert lists_handed_over(smollm2) - before == {1: 1}
    # Each of these keeps `execute` busy for a while, and those that come meanwhile queue behind it.
    chapter = {"text_input": "a chapter of many words " * 20_000, "max_tokens": 1}

    def refused(_: int) -> str:
        with pytest.raises(ServerError) as caught:
            list(grpc.infer(chapter, timeout_s=120))
        return str(caught.value)

    def some_came_as_a_list() -> bool:
        before, handed = lists_handed_over(smollm2), handed_over(smollm2)
        with ThreadPoolExecutor(8) as pool:
            assert all("the context of 8192" in text for text in pool.map(refused, range(8)))
        wait(lambda: handed_over(smollm2) >= handed + 8)
        assert handed_over(smollm2) == handed + 8
        return max(lists_handed_over(smollm2) - before) > 1

    assert any(some_came_as_a_list() for _ in range(8))


def test_32_streams_at_once_all_finish_and_the_metrics_agree(smollm2: TritonServer, grpc: Client) -> None:
    ask(grpc, "A story of more than one whole block. " * 8)  # so that each tier holds some, whatever ran before
    before, handed_before = settled(smollm2), handed_over(smollm2)
    ask(grpc, "alone")
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda number: ask(grpc, f"Number {number} is"), range(32)))
    for responses in answers:
        final = [response.outputs["finish_reason"] for response in responses if "finish_reason" in response.outputs]
        assert len(final) == 1
        assert final[0] in ("stop", "length")
    after = settled(smollm2, handed_before + 33)
    assert handed_over(smollm2) == handed_before + 33
    assert_metrics_agree(before, after, answers)


def assert_metrics_agree(
    before: dict[str, dict[str, float]], after: dict[str, dict[str, float]], answers: list[list[Response]]
) -> None:
    """Counters grew by what the responses say, plus those of the one request that ran alone."""

    def grown(name: str, **labels: str) -> float:
        return total(after[name], **labels) - total(before[name], **labels)

    assert grown("kvtier_requests_total") == 33
    assert grown("kvtier_ttft_seconds_count") == 33
    prompts = sum(responses[-1].outputs["num_input_tokens"] for responses in answers)
    assert prompts < grown("kvtier_prompt_tokens_total") <= prompts + 5
    generated = sum(response.outputs["num_output_tokens"] for responses in answers for response in responses)
    assert generated < grown("kvtier_generated_tokens_total") <= generated + 24
    reused = sum(origins(responses[-1])["hbm"] for responses in answers)
    assert grown("kvtier_prompt_tokens_total", origin="hbm") == reused
    assert total(after["kvtier_running_requests"]) == total(after["kvtier_queued_requests"]) == 0
    assert total(after["kvtier_engine_up"]) == 1
    for tier in ("hbm", "dram", "nvme"):
        capacity = total(after["kvtier_tier_capacity_bytes"], tier=tier)
        assert 0 < total(after["kvtier_tier_used_bytes"], tier=tier) <= capacity
    assert sum(grown(name) for name in after if "failures" in name or "dropped" in name) == 0
