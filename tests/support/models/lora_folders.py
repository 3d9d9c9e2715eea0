"""LoRA adapters with random weights in PEFT's layout, for any model that takes adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.models.adapters.adapter_folder import ADAPTER_CONFIG, ADAPTER_FILE, product_of
from headrace.models.adapters.adapter_modules import AdapterModule, adapter_modules
from headrace.models.formats.safetensors_file import write_safetensors
from headrace.models.model_folder import ModelFolder

Arrays = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


def targets_of(folder: ModelFolder, targets: Sequence[str] = ()) -> list[AdapterModule]:
    found = [module for module in adapter_modules(folder) if product_of(module.tensor) is not None]
    return [module for module in found if not targets or module.leaf in targets]


def write_lora(
    folder: ModelFolder,
    out: Path,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    size: float = 1.0,
    targets: Sequence[str] = (),
    ranks: Mapping[str, int] | None = None,
    **config: Any,
) -> Path:
    """`ranks`: a rank_pattern of plain last names. `size`: of what the adapter changes."""
    random = np.random.default_rng(seed)
    tensors: Arrays = {}
    modules = targets_of(folder, targets)
    for module in modules:
        own = (ranks or {}).get(module.leaf, rank)
        inputs, rows = folder.shapes[module.tensor][1], module.rows.stop - module.rows.start
        prefix = f"base_model.model.{module.name}"
        tensors[f"{prefix}.lora_A.weight"] = random.standard_normal((own, inputs)) / inputs**0.5
        tensors[f"{prefix}.lora_B.weight"] = size * random.standard_normal((rows, own)) * 0.2
        if config.get("use_dora"):
            tensors[f"{prefix}.lora_magnitude_vector"] = 1.0 + 0.3 * random.random(rows)
    keys = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({module.leaf for module in modules}),
        "rank_pattern": dict(ranks or {}),
        "bias": "none",
        "modules_to_save": None,
        **config,
    }
    return write_adapter_files(out, keys, tensors)


def write_adapter_files(out: Path, config: Mapping[str, Any], tensors: Arrays) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    (out / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
    stored = {name: values.astype(np.float32) for name, values in tensors.items()}
    write_safetensors(
        out / ADAPTER_FILE, {name: ("F32", values.shape, lambda held=values: [held]) for name, values in stored.items()}
    )
    return out
