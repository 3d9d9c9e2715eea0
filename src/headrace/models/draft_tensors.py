"""Reads and writes the tensors of draft heads: each is checked for its shape and its values. Knows no kind of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.formats.safetensors_file import SafetensorsFile, write_safetensors
from headrace.models.spec import ModelSpec

Floats = NDArray[np.float32]
TensorSources = Mapping[str, tuple[str, ...]]  # canonical names, and the tensors on disk that make up each

_STORED: Final = {"i": ("I64", "<i8"), "f": ("F32", "<f4")}


def layer_config(target: ModelSpec, *, base: str) -> dict[str, object]:
    """Return what the configs of all new Llama layers for a model say: heads and sizes like the model's own."""
    return {
        "base_model_name_or_path": base,
        "head_dim": target.head_size,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size or 4 * target.hidden_size,
        "max_position_embeddings": target.context,
        "model_type": "llama",
        "num_attention_heads": target.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": target.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "vocab_size": target.vocab_size,
    }


def layer_sources(spec: ModelSpec, layer: str) -> dict[str, tuple[str, ...]]:
    """Return the sources of a Llama layer whose names on disk begin with `layer`, but for the norm of its attention."""
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    qkv = tuple(f"{attention}.{part}_proj" for part in "qkv")
    found = {
        "layers.0.attn.qkv": tuple(f"{part}.weight" for part in qkv),
        "layers.0.attn.o": (f"{attention}.o_proj.weight",),
        "layers.0.mlp.norm": (f"{layer}.post_attention_layernorm.weight",),
        "layers.0.mlp.gate_up": (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
        "layers.0.mlp.down": (f"{mlp}.down_proj.weight",),
    }
    if spec.qkv_bias:
        found["layers.0.attn.qkv.bias"] = tuple(f"{part}.bias" for part in qkv)
    if spec.o_bias:
        found["layers.0.attn.o.bias"] = (f"{attention}.o_proj.bias",)
    if spec.qk_norm == "head":
        found |= {f"layers.0.attn.{part}_norm": (f"{attention}.{part}_norm.weight",) for part in "qk"}
    return found


def read_layer(
    file: SafetensorsFile, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], sources: TensorSources
) -> dict[str, Floats]:
    tensors: dict[str, Floats] = {}
    for name, parts in sources.items():
        shape = shapes[name]
        sizes = _part_sizes(spec, name, shape[0], len(parts))
        found = [read_floats(file, part, (size, *shape[1:])) for part, size in zip(parts, sizes, strict=True)]
        tensors[name] = found[0] if len(found) == 1 else np.concatenate(found)
    return tensors


def split_layer(spec: ModelSpec, tensors: Mapping[str, Floats], sources: TensorSources) -> dict[str, NDArray[Any]]:
    """Return a layer's tensors as they are on disk."""
    found: dict[str, NDArray[Any]] = {}
    for name, parts in sources.items():
        sizes = _part_sizes(spec, name, len(tensors[name]), len(parts))
        found.update(zip(parts, np.split(tensors[name], np.cumsum(sizes)[:-1]), strict=True))
    return found


def _part_sizes(spec: ModelSpec, name: str, rows: int, parts: int) -> tuple[int, ...]:
    return spec.qkv_parts if ".qkv" in name else (rows // parts,) * parts


def read_floats(file: SafetensorsFile, name: str, shape: tuple[int, ...]) -> Floats:
    if name not in file.tensors:
        raise ModelError("Is missing.", path=file.path, tensor=name)
    tensor = file.dense(name)
    if tensor.shape != shape:
        expected, actual = ("x".join(map(str, each)) for each in (shape, tensor.shape))
        raise ModelError(
            f"Has shape {actual}. Expected {expected}: these heads belong to another model.",
            path=file.path,
            tensor=name,
        )
    values = tensor.to_f32()
    if not np.isfinite(values).all():
        raise ModelError("Contains NaN or infinity.", path=file.path, tensor=name)
    return values


def read_tokens(file: SafetensorsFile, name: str, target: ModelSpec, *, offsets: bool) -> NDArray[np.int32] | None:
    """Return the model's tokens that heads choose from, or None if the file does not name them. `offsets`: each is
    stored as its distance from its place."""
    if name not in file.tensors:
        return None
    stored = file.stored(name).data
    if stored.ndim != 1 or not len(stored) or stored.dtype.kind != "i":
        raise ModelError("Must be a list of token ids.", path=file.path, tensor=name)
    most = target.vocab_size
    ids = stored.astype(np.int64)
    within = bool(np.abs(ids).max() < 2 * most)  # before anything is added
    ids = ids + np.arange(len(ids)) if offsets else ids
    if not within or ids.min() < 0 or ids.max() >= most or len(np.unique(ids)) < len(ids):
        raise ModelError(
            f"Must hold different tokens of the model's vocabulary of {most}.", path=file.path, tensor=name
        )
    return ids.astype(np.int32)


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write tensors of f32 or whole numbers."""
    entries: dict[str, tuple[str, tuple[int, ...], Callable[[], Iterable[Any]]]] = {}
    for name, values in sorted(tensors.items()):
        dtype, stored = _STORED[values.dtype.kind]
        data = np.ascontiguousarray(values, dtype=stored)
        entries[name] = (dtype, data.shape, lambda data=data: [data.reshape(-1).view(np.uint8)])
    write_safetensors(path, entries, {"format": "pt"})
