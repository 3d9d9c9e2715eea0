"""Writes what was trained: an adapter in PEFT's layout, or a model folder in Hugging Face layout.

Every folder is written beside its place and then moved there, so that it appears complete or not at all.
"""

# torch's own types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.adapt.decoder import Decoder
from headrace.adapt.modules import trained_modules
from headrace.adapt.recipe import AdaptRecipe
from headrace.compress.compressed_folder import copy_other_files
from headrace.compress.disk_layout import DenseType, dense_type
from headrace.compress.layer_pass import F32, is_norm
from headrace.compress.stored_product import NAMES, to_disk_type
from headrace.errors import RequestError
from headrace.models.adapters.adapter_folder import ADAPTER_CONFIG, ADAPTER_FILE
from headrace.models.adapters.adapter_modules import file_sources, part_slices
from headrace.models.families.family import TensorPart
from headrace.models.formats.atomic_file import new_file
from headrace.models.formats.json_file import read_json
from headrace.models.formats.model_weights import SINGLE_FILE
from headrace.models.formats.safetensors_file import write_safetensors
from headrace.models.gguf.gguf_model import read_config
from headrace.models.gguf.gguf_shards import open_gguf
from headrace.models.gguf.gguf_tokenizer import read_tokenizer
from headrace.models.model_folder import ModelFolder

CARD: Final = "README.md"
_CONFIG_LIMIT: Final = 16 << 20
_MODEL_TYPES: Final = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


def write_adapter(folder: ModelFolder, student: Decoder, recipe: AdaptRecipe, out: Path, *, base: str) -> None:
    """Write the adapter of a student that was trained with `recipe`. `base` is the model's name as it was given."""
    out.mkdir(parents=True)
    modules = trained_modules(folder, recipe.targets)
    tensors: dict[str, Any] = {}
    for module in modules:
        for side in ("A", "B"):
            values = student.trained[f"{module.name}.lora_{side}"].detach().numpy()
            if side == "B":
                values = _file_order(module.part, values)
            tensors[f"base_model.model.{module.name}.lora_{side}.weight"] = _stored(values, "f32")
    write_safetensors(out / ADAPTER_FILE, dict(sorted(tensors.items())), {"format": "pt"})
    config = {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": int(recipe.alpha) if recipe.alpha == int(recipe.alpha) else recipe.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": recipe.rank,
        "rank_pattern": {},
        "revision": None,
        "target_modules": sorted({module.leaf for module in modules}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    _write_json(out / ADAPTER_CONFIG, config)


def check_writable(folder: ModelFolder) -> None:
    """Raise RequestError for a model whose folder `write_model` cannot write."""
    file_sources(folder)
    every = (part for parts in folder.sources.values() for part in parts)
    if any(part.index is not None or part.row is not None or part.transposed or part.flat for part in every):
        raise RequestError(f"{folder.spec.architecture} has tensors that cannot be written one by one.")
    if folder.path.suffix == ".gguf" and "rope_freqs.weight" in folder.weights.names:
        raise RequestError(
            f"{folder.path.name} keeps its rope in a tensor, which a folder in Hugging Face layout cannot. Train an "
            "adapter without --merge, or pass the folder that the file was made from.",
            parameter="model",
        )


def write_model(folder: ModelFolder, student: Decoder, out: Path) -> None:
    """Write a student's weights, with its adapter merged, beside the config and tokenizer of its model.

    Weights that were quantised in the files are written in bf16, others in the type that they had.
    """
    out.mkdir(parents=True)
    sources = file_sources(folder)
    tensors: dict[str, Any] = {}
    for name in folder.shapes:
        kind: DenseType = "bf16" if folder.path.suffix == ".gguf" else dense_type(folder, name)
        for part, rows in part_slices(folder, sources, name):
            tensors[part.name] = _lazily(folder, student, name, part, rows, kind)
    write_safetensors(out / SINGLE_FILE, dict(sorted(tensors.items())), {"format": "pt"})
    if folder.path.suffix == ".gguf":
        _write_gguf_files(folder, out)
        return
    copy_other_files(folder.path, out)
    config = dict(read_json(folder.path / "config.json", limit=_CONFIG_LIMIT))
    for part_of_it in (config, config.get("text_config")):
        if isinstance(part_of_it, dict):
            part_of_it.pop("quantization_config", None)
    _write_json(out / "config.json", config)


def publish(made: Path, out: Path) -> None:
    """Move a complete folder to its place."""
    os.replace(made, out)


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _lazily(
    folder: ModelFolder, student: Decoder, name: str, part: TensorPart, rows: slice, kind: DenseType
) -> tuple[str, tuple[int, ...], Callable[[], Iterable[NDArray[Any]]]]:
    shape = (rows.stop - rows.start, *folder.shapes[name][1:])

    def pieces() -> Iterable[NDArray[Any]]:
        values = _as_stored(folder, name, student.weight(name))[rows]
        yield np.ascontiguousarray(to_disk_type(_file_order(part, values), kind))

    return NAMES[kind], shape, pieces


def _as_stored(folder: ModelFolder, name: str, weight: Tensor) -> F32:
    """Undo what loading does to the weights of norms."""
    values: F32 = weight.numpy()
    spec = folder.spec
    if name in ("norm", "norm.bias") and spec.logit_scale != 1.0:
        values = values / np.float32(spec.logit_scale)
    if spec.norm_offset and is_norm(name):
        values = values - np.float32(spec.norm_offset)
    return values


def _file_order(part: TensorPart, values: F32) -> F32:
    """Put rows into the order that the files have them in."""
    order = part.row_order(len(values))
    if order is None:
        return values
    found = np.empty_like(values)
    found[order] = values
    return found


def _stored(values: F32, kind: DenseType) -> tuple[str, tuple[int, ...], Callable[[], Iterable[NDArray[Any]]]]:
    return NAMES[kind], values.shape, lambda: [np.ascontiguousarray(to_disk_type(values, kind))]


def _write_gguf_files(folder: ModelFolder, out: Path) -> None:
    """Write the config and the tokenizer that a GGUF file holds."""
    file, spec = open_gguf(folder.path), folder.spec
    files = read_tokenizer(file)
    ends = sorted(files.eos_ids)
    config: dict[str, object] = {
        **read_config(file),
        "attention_bias": spec.qkv_bias,
        "model_type": _MODEL_TYPES[spec.architecture],
        "torch_dtype": "bfloat16",
    }
    if spec.architecture == "LlamaForCausalLM":
        config["mlp_bias"] = spec.mlp_bias
    else:
        del config["attention_bias"]
    with new_file(out / "tokenizer.json") as target:
        target.write(files.read())
    named: dict[str, object] = {**files.config, **files.special_tokens}
    templates = files.templates()
    if "default" in templates:
        named["chat_template"] = templates["default"][0]
    _write_json(out / "tokenizer_config.json", named)
    _write_json(out / "generation_config.json", {"do_sample": False, "eos_token_id": ends})
    _write_json(out / "config.json", config)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    with new_file(path) as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
