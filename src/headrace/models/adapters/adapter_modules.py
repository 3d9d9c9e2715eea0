"""Names the modules that an adapter may change, as PEFT and transformers name them, and where their rows are.

A GGUF file has its own tensor names; adapters for it get the names of the model that it was made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from headrace.errors import RequestError
from headrace.models.families.decoder import LLAMA_NAMES, named_sources
from headrace.models.families.family import TensorPart, TensorSources
from headrace.models.model_folder import ModelFolder
from headrace.models.tensor_shapes import is_product

_LLAMA_LIKE: Final = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")  # of GGUF files


class AdapterModule(msgspec.Struct, frozen=True):
    name: str  # "model.layers.0.self_attn.q_proj"
    tensor: str  # canonical name of the product that has its rows
    rows: slice
    part: TensorPart

    @property
    def leaf(self) -> str:
        return self.name.rsplit(".", 1)[-1]


def file_sources(folder: ModelFolder) -> TensorSources:
    """Return the names of tensors in Hugging Face layout. RequestError for GGUF files of other architectures."""
    if folder.path.suffix != ".gguf":
        return folder.sources
    if folder.spec.architecture not in _LLAMA_LIKE:
        raise RequestError(
            f"GGUF files of {folder.spec.architecture} cannot be adapted. Pass the folder in Hugging Face layout that "
            f"the file was made from. Files of {', '.join(_LLAMA_LIKE)} can be.",
            parameter="model",
        )
    return named_sources(folder.spec, LLAMA_NAMES, frozenset(), prefix="model.")


def part_slices(folder: ModelFolder, sources: TensorSources, name: str) -> list[tuple[TensorPart, slice]]:
    """Return the parts of a canonical tensor in files, with their rows of it."""
    parts, found, begin = sources[name], list[tuple[TensorPart, slice]](), 0
    sizes = folder.part_rows(name) if len(parts) > 1 else (folder.shapes[name][0],)
    for part, size in zip(parts, sizes, strict=True):
        found.append((part, slice(begin, begin + size)))
        begin += size
    return found


def adapter_modules(folder: ModelFolder, targets: Sequence[str] = ()) -> list[AdapterModule]:
    """Return the modules that an adapter changes: all products of the layers, or those with these last names."""
    sources = file_sources(folder)
    every = [
        AdapterModule(part.name.removesuffix(".weight"), name, rows, part)
        for name in folder.shapes
        if name.startswith("layers.") and is_product(name)
        for part, rows in part_slices(folder, sources, name)
        if part.by_head is None
    ]
    known = {module.leaf for module in every}
    unknown = [target for target in targets if target not in known]
    if unknown:
        raise RequestError(
            f"Unknown target '{unknown[0]}'. {folder.spec.architecture} has {', '.join(sorted(known))}.",
            parameter="targets",
        )
    return [module for module in every if not targets or module.leaf in targets]
