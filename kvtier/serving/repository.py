"""A model repository with `--set` overrides: a copy of its configs with parameters added, everything else symlinked.

Pure file work; knows neither server nor engine. The version folders stay the originals, so relative paths in
engine.yaml keep their meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kvtier.config import PATH_KEYS
from kvtier.serving.errors import ServingError

ENGINE_FILE = "engine.yaml"


def models_of(repository: Path) -> list[str]:
    """Names of the models in a repository that run our engine (they carry an engine.yaml in a version folder).

    Raises ServingError if the repository is not a folder or holds no model at all.
    """
    if not repository.is_dir():
        raise ServingError(f"--model-repository: {repository} is not a folder")
    folders = [item for item in sorted(repository.iterdir()) if (item / "config.pbtxt").exists()]
    if not folders:
        raise ServingError(f"--model-repository: no model (NAME/config.pbtxt) in {repository}")
    return [item.name for item in folders if any(item.glob(f"[0-9]*/{ENGINE_FILE}"))]


def overlay(repository: Path, overrides: Mapping[str, str], target: Path) -> Path:
    """Make `target` a repository like `repository` whose engines get `overrides`; returns `target`.

    Relative paths among the overrides are taken from the working directory.
    """
    engines = models_of(repository)
    if not engines:
        raise ServingError(f"--set: no model in {repository} has an {ENGINE_FILE}")
    parameters = "".join(_parameter(key, value) for key, value in overrides.items())
    for model in repository.iterdir():
        if model.name not in engines:
            _link(model, target)
            continue
        for item in model.iterdir():
            if item.name == "configs":
                for config in item.glob("*.pbtxt"):
                    _extend(config, target / model.name / item.name, parameters)
            elif item.name == "config.pbtxt":
                _extend(item, target / model.name, parameters)
            else:
                _link(item, target / model.name)
    return target


def _parameter(key: str, value: str) -> str:
    if key in PATH_KEYS:
        value = str(Path(value).expanduser().absolute())
    return f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(value)} }} }}\n"


def _extend(config: Path, folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / config.name).write_text(config.read_text() + "\n" + text)


def _link(item: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / item.name).symlink_to(item.resolve())
