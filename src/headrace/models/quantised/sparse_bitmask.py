"""Reads layers of compressed-tensors whose zeros are not stored: `sparse-24-bitmask` and `sparse-bitmask`.

A bit for each weight says whether it is stored, lowest bit first; the stored ones follow one another row by row. The
weights are not quantised.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.models.config_json import ConfigJson
from headrace.models.formats.quantised_layer import FLOATS, AffineCodes, QuantisedLayer, StoredLayout

SPARSE_FORMATS: Final = ("sparse-24-bitmask", "sparse-bitmask")
_MAX_SIZE: Final = 1 << 24


class SparseBitmask(msgspec.Struct, frozen=True):
    two_of_four: bool

    marker = "bitmask"
    parts = ("bitmask", "compressed", "shape", "row_offsets")

    @classmethod
    def from_config(cls, config: ConfigJson) -> SparseBitmask:
        """Read the section `sparsity_config`."""
        return cls(config.choice("format", {name: name == SPARSE_FORMATS[0] for name in SPARSE_FORMATS}))

    @property
    def label(self) -> str:
        return f"compressed-tensors, {SPARSE_FORMATS[0 if self.two_of_four else 1]}"

    def owns(self, layer: QuantisedLayer) -> bool:
        return layer.has("compressed")

    def shape(self, layer: QuantisedLayer) -> tuple[int, int]:
        layer.check("shape", ("I64", "I32"), (2,))
        outputs, inputs = (int(size) for size in layer.data("shape"))
        if not (0 < outputs <= _MAX_SIZE and 0 < inputs <= _MAX_SIZE):
            raise layer.error("shape", f"Says {outputs}x{inputs}. Expected two sizes from 1 to {_MAX_SIZE}.")
        layer.check("bitmask", ("U8",), (outputs, -(-inputs // 8)))
        if self.two_of_four:
            layer.check("compressed", FLOATS, (outputs, inputs // 2))
        else:
            layer.check("compressed", FLOATS)
        return outputs, inputs

    def layout(self, layer: QuantisedLayer) -> StoredLayout:
        return StoredLayout("float", 16)

    def codes(self, layer: QuantisedLayer) -> AffineCodes | None:
        return None

    def dense(self, layer: QuantisedLayer) -> NDArray[np.float32]:
        shape = self.shape(layer)
        mask = np.unpackbits(layer.data("bitmask"), axis=1, count=shape[1], bitorder="little").view(np.bool_)
        stored = layer.floats("compressed").reshape(-1)
        if np.count_nonzero(mask) != stored.size:
            raise layer.error("bitmask", f"Marks {np.count_nonzero(mask)} weights, but 'compressed' has {stored.size}.")
        values = np.zeros(shape, dtype=np.float32)
        values[mask] = stored
        return values
