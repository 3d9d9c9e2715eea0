"""Reads layers of AWQ in the GEMM layout: `qweight`, `scales` and `qzeros`, as AutoAWQ writes them.

Codes of 4 bits run along the outputs, eight to a word in the order that AWQ's kernels read them.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.models.config_json import ConfigJson
from headrace.models.formats.quantised_layer import FLOATS, AffineCodes, QuantisedLayer, StoredLayout
from headrace.models.quantised.gptq import group_size

_BITS: Final = 4
_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word each of eight outputs is


class Awq(msgspec.Struct, frozen=True):
    group: int  # 0: a whole row

    label = "AWQ, 4 bits"
    marker = "qweight"
    parts = ("qweight", "scales", "qzeros")

    @classmethod
    def from_config(cls, config: ConfigJson) -> Awq:
        key = "bits" if config.has("bits") else "w_bit"
        if config.size(key, maximum=64) != _BITS:
            raise config.mismatch(key, "4")
        key = "version" if config.has("version") else "format"
        config.choice(key, {"gemm": None, "GEMM": None}, default="gemm")
        return cls(group_size(config, "group_size" if config.has("group_size") else "q_group_size", default=128))

    def owns(self, layer: QuantisedLayer) -> bool:
        return True

    def shape(self, layer: QuantisedLayer) -> tuple[int, int]:
        inputs, words = layer.matrix("qweight", "I32")
        groups = -(-inputs // (self.group or inputs))
        layer.check("scales", FLOATS, (groups, words * 8))
        layer.check("qzeros", ("I32",), (groups, words))
        return words * 8, inputs

    def layout(self, layer: QuantisedLayer) -> StoredLayout:
        return StoredLayout("codes", _BITS, self.group)

    def codes(self, layer: QuantisedLayer) -> AffineCodes:
        _, inputs = self.shape(layer)
        return AffineCodes(
            bits=_BITS,
            group=self.group or inputs,
            codes=_in_order(layer.words("qweight")),
            scales=np.ascontiguousarray(layer.floats("scales").T),
            zeros=_in_order(layer.words("qzeros")).astype(np.int16),
        )

    def dense(self, layer: QuantisedLayer) -> NDArray[np.float32]:
        return self.codes(layer).dense()


def _in_order(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Return the numbers of words [rows, outputs / 8] as [outputs, rows]."""
    columns = np.ascontiguousarray(words.T)
    codes = np.empty((len(columns), 8, columns.shape[1]), dtype=np.uint8)
    for output, place in enumerate(_PLACES):
        codes[:, output] = (columns >> np.uint32(4 * place)) & np.uint32(15)
    return codes.reshape(-1, columns.shape[1])
