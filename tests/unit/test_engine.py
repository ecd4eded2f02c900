"""The Python API on a real tiny engine: answers, endings, tiers, cancelling and order of service."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines import BLOCK, CONTEXT, GREEDY, PROMPTS, Gate, Sink, all_free, opened, wait_for
from tiny import EOS_TOKEN_ID, make_checkpoint

from kvtier import Completion, Engine, FinishReason, Request, SamplingParams, TokenEvent
from kvtier.sequence import ScheduledSequence, Sequence
from tests.own_time import own_time


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", tokenizer=True)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with opened(checkpoint) as engine:
        yield engine


@pytest.fixture(scope="module")
def answers(engine: Engine) -> list[Completion]:
    return engine.generate(PROMPTS, GREEDY)


# ---- answers -------------------------------------------------------------------------------------------------------


def test_a_completion_says_all_there_is_to_know(engine: Engine, answers: list[Completion]) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer.token_ids) == 12 and answer.finish_reason == "length"
        assert answer.prompt_token_count == len(prompt) == sum(answer.origin.values())
        assert answer.ttft_s > 0 and answer.usage.output_token_count == 12
        assert engine.tokenizer is not None and isinstance(answer.text, str)


def test_many_threads_get_the_answers_that_one_gets(engine: Engine, answers: list[Completion]) -> None:
    wrong: queue.SimpleQueue[object] = queue.SimpleQueue()

    def work(index: int) -> None:
        try:
            for turn in range(4):
                number = (index + turn) % len(PROMPTS)
                if turn % 2:
                    found = engine.generate([PROMPTS[number]], GREEDY)[0].token_ids
                else:
                    found = [token for event in engine.stream(PROMPTS[number], GREEDY) for token in event.token_ids]
                if found != answers[number].token_ids:
                    wrong.put((number, found))
                engine.stats()
        except BaseException as error:
            wrong.put(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong.empty(), wrong.get()


def test_text_comes_in_pieces_that_make_up_the_whole(engine: Engine) -> None:
    whole = engine.generate(["hello the world"], SamplingParams(max_tokens=20, temperature=0.0))[0]
    events = list(engine.stream("hello the world", SamplingParams(max_tokens=20, temperature=0.0)))
    assert "".join(event.text for event in events) == whole.text
    assert [token for event in events for token in event.token_ids] == whole.token_ids
    assert events[-1].finish_reason is not None and events[-1].usage is not None
    assert all(event.finish_reason is None and event.usage is None for event in events[:-1])


def test_each_prompt_may_have_its_own_parameters(engine: Engine, answers: list[Completion]) -> None:
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (1, 5, 9)]
    found = engine.generate(PROMPTS[:3], params)
    assert [item.token_ids for item in found] == [answers[i].token_ids[:n] for i, n in enumerate((1, 5, 9))]
    assert engine.generate([], GREEDY) == []
    with pytest.raises(ValueError, match="2 for 3 prompts"):
        engine.generate(PROMPTS[:3], params[:2])


def test_a_seed_gives_the_same_answer_alone_and_in_a_crowd(engine: Engine) -> None:
    def sampled(seed: int | None) -> SamplingParams:
        return SamplingParams(max_tokens=16, temperature=1.0, seed=seed, ignore_eos=True)

    alone = engine.generate([PROMPTS[0]], sampled(5))[0].token_ids
    crowd = engine.generate([PROMPTS[1], PROMPTS[0], PROMPTS[0], PROMPTS[2]], [sampled(s) for s in (1, 5, 6, 2)])
    assert crowd[1].token_ids == alone != crowd[2].token_ids
    free = {tuple(engine.generate([PROMPTS[0]], sampled(None))[0].token_ids) for _ in range(3)}
    assert len(free) == 3


def test_the_caller_s_prompt_is_left_alone(engine: Engine) -> None:
    prompt = list(PROMPTS[0])
    engine.generate([prompt], GREEDY)
    assert prompt == PROMPTS[0]


# ---- endings -------------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_answer_and_is_its_last_token(engine: Engine, answers: list[Completion]) -> None:
    tokens = answers[0].token_ids
    stop = next(token for token in tokens[3:] if tokens.index(token) > 2)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    found = engine.generate([PROMPTS[0]], params)[0]
    assert found.finish_reason == "stop" and found.token_ids == tokens[: tokens.index(stop) + 1]


def test_an_end_of_sequence_token_stops_unless_it_is_ignored(checkpoint: Path, tmp_path: Path) -> None:
    with opened(checkpoint) as engine:
        tokens = engine.generate([PROMPTS[0]], GREEDY)[0].token_ids
    other = make_checkpoint(tmp_path, "llama", tokenizer=True, eos_token_id=[EOS_TOKEN_ID, tokens[4]])
    with opened(other, tiers__dram__bytes=0) as engine:
        params = [SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=ignore) for ignore in (False, True)]
        stopped, ignored = engine.generate([PROMPTS[0]] * 2, params)
    assert stopped.finish_reason == "stop" and stopped.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert ignored.finish_reason == "length" and len(ignored.token_ids) == 12


def test_a_stop_string_ends_the_text_before_it_and_leaks_no_piece_of_it(engine: Engine) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    whole = engine.generate(["the end"], params)[0].text
    plain = [place for place in range(4, len(whole) - 6) if "\ufffd" not in whole[place : place + 3]]
    place = next(place for place in plain if whole.index(whole[place : place + 3]) == place)
    stop = whole[place : place + 3]
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True, stop=(stop,))
    pieces: list[str] = []
    for event in engine.stream("the end", params):
        pieces.append(event.text)
        assert whole[:place].startswith("".join(pieces))
    assert "".join(pieces) == whole[:place] and event.finish_reason is FinishReason.STOP


def test_an_answer_ends_with_length_where_the_context_ends(engine: Engine) -> None:
    prompt = [token % 200 + 3 for token in range(CONTEXT - 3)]
    found = engine.generate([prompt], SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True))[0]
    assert found.finish_reason == "length" and len(found.token_ids) == 3
    assert len(engine.generate([prompt[: CONTEXT - 40]], SamplingParams(ignore_eos=True))[0].token_ids) == 40


def test_without_max_tokens_the_configured_default_caps_the_answer(checkpoint: Path) -> None:
    with opened(checkpoint, max_tokens_default=7) as engine:
        found = engine.generate([PROMPTS[0]], SamplingParams(temperature=0.0, ignore_eos=True))[0]
    assert found.finish_reason == "length" and len(found.token_ids) == 7


# ---- tiers ---------------------------------------------------------------------------------------------------------


def test_evict_pushes_down_and_the_origin_tells(checkpoint: Path, tmp_path: Path) -> None:
    prompt = [token % 200 + 3 for token in range(5 * BLOCK + 2)]
    with opened(checkpoint, tiers__nvme__bytes="8MiB", tiers__nvme__path=tmp_path / "cache", sharing=False) as engine:
        runs = [engine.generate([prompt], GREEDY)[0]]
        runs.append(engine.generate([prompt], GREEDY)[0])
        engine.evict("hbm")
        assert engine.stats()["hbm_blocks_used"] == 0
        runs.append(engine.generate([prompt], GREEDY)[0])
        engine.evict("hbm")
        engine.evict("dram")
        assert engine.stats()["dram_slots_used"] == 0
        runs.append(engine.generate([prompt], GREEDY)[0])
        stats = engine.stats()
        assert all(type(value) is int for value in stats.values())
        assert stats["promoted_dram_hbm"] == 5 and stats["promoted_nvme_hbm"] == 5
        assert len({tuple(run.token_ids) for run in runs}) == 1
        counts = [(run.usage.reused_blocks, run.usage.allocated_blocks) for run in runs]
        assert counts == [(0, 6), (5, 1), (5, 1), (5, 1)]
    cached = 5 * BLOCK
    assert [run.origin for run in runs] == [
        {"hbm": hbm, "dram": dram, "nvme": nvme, "computed": len(prompt) - hbm - dram - nvme}
        for hbm, dram, nvme in ((0, 0, 0), (cached, 0, 0), (0, cached, 0), (0, 0, cached))
    ]
    with pytest.raises(ValueError, match='"hbm" or "dram"'):
        engine.evict("nvme")


def test_a_start_says_that_other_layouts_have_taken_the_bytes_of_nvme(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = "the rest is held by files of other row layouts"
    shared = {"tiers__nvme__path": tmp_path / "cache", "sharing": False}
    with opened(checkpoint, tiers__nvme__bytes="8MiB", **shared):
        assert words not in caplog.text
    with opened(checkpoint, block_tokens=8, tiers__nvme__bytes="9MiB", **shared):
        assert words in caplog.text and "tiers.nvme.bytes (9.0 MiB)" in caplog.text
    caplog.clear()
    with opened(checkpoint, block_tokens=8, tiers__nvme__bytes="32MiB", **shared):
        assert words not in caplog.text, "raising it is a way out"


def test_nvme_is_warm_in_the_next_engine(checkpoint: Path, tmp_path: Path) -> None:
    prompt = [token % 200 + 3 for token in range(5 * BLOCK + 2)]
    found: list[Completion] = []
    for _ in range(2):
        with opened(
            checkpoint, tiers__nvme__bytes="8MiB", tiers__nvme__path=tmp_path / "cache", sharing=False
        ) as engine:
            found += engine.generate([prompt], GREEDY)
            engine.evict("hbm")
            engine.evict("dram")
    assert found[0].token_ids == found[1].token_ids
    assert (found[0].origin["nvme"], found[1].origin["nvme"]) == (0, 5 * BLOCK)


def test_a_salt_keeps_tenants_apart(engine: Engine) -> None:
    prompt = [token % 100 + 50 for token in range(4 * BLOCK + 1)]
    hits = [engine.stream(prompt, GREEDY, cache_salt=salt).collect().origin["hbm"] for salt in ("a", "b", "a", "")]
    assert hits == [0, 0, 4 * BLOCK, 0]


def test_an_evict_under_traffic_ends(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.drains.DRAIN_S", 40.0)
    with opened(checkpoint) as engine:
        engine.generate(PROMPTS, GREEDY)
        over = threading.Event()

        def work(first: int) -> None:
            while not over.is_set():
                engine.generate([[first + place % 7 for place in range(5 * BLOCK)]], GREEDY)
                first = (first + 11) % 250

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                for tier in ("hbm", "dram"):
                    with own_time() as clock:
                        engine.evict(tier)
                        assert clock.seconds < 15, tier
        finally:
            over.set()
            for thread in threads:
                thread.join(60)


def test_a_preempted_request_computes_its_partial_block_and_one_more_again_at_most(checkpoint: Path) -> None:
    row_bytes = 3 * 4096
    params = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True)
    prompts = [[(number + place) % 200 + 3 for place in range(BLOCK + 5 * number)] for number in range(7)]
    with opened(checkpoint) as engine:
        expected = [item.token_ids for item in engine.generate(prompts, params)]
    with opened(checkpoint, tiers__hbm__bytes=12 * row_bytes) as engine:
        gate = Gate(engine)  # all are there before the first is computed
        computed, sequences, inner = Counter[int](), dict[int, Sequence](), engine._runner.run

        def run(parts: list[ScheduledSequence]) -> list[int]:
            for part in parts:
                computed[part.sequence.number] += part.count
                sequences[part.sequence.number] = part.sequence
            return inner(parts)

        engine._runner.run = run  # type: ignore[method-assign, assignment]
        sinks = [Sink() for _ in prompts]
        for sink, prompt in zip(sinks, prompts, strict=True):
            engine.submit(Request(prompt, params), sink)
        gate.open()
        assert all(sink.final().error is None for sink in sinks)
        assert [sink.token_ids for sink in sinks] == expected
        assert engine.stats()["preemptions"] >= 3
        for number, sequence in sequences.items():
            again = computed[number] - (len(sequence.tokens) - 1)
            assert 0 <= again <= 2 * BLOCK * sequence.preempted_count, (number, again, sequence.preempted_count)


# ---- cancelling and order --------------------------------------------------------------------------------------------


def test_a_stream_closed_early_cancels_its_request_and_frees_its_blocks(checkpoint: Path) -> None:
    with opened(checkpoint) as engine:
        gate, before = Gate(engine), engine.metrics.requests.value("cancelled")
        gate.let(1)
        with engine.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True)) as stream:
            next(stream)
        gate.let(1)  # in which it may have been when the stream was closed
        wait_for(lambda: engine.metrics.requests.value("cancelled") == before + 1 and all_free(engine))
        stream.close()
        assert list(stream) == []
        del stream
        abandoned = engine.stream(PROMPTS[1], SamplingParams(max_tokens=400, ignore_eos=True))
        del abandoned
        gate.let(1)
        wait_for(lambda: engine.metrics.requests.value("cancelled") == before + 2 and all_free(engine))
        assert engine.metrics.generated_tokens.value() <= 3


def test_a_stream_that_has_ended_has_nothing_to_collect(checkpoint: Path) -> None:
    with opened(checkpoint) as engine:
        gate = Gate(engine)
        stream = engine.stream(PROMPTS[0], GREEDY)
        gate.let(1)
        first = next(stream)
        gate.open()
        rest = stream.collect()
        assert rest.finish_reason == "length" and len(first.token_ids) == 1 and len(rest.token_ids) == 11
        with pytest.raises(ValueError, match="collect: this stream has ended"):
            stream.collect()
        stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
        stream.close()
        with pytest.raises(ValueError, match="collect: this stream has ended"):
            stream.collect()


def test_a_cancelled_request_gets_its_final_event_with_what_it_used(checkpoint: Path) -> None:
    with opened(checkpoint) as engine:
        gate, sink = Gate(engine), Sink()
        handle = engine.submit(Request(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True)), sink)
        gate.let(3)
        wait_for(lambda: len(gate.passes) == 4)
        handle.cancel()
        handle.cancel()
        gate.open()
        final = sink.final()
        assert final.finish_reason is FinishReason.CANCELLED and final.usage is not None
        assert final.usage.output_token_count == len(sink.token_ids) == 4
        handle.cancel()
        assert len(engine.generate([PROMPTS[1]], GREEDY)[0].token_ids) == 12


def test_a_request_of_higher_priority_overtakes_those_that_wait(checkpoint: Path) -> None:
    with opened(checkpoint, scheduler__sequences_max=1, senders=1) as engine:  # two could swap what they hand over
        gate, order = Gate(engine), list[str]()
        sinks = []
        for name, priority in (("running", 0), ("low", 2), ("normal", 1), ("urgent", -5)):
            sink = Sink()
            sinks.append(sink)
            engine.submit(
                Request(PROMPTS[0], SamplingParams(max_tokens=2), priority=priority), named(name, order, sink)
            )
            wait_for(lambda: len(gate.passes) == 1)
        gate.open()
        for sink in sinks:
            sink.final()
        assert order == ["running", "urgent", "normal", "low"]


def named(name: str, order: list[str], sink: Sink) -> Callable[[TokenEvent], None]:
    def take(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            order.append(name)
        sink(event)

    return take


def test_requests_that_arrive_together_share_passes(checkpoint: Path) -> None:
    with opened(checkpoint, scheduler__step_tokens=32) as engine:
        gate = Gate(engine)
        sinks = [Sink() for _ in range(4)]
        for sink, prompt in zip(sinks, PROMPTS, strict=False):
            engine.submit(Request(prompt, GREEDY), sink)
        gate.open()
        for sink in sinks:
            sink.final()
        assert max(len(parts) for parts in gate.passes) == 4
        assert max(sum(count for _, count in parts) for parts in gate.passes) <= 32
