"""The Python API on a real tiny engine: answers, endings, cancelling, limits, failures, and nothing left behind."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import EOS_TOKEN_ID, make_checkpoint

from kvtier import (
    Completion,
    Engine,
    EngineConfig,
    FinishReason,
    InvalidRequest,
    Request,
    SamplingParams,
    TokenEvent,
    Unavailable,
)
from kvtier.sequence import ScheduledSequence

VOCAB, CONTEXT, BLOCK = 300, 512, 16
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS: list[list[int]] = [[(7 * number + 3 * place) % 250 + 3 for place in range(20 + number)] for number in range(6)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", tokenizer=True)


@contextmanager
def opened(checkpoint: Path, **overrides: object) -> Iterator[Engine]:
    values = {
        "model": checkpoint,
        "dtype": "float32",
        "block_tokens": BLOCK,
        "threads": 1,
        "tiers.hbm.bytes": "4MiB",
        "tiers.dram.bytes": "4MiB",
    }
    config = EngineConfig.load(None, values | {name.replace("__", "."): value for name, value in overrides.items()})
    with Engine(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with opened(checkpoint) as engine:
        yield engine


@pytest.fixture(scope="module")
def answers(engine: Engine) -> list[Completion]:
    return engine.generate(PROMPTS, GREEDY)


class Sink:
    """Gathers the events of one request."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.done = threading.Event()

    def __call__(self, event: TokenEvent) -> None:
        self.events.append(event)
        if event.finish_reason is not None:
            self.done.set()

    def final(self) -> TokenEvent:
        """The last event; exactly one is final."""
        assert self.done.wait(60), "no final event"
        assert [event.finish_reason is not None for event in self.events] == [False] * (len(self.events) - 1) + [True]
        return self.events[-1]

    @property
    def token_ids(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]


class Gate:
    """Lets an engine's passes through one by one, and keeps what they were made of."""

    def __init__(self, engine: Engine) -> None:
        self._inner = engine._runner.run
        self._permits = threading.Semaphore(0)
        self._open = False
        self.passes: list[list[tuple[int, int]]] = []
        engine._runner.run = self._run  # type: ignore[method-assign]

    def _run(self, parts: list[ScheduledSequence]) -> list[int]:
        self.passes.append([(part.sequence.number, part.count) for part in parts])
        if not self._open:
            assert self._permits.acquire(timeout=60)
        return self._inner(parts)

    def let(self, count: int) -> None:
        for _ in range(count):
            self._permits.release()

    def open(self) -> None:
        self._open = True
        self._permits.release()


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never comes to that"
        time.sleep(0.002)


def all_free(engine: Engine) -> bool:
    stats = engine.stats()
    idle = stats["hbm_blocks_used"] == stats["hbm_blocks_sealed"] == engine._store._resident._prefix.idle_count
    return idle and stats["running"] == stats["waiting"] == 0 and not engine._loop._live


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
    with opened(checkpoint, tiers__nvme__bytes="8MiB", tiers__nvme__path=tmp_path / "cache") as engine:
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


def test_nvme_is_warm_in_the_next_engine(checkpoint: Path, tmp_path: Path) -> None:
    prompt = [token % 200 + 3 for token in range(5 * BLOCK + 2)]
    found: list[Completion] = []
    for _ in range(2):
        with opened(checkpoint, tiers__nvme__bytes="8MiB", tiers__nvme__path=tmp_path / "cache") as engine:
            found += engine.generate([prompt], GREEDY)
            engine.evict("hbm")
            engine.evict("dram")
    assert found[0].token_ids == found[1].token_ids
    assert (found[0].origin["nvme"], found[1].origin["nvme"]) == (0, 5 * BLOCK)


def test_a_salt_keeps_tenants_apart(engine: Engine) -> None:
    prompt = [token % 100 + 50 for token in range(4 * BLOCK + 1)]
    hits = [engine.stream(prompt, GREEDY, cache_salt=salt).collect().origin["hbm"] for salt in ("a", "b", "a", "")]
    assert hits == [0, 0, 4 * BLOCK, 0]


# ---- cancelling and order --------------------------------------------------------------------------------------------


def test_a_stream_closed_early_cancels_its_request_and_frees_its_blocks(checkpoint: Path) -> None:
    with opened(checkpoint) as engine:
        before = engine.metrics.requests.value("cancelled")
        with engine.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True)) as stream:
            next(stream)
        wait_for(lambda: engine.metrics.requests.value("cancelled") == before + 1 and all_free(engine))
        stream.close()
        assert list(stream) == []
        del stream
        abandoned = engine.stream(PROMPTS[1], SamplingParams(max_tokens=400, ignore_eos=True))
        del abandoned
        wait_for(lambda: engine.metrics.requests.value("cancelled") == before + 2 and all_free(engine))
        assert engine.metrics.generated_tokens.value() < 700


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
    with opened(checkpoint, scheduler__sequences_max=1) as engine:
        gate, order = Gate(engine), list[str]()
        sinks = []
        for name, priority in (("running", 0), ("low", 2), ("normal", 1), ("urgent", -5)):
            sink = Sink()
            sinks.append(sink)
            engine.submit(Request(PROMPTS[0], SamplingParams(max_tokens=2), priority=priority), named(name, order, sink))
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


# ---- trouble ---------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_takes_requests_again_later(checkpoint: Path) -> None:
    with opened(checkpoint, scheduler__sequences_max=1, scheduler__queue_max=1) as engine:
        gate, sinks = Gate(engine), [Sink(), Sink()]
        for sink in sinks:
            engine.submit(Request(PROMPTS[0], GREEDY), sink)
        with pytest.raises(Unavailable, match="queue: 2 requests"):
            engine.submit(Request(PROMPTS[0], GREEDY), Sink())
        assert engine.metrics.request_failures.value("unavailable") == 1
        gate.open()
        for sink in sinks:
            assert sink.final().finish_reason is FinishReason.LENGTH
        assert len(engine.generate([PROMPTS[0]], GREEDY)) == 1


def test_close_gives_every_request_in_flight_a_final_event(checkpoint: Path) -> None:
    with opened(checkpoint, scheduler__sequences_max=2) as engine:
        gate, sinks = Gate(engine), [Sink() for _ in range(6)]
        for sink in sinks:
            engine.submit(Request(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True)), sink)
        gate.let(4)
        wait_for(lambda: len(gate.passes) == 5)
        closer = threading.Thread(target=engine.close)
        closer.start()
        wait_for(lambda: not engine.healthy)
        gate.open()
        closer.join(30)
        assert not closer.is_alive()
        assert [sink.final().finish_reason for sink in sinks] == [FinishReason.CANCELLED] * 6
    with pytest.raises(Unavailable, match="shutting down"):
        engine.submit(Request(PROMPTS[0], GREEDY), Sink())
    with pytest.raises(Unavailable):
        engine.evict("hbm")
    engine.close()
    assert engine.stats()["running"] == 0 and not engine._loop._live
    assert engine.metrics.engine_up.value() == 0


def test_a_bug_fails_every_request_once_and_the_engine_says_it_is_down(checkpoint: Path) -> None:
    with opened(checkpoint, scheduler__sequences_max=2) as engine:
        engine.generate([PROMPTS[3]], GREEDY)
        gate, sinks = Gate(engine), [Sink() for _ in range(4)]
        for sink in sinks:
            engine.submit(Request(PROMPTS[0], GREEDY), sink)
        wait_for(lambda: len(gate.passes) == 1)
        stream = engine.stream(PROMPTS[1], GREEDY)

        def broken(parts: list[ScheduledSequence]) -> list[int]:
            raise RuntimeError("a bug")

        engine._runner.run = broken  # type: ignore[method-assign]
        gate.let(1)
        for sink in sinks:
            final = sink.final()
            assert final.finish_reason is FinishReason.ERROR and final.usage is None
            assert isinstance(final.error, RuntimeError)
        with pytest.raises(RuntimeError, match="a bug"):
            list(stream)
        wait_for(lambda: not engine.healthy)
        assert engine.metrics.engine_up.value() == 0
        assert engine.metrics.request_failures.value("internal") == 5
        assert engine.metrics.requests.value("error") == 5
        with pytest.raises(Unavailable, match="failed"):
            engine.submit(Request(PROMPTS[0], GREEDY), Sink())
        with pytest.raises(Unavailable):
            engine.evict("hbm")
        assert not engine._loop._live and engine.stats()["hbm_blocks_total"] > 0
        started = time.monotonic()
    assert time.monotonic() - started < 5


def test_a_bug_ends_an_evict_that_waits(checkpoint: Path) -> None:
    with opened(checkpoint) as engine:
        engine.generate([PROMPTS[3]], GREEDY)

        def broken(tier: object, give_up: bool) -> bool:
            raise RuntimeError("a bug")

        engine._store.drain = broken  # type: ignore[method-assign, assignment]
        engine.evict("hbm")
        assert not engine.healthy


def test_a_sink_that_raises_loses_its_own_request_only(checkpoint: Path) -> None:
    with opened(checkpoint, senders=1) as engine:
        good = Sink()

        def bad(event: TokenEvent) -> None:
            raise ValueError("a client went away")

        engine.submit(Request(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True)), bad)
        engine.submit(Request(PROMPTS[1], GREEDY), good)
        assert good.final().finish_reason is FinishReason.LENGTH
        wait_for(lambda: engine.metrics.requests.value("cancelled") == 1 and all_free(engine))
        assert engine.healthy


def poison(checkpoint: Path, token: int) -> Path:
    """Make one token overflow float16: it alone has a part along the first axis, which the first MLP blows up."""
    weights = load_file(checkpoint / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, 0] = 0
    embedding[token] = 0
    embedding[token, 0] = 1
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0
    weights["model.layers.0.mlp.gate_proj.weight"][:, 0] = 60000
    weights["model.layers.0.mlp.up_proj.weight"][:, 0] = 60000
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


def test_an_overflow_in_float16_ends_only_the_request_that_overflowed(tmp_path: Path) -> None:
    checkpoint = poison(make_checkpoint(tmp_path, "llama"), 77)
    sound = [[token for token in prompt if token != 77] for prompt in PROMPTS[:3]]
    with opened(checkpoint, dtype="float16") as engine:
        expected = [item.token_ids for item in engine.generate(sound, GREEDY)]
        for poisoned in ([77], [*sound[0][:18], 77, 5, 6], [5, 77, *sound[1]]):
            gate, sinks = Gate(engine), [Sink() for _ in range(4)]
            for sink, prompt in zip(sinks, [sound[0], poisoned, sound[1], sound[2]], strict=True):
                engine.submit(Request(prompt, GREEDY), sink)
            gate.open()
            final = sinks[1].final()
            assert final.finish_reason is FinishReason.ERROR and isinstance(final.error, InvalidRequest)
            assert "float16" in str(final.error)
            for sink, tokens in zip([sinks[0], *sinks[2:]], expected, strict=True):
                assert sink.final().finish_reason is FinishReason.LENGTH and sink.token_ids == tokens
        assert engine.healthy and engine.metrics.request_failures.value("invalid") == 3
        with pytest.raises(InvalidRequest, match="float16"):
            engine.generate([[77]], GREEDY)
        wait_for(lambda: all_free(engine))


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ("", {}, "prompt: must not be empty"),
        ([], {}, "prompt: must not be empty"),
        (5, {}, "prompt: must be"),
        (None, {}, "prompt: must be"),
        ([3, VOCAB], {}, f"input_ids: must be from 0 to {VOCAB - 1}, got {VOCAB}"),
        ([3, -1], {}, "input_ids: must be from 0 to .*, got -1"),
        ([3, "a"], {}, "input_ids: must be whole numbers, got 'a' at position 1"),
        ([3, 4.0], {}, "input_ids: must be whole numbers"),
        ([True], {}, "input_ids: must be whole numbers"),
        ([3] * CONTEXT, {}, f"prompt: has {CONTEXT} tokens, the context of {CONTEXT}"),
        ("a\ud800b", {}, "prompt: "),
        ([{"role": "user"}], {}, "content"),
        ([3], {"max_tokens": 0}, "max_tokens: must be from 1 .*, got 0"),
        ([3], {"max_tokens": -4}, "max_tokens: must be from 1 .*, got -4"),
        ([3], {"max_tokens": "many"}, "max_tokens: must be a whole number, got 'many'"),
        ([3], {"max_tokens": 1.5}, "max_tokens: must be a whole number"),
        ([3], {"temperature": float("nan")}, "temperature: must be a finite number, got nan"),
        ([3], {"temperature": -0.1}, "temperature: must be from 0"),
        ([3], {"top_p": 0}, "top_p: must be above 0"),
        ([3], {"top_k": -2}, "top_k: must be from -1"),
        ([3], {"seed": -1}, "seed: must be from 0"),
        ([3], {"stop": ("",)}, "stop: each must be a string of 1 to"),
        ([3], {"stop": ["x"] * 17}, "stop: at most 16 strings, got 17"),
        ([3], {"stop": 5}, "stop: "),
        ([3], {"stop_token_ids": (VOCAB,)}, f"stop_token_ids: must be below the vocabulary {VOCAB}, got {VOCAB}"),
        ([3], {"stop_token_ids": 7}, "stop_token_ids: "),
    ],
)
def test_bad_input_is_refused_with_field_limit_and_value(
    prompt: object, params: dict[str, object], text: str, engine: Engine
) -> None:
    failures = engine.metrics.request_failures.value("invalid")
    with pytest.raises(InvalidRequest, match=text):
        engine.generate([prompt], SamplingParams(**params))  # type: ignore[list-item, arg-type]
    assert engine.healthy and engine.metrics.request_failures.value("invalid") <= failures + 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"priority": "high"}, "priority: must be a whole number, got 'high'"),
        ({"priority": 1.5}, "priority: must be a whole number"),
        ({"priority": 2**40}, "priority: must be from"),
        ({"cache_salt": 5}, "cache_salt: must be text"),
        ({"cache_salt": "x" * 300}, "cache_salt: at most 256 characters, got 300"),
        ({"cache_salt": "\ud800"}, "cache_salt: must be text"),
    ],
)
def test_bad_options_are_refused_before_they_reach_the_engine(
    options: dict[str, object], text: str, engine: Engine
) -> None:
    with pytest.raises(InvalidRequest, match=text):
        engine.stream([3, 4], GREEDY, **options)  # type: ignore[arg-type]
    assert engine.healthy and len(engine.generate([PROMPTS[0]], GREEDY)[0].token_ids) == 12


def test_what_does_not_fit_hbm_is_refused_with_the_sums(checkpoint: Path) -> None:
    row_bytes = 3 * 4096
    with opened(checkpoint, tiers__hbm__bytes=4 * row_bytes, tiers__dram__bytes=0) as engine:
        held = 4 * BLOCK
        with pytest.raises(InvalidRequest, match=f"prompt: has {held + 1} tokens, tiers.hbm.bytes holds {held}"):
            engine.generate([[3] * (held + 1)], GREEDY)
        with pytest.raises(InvalidRequest, match=f"max_tokens: 60 prompt tokens \\+ 6 need 65 .* holds {held}; ask for 5"):
            engine.generate([[3] * 60], SamplingParams(max_tokens=6))
        full = engine.generate([[3] * 60], SamplingParams(max_tokens=5, ignore_eos=True))[0]
        assert len(full.token_ids) == 5
        assert len(engine.generate([[3] * 60], SamplingParams(ignore_eos=True))[0].token_ids) == 5
        assert len(engine.generate([[3] * held], SamplingParams(max_tokens=1))[0].token_ids) == 1


def test_one_bad_prompt_of_several_raises_and_cancels_the_others(engine: Engine) -> None:
    with pytest.raises(InvalidRequest):
        engine.generate([PROMPTS[0], [VOCAB]], SamplingParams(max_tokens=400, ignore_eos=True))
    wait_for(lambda: all_free(engine))


def test_a_model_without_tokenizer_takes_ids_only(tmp_path: Path) -> None:
    with opened(make_checkpoint(tmp_path, "llama"), tiers__dram__bytes=0) as engine:
        assert engine.tokenizer is None
        found = engine.generate([PROMPTS[0]], GREEDY)[0]
        assert found.text == "" and len(found.token_ids) == 12
        for prompt, params in (("text", GREEDY), (PROMPTS[0], SamplingParams(stop=("x",)))):
            with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
                engine.generate([prompt], params)


def test_torch_is_left_in_the_state_the_engine_needs(engine: Engine) -> None:
    assert torch.get_num_threads() == 1
