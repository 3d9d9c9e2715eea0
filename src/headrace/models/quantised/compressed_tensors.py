"""Reads layers of compressed-tensors: `weight_packed`, or `weight` in int8 or FP8, with `weight_scale`.

Reads pack-quantized, int-quantized, float-quantized and naive-quantized. How activations are quantised does not matter
here: the executor chooses that for its own precision.
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
    unpack_bits,
    words_for,
)
from headrace.models.quantised.fp8 import FP8, Fp8, read_block
from headrace.models.quantised.gptq import shuffled_groups

_FORMATS: Final = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STRATEGIES: Final = ("tensor", "channel", "group", "block")
_MOST_GROUPS: Final = 64  # of layers, that a config describes
_PARTS: Final = (
    "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
)  # fmt: skip


class CompressedTensors(msgspec.Struct, frozen=True):
    bits: frozenset[int]  # of packed layers; a layer's shape says which it has
    symmetric: bool
    fp8: Fp8
    kinds: str  # as in the config, for messages

    marker = "weight_scale"
    parts = _PARTS

    @classmethod
    def from_config(cls, config: ConfigJson) -> CompressedTensors:
        formats = {config.text("format", default=_FORMATS[0])}
        bits: set[int] = set()
        symmetric = True
        block: tuple[int, int] | None = None
        config.refuse("transform_config", "Headrace does not rotate activations", unless=(None, {}))
        sparsity = config.optional_sub("sparsity_config")
        if sparsity is not None:
            sparsity.refuse("format", "sparse files must be stored dense", unless=(None, "dense"))
        groups = config.sub("config_groups")
        if len(groups.names()) > _MOST_GROUPS:
            raise config.mismatch("config_groups", f"at most {_MOST_GROUPS} groups")
        for name in groups.names():
            group = groups.sub(name)
            if group.has("format"):
                formats.add(group.text("format"))
            weights = group.optional_sub("weights")
            if weights is None:
                continue
            bits.add(weights.size("num_bits", minimum=2, maximum=8))
            weights.choice("type", {"int": None, "float": None}, default="int")
            weights.choice("strategy", dict.fromkeys(_STRATEGIES), default="tensor")
            symmetric = symmetric and weights.flag("symmetric", default=True)
            block = read_block(weights, "block_structure") or block
        for name in sorted(formats - {"mixed-precision", "dense"}):
            if name not in _FORMATS:
                raise config.error("format", f"{name[:60]!r} is not supported. Headrace reads {', '.join(_FORMATS)}.")
        return cls(frozenset(bits), symmetric, Fp8(block), ", ".join(sorted(formats)))

    @property
    def label(self) -> str:
        return f"compressed-tensors, {self.kinds}"

    def owns(self, layer: QuantisedLayer) -> bool:
        return layer.has("weight_packed") or layer.dtype("weight") in ("I8", *FP8)

    def shape(self, layer: QuantisedLayer) -> tuple[int, int]:
        if layer.dtype("weight") in FP8:
            return self.fp8.shape(layer)
        outputs, inputs, bits = self._integers(layer)
        groups = self._groups(layer, outputs, inputs)
        if layer.has("weight_zero_point"):
            if layer.dtype("weight_zero_point") == "I32":
                layer.check("weight_zero_point", ("I32",), (words_for(outputs, bits), groups))
            else:
                layer.check("weight_zero_point", ("I8",), layer.shape("weight_scale"))
        if layer.has("weight_g_idx"):
            layer.check("weight_g_idx", ("I32",), (inputs,))
        return outputs, inputs

    def layout(self, layer: QuantisedLayer) -> StoredLayout:
        if layer.dtype("weight") in FP8:
            return self.fp8.layout(layer)
        outputs, inputs, bits = self._integers(layer)
        group = -(-inputs // self._groups(layer, outputs, inputs))
        shuffled = shuffled_groups(layer, "weight_g_idx", inputs, group) is not None
        return StoredLayout(
            "shuffled" if shuffled else "codes",
            bits,
            0 if group == inputs else group,
            not layer.has("weight_zero_point"),
        )

    def codes(self, layer: QuantisedLayer) -> AffineCodes:
        if layer.dtype("weight") in FP8:
            return self.fp8.codes(layer)
        outputs, inputs = self.shape(layer)
        _, _, bits = self._integers(layer)
        middle = 1 << (bits - 1)
        scales = layer.floats("weight_scale")
        groups = self._groups(layer, outputs, inputs)
        if layer.has("weight_packed"):
            codes = unpack_bits(layer.words("weight_packed"), bits, inputs)
        else:
            codes = layer.data("weight").view(np.uint8) ^ np.uint8(middle)  # adds 128
        if not layer.has("weight_zero_point"):
            zeros = np.full((outputs, groups), middle, dtype=np.int16)
        elif layer.dtype("weight_zero_point") == "I32":
            zeros = unpack_bits(layer.words("weight_zero_point").T, bits, outputs).T.astype(np.int16)
        else:
            stored = layer.data("weight_zero_point").astype(np.int16) + np.int16(middle)
            zeros = np.broadcast_to(stored.reshape(-1, groups), (outputs, groups))
        group = -(-inputs // groups)
        return AffineCodes(
            bits=bits,
            group=group,
            codes=codes,
            scales=np.ascontiguousarray(np.broadcast_to(scales.reshape(-1, groups), (outputs, groups))),
            zeros=np.ascontiguousarray(zeros),
            group_of=shuffled_groups(layer, "weight_g_idx", inputs, group),
        )

    def dense(self, layer: QuantisedLayer) -> NDArray[np.float32]:
        return self.codes(layer).dense()

    def _integers(self, layer: QuantisedLayer) -> tuple[int, int, int]:
        """Return outputs, inputs and bits of a layer of whole numbers."""
        if not layer.has("weight_packed"):
            outputs, inputs = layer.matrix("weight", "I8")
            return outputs, inputs, 8
        outputs, words = layer.matrix("weight_packed", "I32")
        layer.check("weight_shape", ("I64", "I32"), (2,))
        rows, inputs = (int(size) for size in layer.data("weight_shape"))
        for bits in sorted(self.bits):
            if rows == outputs and inputs > 0 and words_for(inputs, bits) == words:
                return outputs, inputs, bits
        spelled = " or ".join(str(bits) for bits in sorted(self.bits)) or "no"
        raise layer.error(
            "weight_shape", f"Says {rows}x{inputs}, but 'weight_packed' has {outputs}x{words} words of {spelled} bits."
        )

    def _groups(self, layer: QuantisedLayer, outputs: int, inputs: int) -> int:
        """Return how many groups the inputs have."""
        layer.check("weight_scale", FLOATS)
        shape = layer.shape("weight_scale")
        if shape in ((), (1,), (1, 1), (outputs,), (outputs, 1)):
            return 1
        if len(shape) == 2 and shape[0] == outputs and 0 < shape[1] <= inputs and inputs % shape[1] == 0:
            return shape[1]
        raise layer.error(
            "weight_scale",
            f"Has shape {'x'.join(map(str, shape))}. Expected one scale, one per row of {outputs}, or one per row and "
            f"group of {inputs} inputs.",
        )
