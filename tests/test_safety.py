"""Nothing that runs bytes as code, and no network but where it is the purpose: a walk over the tree's syntax.

Looks at what names mean (imports and their aliases resolved), used in a call or not. What is allowed against a rule is
listed with its reason, and an entry that is not needed any more fails as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [
    path
    for folder in ("kvtier", "model_repository", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ".venv" not in path.parts
]

DESERIALIZERS = "pickle cPickle _pickle dill cloudpickle joblib marshal shelve dbm jsonpickle copyreg multiprocessing"
CODE = (
    "eval exec compile __import__ code codeop runpy imp importlib.import_module importlib.util os.system os.popen pty"
)
LOADERS = (
    "torch.load torch.jit torch.hub torch.package torch.serialization numpy.load numpy.fromregex pandas.read_pickle "
    "yaml.load yaml.load_all yaml.unsafe_load yaml.unsafe_load_all yaml.full_load yaml.full_load_all yaml.Loader "
    "yaml.UnsafeLoader yaml.FullLoader yaml.CLoader jinja2.Template jinja2.Environment "
    "jinja2.sandbox.SandboxedEnvironment"
)
SHELLS = "subprocess.getoutput subprocess.getstatusoutput subprocess.check_output os.execvp commands"
NETWORK = (
    "socket socketserver http urllib ssl asyncio requests httpx aiohttp grpc tritonclient ftplib smtplib "
    "telnetlib xmlrpc wsgiref websockets zmq paramiko huggingface_hub"
)
SHARED_PLACES = "tempfile.mktemp tempfile.gettempdir"
FORBIDDEN = frozenset(" ".join([DESERIALIZERS, CODE, LOADERS, SHELLS, NETWORK, SHARED_PLACES]).split())

UNIX = "the keeper's Unix socket in the cache directory"
SERVED = "talks to the Triton server that it has started, on this machine"
ALLOWED = {
    ("kvtier/keeper/client.py", "socket"): UNIX,
    ("kvtier/keeper/connection.py", "socket"): UNIX,
    ("kvtier/keeper/operator_line.py", "socket"): UNIX,
    ("kvtier/keeper/server.py", "socket"): UNIX,
    ("kvtier/keeper/spawn.py", "socket"): UNIX,
    ("kvtier/client.py", "tritonclient"): "the gRPC client is its purpose; no engine imports it",
    ("kvtier/serving/http.py", "http"): SERVED,
    ("kvtier/serving/server.py", "socket"): "finds free ports on this machine for the server that it starts",
    (
        "scripts/bench/transformers_run.py",
        "importlib.import_module",
    ): "a fixed name, only there when it is compared with",
    ("scripts/make_venv.py", "importlib.util"): "looks whether a module is there",
    ("scripts/sanitize.py", "importlib.util"): "loads the build of the native module that it has made itself",
}


def uses(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every dotted name that is imported or mentioned, as what it means: `t.load` after `import torch as t`."""
    meaning: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                meaning[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                meaning[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}", node
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            dotted = _dotted(node)
            if dotted is not None:
                first, _, rest = dotted.partition(".")
                known = meaning.get(first, first)
                yield f"{known}.{rest}" if rest else known, node


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return None if inner is None else f"{inner}.{node.attr}"
    return None


def offences(source: str) -> set[str]:
    """Rules that a source breaks, by the name that does."""
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imports = {name.split(".")[0] for name, node in uses(tree) if isinstance(node, (ast.Import, ast.ImportFrom))}
    found: set[str] = set()
    for name, _ in uses(tree):
        parts = name.split(".")
        if parts[0] in own and parts[0] not in imports:
            continue
        found |= {rule for end in range(1, len(parts) + 1) if (rule := ".".join(parts[:end])) in FORBIDDEN}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found |= {f"{word.arg}=" for word in node.keywords if word.arg in ("shell", "allow_pickle")}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_unsafe_is_used(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    assert offences(path.read_text()) == {rule for file, rule in ALLOWED if file == name}


def test_every_exception_is_of_a_file_that_is_there() -> None:
    assert {file for file, _ in ALLOWED} <= {str(path.relative_to(ROOT)) for path in SOURCES}


def test_engine_and_keeper_make_no_socket_but_unix_ones() -> None:
    families = set()
    for path in (ROOT / "kvtier" / "keeper").glob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _dotted(node.func) in ("socket.socket", "socket.socketpair", "socket"):
                families.add(_dotted(node.args[0]) if node.args else None)
        assert not {name for name, _ in uses(tree)} & {"socket.AF_INET", "socket.AF_INET6", "socket.create_server"}
    assert families == {"socket.AF_UNIX"}


def test_what_engines_import_reaches_no_network_client() -> None:
    """The client and the serving tools are imported by themselves and the command line only."""
    for path in (ROOT / "kvtier").rglob("*.py"):
        inside = path.relative_to(ROOT / "kvtier").parts[0].removesuffix(".py")
        if inside not in ("client", "serving", "cli"):
            names = {name for name, node in uses(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
            assert not any(name.startswith(("kvtier.client", "kvtier.serving", "kvtier.cli")) for name in names), path


def test_the_native_module_neither_connects_nor_starts_anything() -> None:
    sources = [path for path in (ROOT / "kvtier" / "native").iterdir() if path.suffix in (".cpp", ".hpp", ".h", ".c")]
    assert sources
    for path in sources:
        assert not re.search(r"sys/socket\.h|netinet/|\b(?:system|popen|dlopen|execv\w*)\s*\(", path.read_text()), path


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads as read", "pickle"),
        ("def late():\n    import marshal as m", "marshal"),
        ("import torch as t\nt.load('x')", "torch.load"),
        ("from torch import load\nload('x')", "torch.load"),
        ("import torch\nreader = torch.load", "torch.load"),
        ("import numpy as np\nnp.load('x')", "numpy.load"),
        ("import yaml\nyaml.load(text, Loader=yaml.Loader)", "yaml.load"),
        ("import yaml\nyaml.load_all(text, yaml.UnsafeLoader)", "yaml.UnsafeLoader"),
        ("eval('1')", "eval"),
        ("run = exec", "exec"),
        ("__import__('os')", "__import__"),
        ("import os\nos.system('ls')", "os.system"),
        ("from os import popen", "os.popen"),
        ("import subprocess\nsubprocess.run('ls', shell=True)", "shell="),
        ("from subprocess import Popen\nPopen(text, shell=flag)", "shell="),
        ("import socket\nsocket.socket(socket.AF_INET)", "socket"),
        ("from http.server import HTTPServer", "http"),
        ("import urllib.request", "urllib"),
        ("from multiprocessing.shared_memory import SharedMemory", "multiprocessing"),
        ("from jinja2 import Environment", "jinja2.Environment"),
    ],
)
def test_each_way_round_a_rule_is_seen(source: str, rule: str) -> None:
    assert rule in offences(source)


@pytest.mark.parametrize(
    "source",
    ["import re\nre.compile('x')", "model.eval()", "def load(): ...\nload()", "import yaml\nyaml.safe_load(text)"],
)
def test_what_only_looks_alike_is_no_offence(source: str) -> None:
    assert not offences(source)
