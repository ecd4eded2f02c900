"""The text of one sequence: its tokens through the detokenizer and its stop strings.

Owns what the engine needs between a sampled token and a TokenEvent's text. One object per sequence, one thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.errors import InvalidRequest
from kvtier.tokens.detokenizer import Detokenizer
from kvtier.tokens.stops import StopMatcher
from kvtier.tokens.tokenizer import Tokenizer


class TextStream:
    """Turns the output tokens of a sequence into text that may be shown.

    Text lags behind tokens: characters may be incomplete, and text that may turn out to be a stop string is held. An
    event's token ids are those of its step, its text is what became certain in it; only their sums belong together.
    A token that ended the sequence (EOS, a stop token) must not be pushed: it is no part of the text.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str] = ()) -> None:
        """Without a tokenizer the text stays empty; `stops` then raise InvalidRequest."""
        if tokenizer is None and stops:
            raise InvalidRequest("stop: this model has no tokenizer.json; send stop_token_ids")
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)

    def push(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """Take the next output tokens; return `(text to show now, stop string found)`. Ends before the stop."""
        if self._detokenizer is None:
            return "", False
        return self._matcher.push(self._detokenizer.push(token_ids))

    def finish(self) -> str:
        """The sequence ended: return the rest of its text. Empty after a stop string."""
        if self._detokenizer is None:
            return ""
        text, stopped = self._matcher.push(self._detokenizer.finish())
        return text if stopped else text + self._matcher.finish()
