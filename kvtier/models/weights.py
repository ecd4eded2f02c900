"""Tensors of a decoder, read from safetensors: found, checked, copied once into fused buffers, and digested.

Owns the checkpoint's file names and the Hugging Face tensor names. Files are mapped, so the peak is one copy of the
weights plus page cache. Pickle files are never opened. Files that were digested before are known by their looks
(fingerprint.py). Called once by `decoder.load_decoder`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from kvtier.errors import CheckpointError
from kvtier.models.config import ModelConfig
from kvtier.models.fields import Fields
from kvtier.models.fingerprint import DigestMemory, FileLook, fingerprint, last_change_ns, look_at
from kvtier.models.huge_tensors import HugeTensors
from kvtier.namespace import framed

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SUPPORTED_FILES = f"supported are {SINGLE_FILE}, or {INDEX_FILE} with the shards it names"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NAMES_SHOWN = 4
CPU = torch.device("cpu")

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each tensor."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear map: weight [out, in] and perhaps a bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; `qkv` stacks q, k, v and `gate_up` stacks gate, up along the output dimension."""

    input_norm: torch.Tensor
    qkv: Projection
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Projection
    post_norm: torch.Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All tensors of a decoder in one dtype. `head` is `embedding` itself where they are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype | None,
    progress: Progress | None = None,
    memory: DigestMemory | None = None,
    place: torch.device = CPU,
) -> tuple[DecoderWeights, bytes]:
    """Load every tensor in `dtype` (None: as the embedding is stored) to `place` and digest what is stored.

    The digest covers name, dtype, shape and bytes of each tensor and is the same however they are split over files; it
    is not computed where `memory` has it. Raises CheckpointError for missing, half-written or superfluous files and
    tensors, wrong shapes and dtypes.
    """
    places = _locate(folder)
    paths = sorted(set(places.values()))
    looks = _look_at(paths) if memory is not None else ()  # first: what is opened then either is that or looks changed
    seen, known = b"", None
    with ExitStack() as stack:
        files = {path: _open(stack, path) for path in paths}
        _check_places(places, files)
        if EMBEDDING not in places:
            raise CheckpointError(f"{folder}: tensor {EMBEDDING} is missing")
        if dtype is None:
            dtype = _stored_dtype(files[places[EMBEDDING]], EMBEDDING)
        empty = HugeTensors().empty if place == CPU else torch.empty
        with place:
            weights, targets = _allocate(config, dtype, empty, own_head=not config.tie_embeddings)
        _check_tensors(folder, places, files, targets, config)
        if memory is not None:
            seen = fingerprint(looks, {name: paths.index(places[name]) for name in targets})
            known = memory.recall(seen)
        order = [
            (file, name)
            for path, file in files.items()
            for name in file.offset_keys()
            if name in targets and places[name] == path
        ]
        digest = _copy(order, targets, progress, known)
        if config.tie_embeddings and HEAD in places:
            weights = _with_stored_head(weights, files[places[HEAD]].get_tensor(HEAD))
    if memory is not None:
        unchanged = _look_at(paths) == looks
        if unchanged and known is None:
            memory.remember(seen, digest, last_change_ns(looks))
        if not unchanged and known is not None:
            return load_weights(folder, config, dtype, progress, place=place)
    return weights, digest


def _look_at(paths: list[Path]) -> tuple[FileLook, ...]:
    try:
        return look_at(paths)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from None


def _locate(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, as the index says, or as the single file's header says."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if (folder / SINGLE_FILE).exists():
        with ExitStack() as stack:
            return dict.fromkeys(_open(stack, folder / SINGLE_FILE).keys(), folder / SINGLE_FILE)
    if (folder / INDEX_FILE).exists():
        index = Fields.from_file(folder / INDEX_FILE)
        places: dict[str, Path] = {}
        for name, file in index.inner("weight_map").items():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                index.refuse("weight_map", f"{name} must name a .safetensors file in the same folder")
            places[name] = folder / file
        missing = sorted({path.name for path in places.values() if not path.exists()})
        if missing or not places:
            raise CheckpointError(f"{folder}: {INDEX_FILE} names {_some(missing)} which are missing")
        return places
    found = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in found if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    if pickles:
        raise CheckpointError(f"{folder}: {_some(pickles)}: pickle weights are never read; {SUPPORTED_FILES}")
    others = [name for name in found if name.endswith((".safetensors", ".gguf", ".npz", ".h5"))]
    if others:
        hint = "tensor-parallel shards and other formats are not read"
        raise CheckpointError(f"{folder}: {_some(others)}: {hint}; {SUPPORTED_FILES}")
    raise CheckpointError(f"{folder}: holds no weights; {SUPPORTED_FILES}")


def _open(stack: ExitStack, path: Path) -> Any:
    """Map a file; its header is checked against its length."""
    try:
        return stack.enter_context(safe_open(path, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}); was it written to the end?") from None


def _stored_dtype(file: Any, name: str) -> torch.dtype:
    stored = file.get_slice(name).get_dtype()
    if stored not in STORED_DTYPES:
        raise CheckpointError(
            f"tensor {name} is stored as {stored}; supported are {', '.join(STORED_DTYPES)}, quantised weights are not"
        )
    return STORED_DTYPES[stored]


def _check_places(places: dict[str, Path], files: dict[Path, Any]) -> None:
    names = {path: set(file.keys()) for path, file in files.items()}
    for name, path in places.items():
        if name not in names[path]:
            raise CheckpointError(f"{path}: tensor {name} is not in it though {INDEX_FILE} says so")


def _check_tensors(
    folder: Path,
    places: dict[str, Path],
    files: dict[Path, Any],
    targets: dict[str, torch.Tensor],
    config: ModelConfig,
) -> None:
    """Everything that can be wrong is found before the first byte of a tensor is read."""
    missing = sorted(targets.keys() - places.keys())
    if missing:
        raise CheckpointError(f"{folder}: {len(missing)} tensors are missing: {_some(missing)}")
    ignored = {HEAD} if config.tie_embeddings else set()
    superfluous = sorted(
        name for name in places.keys() - targets.keys() - ignored if not name.endswith(".rotary_emb.inv_freq")
    )
    if superfluous:
        raise CheckpointError(
            f"{folder}: {len(superfluous)} tensors have no place in a {config.family} decoder with this config.json: "
            f"{_some(superfluous)}"
        )
    for name, target in targets.items():
        file = files[places[name]]
        _stored_dtype(file, name)
        shape = tuple(file.get_slice(name).get_shape())
        if shape != tuple(target.shape):
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {list(shape)}, config.json makes it {list(target.shape)} "
                f"(tensor-parallel shards are not read)"
            )


def _copy(
    order: list[tuple[Any, str]], targets: dict[str, torch.Tensor], progress: Progress | None, known: bytes | None
) -> bytes:
    """Copy stored tensors to their targets, in that order; returns the digest of what is stored, if not `known`."""
    total = sum(targets[name].numel() * _stored_dtype(file, name).itemsize for file, name in order)
    done = 0
    records: dict[str, list[bytes]] = {}
    for file, name in order:
        stored = file.get_tensor(name)
        if known is None:
            records[name] = _record(name, stored)
        target = targets[name].copy_(stored)
        if target.dtype == torch.float16 and not bool(torch.isfinite(target).all()):
            raise CheckpointError(f"tensor {name} holds values beyond float16's range: use dtype bfloat16 or float32")
        done += stored.nbytes
        if progress is not None:
            progress(done, total)
    if known is not None:
        return known
    return hashlib.sha256(framed([part for name in sorted(records) for part in records[name]])).digest()


def _record(name: str, stored: Any) -> list[bytes]:
    """What the digest covers of one tensor."""
    content = xxhash.xxh3_128_digest(stored.view(torch.uint8).numpy())  # against accidents; weights are trusted
    return [name.encode(), str(stored.dtype).encode(), json.dumps(list(stored.shape)).encode(), content]


def _with_stored_head(weights: DecoderWeights, stored: torch.Tensor) -> DecoderWeights:
    """Tied by the config yet stored as well: as in Transformers, a head that differs from the embedding is kept."""
    if stored.shape != weights.embedding.shape:
        raise CheckpointError(f"tensor {HEAD} has shape {list(stored.shape)}, expected {list(weights.embedding.shape)}")
    head = stored.to(weights.embedding, copy=True)
    if torch.equal(head, weights.embedding):
        return weights
    return DecoderWeights(weights.embedding, weights.layers, weights.norm, head)


def _allocate(
    config: ModelConfig, dtype: torch.dtype, empty: Callable[..., torch.Tensor], own_head: bool
) -> tuple[DecoderWeights, dict[str, torch.Tensor]]:
    """Uninitialized weights, and the Hugging Face name of every tensor -> the view it is copied into."""
    targets: dict[str, torch.Tensor] = {}

    def tensor(name: str, *shape: int) -> torch.Tensor:
        targets[name] = empty(*shape, dtype=dtype)
        return targets[name]

    def projection(prefix: str, outputs: dict[str, int], inputs: int, has_bias: bool) -> Projection:
        rows = sum(outputs.values())
        weight = empty(rows, inputs, dtype=dtype)
        bias = empty(rows, dtype=dtype) if has_bias else None
        for name, part in zip(outputs, torch.split(weight, list(outputs.values())), strict=True):
            targets[f"{prefix}.{name}.weight"] = part
        if bias is not None:
            for name, part in zip(outputs, torch.split(bias, list(outputs.values())), strict=True):
                targets[f"{prefix}.{name}.bias"] = part
        return Projection(weight, bias)

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
        qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        gate_up = {"gate_proj": config.intermediate, "up_proj": config.intermediate}
        down = {"down_proj": config.hidden}
        return LayerWeights(
            input_norm=tensor(f"{prefix}.input_layernorm.weight", config.hidden),
            qkv=projection(attention, qkv, config.hidden, config.qkv_bias),
            q_norm=tensor(f"{attention}.q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=tensor(f"{attention}.k_norm.weight", config.head_dim) if config.qk_norm else None,
            output=projection(attention, {"o_proj": config.hidden}, q_rows, config.output_bias),
            post_norm=tensor(f"{prefix}.post_attention_layernorm.weight", config.hidden),
            gate_up=projection(mlp, gate_up, config.hidden, config.mlp_bias),
            down=projection(mlp, down, config.intermediate, config.mlp_bias),
        )

    vocab = (config.vocab, config.hidden)
    embedding, layers = tensor(EMBEDDING, *vocab), tuple(layer(index) for index in range(config.layers))
    norm = tensor("model.norm.weight", config.hidden)
    return DecoderWeights(embedding, layers, norm, tensor(HEAD, *vocab) if own_head else embedding), targets


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown + (f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else "")
