"""Reads layers of GPTQ: `qweight`, `scales`, `qzeros` and `g_idx`, as AutoGPTQ and GPTQModel write them.

Codes run along the inputs and zeros along the outputs, in streams of bits. Zeros are stored one too low in the first
format ("gptq") and as they are in the second ("gptq_v2").
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.models.config_json import ConfigJson
from headrace.models.formats.quantised_layer import (
    FLOATS,
    AffineCodes,
    QuantisedLayer,
    StoredLayout,
    runs,
    unpack_bits,
    words_for,
)

_BITS: Final = (2, 3, 4, 8)
MAX_GROUP: Final = 1 << 20


def group_size(config: ConfigJson, key: str = "group_size", *, default: int = -1) -> int:
    """Return the inputs that share a scale; 0 for a whole row, which files write as -1."""
    size = config.size(key, minimum=-1, maximum=MAX_GROUP, default=default)
    if size == 0:
        raise config.mismatch(key, "-1 or a number of inputs")
    return max(size, 0)


class Gptq(msgspec.Struct, frozen=True):
    bits: int
    group: int  # 0: a whole row
    symmetric: bool
    zero_offset: int  # added to stored zeros

    marker = "qweight"
    parts = ("qweight", "scales", "qzeros", "g_idx")

    @classmethod
    def from_config(cls, config: ConfigJson) -> Gptq:
        bits = config.size("bits", maximum=8)
        if bits not in _BITS:
            raise config.mismatch("bits", "2, 3, 4 or 8")
        zeros = config.choice("checkpoint_format", {"gptq": 1, "gptq_v2": 0}, default="gptq")
        config.refuse("dynamic", "all layers must have the same bits", unless=(None, {}))
        config.refuse("pack_dtype", "codes must be packed into int32", unless=(None, "int32"))
        return cls(bits, group_size(config), config.flag("sym", default=False), zeros)

    @property
    def label(self) -> str:
        return f"GPTQ, {self.bits} bits"

    def owns(self, layer: QuantisedLayer) -> bool:
        return True

    def shape(self, layer: QuantisedLayer) -> tuple[int, int]:
        rows, outputs = layer.matrix("qweight", "I32")
        inputs = rows * 32 // self.bits
        if rows * 32 % self.bits:
            raise layer.error("qweight", f"Has {rows} rows. Expected whole numbers of {self.bits} bits.")
        groups = -(-inputs // (self.group or inputs))
        layer.check("scales", FLOATS, (groups, outputs))
        layer.check("qzeros", ("I32",), (groups, words_for(outputs, self.bits)))
        if layer.has("g_idx"):
            layer.check("g_idx", ("I32",), (inputs,))
        return outputs, inputs

    def layout(self, layer: QuantisedLayer) -> StoredLayout:
        _, inputs = self.shape(layer)
        kind = "codes" if self._group_of(layer, inputs) is None else "shuffled"
        return StoredLayout(kind, self.bits, self.group, self.symmetric)

    def codes(self, layer: QuantisedLayer) -> AffineCodes:
        outputs, inputs = self.shape(layer)
        stored = unpack_bits(layer.words("qzeros"), self.bits, outputs)
        zeros = (stored + np.uint8(self.zero_offset)) & np.uint8((1 << self.bits) - 1)
        return AffineCodes(
            bits=self.bits,
            group=self.group or inputs,
            codes=unpack_bits(layer.words("qweight").T, self.bits, inputs),
            scales=np.ascontiguousarray(layer.floats("scales").T),
            zeros=np.ascontiguousarray(zeros.T.astype(np.int16)),
            group_of=self._group_of(layer, inputs),
        )

    def dense(self, layer: QuantisedLayer) -> NDArray[np.float32]:
        return self.codes(layer).dense()

    def _group_of(self, layer: QuantisedLayer, inputs: int) -> NDArray[np.int64] | None:
        return shuffled_groups(layer, "g_idx", inputs, self.group or inputs)


def shuffled_groups(layer: QuantisedLayer, part: str, inputs: int, group: int) -> NDArray[np.int64] | None:
    """Return the group of every input; None if there is no such part, or groups are runs of inputs."""
    if not layer.has(part):
        return None
    index = layer.data(part).astype(np.int64)
    groups = -(-inputs // group)
    if index.min() < 0 or index.max() >= groups:
        raise layer.error(part, f"Names group {index.max() if index.min() >= 0 else index.min()} of {groups}.")
    return None if np.array_equal(index, runs(inputs, group)) else index
