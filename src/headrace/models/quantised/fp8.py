"""Reads layers in FP8 (E4M3 or E5M2): `weight` with `weight_scale` or `weight_scale_inv`, which multiplies it.

A scale belongs to the tensor, to a row, or to a block of rows and inputs. Static and dynamic scales of activations are
ignored: the executor rounds no activations beside FP8 weights.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.models.config_json import ConfigJson
from headrace.models.formats.quantised_layer import FLOATS, AffineCodes, QuantisedLayer, StoredLayout

FP8: Final = ("F8_E4M3", "F8_E5M2")
_MAX_BLOCK: Final = 1 << 17
_MAX_BF16: Final = float(2**128 - 2**120)  # the largest finite number


def _table(exponent_bits: int, *, infinities: bool) -> NDArray[np.float32]:
    """Return what each of the 256 bytes stands for."""
    mantissa_bits = 7 - exponent_bits
    codes = np.arange(256)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = codes & (1 << mantissa_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    values = np.ldexp(np.where(exponent == 0, mantissa, mantissa + (1 << mantissa_bits)), 0).astype(np.float32)
    values = np.ldexp(values, np.maximum(exponent, 1) - bias - mantissa_bits).astype(np.float32)
    top = exponent == (1 << exponent_bits) - 1
    if infinities:
        values[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    else:
        values[top & (mantissa == (1 << mantissa_bits) - 1)] = np.nan
    return np.where(codes >= 128, -values, values).astype(np.float32)


_NOT_FINITE: Final = {"F8_E4M3": 0x7F, "F8_E5M2": 0x7C}  # all of these bits are set in infinity and NaN
_NAMES: Final = {"F8_E4M3": "fp8", "F8_E5M2": "fp8e5m2"}  # of the kernels
# What each byte stands for.
TABLES: Final = {"F8_E4M3": _table(4, infinities=False), "F8_E5M2": _table(5, infinities=True)}


class Fp8(msgspec.Struct, frozen=True):
    block: tuple[int, int] | None = None  # rows and inputs that share a scale

    label = "FP8"
    marker = "weight"
    parts = ("weight", "weight_scale", "weight_scale_inv", "input_scale", "activation_scale", "output_scale")

    @classmethod
    def from_config(cls, config: ConfigJson) -> Fp8:
        return cls(read_block(config, "weight_block_size"))

    def owns(self, layer: QuantisedLayer) -> bool:
        return layer.dtype("weight") in FP8

    def shape(self, layer: QuantisedLayer) -> tuple[int, int]:
        outputs, inputs = layer.matrix("weight", *FP8)
        shapes = [(), (1,), (1, 1), (outputs,), (outputs, 1)]
        if self.block is not None:
            shapes.append((-(-outputs // self.block[0]), -(-inputs // self.block[1])))
        layer.check(_scale_of(layer), FLOATS, *shapes)
        return outputs, inputs

    def layout(self, layer: QuantisedLayer) -> StoredLayout:
        _, inputs = self.shape(layer)
        _, width = self._block_of(layer)
        return StoredLayout("float", 8, 0 if width == inputs else width, table=_NAMES[layer.dtype("weight") or ""])

    def codes(self, layer: QuantisedLayer) -> AffineCodes:
        outputs, inputs = self.shape(layer)
        table = TABLES[layer.dtype("weight") or ""]
        codes = np.ascontiguousarray(layer.data("weight")).view(np.uint8)
        top = np.uint8(_NOT_FINITE[layer.dtype("weight") or ""])
        if ((codes & top) == top).any():
            raise layer.error("weight", "Contains NaN or infinity. Download or convert the model again.")
        height, width = self._block_of(layer)
        scales = layer.floats(_scale_of(layer)).reshape(-1, -(-inputs // width))
        rows = np.arange(outputs) // height
        spread = np.ascontiguousarray(scales[rows])
        # Without the sign, a larger code is a larger number.
        highest = np.maximum.reduceat(codes & np.uint8(0x7F), np.arange(0, inputs, width), axis=1)
        if (table[highest].astype(np.float64) * np.abs(spread) > _MAX_BF16).any():
            raise layer.error(
                _scale_of(layer),
                f"A weight times its scale is above {_MAX_BF16:.4g}, the range of bf16. Download or convert the model "
                "again.",
            )
        return AffineCodes(
            bits=8,
            group=width,
            codes=codes,
            scales=spread,
            zeros=np.zeros((outputs, scales.shape[1]), dtype=np.int16),
            table=table,
        )

    def dense(self, layer: QuantisedLayer) -> NDArray[np.float32]:
        return self.codes(layer).dense()

    def _block_of(self, layer: QuantisedLayer) -> tuple[int, int]:
        """Return the rows and inputs that share a scale."""
        outputs, inputs = layer.shape("weight")
        shape = layer.shape(_scale_of(layer))
        count = math.prod(shape)
        if self.block is None or (count in (1, outputs) and shape[1:] in ((), (1,))):
            return outputs // count, inputs
        height, width = self.block
        return height, min(width, inputs)


def read_block(config: ConfigJson, key: str) -> tuple[int, int] | None:
    """Return the rows and inputs of a block; None if there are no blocks."""
    sizes = config.optional_sizes(key, minimum=1, maximum=_MAX_BLOCK, max_items=2)
    if sizes is None:
        return None
    if len(sizes) != 2:
        raise config.mismatch(key, "two sizes, of rows and of inputs")
    return sizes[0], sizes[1]


def _scale_of(layer: QuantisedLayer) -> str:
    return "weight_scale_inv" if layer.has("weight_scale_inv") else "weight_scale"
