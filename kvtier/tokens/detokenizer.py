"""Token ids to text, a few at a time, in whole characters.

Owns the window of tokens whose text may still change. Knows nothing of stop strings, events or sequences. One object
per sequence, used by one thread; the cost of a token does not grow with the length of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.tokens.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
HELD_TOKENS_MAX = 64
"""Unsettled tokens kept at most; only a longer run of byte tokens is shown before it has ended."""


class Detokenizer:
    """Emits the text of a growing list of tokens so that the pieces joined equal `Tokenizer.decode` of all of them.

    Text is settled once no later token can change it. A piece that ends within a character waits for its rest. Where
    the decoder reads runs of byte tokens (`<0xE4>`...), one bad byte turns all its run into replacement characters, so
    a run waits for its end, or for `HELD_TOKENS_MAX`: beyond that its whole characters are shown at once, and only
    then can an invalid run differ from `decode`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[
            int
        ] = []  # a settled token before the window: the first token of a text decodes differently
        self._window: list[int] = []  # tokens whose text is not all settled
        self._emitted = 0  # characters of decode(context + window) that need no emitting any more

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text they settled, perhaps empty."""
        self._window += [token for token in token_ids if self._tokenizer.shows(token)]
        if not self._window:
            return ""
        count = len(self._window)
        run = self._byte_run()
        text = self._text(count - run)
        settled = text[:-1] if run == 0 and text.endswith(REPLACEMENT) else text
        piece = settled[self._emitted :]
        self._emitted = max(self._emitted, len(settled))
        if settled is text and run < count:
            self._rebase(count - run)
        elif run > HELD_TOKENS_MAX:
            piece += self._cut_run()
        elif count > HELD_TOKENS_MAX:
            self._shorten()
        return piece

    def finish(self) -> str:
        """Return the text still held, incomplete characters as replacement characters. Nothing may be pushed after."""
        piece = self._text(len(self._window))[self._emitted :]
        self._window = []
        self._emitted = len(self._text(0))
        return piece

    def _text(self, count: int) -> str:
        """Text of the context and the first `count` tokens of the window."""
        return self._tokenizer.decode(self._context + self._window[:count])

    def _byte_run(self) -> int:
        """Byte tokens at the end of the window."""
        byte_ids = self._tokenizer.byte_ids
        run = 0
        while byte_ids and run < len(self._window) and self._window[-1 - run] in byte_ids:
            run += 1
        return run

    def _rebase(self, count: int) -> None:
        """Make the last of the first `count` tokens, all settled, the context."""
        self._context, self._window = self._window[count - 1 : count], self._window[count:]
        self._emitted = len(self._text(0))

    def _cut_run(self) -> str:
        """Give out a run that became too long, less the bytes of a character that is not complete."""
        for keep in range(4):
            text = self._text(len(self._window) - keep)[self._emitted :]
            if REPLACEMENT not in text:
                break
        else:
            keep, text = 0, self._text(len(self._window))[self._emitted :]
        self._window = self._window[len(self._window) - keep :]
        return text

    def _shorten(self) -> None:
        """Move the window up to a character boundary near its end: a run of invalid bytes must not make it grow."""
        decode = self._tokenizer.decode
        for keep in range(1, 5):
            head, tail = self._window[:-keep], self._window[-keep:]
            if decode(head) + decode(tail) == decode(self._window):
                given = self._emitted - len(self._text(len(head)))
                self._rebase(len(head))
                self._emitted += given
                return
