"""Writes a model in the formats of quantised folders: GPTQ and AWQ here, the others by `headrace compress`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.compress.compression import compress_model, products_of, scale_type
from headrace.compress.grids import Grid, GridSpec, fit, round_to_nearest
from headrace.compress.recipe import Recipe
from headrace.compress.work_folder import as_pieces
from headrace.models.formats.model_weights import SINGLE_FILE, ModelWeights
from headrace.models.formats.quantised_layer import pack_bits
from headrace.models.formats.safetensors_file import write_safetensors
from headrace.models.model_folder import ModelFolder, open_model

GROUP: Final = 128
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # of the outputs in a word
Stored = dict[str, tuple[str, NDArray[Any]]]
RECIPES: Final[Mapping[str, tuple[str, int, dict[str, Any]]]] = {
    "compressed-tensors W8A8": ("smoothquant", 8, {"group": 0, "symmetric": True}),
    "compressed-tensors W4A16": ("awq+gptq", 4, {"group": GROUP}),
    "compressed-tensors W3A16": ("awq+gptq", 3, {"group": GROUP}),
    "compressed-tensors FP8": ("fp8", 8, {"group": 0, "symmetric": True}),
    "bitsandbytes NF4": ("nf4", 4, {}),
}


def _gptq(layer: str, codes: NDArray[np.uint8], grid: Grid) -> Stored:
    inputs = codes.shape[1]
    zeros = (grid.zeros.T - 1).astype(np.uint8) & np.uint8(15)  # version 1 stores one less
    return {
        f"{layer}.qweight": ("I32", np.ascontiguousarray(pack_bits(codes, 4).T).view(np.int32)),
        f"{layer}.qzeros": ("I32", pack_bits(zeros, 4).view(np.int32)),
        f"{layer}.scales": ("F16", np.ascontiguousarray(grid.scales.T).astype(np.float16)),
        f"{layer}.g_idx": ("I32", (np.arange(inputs) // GROUP).astype(np.int32)),
    }


def _awq(layer: str, codes: NDArray[np.uint8], grid: Grid) -> Stored:
    def words(values: NDArray[np.uint8]) -> NDArray[np.int32]:
        ordered = values.reshape(len(values), -1, 8)[:, :, AWQ_ORDER].reshape(values.shape)
        return pack_bits(np.ascontiguousarray(ordered), 4).view(np.int32)

    return {
        f"{layer}.qweight": ("I32", words(codes.T)),
        f"{layer}.qzeros": ("I32", words(grid.zeros.T.astype(np.uint8))),
        f"{layer}.scales": ("F16", np.ascontiguousarray(grid.scales.T).astype(np.float16)),
    }


CONFIGS: Final[Mapping[str, tuple[Callable[[str, NDArray[np.uint8], Grid], Stored], dict[str, Any]]]] = {
    "GPTQ, 4 bits": (
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False},
    ),
    "AWQ, 4 bits": (
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    ),
}


def write(name: str, source: Path, out: Path, text: str) -> ModelFolder:
    """Write a model of bf16 weights in a format of RECIPES or CONFIGS."""
    if name in RECIPES:
        method, bits, options = RECIPES[name]
        folder = open_model(source)
        recipe = Recipe(
            method=method, bits=dict.fromkeys(products_of(folder), bits), scale_type=scale_type(folder), **options
        )
        tokens = folder.tokenizer.encode(text)
        windows = [tokens[start : start + 256] for start in range(0, min(len(tokens), 4096), 256)]
        kind = "bitsandbytes" if method == "nf4" else "compressed-tensors"
        compress_model(folder, out, windows, recipe, format=kind).publish(out)
        return open_model(out)
    store, config = CONFIGS[name]
    weights = ModelWeights.open(source)
    tensors: Stored = {}
    for each in sorted(weights.names):
        tensor = weights.stored(each)
        if ".layers." not in each or tensor.data.ndim != 2:
            tensors[each] = (tensor.dtype, tensor.data)
            continue
        values = tensor.to_f32()
        grid = fit(values, GridSpec(bits=4, group=GROUP, symmetric=False, scale_type="f16"))
        tensors |= store(each.removesuffix(".weight"), round_to_nearest(values, grid), grid)
    out.mkdir()
    write_safetensors(out / SINGLE_FILE, as_pieces(dict(sorted(tensors.items()))), {"format": "pt"})
    for path in source.glob("*.json"):
        shutil.copyfile(path, out / path.name)
    for path in source.glob("*.jinja"):
        shutil.copyfile(path, out / path.name)
    values = json.loads((source / "config.json").read_text())
    # vLLM computes these in f16 only.
    (out / "config.json").write_text(json.dumps(values | {"quantization_config": config, "torch_dtype": "float16"}))
    return open_model(out)
