"""Chat templates: transformers' text, clients' nonsense refused, runaway templates stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.errors import CheckpointError, InvalidRequest
from kvtier.tokens import ChatTemplate, RenderLimits, Tokenizer, checked_messages
from tests.own_time import own_time
from tests.tiny import make_tokenizer

SMOLLM2 = Path(__file__).parents[2] / ".cache" / "models" / "smollm2"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = [{"role": "user", "content": " Hi <b> & “you”\n"}]
CHAT = [{"role": "system", "content": "Be short."}, *USER, {"role": "assistant", "content": "Hello."}, *USER]
LIMITS = RenderLimits(characters_max=10_000, steps_max=10_000, render_s=60.0)

LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{% set system = messages[0].content %}{% else %}{% set loop_messages = messages %}{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message.role == 'user' %}{{ bos_token ~ '[INST] ' ~ message['content'] | trim ~ ' [/INST]' }}
    {%- elif message.role == 'assistant' %}{{ ' ' + message.content.strip() + ' ' + eos_token }}{% endif %}
{% endfor %}"""
TEMPLATES = {
    "llama2": LLAMA2,
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages[-1] | tojson(sort_keys=true) }}",
    "loop": "{% for m in messages %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}"
    "{% if loop.index == 2 %}{% break %}{% endif %}{% else %}none{% endfor %}{{ missing }}{{ tools is none }}",
    "macro": "{% macro one(m, x='y') %}[{{ m.role }}{{ x }}{{ caller() if caller }}]{% endmacro %}"
    "{% for m in messages %}{{ one(m) }}{% call one(m, x=loop.index) %}in{% endcall %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, s='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.s = ns.s ~ m.role %}{% endfor %}{{ ns.n * 2 }}{{ ns.s }}{{ '-' * 3 }}{{ [1] + [2] }}{{ 2 ** 5 }}",
    "generation": "{% for m in messages %}{% generation %}{% set a = m.role %}{{ a }}{% endgeneration %}{{ a }}"
    "{% endfor %}",
    "recursive": "{% for a in [[1, [2, 3]], [4]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}",
    "prompt": "{{ bos_token }}{% if add_generation_prompt %}go{% endif %}{{ unk_token }}{{ strftime_now('%Y') }}",
    "blocks": "  {% if true %}\n  x\n  {% endif %}\n{% set b %}{{ messages[0].role }}!{% endset %}{{ b | upper }}\n",
}


def render(source: str, messages: object = USER, limits: RenderLimits | None = None) -> str:
    return ChatTemplate(source, SPECIAL, limits).render(messages)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    theirs.chat_template = TEMPLATES[name]
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name])
    ours = Tokenizer.load(tmp_path)
    assert ours is not None and ours.chat_template is not None
    for messages in (USER, CHAT):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.chat_template.render(messages) == expected
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(messages) == ids


@pytest.mark.smollm2
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="no SmolLM2 checkpoint: run scripts/fetch_model.py")
def test_smollm2_conversations_equal_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.load(SMOLLM2), AutoTokenizer.from_pretrained(SMOLLM2)
    assert ours is not None
    for messages in (USER, CHAT):
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(messages) == ids


def test_templates_are_found_where_model_folders_keep_them(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    config_path = tmp_path / "tokenizer_config.json"
    config = json.loads(config_path.read_text())

    def rendered(template: object) -> str | None:
        config_path.write_text(json.dumps(config | {"chat_template": template}))
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer is not None
        return tokenizer.chat_template.render(USER) if tokenizer.chat_template else None

    assert rendered("plain") == "plain"
    assert rendered([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]) == "d"
    assert rendered([{"name": "tool_use", "template": "t"}]) is None
    assert rendered(None) is None
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("{% broken")
    assert rendered("plain") == "plain"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered("plain") == "file"


def test_the_templates_own_words_reach_the_client() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render(LLAMA2, [{"role": "assistant", "content": "no"}])
    with pytest.raises(InvalidRequest, match="ZeroDivisionError"):
        render("{{ 1 / 0 }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ raise_exception.__globals__.x }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequest, match="unsafe"):
        render(source)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}", "steps"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "characters"),
        ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}", "characters"),
        ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set x %}{{ n.x }}{{ n.x }}{% endset %}"
         "{% set n.x = x %}{% endfor %}", "characters"),
        ("{{ 'a' * 10**10 }}", "characters"),
        ("{{ 10 ** 100000000 }}", "bits"),
        ("{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}", "bits"),
        ("{% for i in range(5000) %}{{ messages[0].content }}{% endfor %}", "characters"),
    ],
)  # fmt: skip
def test_runaway_templates_are_stopped(source: str, word: str) -> None:
    with own_time() as clock, pytest.raises(InvalidRequest, match=word):
        render(source, limits=LIMITS)
    assert clock.seconds < 5


def test_a_slow_template_is_stopped_by_the_clock() -> None:
    slow = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match=r"longer than 0\.05 s"):
        render(slow, limits=RenderLimits(steps_max=10**9, render_s=0.05))


def test_a_template_with_errors_is_a_broken_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="chat template: cannot be compiled"):
        ChatTemplate("{% for")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: must be a list of at least one message"),
        ("text", "messages: must be a list"),
        ({"role": "user"}, "messages: must be a list"),
        ([{"role": "user", "content": "a"}, 5], r"messages\[1\]: must be an object with role and content, got int"),
        ([{"content": "a"}], r"messages\[0\].role: must be text such as user, got nothing"),
        ([{"role": "", "content": "a"}], r"messages\[0\].role: must be text"),
        ([{"role": "user"}], r"messages\[0\].content: must be text, got nothing"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content: must be text, got 5"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content: must be text or a list of"),
        ([{"role": "user", "content": "a", "x": object()}], r"messages\[0\]: must hold plain JSON values, got object"),
        ([{"role": "user", "content": "a"}] * 10_001, "messages: at most 10000, got 10001"),
    ],
)
def test_malformed_messages_are_refused_by_name(messages: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        render("x", messages)


def test_messages_become_plain_data() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given = [
        {"role": "user", "content": parts, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{}]},
    ]
    expected = [{"role": "user", "content": "a\nb"}, {"role": "assistant", "tool_calls": [{}]}]
    assert checked_messages(given) == expected
    deep: list[object] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested deeper than 16"):
        checked_messages([{"role": "user", "content": "a", "x": deep}])
