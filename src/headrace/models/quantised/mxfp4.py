"""Reads experts in MXFP4, as gpt-oss is published: a 4-bit float for each weight, and a power of two for each 32.

A tensor of the files holds all experts of a layer: `..._blocks` [experts, outputs, groups, 16] with two weights in a
byte, the low half first, and `..._scales` [experts, outputs, groups]. Twice a 4-bit float is a whole number, so the
weights keep their exact values as codes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.models.config_json import MAX_EXPERTS, ConfigJson
from headrace.models.formats.model_weights import ModelWeights
from headrace.models.formats.quantised_layer import AffineCodes, QuantisedLayer, StoredLayout
from headrace.models.formats.safetensors_file import TensorEntry
from headrace.models.formats.tensors import DenseTensor, StoredTensor

_GROUP: Final = 32
_BIAS: Final = 127  # of the scales' exponents
_DOUBLED: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int16)
_ENDS: Final = ("blocks", "scales")


class ExpertTensors:
    """The tensors of the files, with each expert's part of a `NAME_blocks` as `EXPERTS.NUMBER.NAME.blocks`."""

    def __init__(self, stored: ModelWeights) -> None:
        self._stored = stored
        self._parts: dict[str, tuple[str, int]] = {}  # name -> tensor of the files, expert
        split: set[str] = set()
        for name in stored.names:
            stem, _, end = name.rpartition("_")
            entry = stored.entry(name)
            if end not in _ENDS or entry is None or not entry.shape or entry.shape[0] > MAX_EXPERTS:
                continue
            split.add(name)
            block, _, leaf = stem.rpartition(".")
            for expert in range(entry.shape[0]):
                self._parts[f"{block}.{expert}.{leaf}.{end}"] = (name, expert)
        self.files = stored.files
        self.total_bytes = stored.total_bytes
        self.names = (stored.names - split) | self._parts.keys()

    def drop_pages(self) -> None:
        self._stored.drop_pages()

    def entry(self, name: str) -> TensorEntry | None:
        whole, _ = self._parts.get(name, (name, 0))
        entry = self._stored.entry(whole)
        if entry is None or name not in self._parts:
            return entry
        return entry._replace(shape=entry.shape[1:])

    def stored(self, name: str) -> StoredTensor:
        whole, expert = self._parts.get(name, (name, 0))
        tensor = self._stored.stored(whole)
        return tensor if name not in self._parts else msgspec.structs.replace(tensor, data=tensor.data[expert])

    def path_of(self, name: str) -> Path:
        return self._stored.path_of(self._parts.get(name, (name, 0))[0])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.shape(name)

    def dense(self, name: str) -> DenseTensor:
        return self._stored.dense(name)


class Mxfp4(msgspec.Struct, frozen=True):
    label = "MXFP4"
    marker = "blocks"
    parts = _ENDS

    @classmethod
    def from_config(cls, config: ConfigJson) -> Mxfp4:
        return cls()

    def owns(self, layer: QuantisedLayer) -> bool:
        return True

    def shape(self, layer: QuantisedLayer) -> tuple[int, int]:
        blocks = layer.shape("blocks")
        if len(blocks) != 3 or 0 in blocks or blocks[2] != _GROUP // 2:
            spelled = "x".join(map(str, blocks)) or "a scalar"
            raise layer.error("blocks", f"Has shape {spelled} for an expert. Expected outputs x groups x 16.")
        layer.check("blocks", ("U8",))
        layer.check("scales", ("U8",), blocks[:2])
        return blocks[0], blocks[1] * _GROUP

    def layout(self, layer: QuantisedLayer) -> StoredLayout:
        return StoredLayout("table", 4, _GROUP, symmetric=True, table="mxfp4")

    def codes(self, layer: QuantisedLayer) -> AffineCodes:
        outputs, inputs = self.shape(layer)
        stored = layer.data("blocks")
        each = np.empty((*stored.shape, 2), dtype=np.uint8)
        each[..., 0], each[..., 1] = stored & 15, stored >> 4
        exponents = layer.data("scales").astype(np.int32)
        if (exponents == 255).any():
            raise layer.error("scales", "Contains NaN. Download the model again.")
        scales = np.ldexp(np.float32(0.5), exponents - _BIAS).astype(np.float32)
        if not np.isfinite(scales).all():
            raise layer.error("scales", "Contains a scale that f32 does not hold. Download the model again.")
        zeros = np.zeros(scales.shape, dtype=np.int16)
        return AffineCodes(4, _GROUP, each.reshape(outputs, inputs), scales, zeros, table=_DOUBLED)

    def dense(self, layer: QuantisedLayer) -> NDArray[np.float32]:
        return self.codes(layer).dense()
