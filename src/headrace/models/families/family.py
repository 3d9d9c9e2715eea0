"""What a family of models is to the rest of Headrace.

Owns TensorPart, TensorSources and Family: the contract between families and loading. Knows no family and reads no file.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from headrace.models.config_json import ConfigJson
from headrace.models.spec import ModelSpec


class TensorPart(msgspec.Struct, frozen=True):
    """A tensor in the model's files, or one expert of a tensor that holds all experts: [experts, outputs, inputs]."""

    name: str
    index: int | None = None


TensorSources = dict[str, tuple[TensorPart, ...]]  # canonical tensor -> its parts, joined along the rows


class Family(Protocol):
    """What a family's module holds: what it accepts, what the model is, and where its tensors are."""

    architectures: tuple[str, ...]  # Hugging Face class names

    def spec(self, config: ConfigJson) -> ModelSpec: ...

    def sources(self, spec: ModelSpec, names: frozenset[str]) -> TensorSources:
        """Where each tensor of `tensor_shapes(spec)` is; `names` are the tensors in the files.

        Names that the files lack are given all the same: loading reports what is missing by its name.
        """
        ...


def architecture_of(config: ConfigJson) -> str:
    """The Hugging Face class that a config names: the first of `architectures`."""
    names = config.strings("architectures")
    if not names:
        raise config.mismatch("architectures", "a list with the name of a model class")
    return names[0]
