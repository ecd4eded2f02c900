"""A random Llama of any shape as a Hugging Face folder, seeded. Knows no engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file


class Shape(NamedTuple):
    """Of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    context: int
    dtype: str

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads


def make_checkpoint(folder: Path, shape: Shape) -> Path:
    """Write config.json and weights of order 1; returns the folder."""
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(20)
    weights: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        weights[name] = (torch.randn(rows, columns, generator=random) / columns**0.5).to(getattr(torch, shape.dtype))

    matrix("model.embed_tokens.weight", shape.vocab, shape.hidden)
    matrix("lm_head.weight", shape.vocab, shape.hidden)
    kv_rows = shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", shape.hidden), ("k", kv_rows), ("v", kv_rows), ("o", shape.hidden)):
            matrix(f"{prefix}.self_attn.{name}_proj.weight", rows, shape.hidden)
        matrix(f"{prefix}.mlp.gate_proj.weight", shape.intermediate, shape.hidden)
        matrix(f"{prefix}.mlp.up_proj.weight", shape.intermediate, shape.hidden)
        matrix(f"{prefix}.mlp.down_proj.weight", shape.hidden, shape.intermediate)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = torch.ones(shape.hidden, dtype=getattr(torch, shape.dtype))
    weights["model.norm.weight"] = torch.ones(shape.hidden, dtype=getattr(torch, shape.dtype))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.context,
        "vocab_size": shape.vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": shape.dtype,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
