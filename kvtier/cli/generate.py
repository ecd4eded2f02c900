"""`kvtier generate`: complete prompts from the command line or stdin, as text or as JSON lines."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli import options
from kvtier.cli.groups import with_groups
from kvtier.cli.terminal import cost_line, loaded_engine, messages, reported
from kvtier.errors import InvalidRequest
from kvtier.request import Completion

if TYPE_CHECKING:
    from kvtier.engine import Prompt


@with_groups
def generate(
    model: options.ModelDirectory,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Texts to complete; none: stdin is one.")
    ] = None,
    use_chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user's message: the chat template is put around it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt and line.")] = False,
    *,
    sampling: options.SamplingOptions,
    cache: options.CacheOptions,
    engine_options: options.EngineOptions,
) -> None:
    """Complete prompts, all in one batch. Answers go to stdout, what they cost to stderr.

    Examples:

      [bold]kvtier generate .cache/models/smollm2 --max-tokens 8 \\
          "The capital of France is"[/]

      [bold]kvtier generate .cache/models/smollm2 --chat "A river?" "A lake?" --json[/]

      [bold]kvtier generate .cache/models/smollm2 --nvme 1GiB < CHANGELOG.md[/]

    The last one, a second time, has its prompt from NVMe.
    """
    with reported():
        params = sampling.params()
        texts = prompts or [_standard_input()]
        with loaded_engine(engine_options.engine_config(model)) as engine:
            started = time.monotonic()
            completions = engine.generate([_prompt(text, use_chat) for text in texts], params, **cache.of_request())
            elapsed_s = time.monotonic() - started
        for text, completion in zip(texts, completions, strict=True):
            _show(text, completion, None if len(texts) > 1 else elapsed_s, as_json)


def _prompt(text: str, use_chat: bool) -> Prompt:
    if not use_chat:
        return text
    message: dict[str, object] = {"role": "user", "content": text}
    return [message]


def _standard_input() -> str:
    if sys.stdin.isatty():
        messages().print("[dim]no PROMPT given: type one, then Ctrl-D[/]")
    text = sys.stdin.read()
    if not text:
        raise InvalidRequest("PROMPT: none was given and stdin is empty")
    return text


def _show(prompt: str, completion: Completion, elapsed_s: float | None, as_json: bool) -> None:
    """`elapsed_s` is None where several prompts ran together: each gets a heading then, and has no speed of its own."""
    if as_json:
        fields = dataclasses.asdict(completion)
        del fields["usage"]
        typer.echo(json.dumps({"prompt": prompt, **fields}, ensure_ascii=False))
        return
    if elapsed_s is None:
        messages().print(repr(prompt[:70]), style="bold", markup=False)
    typer.echo(completion.text)
    messages().print(f"[dim]{cost_line(completion.usage, elapsed_s)}[/]")
