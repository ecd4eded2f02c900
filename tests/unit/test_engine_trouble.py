"""The Python API when things go wrong: full queues, closing, bugs, failing sinks, overflows; and bad input."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import (
    BLOCK,
    CONTEXT,
    GREEDY,
    LEAVE_S,
    PROMPTS,
    VOCAB,
    Gate,
    Sink,
    all_free,
    end_keepers,
    knows_shelves,
    opened,
    wait_for,
)
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint

from kvtier import Engine, FinishReason, InvalidRequest, Request, SamplingParams, TokenEvent, Unavailable
from kvtier.byte_text import parse_bytes
from kvtier.errors import ConfigError, ShelfError
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.keeper.opening import SharedShelves
from kvtier.models.decoder import NonFiniteError
from kvtier.sequence import ScheduledSequence
from kvtier.shelf import Shelf
from kvtier.shelves import open_nvme_shelf
from tests.own_time import own_time
from tests.shelf_desk import shelf, shelf_json


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", tokenizer=True)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with opened(checkpoint) as engine:
        yield engine


# ---- trouble ---------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_takes_requests_again_later(checkpoint: Path) -> None:
    with opened(checkpoint, scheduler__sequences_max=1, scheduler__queue_max=1) as engine:
        gate, sinks = Gate(engine), [Sink(), Sink()]
        for sink in sinks:
            engine.submit(Request(PROMPTS[0], GREEDY), sink)
        with pytest.raises(Unavailable, match=r"scheduler\.queue_max \+ scheduler\.sequences_max: 2 requests"):
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
        closer.join(60)
        assert not closer.is_alive()
        assert [sink.final().finish_reason for sink in sinks] == [FinishReason.CANCELLED] * 6
    with pytest.raises(Unavailable, match="shutting down"):
        engine.submit(Request(PROMPTS[0], GREEDY), Sink())
    with pytest.raises(Unavailable):
        engine.evict("hbm")
    engine.close()
    assert engine.stats()["running"] == 0 and not engine._loop._live
    assert engine.metrics.engine_up.value() == 0


def test_close_fails_what_a_hung_pass_keeps_and_ends_in_time(checkpoint: Path) -> None:
    with opened(checkpoint, scheduler__sequences_max=2) as engine:
        gate, sinks = Gate(engine), [Sink() for _ in range(4)]
        for sink in sinks:
            engine.submit(Request(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True)), sink)
        stream = engine.stream(PROMPTS[1], GREEDY)
        wait_for(lambda: len(gate.passes) == 1)
        with own_time() as clock:
            engine.close(0.3)
            assert clock.seconds < 5
        for sink in sinks:
            final = sink.final()
            assert final.finish_reason is FinishReason.ERROR and isinstance(final.error, Unavailable)
        with pytest.raises(Unavailable, match="shutting down"):
            stream.collect()
        gate.open()
        engine._loop._thread.join(60)
        assert not engine._loop._thread.is_alive() and [len(sink.events) for sink in sinks] == [1] * 4


def test_close_has_one_deadline_for_hung_sinks_and_all_the_rest(checkpoint: Path) -> None:
    gate = threading.Event()
    with opened(checkpoint, senders=3) as engine:
        for _ in range(6):
            engine.submit(Request(PROMPTS[0], GREEDY), lambda _: wait_for_event(gate))
        wait_for(lambda: engine.metrics.requests.value("length") == 6)
        with own_time() as clock:
            engine.close(0.6)
            assert clock.seconds < 3
    gate.set()


@pytest.mark.parametrize("sharing", [False, True])
def test_close_writes_down_what_waits_and_the_next_engine_finds_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharing: bool
) -> None:
    calls = FaultyCalls()
    monkeypatch.setattr("kvtier.assembly.open_nvme_shelf", functools.partial(open_nvme_shelf, calls=calls))
    monkeypatch.setattr("kvtier.assembly.SharedShelves", functools.partial(SharedShelves, calls=calls))
    prompt = [3 + place % 250 for place in range(6 * BLOCK)]
    cache = tmp_path / "cache"
    options = {"tiers__nvme__bytes": "1MiB", "tiers__nvme__path": cache, "tiers__linger_s": 0, "sharing": sharing}
    with opened(checkpoint, tiers__dram__bytes="256KiB", io__in_flight_max=1, **options) as engine:
        wait_for(lambda: knows_shelves(engine, "nvme"))
        calls.inject([Fault(Call.WRITE, calls.count(Call.WRITE) + 1, Effect.HANG, sticky=True)])
        [first] = engine.generate([prompt], GREEDY)
        closer = threading.Thread(target=engine.close)
        closer.start()
        engine._loop._thread.join(60)
        assert not engine._loop._thread.is_alive() and engine.stats()["waiting_writes"] >= 4
        calls.release()
        closer.join(60)
        assert not closer.is_alive()
        assert engine.stats()["waiting_writes"] == engine.stats()["writing_blocks"] == 0
    end_keepers(cache, LEAVE_S)  # and DRAM with it
    with opened(checkpoint, tiers__dram__bytes=0, **options) as engine:
        wait_for(lambda: knows_shelves(engine, "nvme"))
        [again] = engine.generate([prompt], GREEDY)
        assert again.origin["nvme"] == 5 * BLOCK and again.token_ids == first.token_ids


def test_what_is_wrong_with_the_configuration_of_a_shelf_ends_the_start(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Shelf:
        raise ConfigError("io.something: cannot be had here")

    monkeypatch.setattr("kvtier.assembly.open_nvme_shelf", refuse)
    options = {"tiers__nvme__bytes": "1MiB", "tiers__nvme__path": tmp_path / "cache", "sharing": False}
    with pytest.raises(ConfigError, match="cannot be had here"), opened(checkpoint, **options):
        pass


def wait_for_event(event: threading.Event) -> None:
    assert event.wait(60)


def test_a_bug_fails_every_request_once_and_the_engine_says_it_is_down(checkpoint: Path) -> None:
    with opened(checkpoint, scheduler__sequences_max=2) as engine:
        engine.generate([PROMPTS[3]], GREEDY)
        gate, sinks = Gate(engine), [Sink() for _ in range(4)]
        for sink in sinks:
            engine.submit(Request(PROMPTS[0], GREEDY), sink)
        wait_for(lambda: len(gate.passes) == 1)
        stream = engine.stream(PROMPTS[1], GREEDY)

        def broken(_: Sequence[ScheduledSequence]) -> list[int]:
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
        with own_time() as clock:
            engine.close()
            assert clock.seconds < 5


def test_a_bug_ends_an_evict_that_waits(checkpoint: Path) -> None:
    with opened(checkpoint) as engine:
        engine.generate([PROMPTS[3]], GREEDY)

        def broken(*_: object, **__: object) -> bool:
            raise RuntimeError("a bug")

        engine._store.drain = broken  # type: ignore[method-assign, assignment]
        engine.evict("hbm")
        assert not engine.healthy


def test_a_sink_that_raises_loses_its_own_request_only(checkpoint: Path) -> None:
    with opened(checkpoint, senders=1) as engine:
        gate, good = Gate(engine), Sink()

        def bad(_: TokenEvent) -> None:
            raise ValueError("a client went away")

        def given_up() -> bool:
            return bool(engine._loop._cancels) or engine.metrics.requests.value("cancelled") == 1

        engine.submit(Request(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True)), bad)
        engine.submit(Request(PROMPTS[1], GREEDY), good)
        gate.let(1)
        wait_for(given_up)
        gate.open()
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
            assert final.finish_reason is FinishReason.ERROR and isinstance(final.error, NonFiniteError)
            assert final.error.tokens[0] == poisoned.index(77) and final.error.tokens[-1] < len(poisoned)
            assert f"in float16 for {len(final.error.tokens)} tokens: use dtype bfloat16" in str(final.error)
            for sink, tokens in zip([sinks[0], *sinks[2:]], expected, strict=True):
                assert sink.final().finish_reason is FinishReason.LENGTH and sink.token_ids == tokens
        assert engine.healthy and engine.metrics.request_failures.value("internal") == 3
        with pytest.raises(NonFiniteError, match="float16"):
            engine.generate([[77]], GREEDY)
        wait_for(lambda: all_free(engine))


# ---- a shelf that takes its time -------------------------------------------------------------------------------------


class SlowDisk:
    """Opens the NVMe shelf at the second call, and only once it is let."""

    def __init__(self) -> None:
        self.calls = 0
        self.entered, self.let = threading.Event(), threading.Event()
        self.shelves: list[Shelf] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Shelf:
        self.calls += 1
        if self.calls == 1:
            raise ShelfError("the disk is not there yet")
        self.entered.set()
        assert self.let.wait(60)
        self.shelves.append(open_nvme_shelf(*args, **kwargs))
        return self.shelves[-1]


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    disk = SlowDisk()
    monkeypatch.setattr("kvtier.assembly.open_nvme_shelf", disk)
    monkeypatch.setattr("kvtier.reopening.RETRY_S", 0.05)
    return disk


def test_requests_are_served_while_a_shelf_opens_and_numbers_are_given(
    checkpoint: Path, tmp_path: Path, slow_disk: SlowDisk
) -> None:
    with opened(checkpoint, tiers__nvme__bytes="8MiB", tiers__nvme__path=tmp_path / "cache", sharing=False) as engine:
        engine.generate([PROMPTS[0]], GREEDY)
        assert slow_disk.entered.wait(60)
        assert len(engine.generate(PROMPTS, GREEDY)) == len(PROMPTS)
        assert "nvme_slots_total" not in engine.stats() and not slow_disk.shelves
        slow_disk.let.set()
        while "nvme_slots_total" not in engine.stats():
            engine.generate([PROMPTS[1]], GREEDY)


def test_a_shelf_that_opens_after_the_close_is_closed_and_its_directory_free_again(
    checkpoint: Path, tmp_path: Path, slow_disk: SlowDisk
) -> None:
    with opened(checkpoint, tiers__nvme__bytes="8MiB", tiers__nvme__path=tmp_path / "cache", sharing=False) as engine:
        engine.generate([PROMPTS[0]], GREEDY)
        assert slow_disk.entered.wait(60)
        with own_time() as clock:
            engine.close()
            assert clock.seconds < 5
    slow_disk.let.set()
    wait_for(lambda: not any(thread.name == "kvtier-opener" for thread in threading.enumerate()))
    assert len(slow_disk.shelves) == 1 and slow_disk.shelves[0]._closed
    with opened(checkpoint, tiers__nvme__bytes="8MiB", tiers__nvme__path=tmp_path / "cache", sharing=False) as engine:
        engine.generate([PROMPTS[0]], GREEDY)
        while "nvme_slots_total" not in engine.stats():
            engine.generate([PROMPTS[1]], GREEDY)


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
        engine.generate([prompt], SamplingParams(**params))  # type: ignore[arg-type]
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
        sums = "they need 60.0 KiB and there are 48.0 KiB; raise tiers.hbm.bytes, or give tiers.dram.bytes: .*"
        with pytest.raises(
            InvalidRequest, match=f"prompt: has {held + 1} tokens, tiers.hbm.bytes holds {held}: {sums}"
        ):
            engine.generate([[3] * (held + 1)], GREEDY)
        with pytest.raises(
            InvalidRequest,
            match=f"max_tokens: 60 prompt tokens \\+ 6 need room for 65, .* holds {held}: .*; or ask for 5",
        ):
            engine.generate([[3] * 60], SamplingParams(max_tokens=6))
        full = engine.generate([[3] * 60], SamplingParams(max_tokens=5, ignore_eos=True))[0]
        assert len(full.token_ids) == 5
        assert len(engine.generate([[3] * 60], SamplingParams(ignore_eos=True))[0].token_ids) == 5
        assert len(engine.generate([[3] * held], SamplingParams(max_tokens=1))[0].token_ids) == 1


@pytest.mark.parametrize(
    ("dram_rows", "quota_rows", "sums"),
    [
        (3, 0, "they need 252 KiB and there are 240 KiB in HBM alone or, streamed, 96.0 KiB: of HBM 60.0 KiB for each"),
        (20, 0, "they need 312 KiB and there are 300 KiB: of HBM 60.0 KiB for each .*, of DRAM 240 KiB, of NVMe 0 B; "),
        (20, 0, "; raise tiers.dram.bytes or tiers.nvme.bytes$"),
        (40, 20, "of DRAM 240 KiB, of NVMe 0 B; raise tiers.dram.tenant_bytes$"),
    ],
)
def test_what_fits_neither_hbm_nor_the_shelves_is_refused_with_the_sums_and_a_way_out(
    dram_rows: int, quota_rows: int, sums: str, checkpoint: Path
) -> None:
    row_bytes = 3 * 4096
    slot_bytes = row_bytes + 4096
    sizes: dict[str, object] = {"tiers__dram__bytes": dram_rows * slot_bytes}
    sizes["tiers__dram__tenant_bytes"] = quota_rows * slot_bytes
    with opened(checkpoint, tiers__hbm__bytes=20 * row_bytes, **sizes) as engine:
        fits = max(20, 5 + (quota_rows or dram_rows)) * BLOCK
        with pytest.raises(InvalidRequest, match=sums):
            engine.generate([[3] * (fits + 1)], SamplingParams(max_tokens=1), cache_tenant="someone")
        [done] = engine.generate([[3] * fits], SamplingParams(max_tokens=1), cache_tenant="someone")
        assert len(done.token_ids) == 1


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


def test_a_context_longer_than_the_model_s_is_refused_with_the_limit(checkpoint: Path) -> None:
    text = rf"context: the model was made for {CONTEXT} tokens, got {CONTEXT + 1}"
    with pytest.raises(ConfigError, match=text), opened(checkpoint, context=CONTEXT + 1):
        pass
    with opened(checkpoint, context=CONTEXT, tiers__dram__bytes=0) as engine:
        assert len(engine.generate([[3] * (CONTEXT - 1)], GREEDY)[0].token_ids) == 1


def test_an_hbm_that_a_hung_disk_could_keep_whole_is_refused_with_a_way_out(checkpoint: Path, tmp_path: Path) -> None:
    row_bytes = 3 * 4096
    nvme: dict[str, object] = {
        "tiers__nvme__bytes": "1MiB",
        "tiers__nvme__path": tmp_path / "cache",
        "sharing": False,
        "io__readers": 4,
        "io__writers": 2,
    }
    for dram, streamed_max, spare in (("1MiB", 0, 4), ("1MiB", 2, 6), (0, 0, 6)):
        nvme["scheduler__streamed_max"] = streamed_max
        text = rf"tiers\.hbm\.bytes: {spare + 1} blocks.* keep {spare} .*io\.readers"
        small: dict[str, object] = {"tiers__hbm__bytes": (spare + 1) * row_bytes, "tiers__dram__bytes": dram}
        with pytest.raises(ConfigError, match=text), opened(checkpoint, **small, **nvme):
            pass
        with opened(checkpoint, tiers__hbm__bytes=(spare + 2) * row_bytes, tiers__dram__bytes=dram, **nvme) as engine:
            with pytest.raises(InvalidRequest, match=f"tiers.hbm.bytes holds {2 * BLOCK}"):
                engine.generate([[3] * (2 * BLOCK + 1)], GREEDY)
            assert len(engine.generate([[3] * 2 * BLOCK], SamplingParams(max_tokens=1))[0].token_ids) == 1


@pytest.mark.parametrize("key", ["tiers.dram.tenant_bytes", "tiers.nvme.tenant_bytes", "tiers.nvme.write_bytes_day"])
def test_a_limit_that_no_block_fits_is_refused_with_a_way_out(checkpoint: Path, key: str) -> None:
    text = rf"{key}: 15.9 KiB hold no block, one takes 16.0 KiB; raise it, or 0 for no limit"
    limit: dict[str, object] = {key.replace(".", "__"): 16383}
    with pytest.raises(ConfigError, match=text), opened(checkpoint, **limit):
        pass


def test_a_start_that_finds_shelves_of_other_bytes_says_so_and_how_to_have_its_own(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "kvtier.assembly")

    def start(dram: str, nvme: str) -> tuple[list[str], int, int]:
        caplog.clear()
        sizes = {"tiers__dram__bytes": dram, "tiers__nvme__bytes": nvme, "tiers__dram__staging_bytes": 0}
        with opened(checkpoint, **sizes, tiers__nvme__path=tmp_path / "cache", tiers__linger_s=600) as engine:
            asked = shelf_json("stat", tmp_path / "cache")["owners"][0]["asked_bytes"]
            stats = engine.stats()
        assert asked == {"dram": parse_bytes(dram), "nvme": parse_bytes(nvme)}
        return caplog.messages, stats["dram_slots_total"], stats["nvme_slots_total"]

    said, dram_slots, nvme_slots = start("1MiB", "2MiB")
    assert (said, dram_slots) == ([], 64)
    assert start("1MiB", "2MiB") == ([], dram_slots, nvme_slots), "nothing has changed"
    for others in (("2MiB", "512KiB"), ("768KiB", "4MiB"), ("0", "0")):
        said, *slots = start(*others)
        assert slots == [dram_slots, nvme_slots] and len(said) == 2
        assert "the DRAM shelf has 64 blocks (1.0 MiB), where tiers.dram.bytes comes to" in said[0]
        assert f"the NVMe shelf has {nvme_slots} blocks" in said[1] and "tiers.nvme.bytes comes to" in said[1]
        assert all(f"`kvtier shelf stop {tmp_path / 'cache'} --now`" in text for text in said)
    assert shelf("stop", tmp_path / "cache", "--now").exit_code == 0
    said, dram_slots, new_slots = start("2MiB", "512KiB")
    assert (said, dram_slots) == ([], 128) and new_slots < nvme_slots
    end_keepers(tmp_path / "cache")


@pytest.mark.parametrize("sharing", [False, True])
def test_the_limits_of_the_configuration_are_those_of_the_shelves(
    checkpoint: Path, tmp_path: Path, sharing: bool
) -> None:
    limits: dict[str, object] = {
        "tiers__pin_share": 0.0,
        "tiers__dram__tenant_bytes": 2 * 16384,
        "tiers__nvme__tenant_bytes": 16384,
        "tiers__nvme__write_bytes_day": 3 * 16384,
        "tiers__nvme__bytes": "1MiB",
        "tiers__nvme__path": tmp_path / "cache",
        "tiers__linger_s": 0,
        "sharing": sharing,
    }
    with opened(checkpoint, **limits) as engine:
        engine.generate([[3] * (6 * BLOCK)], GREEDY, cache_tenant="someone", cache_pin=True)
        wait_for(lambda: engine.stats()["dram_quota_refused"] > 0 and engine.stats()["dram_pins_refused"] > 0)
        engine.generate([[5] * (8 * BLOCK)], GREEDY)
        wait_for(lambda: engine.stats()["nvme_write_budget_refused"] > 0)
        stats = engine.stats()
        assert stats["dram_pinned"] == stats["nvme_pinned"] == 0 and stats["nvme_writes"] <= 3
