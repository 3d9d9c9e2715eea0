"""A model without some of its layers, which shares the weights of the others: a drafter for self-speculation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, TypeVar

import msgspec

from headrace.errors import RequestError
from headrace.models.spec import ModelSpec

Value = TypeVar("Value")

_LAYERS: Final = "layers."


def check_skipped(spec: ModelSpec, skipped: Collection[int]) -> None:
    """Raise RequestError for layers that the model does not have, or if none would be left."""
    count = len(spec.layers)
    if skipped and (spec.layer_inputs is not None or any(layer.shares is not None for layer in spec.layers)):
        raise RequestError(
            "'skip_layers' is not available for this model: its layers read what others compute beside the residual.",
            parameter="skip_layers",
        )
    for layer in skipped:
        if not 0 <= layer < count:
            raise RequestError(
                f"'skip_layers' names layer {layer}. This model has the layers 0 to {count - 1}.",
                parameter="skip_layers",
            )
    if len(set(skipped)) >= count:
        raise RequestError("'skip_layers' names every layer. Leave at least one.", parameter="skip_layers")


def shorter_spec(spec: ModelSpec, skipped: Collection[int]) -> ModelSpec:
    check_skipped(spec, skipped)
    layers = tuple(layer for place, layer in enumerate(spec.layers) if place not in skipped)
    return msgspec.structs.replace(spec, layers=layers)


def shorter_tensors(spec: ModelSpec, tensors: Mapping[str, Value], skipped: Collection[int]) -> dict[str, Value]:
    """Return the same tensors under the names that they have in the shorter model."""
    kept = [place for place in range(len(spec.layers)) if place not in skipped]
    places = {str(old): new for new, old in enumerate(kept)}
    found: dict[str, Value] = {}
    for name, tensor in tensors.items():
        if not name.startswith(_LAYERS):
            found[name] = tensor
            continue
        old, _, rest = name.removeprefix(_LAYERS).partition(".")
        if old in places:
            found[f"{_LAYERS}{places[old]}.{rest}"] = tensor
    return found
