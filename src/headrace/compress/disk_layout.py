"""Says under which names, and in which types, a model's layers are in files that a compressed model is written to.

A layer's tensors keep the names of the model's own files. Experts that those files hold in one tensor get one tensor
each, because quantised formats hold matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from headrace.models.config_json import ConfigJson
from headrace.models.families import TensorSources, family_of
from headrace.models.model_folder import ModelFolder

DenseType = Literal["bf16", "f16", "f32"]


class DiskPart(NamedTuple):
    """Rows of a canonical tensor, and the tensor that they are on disk."""

    name: str
    rows: slice


def written_sources(folder: ModelFolder) -> TensorSources:
    """Return the names that each canonical tensor is written under."""
    fused = {part.name for parts in folder.sources.values() for part in parts if part.index is not None}
    if not fused:
        return folder.sources
    return family_of(ConfigJson.read(folder.path / "config.json")).sources(folder.spec, folder.weights.names - fused)


def parts_of(folder: ModelFolder, written: TensorSources, name: str) -> Iterator[DiskPart]:
    """Yield where the rows of a canonical tensor are written."""
    parts = written[name]
    rows = folder.shapes[name][0]
    sizes = folder.part_rows(name) if len(parts) == len(folder.sources[name]) else (rows // len(parts),) * len(parts)
    begin = 0
    for part, size in zip(parts, sizes, strict=True):
        yield DiskPart(part.name, slice(begin, begin + size))
        begin += size


def dense_type(folder: ModelFolder, name: str) -> DenseType:
    """Return the type of a canonical tensor on disk; bf16 for what is quantised there."""
    part = folder.sources[name][0]
    return "bf16" if folder.weights.layout(part.name) is not None else folder.weights.dense(part.name).dtype


def untouched_names(folder: ModelFolder) -> list[str]:
    """Return the names of tensors in the files that belong to no layer: they are copied."""
    in_layers = {part.name for name, parts in folder.sources.items() if name.startswith("layers.") for part in parts}
    return sorted(folder.weights.names - in_layers)
