"""What is written about the code elsewhere agrees with it: README's table, lock file, Dockerfile, links."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from kvtier import __version__
from kvtier.config import EngineConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object, object]]:
    """(dotted key, default, type) of every key of engine.yaml, in order."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys_of(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.default, field.annotation


def shown(default: object) -> str:
    return "needed" if default is PydanticUndefined else "`none`" if default is None else f"`{default}`"


def test_readmes_table_holds_every_key_with_its_default() -> None:
    table = README[README.index("## Configuration") :]
    rows = re.findall(r"^\| `([a-z_.]+)` \| (\S+) \|", table, re.MULTILINE)
    assert rows == [(key, shown(default)) for key, default, _ in keys_of(EngineConfig)]


def test_readmes_table_names_every_choice() -> None:
    for key, _, annotation in keys_of(EngineConfig):
        choices = get_args(annotation) if "Literal" in str(get_origin(annotation)) else ()
        [row] = [line for line in README.splitlines() if line.startswith(f"| `{key}` |")]
        for choice in choices:
            assert f"`{choice}`" in row.split("|", 3)[3], f"{key}: {choice} is not explained"


def locked() -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "requirements.lock").read_text().splitlines())
    return [Requirement(line) for line in lines if line]


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12"])
def test_the_lock_pins_each_package_once_for_each_python(version: str) -> None:
    environment = {"python_version": version, "python_full_version": f"{version}.4"}
    pins = [pin for pin in locked() if pin.marker is None or pin.marker.evaluate(environment)]
    names = [canonicalize_name(pin.name) for pin in pins]
    assert sorted(set(names)) == sorted(names)
    assert all(re.fullmatch(r"==[^*+]+", str(pin.specifier)) for pin in pins)
    by_name = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = [*PYPROJECT["project"]["dependencies"], *extras["client"], *extras["dev"]]
    for requirement in map(Requirement, [*wanted, *PYPROJECT["build-system"]["requires"]]):
        assert requirement.specifier.contains(by_name[canonicalize_name(requirement.name)]), requirement


def test_the_lock_is_complete() -> None:
    """Whatever a locked package needs on this Python is locked, too; torch alone brings its CUDA libraries itself."""
    pins = {canonicalize_name(pin.name): pin for pin in locked() if pin.marker is None or pin.marker.evaluate()}
    for name, pin in pins.items():
        for line in importlib.metadata.requires(name) or []:
            needed = Requirement(line)
            extras = pin.extras or {""}
            if name == "torch" or not any(
                needed.marker is None or needed.marker.evaluate({"extra": e}) for e in extras
            ):
                continue
            assert canonicalize_name(needed.name) in pins, f"{name} needs {needed}"


def dockerfile() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def test_what_the_dockerfile_copies_is_there_and_reaches_docker() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    sources = [
        source
        for verb, rest in dockerfile()
        if verb == "COPY" and not rest.startswith("--from=")
        for source in rest.split()[:-1]
    ]
    assert {"kvtier", "model_repository", "pyproject.toml", "requirements.lock"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        ignored = False
        for rule in rules:
            if fnmatch.fnmatch(source, rule.removeprefix("!")):
                ignored = not rule.startswith("!")
        assert not ignored, f".dockerignore keeps {source} out"


def test_the_container_runs_as_an_ordinary_user_with_a_volume() -> None:
    last_stage = dockerfile()[max(i for i, (verb, _) in enumerate(dockerfile()) if verb == "FROM") :]
    verbs = dict(last_stage)
    assert verbs["USER"] not in ("root", "0")
    assert verbs["VOLUME"] == "/cache" and "chmod -R a-w" in dict(reversed(last_stage))["RUN"] + verbs["RUN"]
    assert "kvtier.cli.serve" in verbs["ENTRYPOINT"]
    assert "g++" not in " ".join(rest for _, rest in last_stage)


def test_without_a_compiler_the_package_is_built_in_pure_python(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "kvtier", tmp_path / "kvtier", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(tmp_path)]
    nothing = {"CC": shutil.which("false") or "", "CXX": shutil.which("false") or ""}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | nothing)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as packed:
        there = {name for name in packed.namelist() if name.endswith(".py")}
    assert there == {str(path.relative_to(ROOT)) for path in (ROOT / "kvtier").rglob("*.py")}


def test_versions_agree() -> None:
    assert PYPROJECT["project"]["version"] == __version__
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_files_that_exist(path: Path) -> None:
    text = path.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    named = re.findall(r"`((?:scripts|docs|tests|model_repository|kvtier)/[\w./]*\w)`", text)
    for name in [*links, *named]:
        base = path.parent if name in links else ROOT
        assert (base / name).exists(), f"{path.name} names {name}"


def test_architecture_names_every_module_of_the_package() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    modules = {path.name.removesuffix(".py") for path in (ROOT / "kvtier").iterdir() if path.suffix in ("", ".py")}
    for module in sorted(modules - {"__init__", "__pycache__"}):
        assert re.search(rf"`{module}/?`", text), f"{module} is missing in docs/ARCHITECTURE.md"
