"""Chat templates: messages to prompt text, as Hugging Face transformers renders them.

Owns the sandbox and its bounds. Knows no token ids. A template comes with the model folder, so the operator chose it;
messages come from clients. Bounded are time and steps of loops and macros, the text printed and the strings built by
operators; a single call of a filter or string method runs to its end. Rendered from any thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from kvtier.errors import CheckpointError, InvalidRequest

MESSAGES_MAX = 10_000
MESSAGE_DEPTH_MAX = 16
NUMBER_BITS_MAX = 4096
_METER = "kvtier_meter"


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one rendering may use; beyond it the request is refused."""

    characters_max: int = 16_000_000
    """Characters printed, and of any string made by `+`, `~` or `*`."""
    steps_max: int = 1_000_000
    """Rounds of loops and calls of macros."""
    render_s: float = 5.0


class ChatTemplate:
    """A compiled template. `render` may be called from several threads at once."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, limits: RenderLimits | None = None
    ) -> None:
        """`special_tokens` ("bos_token" -> text) are variables of `source`. Raises CheckpointError if it has errors."""
        self._limits = limits or RenderLimits()
        self._variables = dict(special_tokens or {})
        try:
            self._template = _Environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(f"chat template: cannot be compiled: {error}") from None

    @classmethod
    def load(
        cls, folder: Path, config: Mapping[str, object], special_tokens: Mapping[str, str], limits: RenderLimits
    ) -> ChatTemplate | None:
        """The default template of a model folder whose tokenizer_config.json holds `config`; None if there is none.

        `chat_template.jinja` goes before `config["chat_template"]`, which is one text or a list of named ones. Raises
        CheckpointError if either is broken.
        """
        source = config.get("chat_template")
        if isinstance(source, list):
            named = {item.get("name"): item.get("template") for item in source if isinstance(item, Mapping)}
            source = named.get("default")
        path = folder / "chat_template.jinja"
        if not path.is_file():
            path = folder / "additional_chat_templates" / "default.jinja"
        if path.is_file():
            try:
                source = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path}: cannot be read: {error}") from None
        if source is None:
            return None
        if not isinstance(source, str):
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'}: chat_template must be text, or a list of named texts"
            )
        return cls(source, special_tokens, limits)

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """Prompt text of a conversation, ending where the assistant's next message begins.

        Raises InvalidRequest for malformed messages, with the template's own words if it rejects them, and if a limit
        is passed.
        """
        meter = _Meter(self._limits)
        variables = {**self._variables, "tools": None, "documents": None, "add_generation_prompt": True, _METER: meter}
        try:
            return "".join(self._template.generate(messages=checked_messages(messages), **variables))
        except InvalidRequest:
            raise
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"chat: the template rejects the messages: {error.message or error}") from None
        except Exception as error:  # templates run any expression, so any exception: none of them is ours
            raise InvalidRequest(f"chat: the template fails on the messages: {type(error).__name__}: {error}") from None


def checked_messages(messages: object) -> list[dict[str, object]]:
    """Copy a conversation into plain data: keys with None left out, lists of text parts joined by newlines.

    Raises InvalidRequest naming the message unless each is an object with a text `role` and a text `content` (which
    may be missing beside `tool_calls`).
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest("messages: must be a list of at least one message")
    if len(messages) > MESSAGES_MAX:
        raise InvalidRequest(f"messages: at most {MESSAGES_MAX}, got {len(messages)}")
    return [_checked_message(f"messages[{position}]", message) for position, message in enumerate(messages)]


def _checked_message(name: str, message: object) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{name}: must be an object with role and content, got {type(message).__name__}")
    plain = {str(key): _plain(name, value, MESSAGE_DEPTH_MAX) for key, value in message.items() if value is not None}
    if not isinstance(plain.get("role"), str) or not plain["role"]:
        raise InvalidRequest(f"{name}.role: must be text such as user, got {_shown(plain.get('role'))}")
    content = plain.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if not content or len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(f'{name}.content: must be text or a list of {{"type": "text", "text": ...}} parts')
        plain["content"] = "\n".join(str(text) for text in texts)
    elif not isinstance(content, str) and not (content is None and plain.get("tool_calls")):
        raise InvalidRequest(f"{name}.content: must be text, got {_shown(content)}")
    return plain


def _plain(name: str, value: object, depth: int) -> object:
    """`value` rebuilt of exact JSON types, so that nothing with methods of its own enters the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth == 0:
        raise InvalidRequest(f"{name}: nested deeper than {MESSAGE_DEPTH_MAX}")
    if isinstance(value, Mapping):
        return {str(key): _plain(name, item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(name, item, depth - 1) for item in value]
    raise InvalidRequest(f"{name}: must hold plain JSON values, got {type(value).__name__}")


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)[:80]


class _Meter:
    """What one rendering has used so far."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._steps = 0
        self._characters = 0
        self._deadline_s = time.monotonic() + limits.render_s

    def step(self) -> None:
        self._steps += 1
        if self._steps > self._limits.steps_max:
            raise InvalidRequest(f"chat: the template takes more than {self._limits.steps_max} steps on these messages")
        if time.monotonic() > self._deadline_s:
            raise InvalidRequest(f"chat: the template takes longer than {self._limits.render_s:g} s on these messages")

    def printed(self, characters: int) -> None:
        self._characters += characters
        self.built(self._characters)

    def built(self, characters: int) -> None:
        if characters > self._limits.characters_max:
            raise InvalidRequest(f"chat: the template makes more than {self._limits.characters_max} characters")


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says, for training: here its body is printed as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with what chat templates expect, and a meter on loops, macros, printing and string building."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_print)
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        result = _Instrument().visit(template)
        assert isinstance(result, nodes.Template)
        return result

    def step(self, context: Context) -> None:
        """Called at the start of every loop round and macro."""
        _meter(context).step()

    def join(self, context: Context, values: Sequence[object]) -> str:
        """The `~` operator."""
        texts = [str(value) for value in values]
        _meter(context).built(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """The operators that can make something big of something small."""
        meter = _meter(context)
        if operator == "+" and isinstance(left, (str, list)) and isinstance(right, (str, list)):
            meter.built(len(left) + len(right))
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                    meter.built(len(sequence) * count)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > NUMBER_BITS_MAX:
                raise InvalidRequest(f"chat: the template makes a number of more than {NUMBER_BITS_MAX} bits")
        return super().call_binop(context, operator, left, right)


class _Instrument(NodeTransformer):
    """Rewrites a parsed template so that loops, macros and `~` go through the environment's meter."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (jinja's visitor names)
        return self._stepped(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._stepped(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._stepped(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("join", nodes.List(node.nodes)).set_lineno(node.lineno, override=True)

    def _stepped(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        step = nodes.ExprStmt(_call("step")).set_lineno(node.lineno, override=True)
        node.body.insert(0, step)
        return node


def _call(method: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), [nodes.ContextReference(), *arguments], [], None, None)


def _meter(context: Context) -> _Meter:
    meter = context.parent[_METER]
    assert isinstance(meter, _Meter)
    return meter


@jinja2.pass_context
def _print(context: Context, value: object) -> object:
    if isinstance(value, str):
        _meter(context).printed(len(value))
    return value


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: unlike jinja2's own filter it escapes no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
