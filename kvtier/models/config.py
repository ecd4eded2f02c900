"""What a checkpoint says about itself, normalized: `ModelConfig`, read from config.json and generation_config.json.

Owns the differences between the families and between the spellings of Transformers 4 and 5; past this file a family
is only a set of flags. Everything unsupported is refused here, by name. Reads no tensor and knows no tokenizer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import CheckpointError
from kvtier.models.fields import Fields
from kvtier.models.rope import Rope, YarnRope, rope_architecture, rope_from_fields
from kvtier.request import REPETITION_PENALTY_MAX, REPETITION_PENALTY_MIN, TEMPERATURE_MAX

ACCEPTED = (
    "a model is given as the path of a Hugging Face folder (config.json, *.safetensors, tokenizer), not by a name on "
    "the hub: download it first; `scripts/fetch_model.py` writes SmolLM2-135M-Instruct to .cache/models/smollm2"
)
DTYPES = ("float32", "bfloat16", "float16")
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class _Family:
    """What a family means where config.json is silent, as in its Transformers 5 class."""

    name: str
    architecture: str
    kv_heads: int | None
    """None: as many as heads."""
    head_dim: int | None
    """None: hidden / heads."""
    qkv_bias: bool | None
    """None: `attention_bias` decides, for the output projection too."""
    mlp_bias: bool | None
    """None: `mlp_bias` decides."""
    qk_norm: bool


FAMILIES = {
    family.name: family
    for family in (
        _Family("llama", "LlamaForCausalLM", None, None, None, None, False),
        _Family("mistral", "MistralForCausalLM", 8, None, False, False, False),
        _Family("qwen2", "Qwen2ForCausalLM", 32, None, True, False, False),
        _Family("qwen3", "Qwen3ForCausalLM", 32, 128, None, False, True),
    )
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling where a request is silent, from generation_config.json; greedy (temperature 0) unless do_sample is true.

    Only what the file says: Transformers' own unwritten default of top_k 50 is not applied.
    """

    temperature: float = 0.0
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape and constants, family by family normalized. Made by `from_folder`."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    """Longest sequence in tokens."""
    windows: tuple[int | None, ...]
    """For each layer: how many positions, its own included, a query sees; None: all."""
    rope: Rope
    rms_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    checkpoint_dtype: str | None
    """"float32", "bfloat16", "float16", or None where the config does not say."""
    eos_token_ids: frozenset[int]
    """Union of config.json and generation_config.json."""
    generation: GenerationDefaults

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read a Hugging Face folder. Raises CheckpointError naming field, value, and what is supported."""
        try:
            os.stat(folder / "config.json")
        except (FileNotFoundError, NotADirectoryError):
            what = (
                "holds no config.json" if folder.is_dir() else "is no folder" if folder.exists() else "no such folder"
            )
            raise CheckpointError(f"{folder}: {what}; {ACCEPTED}") from None
        except OSError:
            pass  # reading it says why
        config = Fields.from_file(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation = (
            Fields.from_file(generation_path) if generation_path.exists() else Fields("generation_config.json", {})
        )
        return _read(config, generation)

    def architecture(self) -> dict[str, object]:
        """JSON-able identity of everything but weights, dtype and layout that decides the bytes of K and V."""
        return {
            "family": self.family,
            "layers": self.layers,
            "hidden": self.hidden,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate": self.intermediate,
            "windows": list(self.windows),
            "rope": rope_architecture(self.rope),
            "rms_eps": self.rms_eps,
            "qkv_bias": self.qkv_bias,
            "output_bias": self.output_bias,
            "mlp_bias": self.mlp_bias,
            "qk_norm": self.qk_norm,
        }


def _read(config: Fields, generation: Fields) -> ModelConfig:
    family = _family(config)
    _refuse_unsupported(config)
    layers = config.whole("num_hidden_layers")
    hidden = config.whole("hidden_size")
    heads = config.whole("num_attention_heads")
    kv_heads = config.whole("num_key_value_heads", family.kv_heads or heads)
    if heads % kv_heads:
        config.refuse("num_key_value_heads", f"expected a divisor of num_attention_heads = {heads}")
    layer_types, windows = _windows(config, family, layers)
    positions = config.whole("max_position_embeddings")
    rope = rope_from_fields(config, layer_types, positions)
    attention_bias = family.qkv_bias is None and config.flag("attention_bias", False)
    return ModelConfig(
        family=family.name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(config, family, hidden, heads),
        intermediate=config.whole("intermediate_size"),
        vocab=config.whole("vocab_size"),
        context=max(positions, rope.context if isinstance(rope, YarnRope) else 0),
        windows=windows,
        rope=rope,
        rms_eps=config.number("rms_norm_eps", 1e-6),
        qkv_bias=bool(family.qkv_bias) or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.mlp_bias is None and config.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        tie_embeddings=config.flag("tie_word_embeddings", False),
        checkpoint_dtype=_checkpoint_dtype(config),
        eos_token_ids=config.token_ids("eos_token_id") | generation.token_ids("eos_token_id"),
        generation=_generation(generation),
    )


def _family(config: Fields) -> _Family:
    supported = f"supported are {', '.join(FAMILIES)}"
    family = FAMILIES.get(config.text("model_type"))
    if family is None:
        config.refuse("model_type", supported)
    architectures = config.texts("architectures")
    if architectures is not None and family.architecture not in architectures:
        config.refuse("architectures", f"expected {family.architecture}; {supported}, each as its ForCausalLM class")
    return family


def _refuse_unsupported(config: Fields) -> None:
    if config.has("auto_map"):
        config.refuse("auto_map", "remote code is never run; supported are Transformers' own classes")
    for key in ("quantization_config", "compression_config"):
        if config.has(key):
            config.refuse(key, f"quantised checkpoints are not supported, only {', '.join(DTYPES)} weights")
    if config.text("hidden_act", "silu") != "silu":
        config.refuse("hidden_act", "only silu is supported")


def _head_dim(config: Fields, family: _Family, hidden: int, heads: int) -> int:
    """Explicit, else the family's, else (also where it is null) hidden / heads."""
    if not config.has("head_dim") and hidden % heads and (family.head_dim is None or config.is_null("head_dim")):
        config.refuse("num_attention_heads", f"expected a divisor of hidden_size = {hidden}, or an explicit head_dim")
    derived = hidden // heads
    head_dim = config.whole("head_dim", derived if config.is_null("head_dim") else family.head_dim or derived)
    if head_dim % 2:
        config.refuse("head_dim", f"rotary embedding needs an even head_dim, not {head_dim}")
    return head_dim


def _windows(config: Fields, family: _Family, layers: int) -> tuple[list[str], tuple[int | None, ...]]:
    """Attention kind and window of each layer."""
    window: int | None = None
    first_windowed = 0
    if family.name == "mistral" and not config.is_null("sliding_window"):
        window = config.whole("sliding_window", 4096)
    elif family.name in ("qwen2", "qwen3") and config.flag("use_sliding_window", False):
        window = None if config.is_null("sliding_window") else config.whole("sliding_window", 4096)
        first_windowed = config.whole("max_window_layers", 28, low=0)
    kinds = [FULL if window is None or layer < first_windowed else SLIDING for layer in range(layers)]
    given = config.texts("layer_types")
    if given is not None:
        if len(given) != layers or not set(given) <= {FULL, SLIDING}:
            config.refuse("layer_types", f"expected num_hidden_layers = {layers} of {FULL} or {SLIDING}")
        if family.name in ("llama", "mistral") and given != kinds:
            config.refuse(
                "layer_types", f"the {family.name} family has the same attention in all layers, here {kinds[0]}"
            )
        if window is None and SLIDING in given:
            config.refuse("layer_types", f"{SLIDING} needs use_sliding_window true and a sliding_window")
        kinds = given
    return kinds, tuple(window if kind == SLIDING else None for kind in kinds)


def _checkpoint_dtype(config: Fields) -> str | None:
    key = "dtype" if config.has("dtype") else "torch_dtype"
    dtype = config.text(key, "auto")
    if dtype not in (*DTYPES, "auto"):
        config.refuse(key, f"supported are {', '.join(DTYPES)}")
    return None if dtype == "auto" else dtype


def _generation(generation: Fields) -> GenerationDefaults:
    top_p, penalty = generation.number("top_p", 1.0), generation.number("repetition_penalty", 1.0)
    if not 0 < top_p <= 1:
        generation.refuse("top_p", "expected a number above 0, at most 1")
    if not REPETITION_PENALTY_MIN <= penalty <= REPETITION_PENALTY_MAX:
        bounds = f"{REPETITION_PENALTY_MIN:g} to {REPETITION_PENALTY_MAX:g}"
        generation.refuse("repetition_penalty", f"expected a number from {bounds}")
    if not generation.flag("do_sample", False):
        return GenerationDefaults(repetition_penalty=penalty)
    min_p = generation.number("min_p", 0.0)
    if min_p > 1:
        generation.refuse("min_p", "expected a number from 0 to 1")
    temperature = generation.number("temperature", 1.0)
    if temperature > TEMPERATURE_MAX:
        generation.refuse("temperature", f"expected a number from 0 to {TEMPERATURE_MAX:g}")
    return GenerationDefaults(temperature, generation.whole("top_k", 0, low=0), top_p, min_p, penalty)
