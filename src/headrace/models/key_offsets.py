"""Reads and writes files of key offsets: what KV memory subtracts from keys in each layer, KV head and channel.

A safetensors file with `layers.N.key_offsets`, f32 [KV heads, head size], for each layer that computes keys. Attention
does not change, because a query's scores all move by the same number. Measures nothing: that is in
`engine/executors/key_means.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError, RequestError
from headrace.models.formats.safetensors_file import SafetensorsFile, write_safetensors
from headrace.models.spec import ModelSpec
from headrace.variant import Variant

Floats = NDArray[np.float32]

_NAME: Final = "layers.{}.key_offsets"
_LARGEST: Final = 1e4  # as large a key as f16 scales keep with room


class KeyOffsets(msgspec.Struct, frozen=True):
    layers: dict[int, Floats]  # [KV heads, head size] by the model's layers

    @property
    def digest(self) -> str:
        """A digest of the numbers: KV that was rounded with these cannot be read with others."""
        digest = hashlib.sha256()
        for layer, values in sorted(self.layers.items()):
            digest.update(f"{layer} {values.shape} ".encode())
            digest.update(np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()

    def tensors(self) -> dict[str, Floats]:
        """Return what the core takes beside a model's tensors."""
        return {f"layers.{layer}.attn.key_offsets": values.reshape(-1) for layer, values in self.layers.items()}


def key_shapes(spec: ModelSpec) -> dict[int, tuple[int, int]]:
    """Return KV heads and head size of each layer whose keys can have offsets. RequestError if the model cannot."""
    if not spec.causal or spec.kind != "decoder":
        why = "is an encoder, which keeps no keys"
    elif spec.sinks:
        why = "has attention sinks, whose scores offsets would not move"
    elif spec.attention_softcap:
        why = "caps its attention scores, so moving them changes the answer"
    elif spec.latent is not None and spec.latent.kept:
        why = "keeps a latent instead of keys. Set latent_kv = false, or remove 'kv_offsets'"
    else:
        shapes = {
            place: spec.head_shape(layer)[:2]
            for place, layer in enumerate(spec.layers)
            if layer.attends and layer.shares is None
        }
        if shapes:
            return shapes
        why = "has no layer with attention"
    raise RequestError(f"Key offsets are not available: {spec.architecture} {why}.", parameter="kv_offsets")


def offsets_of(spec: ModelSpec, variant: Variant) -> KeyOffsets | None:
    """Return the offsets that a variant's KV has. RequestError if they cannot be read or belong to another model."""
    if variant.offsets_file is None:
        return None
    key_shapes(spec)
    try:
        return open_key_offsets(Path(variant.offsets_file).expanduser(), spec)
    except ModelError as error:
        raise RequestError(
            f"{error} `headrace kv-offsets MODEL FILE` makes such a file.", parameter="kv_offsets"
        ) from None


def open_key_offsets(path: Path, spec: ModelSpec) -> KeyOffsets:
    """Read offsets for a model. Raise ModelError if the file is wrong or belongs to another model."""
    if not path.is_file():
        raise ModelError("There is no such file of key offsets.", path=path)
    file = SafetensorsFile.open(path)
    shapes = key_shapes(spec)
    expected = {_NAME.format(layer): shape for layer, shape in shapes.items()}
    if other := next((name for name in file.tensors if name not in expected), None):
        raise ModelError(
            "The model has no layer with keys of this name: the file is of another model.", path=path, tensor=other
        )
    layers: dict[int, Floats] = {}
    for layer, (name, shape) in zip(shapes, expected.items(), strict=True):
        values = file.dense(name)
        if values.shape != shape:
            found = "x".join(map(str, values.shape)) or "a scalar"
            raise ModelError(f"Has shape {found}. This model's keys are {shape[0]}x{shape[1]}.", path=path, tensor=name)
        floats = np.array(values.to_f32(), dtype=np.float32)
        if not (np.abs(floats) <= _LARGEST).all():
            raise ModelError(f"Has a number that is not within ±{_LARGEST:,.0f}.", path=path, tensor=name)
        layers[layer] = floats
    return KeyOffsets(layers)


def write_key_offsets(path: Path, offsets: KeyOffsets, about: Mapping[str, str]) -> None:
    """Write offsets. `about` says what they were measured on."""
    write_safetensors(
        path,
        {
            _NAME.format(layer): ("F32", values.shape, lambda values=values: [np.ascontiguousarray(values)])
            for layer, values in sorted(offsets.layers.items())
        },
        metadata=about,
    )
