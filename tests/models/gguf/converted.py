"""Writes a model folder as a GGUF file with the package gguf, as llama.cpp's converters do it.

The names of tensors are those of the package's table. What converters do to keys and weights is written from their
definition in converted_keys and converted_weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.models.gguf.converted_keys import KEYS, common_keys
from tests.models.gguf.converted_model import Model
from tests.models.gguf.converted_weights import WEIGHTS, plain
from tests.models.gguf.gguf_models import write_vocabulary


def write_converted(
    folder: Path, path: Path, name: str, types: Mapping[str, str] | None = None, change: Any = None
) -> None:
    """Write a folder as a file of an architecture. `types` has the type of tensors by the end of their names; others
    are F32. `change` may change what the writer holds before it is written."""
    kind = next(each for each, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    writer = gguf.GGUFWriter(str(path), name)
    model = Model(folder, writer, kind)
    common_keys(model)
    if name in KEYS:
        KEYS[name](model)
    write_vocabulary(writer, json.loads((folder / "tokenizer.json").read_text()))
    convert = WEIGHTS.get(name, plain)
    tied = bool(model.config.get("tie_word_embeddings"))
    for source, tensor in model.tensors.items():
        if source == "lm_head.weight" and tied:
            continue
        for target, values in convert(model, source, tensor):
            chosen = next((each for end, each in (types or {}).items() if target.endswith(end)), "F32")
            kind = gguf.GGMLQuantizationType[chosen]
            writer.add_tensor(target, gguf.quantize(np.ascontiguousarray(values.float().numpy()), kind), raw_dtype=kind)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
