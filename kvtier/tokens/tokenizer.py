"""The tokenizer of a model folder: `tokenizer.json` as `tokenizer_config.json` completes it.

Owns how text becomes token ids and ids become text. Knows nothing of models; chat templates are rendered next door.
Loaded once by the engine, then read by any number of threads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from kvtier.errors import CheckpointError, InvalidRequest
from kvtier.tokens.chat_template import ChatTemplate, RenderLimits

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys of tokenizer_config.json that name one special token each."""


class Tokenizer:
    """Text to token ids and back. All methods may be called from several threads at once."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """`special_tokens` maps names such as "bos_token" to their text. `inner` must not be changed afterwards."""
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        vocab = inner.get_vocab(with_added_tokens=True)
        self.vocab_limit = max(vocab.values(), default=-1) + 1
        """One more than the highest token id; logits from here on belong to no token."""
        self.token_bytes_max = max((len(token.encode()) for token in vocab), default=0)
        """No token stands for more bytes of text than this (byte-level vocabularies spell some bytes with two)."""
        self.special_ids = frozenset(i for i, token in inner.get_added_tokens_decoder().items() if token.special)
        """Ids that `decode` leaves out."""
        self.byte_ids = self._find_byte_ids()
        """Ids of `<0x00>` to `<0xFF>` where a run of them is decoded as UTF-8 bytes, else empty."""

    @classmethod
    def load(cls, folder: Path, limits: RenderLimits | None = None) -> Tokenizer | None:
        """Read the tokenizer files of `folder`; None if it has no `tokenizer.json` (then only token ids can be used).

        Raises CheckpointError for files that are there but broken, the chat template included.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            inner = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: is not a tokenizer: {error}") from None
        config = _read_object(folder / "special_tokens_map.json") | _read_object(folder / "tokenizer_config.json")
        special_tokens = {name: text for name in SPECIAL_NAMES if (text := _content(config.get(name))) is not None}
        _add_tokens(inner, config, special_tokens, path)
        template = ChatTemplate.load(folder, config, special_tokens, limits or RenderLimits())
        return cls(inner, special_tokens, template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in the text are recognised as such.

        `add_special_tokens` adds what the post-processor of tokenizer.json puts around a prompt (often BOS); as in
        transformers, that goes before `add_bos_token` of tokenizer_config.json. Raises InvalidRequest if `text` is no
        valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"prompt: is not valid Unicode, character {error.start} is a lone surrogate") from None
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins. The template brings all special tokens itself.

        Raises InvalidRequest if the model folder has no chat template, or messages or template do not go together.
        """
        if self.chat_template is None:
            raise InvalidRequest("chat: this model has no chat template; send plain text_input or input_ids")
        return self.encode(self.chat_template.render(messages), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens; ids that belong to no token give nothing."""
        return self._inner.decode(token_ids, skip_special_tokens=True)

    def shows(self, token_id: int) -> bool:
        """True if `decode` looks at `token_id` at all: it is a token and not a special one."""
        return token_id not in self.special_ids and self._inner.id_to_token(token_id) is not None

    def _find_byte_ids(self) -> frozenset[int]:
        ids = [self._inner.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        letter = ids[ord("A")]
        if letter is None or self.decode([letter]) != "A":
            return frozenset()
        return frozenset(token_id for token_id in ids if token_id is not None)


def encode_prompt(tokenizer: Tokenizer | None, prompt: str | list[int] | list[dict[str, object]]) -> list[int]:
    """Token ids of a `Request.prompt` of any kind. The engine checks ids and length against the model.

    Raises InvalidRequest if the prompt needs a tokenizer or a template that the model folder lacks, or is empty.
    """
    if isinstance(prompt, str):
        ids = _required(tokenizer).encode(prompt)
    elif prompt and isinstance(prompt[0], Mapping):
        ids = _required(tokenizer).encode_chat(prompt)
    else:
        for position, token in enumerate(prompt):
            if isinstance(token, bool) or not isinstance(token, int):
                raise InvalidRequest(f"input_ids: must be whole numbers, got {token!r} at position {position}")
        ids = list(prompt)  # type: ignore[arg-type]
    if not ids:
        raise InvalidRequest("prompt: must not be empty, got one that has no tokens")
    return ids


def _required(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise InvalidRequest("text_input: this model has no tokenizer.json; send input_ids")
    return tokenizer


def _add_tokens(
    inner: tokenizers.Tokenizer, config: Mapping[str, object], special_tokens: Mapping[str, str], path: Path
) -> None:
    """Bring in added tokens that only tokenizer_config.json knows, and mark the named ones special."""
    known = {token.content: token for token in inner.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder", {})
    if not isinstance(declared, Mapping) or not all(key.isdecimal() for key in declared):
        raise CheckpointError(f"{path.parent / 'tokenizer_config.json'}: added_tokens_decoder must map ids to tokens")
    for token_id, value in sorted(declared.items(), key=lambda item: int(item[0])):
        text = _content(value)
        if text is None or text in known:
            continue
        flags = {name: bool(value.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        inner.add_tokens([tokenizers.AddedToken(text, **flags)])
        if inner.token_to_id(text) != int(token_id):
            raise CheckpointError(
                f"{path}: token {text!r} is {inner.token_to_id(text)}, tokenizer_config.json says {token_id}"
            )
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    extra = extra.values() if isinstance(extra, Mapping) else extra
    texts = [*special_tokens.values(), *(text for value in extra if (text := _content(value)) is not None)]  # type: ignore[attr-defined]
    for text in dict.fromkeys(texts):
        if inner.token_to_id(text) is not None and not (text in known and known[text].special):
            inner.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])


def _content(value: object) -> str | None:
    """Text of a token that is written as a string or as an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_object(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold an object")
    return value
