"""engine.yaml: sizes, overrides, paths, and errors that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.byte_text import parse_bytes
from kvtier.config import EngineConfig
from kvtier.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("2kb", 2000), (4096, 4096), ("0", 0), (0.5, 0.5), ("0.9", 0.9)],
)
def test_sizes_are_bytes_or_a_share(text: object, value: float) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["12 MoB", "MiB", "-1", "1.5", 1.5, True, "nan", None, [1], "1e3", 2**60])
def test_anything_else_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match=r"size|share"):
        parse_bytes(text)


def test_overrides_by_dotted_key_win_and_text_is_read_as_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("model: weights\nblock_tokens: 16\ntiers: {hbm: {bytes: 1MiB}}\n")
    config = EngineConfig.load(path, {"block_tokens": "64", "tiers.hbm.bytes": "2MiB", "tiers.nvme.path": None})
    assert config.block_tokens == 64
    assert config.tiers.hbm.bytes == 2 << 20
    assert config.model == tmp_path / "weights"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"tiers.hbm.byte": 1}, ["tiers.hbm.byte: no such key; did you mean tiers.hbm.bytes?"]),
        ({"tier.hbm.bytes": 1}, ["tier: no such key; did you mean tiers?"]),
        ({"hbm.bytes": 1}, ["hbm: no such key; did you mean tiers.hbm?"]),
        ({"scheduler.wait_s": 1}, ["scheduler.wait_s: no such key; did you mean tiers.nvme.wait_s?"]),
        ({"tenant_bytes": 1}, ["did you mean tiers.dram.tenant_bytes or tiers.nvme.tenant_bytes?"]),
        ({"tiers.hbm.zzz": 1}, ["tiers.hbm.zzz: no such key; known here: tiers.hbm.bytes"]),
        ({"blocks": 1}, ["blocks: no such key"]),
        ({"block_tokens": 7}, ["block_tokens", "16", "7"]),
        ({"tiers.hbm.bytes": "12 MoB"}, ["tiers.hbm.bytes", "MiB", "12 MoB"]),
        ({"tiers.nvme.bytes": "1GiB"}, ["tiers.nvme.path", "needed"]),
        ({"tiers.dram.tenant_bytes": 0.5}, ["tiers.dram.tenant_bytes", "not a share"]),
        ({"tiers.nvme.write_bytes_day": "-1"}, ["tiers.nvme.write_bytes_day", "size"]),
        ({"tiers.pin_share": 1.5}, ["tiers.pin_share", "1"]),
        ({"scheduler.step_tokens": 0}, ["scheduler.step_tokens", "1", "0"]),
        ({"device": "gpu"}, ["device", "cpu, cuda", "'gpu'"]),
        ({"dtype": "int4"}, ["dtype", "bfloat16", "int4"]),
        ({"model.x": 1}, ["model.x"]),
    ],
)
def test_errors_name_key_limit_and_value(overrides: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(None, {"model": "/m"} | overrides)
    for part in parts:
        assert part in str(caught.value)


def test_paths_are_told_without_the_way_that_led_there(tmp_path: Path) -> None:
    folder = tmp_path / "repository/m/1"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    text = "model: ../../../weights\ntiers: {nvme: {bytes: 1MiB, path: ../../../cache/../kv}}\n"
    (folder / "engine.yaml").write_text(text)
    for given in (folder, tmp_path / "link"):
        config = EngineConfig.load(given / "engine.yaml")
        assert config.model == tmp_path.resolve() / "weights"
        assert config.tiers.nvme.path == tmp_path.resolve() / "cache/../kv", "cache may be a symlink"


def test_files_that_are_no_configuration_are_refused(tmp_path: Path) -> None:
    for text in ("- a\n", "a: [\n", "just text"):
        path = tmp_path / "engine.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"engine\.yaml"):
            EngineConfig.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        EngineConfig.load(tmp_path / "missing.yaml")
