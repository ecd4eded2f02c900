"""The detokenizer: its pieces joined are what decoding everything at once gives, for every kind of tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvtier.errors import InvalidRequest
from kvtier.tokens import Detokenizer, TextStream, Tokenizer
from tests.tiny import make_tokenizer

TEXT = "Hello, wörld 🎉! Ünïcode 中文字 — ok\n\n  indented\tand the end 🏳️‍🌈"


def byte_level(folder: Path) -> Tokenizer:
    make_tokenizer(folder)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer


def sentencepiece_bpe(_: Path) -> Tokenizer:
    """Like Llama 2: BPE with byte tokens, spaces as ▁, the first space stripped."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁▁",
        "a",
        "▁a",
        "b",
        "\N{REPLACEMENT CHARACTER}",
    ]
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[("▁", "a"), ("▁", "▁")],
        byte_fallback=True,
        unk_token="<unk>",
        fuse_unk=True,
    )
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    inner.add_tokens([AddedToken("<tool call>")])
    return Tokenizer(inner)


def unigram(_: Path) -> Tokenizer:
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("▁a", -1.5), ("a", -2.0), ("▁▁", -2.0), ("bc", -2.5), ("中", -3.0)]
    inner = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.add_special_tokens([AddedToken("<unk>", special=True)])
    return Tokenizer(inner)


def word_piece(_: Path) -> Tokenizer:
    tokens = ["[UNK]", "a", "##b", "##c", "do", "x"]
    inner = tokenizers.Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece()
    return Tokenizer(inner)


def word_level(_: Path) -> Tokenizer:
    """No decoder at all: tokens joined by spaces."""
    return Tokenizer(tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]")))


@pytest.fixture(scope="module", params=[byte_level, sentencepiece_bpe, unigram, word_piece, word_level])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    result = request.param(tmp_path_factory.mktemp("tokenizer"))
    assert isinstance(result, Tokenizer)
    return result


def pieces(tokenizer: Tokenizer, parts: list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(part) for part in parts), detokenizer.finish()]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_pieces_joined_equal_the_decoded_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    token = st.integers(0, tokenizer.vocab_limit + 1)  # beyond: ids that belong to no token
    parts = data.draw(st.lists(st.lists(token, max_size=4), max_size=12))
    whole = [token for part in parts for token in part]
    assert "".join(pieces(tokenizer, parts)) == tokenizer.decode(whole)


@pytest.mark.parametrize("make", [byte_level, sentencepiece_bpe])
def test_real_text_streams_in_whole_characters(make: object, tmp_path: Path) -> None:
    tokenizer = make(tmp_path)  # type: ignore[operator]
    ids = tokenizer.encode(TEXT)
    parts = pieces(tokenizer, [[token] for token in ids])
    assert "".join(parts) == tokenizer.decode(ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    assert sum(map(bool, parts)) > 10  # it did stream


@pytest.mark.parametrize("make", [byte_level, sentencepiece_bpe])
def test_long_runs_of_broken_bytes_stay_exact_and_cheap(
    make: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make(tmp_path)  # type: ignore[operator]
    if tokenizer.byte_ids:
        ids = [3 + byte for byte in "語の学".encode() * 40]  # valid: shown before the run has ended
    else:
        lead, rest = tokenizer.encode("é")
        ids = [lead] * 500 + [rest]  # bad all the way, and then a whole character
    longest = 0
    decode = tokenizer.decode

    def watched(token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return str(decode(token_ids))

    monkeypatch.setattr(tokenizer, "decode", watched)
    parts = pieces(tokenizer, [[token] for token in ids])
    assert "".join(parts) == decode(ids)
    assert longest <= 68


def test_a_run_of_byte_tokens_waits_for_its_end(tmp_path: Path) -> None:
    tokenizer = sentencepiece_bpe(tmp_path)
    a = tokenizer.encode("a")[-1]
    good = [3 + byte for byte in "中".encode()]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(good) == ""  # one bad byte more would spoil it
    assert detokenizer.push([a]) == tokenizer.decode([*good, a])
    spoilt = Detokenizer(tokenizer)
    assert spoilt.push(good) == ""
    assert spoilt.push([3 + 0xFF]) == ""
    assert spoilt.finish() == "\N{REPLACEMENT CHARACTER}" * 4


def test_an_incomplete_character_is_shown_at_the_end_only(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    ids = tokenizer.encode("x🎉")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids[:-1]) == "x"
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_give_no_text_and_break_nothing(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    first, second = tokenizer.encode("é")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token]) for token in (first, 1, second)] == ["", "", "é"]


def test_a_text_stream_joins_detokenizer_and_stops(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    ids = [tokenizer.encode(character)[0] for character in "one STOP two"]
    stream = TextStream(tokenizer, ["STOP"])
    results = [stream.push([token]) for token in ids[:8]]
    assert "".join(text for text, _ in results) == "one "
    assert [stopped for _, stopped in results] == [False] * 7 + [True]
    assert stream.finish() == ""
    held = TextStream(tokenizer, ["STOP"])
    assert held.push(ids[:6]) == ("one ", False)
    assert held.finish() == "ST"


def test_without_a_tokenizer_there_is_no_text_and_no_stop_string() -> None:
    stream = TextStream(None)
    assert stream.push([1, 2]) == ("", False)
    assert stream.finish() == ""
    with pytest.raises(InvalidRequest, match=r"stop: this model has no tokenizer\.json"):
        TextStream(None, ["x"])
