"""Reads and writes checkpoints and model folders. Every file appears complete or not at all.

A checkpoint is one safetensors file with the run's settings and position in its metadata, so nothing is unpickled. Does
not know training.
"""

# torch's own types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.models.formats.safetensors_file import write_safetensors
from training.decoder import Decoder
from training.shape import Shape, config_json
from training.tokenizer import BEGIN, END, PAD, read, token_id, write_text
from training.tokenizer import FILES as TOKENIZER_FILES

CHECKPOINT: Final = "checkpoint.safetensors"
MODEL_FILES: Final = (*TOKENIZER_FILES, "config.json", "generation_config.json", "model.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    settings: dict[str, Any]  # what the run was started with
    progress: dict[str, Any]  # where it is
    weights: Mapping[str, Tensor]
    state: Mapping[str, Tensor]  # of the optimiser


def _pieces(tensor: Tensor) -> Callable[[], Iterator[NDArray[Any]]]:
    return lambda: iter([np.ascontiguousarray(tensor.detach().cpu().numpy())])


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    named = {f"weights.{name}": value for name, value in checkpoint.weights.items()}
    named |= {f"state.{name}": value for name, value in checkpoint.state.items()}
    metadata = {"settings": json.dumps(checkpoint.settings), "progress": json.dumps(checkpoint.progress)}
    tensors = {name: ("F32", tuple(value.shape), _pieces(value)) for name, value in named.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f".{CHECKPOINT}.*.part"):
        left.unlink()  # by a run that was killed while it wrote
    write_safetensors(folder / CHECKPOINT, tensors, metadata)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    from safetensors import safe_open

    path = folder / CHECKPOINT
    if not path.exists():
        return None
    parts: dict[str, dict[str, Tensor]] = {"weights": {}, "state": {}}
    with safe_open(str(path), framework="pt") as file:
        metadata: Mapping[str, str] = file.metadata()
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            part, _, name = key.partition(".")
            parts[part][name] = file.get_tensor(key)
    return Checkpoint(json.loads(metadata["settings"]), json.loads(metadata["progress"]), **parts)


def write_model(model: Decoder, tokenizer_folder: Path, folder: Path) -> None:
    """Write the model in bf16 as transformers would, with its tokenizer. The weights come last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        write_text(folder / name, (tokenizer_folder / name).read_text(encoding="utf-8"))
    tokenizer = read(tokenizer_folder)
    begin, end, pad = (token_id(tokenizer, token) for token in (BEGIN, END, PAD))
    config = config_json(model.shape, begin=begin, end=end, pad=pad)
    generation = {"bos_token_id": begin, "do_sample": False, "eos_token_id": [end], "pad_token_id": pad}
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    write_text(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")
    named = {name: weight.detach().cpu().bfloat16().view(torch.int16) for name, weight in model.named_parameters()}
    tensors = {name: ("BF16", tuple(value.shape), _pieces(value)) for name, value in sorted(named.items())}
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})


def read_model(folder: Path) -> Decoder:
    """Read a model written by `write_model`."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = Shape(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_size=config["head_dim"],
        inner=config["intermediate_size"],
    )
    model = Decoder(shape)
    model.load_state_dict({name: value.float() for name, value in load_file(folder / "model.safetensors").items()})
    return model


def digest(folder: Path) -> str:
    """Return the digest of a model's weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def copy_tokenizer(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in reversed(TOKENIZER_FILES):  # tokenizer.json last, so that its presence says that all are there
        shutil.copyfile(source / name, target / name)


def copy_model(source: Path, target: Path) -> None:
    """Copy a finished model, and nothing else, to its place."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in MODEL_FILES:
        shutil.copyfile(source / name, target / name)
