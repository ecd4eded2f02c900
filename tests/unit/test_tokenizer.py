"""The tokenizer: the same ids and text as transformers, and clear words for broken folders."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, processors

from kvtier.errors import CheckpointError, InvalidRequest
from kvtier.tokens import Tokenizer, encode_prompt
from tests.tiny import SPECIAL_TOKENS, make_tokenizer

SMOLLM2 = Path(__file__).parents[2] / ".cache" / "models" / "smollm2"
TEXTS = ["Hello, wörld 🎉", " leading and trailing ", "", "a<|im_end|>b", "\n\n\t中文 1234567", "x" * 1000]


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer


def change_config(folder: Path, **values: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer(tmp_path)
    return tmp_path


def assert_like_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"], (text, special)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_limit == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map


@pytest.mark.smollm2
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="no SmolLM2 checkpoint: run scripts/fetch_model.py")
def test_smollm2_is_read_as_transformers_reads_it() -> None:
    assert_like_transformers(SMOLLM2)
    assert load(SMOLLM2).vocab_limit == 49152


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"bos_token": {"__type": "AddedToken", "content": "<|im_start|>"}, "add_bos_token": True},
        {"additional_special_tokens": ["Ġthe"]},
    ],
)
def test_conventions_of_the_config_are_read_as_transformers_reads_them(
    folder: Path, changes: dict[str, object]
) -> None:
    change_config(folder, **changes)
    assert_like_transformers(folder)


def test_the_post_processor_of_the_file_decides_what_surrounds_a_prompt(folder: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(
        single=[SPECIAL_TOKENS[1], "$A"], special_tokens=[(SPECIAL_TOKENS[1], 1)]
    )
    inner.save(str(folder / "tokenizer.json"))
    assert load(folder).encode("hello")[0] == 1
    assert load(folder).encode("hello", add_special_tokens=False)[0] != 1
    change_config(folder, add_bos_token=False)
    assert load(folder).encode("hello")[0] == 1
    assert_like_transformers(folder)


def test_truncation_and_padding_of_the_file_do_not_apply(folder: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=50)
    inner.save(str(folder / "tokenizer.json"))
    assert 4 < len(load(folder).encode("hello there, what a day")) < 50


def test_tokens_that_only_the_config_declares_are_added(folder: Path) -> None:
    limit = load(folder).vocab_limit
    change_config(folder, added_tokens_decoder={str(limit): {"content": "<think>", "special": False}})
    tokenizer = load(folder)
    assert tokenizer.encode("<think>") == [limit]
    assert tokenizer.vocab_limit == limit + 1
    assert tokenizer.decode([limit]) == "<think>"
    change_config(folder, added_tokens_decoder={"7000": {"content": "<think>", "special": False}})
    with pytest.raises(CheckpointError, match="7000"):
        load(folder)


def test_named_tokens_are_special_even_where_the_file_does_not_say_so(folder: Path) -> None:
    path = folder / "tokenizer.json"
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.add_tokens([AddedToken("<end>", special=False)])
    inner.save(str(path))
    change_config(folder, eos_token="<end>")
    tokenizer = load(folder)
    assert tokenizer.decode(tokenizer.encode("a<end>")) == "a"
    assert_like_transformers(folder)


def test_a_named_token_that_has_no_id_gets_none(folder: Path) -> None:
    limit = load(folder).vocab_limit
    change_config(folder, pad_token="<pad>")  # transformers would give it an id the model knows nothing of
    tokenizer = load(folder)
    assert tokenizer.vocab_limit == limit
    assert max(tokenizer.encode("<pad>")) < limit


def test_a_folder_without_tokenizer_takes_token_ids_only(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None
    assert encode_prompt(None, [1, 2]) == [1, 2]
    with pytest.raises(InvalidRequest, match="text_input: this model has no tokenizer"):
        encode_prompt(None, "hello")
    with pytest.raises(InvalidRequest, match="text_input: this model has no tokenizer"):
        encode_prompt(None, [{"role": "user", "content": "hello"}])


def test_prompts_of_every_kind_are_encoded(folder: Path) -> None:
    tokenizer = load(folder)
    assert encode_prompt(tokenizer, "hello") == tokenizer.encode("hello")
    chat = encode_prompt(tokenizer, [{"role": "user", "content": "hello"}])
    assert chat == tokenizer.encode(
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    for bad in ("", [], [True], [1.0], ["1"]):
        with pytest.raises(InvalidRequest):
            encode_prompt(tokenizer, bad)  # type: ignore[arg-type]


def test_no_special_token_is_added_after_a_template(folder: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(
        single=[SPECIAL_TOKENS[0], "$A"], special_tokens=[(SPECIAL_TOKENS[0], 0)]
    )
    inner.save(str(folder / "tokenizer.json"))
    change_config(folder, chat_template="{{ bos_token }}{{ messages[0].content }}")
    tokenizer = load(folder)
    assert tokenizer.encode("a")[0] == 0
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]) == [
        0,
        *tokenizer.encode("a", add_special_tokens=False),
    ]


def test_a_conversation_needs_a_template(folder: Path) -> None:
    change_config(folder, chat_template=None)
    with pytest.raises(InvalidRequest, match="chat: this model has no chat template"):
        load(folder).encode_chat([{"role": "user", "content": "a"}])


def test_text_that_is_no_unicode_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="character 1 is a lone surrogate"):
        load(folder).encode("a\ud800")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", '{"a":'),
        ("tokenizer_config.json", "[]"),
        ("special_tokens_map.json", "x"),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "y"}}}'),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("tokenizer_config.json", '{"chat_template": "{% for"}'),
    ],
)
def test_broken_files_are_named(folder: Path, file: str, content: str) -> None:
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer|special_tokens_map|chat template"):
        Tokenizer.load(folder)


def test_many_threads_get_the_same_ids(folder: Path) -> None:
    tokenizer = load(folder)
    texts = [f"the cat and the hat number {i} " * 20 for i in range(50)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == [tokenizer.encode(text) for text in texts]
