"""ModelConfig: both spellings of every field, the families' rules, and each refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvtier.errors import CheckpointError
from kvtier.models.config import GenerationDefaults, ModelConfig
from kvtier.models.rope import DefaultRope, YarnRope
from tests.tiny import make_checkpoint


def read(folder: Path, family: str = "llama", **overrides: Any) -> ModelConfig:
    """The config of a tiny checkpoint with these fields."""
    return ModelConfig.from_folder(make_checkpoint(folder, family, **overrides))


def write_config(folder: Path, **fields: Any) -> Path:
    """A folder with a valid Llama config.json in which `fields` are replaced; no weights."""
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "vocab_size": 300,
    }
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize(
    ("family", "overrides", "head_dim"),
    [
        ("llama", {}, 16),
        ("llama", {"head_dim": None}, 16),
        ("llama", {"head_dim": 24}, 24),
        ("mistral", {"head_dim": 32}, 32),
        ("qwen2", {}, 16),
        ("qwen3", {"head_dim": 32}, 32),
    ],
)
def test_head_dim_is_explicit_or_derived(tmp_path: Path, family: str, overrides: dict[str, Any], head_dim: int) -> None:
    assert read(tmp_path, family, **overrides).head_dim == head_dim


def test_qwen3_without_head_dim_has_its_own_default(tmp_path: Path) -> None:
    assert ModelConfig.from_folder(write_config(tmp_path, model_type="qwen3")).head_dim == 128


@pytest.mark.parametrize(
    ("family", "overrides", "windows"),
    [
        ("llama", {"sliding_window": 8}, (None, None, None)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("mistral", {"sliding_window": ...}, (4096, 4096, 4096)),
        ("qwen2", {"sliding_window": 8}, (None, None, None)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8, 8, 8)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, (None, None, 8)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 9}, (None, None, None)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}, (None, None, None)),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_windows(tmp_path: Path, family: str, overrides: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(tmp_path, family, **overrides).windows == windows


def test_biases_and_norms_follow_the_family(tmp_path: Path) -> None:
    def flags(family: str, **overrides: Any) -> tuple[bool, bool, bool, bool]:
        config = ModelConfig.from_folder(write_config(tmp_path, model_type=family, **overrides))
        return config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm

    assert flags("llama") == (False, False, False, False)
    assert flags("llama", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert flags("mistral", attention_bias=True) == (False, False, False, False)
    assert flags("qwen2") == (True, False, False, False)
    assert flags("qwen3") == (False, False, False, True)
    assert flags("qwen3", attention_bias=True) == (True, True, False, True)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_transformers_saves_reads_like_what_was_written(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / "old", family, rope_scaling={"type": "linear", "factor": 2.0})
    transformers.AutoConfig.from_pretrained(folder).save_pretrained(tmp_path / "new")
    saved = json.loads((tmp_path / "new" / "config.json").read_text())
    assert "rope_parameters" in saved and "dtype" in saved  # the spelling of Transformers 5
    assert ModelConfig.from_folder(tmp_path / "new") == ModelConfig.from_folder(folder)


def test_dtype_in_both_spellings(tmp_path: Path) -> None:
    def dtype(**fields: Any) -> str | None:
        return ModelConfig.from_folder(write_config(tmp_path, **fields)).checkpoint_dtype

    assert dtype() is None
    assert dtype(torch_dtype="bfloat16") == "bfloat16"
    assert dtype(dtype="float16") == "float16"
    assert dtype(torch_dtype="auto") is None


def test_eos_is_the_union_and_generation_defaults_apply_only_when_sampling(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=2)
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == {2}
    fields = {"eos_token_id": [7, 2], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    config = ModelConfig.from_folder(tmp_path)
    assert config.eos_token_ids == {2, 7}
    assert config.generation == GenerationDefaults(repetition_penalty=1.1)
    (tmp_path / "generation_config.json").write_text(json.dumps({**fields, "do_sample": True}))
    assert ModelConfig.from_folder(tmp_path).generation == GenerationDefaults(0.6, 20, 0.9, 0.0, 1.1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repetition_penalty": 1e-300}, r"repetition_penalty is 1e-300, expected a number from 0\.01 to 100"),
        ({"repetition_penalty": 101}, r"repetition_penalty is 101, expected a number from 0\.01 to 100"),
        ({"temperature": 1e300}, r"temperature is 1e\+300, expected a number from 0 to 100"),
        ({"temperature": 10**400}, r"temperature is 10+, expected a number of at least 0"),
        ({"temperature": -1}, r"temperature is -1, expected a number of at least 0"),
        ({"top_p": 0.0}, r"top_p is 0\.0, expected a number above 0, at most 1"),
        ({"min_p": 1.5}, r"min_p is 1\.5, expected a number from 0 to 1"),
        ({"top_k": -3}, r"top_k is -3"),
    ],
)
def test_generation_defaults_beyond_what_a_request_may_ask_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, **fields}))
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {message}"):
        ModelConfig.from_folder(tmp_path)


def test_yarn_stretches_the_context_and_other_ropes_do_not(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert ModelConfig.from_folder(write_config(tmp_path, rope_scaling=yarn)).context == 2048
    linear = {"rope_type": "linear", "factor": 4.0}
    assert ModelConfig.from_folder(write_config(tmp_path, rope_scaling=linear)).context == 512


def test_architecture_is_json_and_tells_apart_what_decides_the_bytes_of_k_and_v(tmp_path: Path) -> None:
    def architecture(**fields: Any) -> str:
        return json.dumps(ModelConfig.from_folder(write_config(tmp_path, **fields)).architecture(), sort_keys=True)

    plain = architecture()
    assert architecture(eos_token_id=5, torch_dtype="float16", bos_token_id=9, _name_or_path="x") == plain
    assert architecture(rope_scaling={"type": "dynamic", "factor": 2.0}) == plain
    different: list[dict[str, Any]] = [
        {"rope_theta": 5e5},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rms_norm_eps": 1e-5},
        {"attention_bias": True},
        {"num_key_value_heads": 4},
        {"model_type": "mistral", "sliding_window": 8},
    ]
    texts = {plain} | {architecture(**fields) for fields in different}
    assert len(texts) == 1 + len(different)
    assert str(tmp_path) not in plain


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gemma3"}, r"model_type is 'gemma3', supported are llama, mistral, qwen2, qwen3"),
    ({"model_type": None}, r"model_type is None"),
    ({"architectures": ["LlamaForSequenceClassification"]}, r"architectures .*expected LlamaForCausalLM"),
    ({"auto_map": {"AutoModel": "x.Y"}}, r"auto_map .*remote code is never run"),
    ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config .*quantised .*float32, bfloat16"),
    ({"hidden_act": "gelu"}, r"hidden_act is 'gelu', only silu"),
    ({"hidden_size": "64"}, r"hidden_size is '64', expected a whole number of at least 1"),
    ({"hidden_size": None}, r"hidden_size is None, expected"),
    ({"num_hidden_layers": 0}, r"num_hidden_layers is 0"),
    ({"num_attention_heads": True}, r"num_attention_heads is True"),
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, r"num_attention_heads is 5, expected a divisor of hidden"),
    ({"num_key_value_heads": 3}, r"num_key_value_heads is 3, expected a divisor of num_attention_heads = 4"),
    ({"head_dim": 15}, r"head_dim is 15, .*even"),
    ({"rms_norm_eps": float("nan")}, r"rms_norm_eps is nan"),
    ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings is 'yes', expected true or false"),
    ({"torch_dtype": "float8_e4m3fn"}, r"torch_dtype is 'float8_e4m3fn', supported are float32"),
    ({"eos_token_id": "</s>"}, r"eos_token_id is '</s>', expected a token id"),
    ({"layer_types": ["full_attention"]}, r"layer_types .*num_hidden_layers = 3"),
    ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 8}, r"layer_types .*same attention in all layers"),
    ({"model_type": "mistral", "layer_types": ["full_attention"] * 3, "sliding_window": 8}, r"layer_types .*same"),
    (
        {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3, "num_key_value_heads": 4},
        r"use_sliding_window",
    ),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5, partial rotary"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, r"partial rotary"),
    ({"rope_interleaved": True}, r"rope_interleaved is True"),
    (
        {"rope_scaling": {"type": "longrope", "factor": 2.0}},
        r"type is 'longrope', supported are default, linear, llama3",
    ),
    ({"rope_scaling": {"rope_type": "mrope"}}, r"rope_type is 'mrope', supported are"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, r"mrope_section is \[1\], which is not known"),
    ({"rope_scaling": {"type": "linear"}}, r"factor is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, r"factor is 0"),
    ({"rope_scaling": {**YARN, "factor": "4"}}, r"factor is '4'"),
    ({"rope_scaling": 3}, r"rope_scaling is 3, expected an object"),
    ({"rope_theta": 0.5}, r"rope_theta is 0.5, expected a number above 1"),
    (
        {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        r"low_freq_factor",
    ),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 128}},
        r"original_max_position_embeddings is 128, dynamic rope is supported up to its original context",
    ),
    ({"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 8.0}}, r"rope_scaling .*contradicts rope_parameters"),
    (
        {
            "model_type": "qwen3",
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}},
        },
        r"rope_parameters .*differs between layer types",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSALS, ids=[str(index) for index in range(len(REFUSALS))])
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_folder(write_config(tmp_path, **fields))


def test_rope_nested_by_layer_type_is_read_where_it_agrees(tmp_path: Path) -> None:
    nested = {"full_attention": YARN, "sliding_attention": YARN}
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    window = {"use_sliding_window": True, "sliding_window": 8, "layer_types": kinds, "num_key_value_heads": 4}
    config = ModelConfig.from_folder(write_config(tmp_path, model_type="qwen2", rope_parameters=nested, **window))
    assert config.rope == ModelConfig.from_folder(write_config(tmp_path, rope_scaling=YARN)).rope
    assert isinstance(config.rope, YarnRope)


def test_a_checkpoint_with_nothing_on_rope_gets_the_default(tmp_path: Path) -> None:
    assert ModelConfig.from_folder(write_config(tmp_path)).rope == DefaultRope(10_000.0)


def test_what_is_no_folder_is_refused_with_what_would_be_one(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    for name, what in (("HuggingFaceTB/SmolLM2-135M", "no such folder"), ("model.gguf", "is no folder")):
        with pytest.raises(CheckpointError, match=rf"{name}: {what}; .* not by a name on the hub: .*fetch_model\.py"):
            ModelConfig.from_folder(tmp_path / name)


def test_a_missing_or_half_written_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r": holds no config\.json; a model is given as the path of a"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(CheckpointError, match="written to the end"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="holds a JSON list"):
        ModelConfig.from_folder(tmp_path)
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        ModelConfig.from_folder(tmp_path)
