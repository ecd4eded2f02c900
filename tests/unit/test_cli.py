"""The `kvtier` command over a tiny real checkpoint: what goes to stdout and stderr, and how it ends."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
from tiny import make_checkpoint
from typer.testing import CliRunner, Result

from kvtier import __version__
from kvtier.cli.main import app
from kvtier.cli.smoke import address_of
from kvtier.cli.terminal import cost_line
from kvtier.client import Client
from kvtier.errors import KvtierError
from kvtier.request import Origin, Usage

SMALL = ["--hbm", "1MiB", "--dram", "1MiB", "--dtype", "float32", "--set", "block_tokens=16", "--set", "threads=1"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cli") / "model", tokenizer=True)


def run(*arguments: object, stdin: str = "") -> Result:
    result = CliRunner().invoke(app, [str(item) for item in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def objects(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_version_is_the_packages() -> None:
    assert run("--version").stdout == f"kvtier {__version__}\n"


@pytest.mark.parametrize("command", ["chat", "generate", "plan", "smoke"])
def test_help_teaches_every_command_with_examples(command: str) -> None:
    assert command in run("--help").stdout
    text = run(command, "--help").stdout
    assert "Examples:" in text and text.count(f"kvtier {command}") >= 2


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Every command below one, by what is typed for it."""
    below = getattr(command, "commands", {})
    if not below:
        yield name, command
    for word, inner in below.items():
        yield from commands(f"{name} {word}", inner)


COMMANDS = dict(commands("kvtier", typer.main.get_command(app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_fit_80_columns_and_their_options_exist(name: str) -> None:
    command = COMMANDS[name]
    lines = [line for line in command.help.splitlines() if "[bold]" in line]
    assert len(lines) >= 2
    for line in lines:
        shown = line.replace("[bold]", "").replace("[/]", "")
        assert len(shown) <= 78 and name in shown
    for example in re.findall(r"\[bold\](.*?)\[/\]", command.help, re.DOTALL):
        lexer = shlex.shlex(example.replace("\\\n", " "), posix=True, punctuation_chars="|&<")
        lexer.whitespace_split = True
        words = list(lexer)
        typed = itertools.takewhile(lambda word: word not in ("|", "&&", "<"), words[words.index("kvtier") :])
        arguments = list(typed)[len(name.split()) :]
        command.make_context(name, arguments)  # refuses what it does not know


def test_every_option_says_what_it_is_for() -> None:
    for name, command in COMMANDS.items():
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name}: {parameter.name}"


def test_generate_completes_several_prompts_as_json_lines(checkpoint: Path) -> None:
    answers = objects(run("generate", checkpoint, "the sea", "an island", "--json", "--max-tokens", 5, *SMALL))
    assert [answer["prompt"] for answer in answers] == ["the sea", "an island"]
    for answer in answers:
        assert set(answer) == {
            "prompt",
            "text",
            "token_ids",
            "finish_reason",
            "prompt_token_count",
            "origin",
            "ttft_s",
        }
        assert sum(answer["origin"].values()) == answer["prompt_token_count"]  # type: ignore[attr-defined]


def test_generate_reads_stdin_and_keeps_costs_out_of_stdout(checkpoint: Path) -> None:
    options = ["--max-tokens", 6, "--temperature", 0, *SMALL]
    piped = run("generate", checkpoint, *options, stdin="the sea")
    [answer] = objects(run("generate", checkpoint, "the sea", "--json", *options))
    assert piped.stdout == f"{answer['text']}\n"
    assert "tokens in (computed" in piped.stderr


def test_generate_with_chat_puts_the_template_around_the_prompt(checkpoint: Path) -> None:
    options = ["--json", "--max-tokens", 1, *SMALL]
    [plain] = objects(run("generate", checkpoint, "hello", *options))
    [chat] = objects(run("generate", checkpoint, "hello", "--chat", *options))
    assert chat["prompt_token_count"] > plain["prompt_token_count"]  # type: ignore[operator]


@pytest.mark.parametrize(("sharing", "tier"), [("false", "nvme"), ("true", "dram")])
def test_a_shelf_is_warm_for_the_next_command(checkpoint: Path, tmp_path: Path, sharing: str, tier: str) -> None:
    text = "the sea and the island and the rain " * 6
    options = ["--json", "--max-tokens", 2, *SMALL, "--nvme", "8MiB", "--cache-dir", tmp_path / "kv"]
    options += ["--set", f"sharing={sharing}", "--set", "tiers.linger_s=20", "--set", "tiers.load=always"]
    options += ["--set", "tiers.nvme.wait_s=60"]
    [first] = objects(run("generate", checkpoint, text, *options))
    [second] = objects(run("generate", checkpoint, text, *options))
    assert first["origin"][tier] == 0
    assert second["origin"][tier] >= 32
    assert second["text"] == first["text"]


def test_what_becomes_of_the_blocks_can_be_said_on_the_command_line(checkpoint: Path) -> None:
    text = "the sea and the island and the rain " * 3
    same = [
        "generate",
        checkpoint,
        text,
        text,
        "--json",
        "--max-tokens",
        1,
        *SMALL,
        "--set",
        "scheduler.sequences_max=1",
        "--set",
        "sharing=false",
    ]
    reused = [answer["origin"]["hbm"] for answer in objects(run(*same))]
    assert reused[0] == 0 < reused[1]
    for refused in (["--no-cache-read"], ["--no-cache-write"]):
        assert [answer["origin"]["hbm"] for answer in objects(run(*same, *refused))] == [0, 0]
    kept = ["--cache-salt", "s", "--cache-tenant", "t", "--cache-priority", "5", "--cache-ttl", 60, "--cache-pin"]
    assert [answer["origin"]["hbm"] for answer in objects(run(*same, *kept))] == reused
    piped = run("chat", checkpoint, "--max-tokens", 4, "--system", text, "--no-cache-read", *SMALL, stdin="hi\nhi\n")
    assert piped.exit_code == 0 and piped.stderr.count("tokens in (computed") == 2


def test_a_piped_chat_answers_line_by_line_and_finds_its_history_again(checkpoint: Path) -> None:
    options = ["--max-tokens", 4, "--temperature", 0, "--system", "Speak of the rain, the sea and the island.", *SMALL]
    result = run("chat", checkpoint, *options, stdin="hello there\n\nand then?\n/reset\nhello there\n/quit\nnot read\n")
    assert result.exit_code == 0, result.output
    costs = [line for line in result.stderr.splitlines() if "tokens in" in line]
    first, second, after_reset = (int(line.split()[0]) for line in costs)
    assert second > first + 10 and after_reset == first, "the history was not sent, or not forgotten"
    assert "HBM" not in costs[0] and "HBM" in costs[1] and "HBM" in costs[2]
    again = run("chat", checkpoint, *options, stdin="hello there\n")
    assert result.stdout.startswith(again.stdout) and result.stdout.endswith(again.stdout)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["smollm2", "x"], "smollm2: no such folder; a model is given as the path of a Hugging Face folder"),
        (["MODEL", "x", "--temperature", "nan"], "temperature: must be a finite number"),
        (["MODEL", "x", "--max-tokens", "0"], "max_tokens: must be from 1"),
        (["MODEL", "x", "--hbm", "lots"], "tiers.hbm.bytes: is a size such as 512MiB"),
        (["MODEL", "x", "--set", "tiers.hmb.bytes=1MiB"], "did you mean tiers.hbm?"),
        (["MODEL", "x", "--set", "nonsense"], "KEY=VALUE"),
        (["MODEL", "x " * 2000, *SMALL], "context"),
        (["MODEL", "x", "--cache-ttl", "0", *SMALL], "cache_ttl_s: must be from 1 to 31536000, got 0"),
        (["MODEL", "x", "--cache-pin", "--no-cache-write", *SMALL], "cache_pin: is for blocks that are kept, got True"),
        (["MODEL"], "PROMPT"),
    ],
)
def test_a_users_mistake_is_one_message_and_status_2(checkpoint: Path, arguments: list[str], words: str) -> None:
    result = run("generate", *[checkpoint if item == "MODEL" else item for item in arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.output and not result.stdout


def test_chat_needs_a_chat_template(tmp_path: Path) -> None:
    result = run("chat", make_checkpoint(tmp_path / "model"), *SMALL, stdin="hello\n")
    assert result.exit_code == 2 and "chat template" in " ".join(result.stderr.split())


def test_smoke_says_that_nobody_answers() -> None:
    with socket.socket() as held:
        held.bind(("localhost", 0))
        address = f"localhost:{held.getsockname()[1]}"
        result = run("smoke", address, "--timeout", 2, "--model", "llama")
    assert result.exit_code == 1 and not result.stdout
    told = " ".join(result.stderr.split())
    assert told.startswith(f"error: asked {address} for the configuration of model llama: nobody answers (")
    assert "is a Triton server running there, and is this its gRPC port, 8001 unless" in told
    assert "ipv4:" not in told and "StatusCode" not in told


@pytest.mark.parametrize(
    ("status", "text", "told"),
    [
        (
            "StatusCode.UNAVAILABLE",
            "failed to connect; last error: UNKNOWN: ipv4:127.0.0.1:1: refused",
            "(refused); is",
        ),
        (
            "StatusCode.UNAVAILABLE",
            "errors: [field:lookup error: Domain name not found]",
            "(Domain name not found); is",
        ),
        ("StatusCode.DEADLINE_EXCEEDED", "Deadline Exceeded", "none within 2 s; give it longer"),
        ("StatusCode.NOT_FOUND", "Request for unknown model: 'm' is not found", "it does not serve that model"),
        ("StatusCode.UNIMPLEMENTED", "Received http2 header: 404", "what answers is no Triton server's gRPC port (Rec"),
        (None, "unexpected shape for input 'stream'", "for an answer of model m: unexpected shape for input 'stream'"),
        (None, "INVALID_ARGUMENT: top_p: must be above 0", "top_p: must be above 0"),
    ],
)
def test_the_client_says_what_it_asked_whom_and_what_to_do(status: str | None, text: str, told: str) -> None:
    with mock.patch("tritonclient.grpc.InferenceServerClient") as connection:
        connection.return_value.get_model_config.return_value.config.max_batch_size = 1
        error = mock.Mock(message=lambda: text, status=lambda: status)
        found = Client("gpu7:8001", "m")._explained(error, "an answer", 2.0)
    assert told in str(found)
    assert found.status == ("INVALID_ARGUMENT" if "INVALID" in text else (status or "UNKNOWN").rpartition(".")[2])
    assert str(found).startswith("top_p" if "INVALID" in text else "asked gpu7:8001 for an answer of model m: ")


@pytest.mark.parametrize("url", ["http://localhost:8000", "localhost", "localhost:grpc", ":8001"])
def test_smoke_wants_a_grpc_address(url: str) -> None:
    result = run("smoke", url)
    assert result.exit_code == 1 and "HOST:PORT" in " ".join(result.stderr.split())


def test_an_address_may_carry_its_scheme() -> None:
    assert address_of("grpc://gpu7:8001/") == address_of("gpu7:8001") == "gpu7:8001"
    with pytest.raises(KvtierError):
        address_of("https://gpu7:8001")


def test_a_cost_line_names_only_the_origins_there_are() -> None:
    usage = Usage(96, 11, Origin(hbm=64, nvme=32), 3, 1, 0.5)
    assert cost_line(usage, 1.5) == "96 tokens in (HBM 64, NVMe 32) · 11 out · first after 0.50 s · 10 tokens/s"
    assert cost_line(usage, None).endswith("first after 0.50 s")
    assert cost_line(Usage(1, 1, Origin(computed=1), 0, 1, 0.5), None).startswith("1 token in (computed 1) · 1 out")
