"""Writes a compressed model as a folder in Hugging Face layout, from finished layers and the original's files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from headrace.compress.disk_layout import parts_of, untouched_names
from headrace.compress.pruning import STRUCTURED
from headrace.compress.recipe import KEPT, Recipe
from headrace.compress.stored_product import NAMES, to_disk_type
from headrace.models.families import TensorSources
from headrace.models.formats.atomic_file import new_file
from headrace.models.formats.json_file import read_json
from headrace.models.formats.model_weights import INDEX_FILE, PICKLE_SUFFIXES, SINGLE_FILE
from headrace.models.formats.safetensors_file import SafetensorsFile, write_safetensors
from headrace.models.model_folder import ModelFolder
from headrace.models.tensor_shapes import is_product

FORMATS: Final = ("compressed-tensors", "bitsandbytes", "gguf", "dense", "sparse-bitmask")
SPARSE: Final = "sparse-bitmask"
CARD: Final = "README.md"
_CONFIG_LIMIT: Final = 16 << 20
_SKIPPED: Final = (".safetensors", ".gguf", *PICKLE_SUFFIXES, ".msgpack", ".h5", ".onnx")

Pieces = tuple[str, tuple[int, ...], Callable[[], Iterable[Any]]]


def write_folder(
    folder: ModelFolder,
    out: Path,
    layers: Sequence[SafetensorsFile],
    recipe: Recipe,
    format: str,
    written: TensorSources,
) -> None:
    """Write weights, config and the original's other files. The config comes last: a folder with one is complete."""
    out.mkdir(exist_ok=True)
    copied = {name: name for name in untouched_names(folder)}
    write_safetensors(out / SINGLE_FILE, joined_tensors(folder, layers, copied), {"format": "pt"})
    copy_other_files(folder.path, out)
    config = dict(read_json(folder.path / "config.json", limit=_CONFIG_LIMIT))
    nested = config.get("text_config")
    if isinstance(nested, dict):
        cast("dict[str, Any]", nested).pop("quantization_config", None)
    if format == "dense":
        config.pop("quantization_config", None)
    else:
        config["quantization_config"] = _CONFIGS[format](folder, recipe, written)
    with new_file(out / "config.json") as file:
        file.write(json.dumps(config, indent=2).encode() + b"\n")


def joined_tensors(
    folder: ModelFolder, layers: Sequence[SafetensorsFile], copied: Mapping[str, str]
) -> dict[str, Pieces]:
    """Return the tensors of finished layers, and those of the original under new names."""
    tensors = {name: _stored(layer, name) for layer in layers for name in layer.tensors}
    for name, new in copied.items():
        tensors.setdefault(new, _copied(folder, name))
    return dict(sorted(tensors.items()))


def copy_other_files(source: Path, target: Path) -> None:
    """Copy the files of a model folder that are neither weights nor its config nor its card."""
    for path in sorted(source.iterdir()):
        name = path.name
        if path.is_file() and not name.endswith(_SKIPPED) and name not in (INDEX_FILE, CARD, "config.json"):
            shutil.copyfile(path, target / name)


def _stored(file: SafetensorsFile, name: str) -> Pieces:
    entry = file.tensors[name]
    return entry.dtype, entry.shape, lambda: [file.stored(name).data]


def _copied(folder: ModelFolder, name: str) -> Pieces:
    kind = "bf16" if folder.weights.layout(name) is not None else folder.weights.dense(name).dtype

    def pieces() -> Iterable[Any]:
        tensor = folder.weights.dense(name)
        yield tensor.data if tensor.dtype == kind else to_disk_type(tensor.to_f32(), kind)

    return NAMES[kind], folder.weights.shape(name), pieces


def _layer_names(folder: ModelFolder, written: TensorSources, names: Iterable[str]) -> list[str]:
    """Return modules as Hugging Face names them."""
    parts = (part for name in names for part in parts_of(folder, written, name))
    return [part.name.removesuffix(".weight") for part in parts]


def _kept(folder: ModelFolder, recipe: Recipe, written: TensorSources) -> list[str]:
    """Return the modules that stay as they are."""
    names = [name for name in folder.shapes if is_product(name) or name.endswith(".router")]
    kept = [name for name in names if recipe.bits.get(name, KEPT) == KEPT]
    return sorted({"lm_head", *_layer_names(folder, written, (name for name in kept if name != "embed"))})


def _compressed_tensors_config(folder: ModelFolder, recipe: Recipe, written: TensorSources) -> dict[str, Any]:
    groups: dict[str, Any] = {}
    used = sorted({bits for bits in recipe.bits.values() if bits < KEPT})
    kinds: set[str] = set()
    for number, bits in enumerate(used):
        spec = recipe.grid(bits)
        names = [name for name, each in recipe.bits.items() if each == bits]
        bytes_of_8 = recipe.quantises_activations and bits == 8 and spec.symmetric
        number_type = "float" if spec.kind == "fp8" else "int"
        kind = f"{number_type}-quantized" if bytes_of_8 else "pack-quantized"
        kinds.add(kind)
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(used) == 1 else _layer_names(folder, written, names),
            "format": kind,
            "weights": {
                "num_bits": bits,
                "type": number_type,
                "symmetric": spec.symmetric,
                "strategy": "group" if spec.group else "channel",
                "group_size": spec.group or None,
                "dynamic": False,
                "actorder": None,
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
            "input_activations": {**_ACTIVATIONS, "type": number_type} if recipe.quantises_activations else None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "mixed-precision" if len(kinds) > 1 else next(iter(kinds), "dense"),
        "config_groups": groups,
        "ignore": _kept(folder, recipe, written),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


_ACTIVATIONS: Final[Mapping[str, Any]] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
    "group_size": None,
    "actorder": None,
    "block_structure": None,
    "observer": None,
    "observer_kwargs": {},
}


def _bitsandbytes_config(folder: ModelFolder, recipe: Recipe, written: TensorSources) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": recipe.nested,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": _kept(folder, recipe, written),
    }


def _sparse_config(folder: ModelFolder, recipe: Recipe, written: TensorSources) -> dict[str, Any]:
    two_of_four = recipe.sparsity == STRUCTURED
    kept = [name for name in folder.shapes if is_product(name) and name not in (*recipe.pruned, "embed")]
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "dense",
        "config_groups": {},
        "ignore": [],
        "sparsity_config": {
            "format": "sparse-24-bitmask" if two_of_four else "sparse-bitmask",
            "targets": ["Linear"],
            "ignore": sorted({"lm_head", *_layer_names(folder, written, (name for name in kept if name != "head"))}),
            "global_sparsity": 0.5 if two_of_four else float(recipe.sparsity),
            "sparsity_structure": STRUCTURED if two_of_four else "unstructured",
        },
    }


_CONFIGS: Final[Mapping[str, Callable[[ModelFolder, Recipe, TensorSources], dict[str, Any]]]] = {
    "compressed-tensors": _compressed_tensors_config,
    "bitsandbytes": _bitsandbytes_config,
    SPARSE: _sparse_config,
}


def card_of(model: Path) -> Path:
    """Return where the card of a model is: in its folder, or beside its GGUF file."""
    return model.with_name(f"{model.name}.md") if model.suffix == ".gguf" else model / CARD


def folder_bytes(path: Path) -> int:
    """Return the bytes of a model's weight files."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))
