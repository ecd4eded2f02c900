"""`kvtier chat`: a conversation in the terminal, or over a pipe with one line a turn.

Owns the conversation. Each turn sends the whole history again; the engine finds its blocks in the tiers, and the line
under each answer says in which.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli import options
from kvtier.cli.groups import with_groups
from kvtier.cli.terminal import cost_line, loaded_engine, messages, reported
from kvtier.errors import InvalidRequest, RequestError
from kvtier.request import SamplingParams

if TYPE_CHECKING:
    from kvtier.engine import Engine

WELCOME = "[dim]/reset starts over, /quit or Ctrl-D ends, Ctrl-C cuts an answer short[/]"


@with_groups
def chat(
    model: options.ModelDirectory,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="What the model is told first.")
    ] = None,
    *,
    sampling: options.SamplingOptions,
    cache: options.CacheOptions,
    engine_options: options.EngineOptions,
) -> None:
    """Talk to a model. The line under each answer says where the history's tokens came from.

    With a pipe on stdin, each line is one turn and only the answers go to stdout.

    Examples:

      [bold]kvtier chat .cache/models/smollm2[/]

      [bold]kvtier chat .cache/models/smollm2 --system "Answer in French."[/]

      [bold]kvtier chat .cache/models/smollm2 --nvme 1GiB[/]   # warm again next time

      [bold]printf 'Name a river.\\nA longer one?\\n' | kvtier chat .cache/models/smollm2[/]
    """
    with reported():
        params = sampling.params()
        with loaded_engine(engine_options.engine_config(model)) as engine:
            if engine.tokenizer is None or engine.tokenizer.chat_template is None:
                raise InvalidRequest(f"{model}: has no chat template to talk with; use kvtier generate")
            converse(Conversation(engine, params, system, cache), interactive=sys.stdin.isatty())


@dataclass(eq=False, slots=True)
class Conversation:
    """What was said so far."""

    engine: Engine
    params: SamplingParams
    system: str | None
    cache: options.CacheOptions
    turns: list[dict[str, object]] = field(default_factory=list)

    def say(self, text: str) -> Generator[str, None, None]:
        """Add a turn and yield the pieces of its answer; then tell its cost on stderr.

        A turn that is refused leaves no trace; one that is cut short stays with what was said.
        """
        system: list[dict[str, object]] = [{"role": "system", "content": self.system}] if self.system else []
        self.turns.append({"role": "user", "content": text})
        answer: list[str] = []
        started = time.monotonic()
        try:
            events = self.engine.stream([*system, *self.turns], self.params, **self.cache.of_request())
        except RequestError:
            self.turns.pop()
            raise
        try:
            for event in events:
                answer.append(event.text)
                yield event.text
                if event.usage is not None:
                    self._tell(cost_line(event.usage, time.monotonic() - started))
        finally:
            events.close()
            self.turns.append({"role": "assistant", "content": "".join(answer)})

    def _tell(self, line: str) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()
        messages().print(f"[dim]{line}[/]")


def converse(conversation: Conversation, interactive: bool) -> None:
    """Turn by turn until the input ends. A refused turn ends a piped conversation; a typing person may try again."""
    console = messages()
    if interactive:
        import readline  # noqa: F401 (line editing for input())

        console.print(WELCOME)
    for line in _lines(interactive):
        command = line.strip()
        if command in ("/quit", "/exit"):
            return
        if command == "/reset":
            conversation.turns.clear()
            console.print("[dim]a new conversation[/]")
            continue
        if not command:
            continue
        try:
            _answer(conversation, command, interactive)
        except RequestError as error:
            if not interactive:
                raise
            console.print(f"{error} (/reset starts over)", style="red", markup=False)


def _answer(conversation: Conversation, text: str, interactive: bool) -> None:
    pieces = conversation.say(text)
    try:
        with contextlib.closing(pieces):
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        if not interactive:
            raise
        sys.stdout.write(" ...\n")


def _lines(interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from sys.stdin
        return
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("\n> ")
    sys.stdout.write("\n")
