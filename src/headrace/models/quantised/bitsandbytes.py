"""Reads layers of bitsandbytes: `weight` in 4 bits (NF4, FP4) with its quantisation state, or in int8 with `SCB`.

In 4 bits the values of a table are multiplied by the largest magnitude of their block; those magnitudes may be
quantised in turn ("nested", or double quantisation).
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.models.config_json import ConfigJson
from headrace.models.formats.quantised_layer import AffineCodes, QuantisedLayer, StoredLayout

# For each state the whole numbers that the kernels have for the 16 values of its table, and what 1 is among them.
_TABLES: Final = {
    "nf4": (124.34, (-124, -87, -65, -49, -35, -23, -11, 0, 10, 20, 31, 42, 55, 70, 90, 124)),
    "fp4": (120.0, (0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30)),
}
_STATES: Final = tuple(_TABLES)
_STATE: Final = "weight.quant_state.bitsandbytes__"
_STATE_LIMIT: Final = 64 * 1024  # bytes
_MAX_BLOCK: Final = 1 << 16
_MAX_SIZE: Final = 1 << 24
_INT8_UNIT: Final = np.float32(1 / 127)
_PARTS_4: Final = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")


class _State(msgspec.Struct, frozen=True):
    kind: str
    block: int
    shape: tuple[int, int]
    nested_block: int  # 0: magnitudes are not quantised
    nested_offset: float


class BitsAndBytes(msgspec.Struct, frozen=True):
    four_bits: bool

    marker = "weight"
    parts = ("weight", "SCB", "weight_format", *_PARTS_4, *(f"{_STATE}{kind}" for kind in _STATES))

    @classmethod
    def from_config(cls, config: ConfigJson) -> BitsAndBytes:
        four, eight = config.flag("load_in_4bit", default=False), config.flag("load_in_8bit", default=False)
        if four == eight:
            raise config.error("load_in_4bit", "Expected either load_in_4bit or load_in_8bit to be true.")
        if four:
            config.choice("bnb_4bit_quant_type", dict.fromkeys(_STATES), default="fp4")
            config.refuse("bnb_4bit_quant_storage", "codes must be stored as uint8", unless=(None, "uint8"))
        return cls(four)

    @property
    def label(self) -> str:
        return "bitsandbytes, 4 bits" if self.four_bits else "bitsandbytes, int8"

    def owns(self, layer: QuantisedLayer) -> bool:
        return layer.dtype("weight") in ("U8", "I8")

    def shape(self, layer: QuantisedLayer) -> tuple[int, int]:
        if not self.four_bits:
            outputs, inputs = layer.matrix("weight", "I8")
            layer.check("SCB", ("F32",), (outputs,))
            if layer.has("weight_format"):
                layer.check("weight_format", ("U8",), (), (1,))
            return outputs, inputs
        state = self._state(layer)
        count = math.prod(state.shape)
        layer.check("weight", ("U8",), (-(-count // 2), 1), (1, -(-count // 2)))
        layer.check("weight.quant_map", ("F32",), (16,))
        blocks = -(-count // state.block)
        if state.nested_block:
            layer.check("weight.absmax", ("U8",), (blocks,))
            layer.check("weight.nested_absmax", ("F32",), (-(-blocks // state.nested_block),))
            layer.check("weight.nested_quant_map", ("F32",), (256,))
        else:
            layer.check("weight.absmax", ("F32",), (blocks,))
        return state.shape

    def layout(self, layer: QuantisedLayer) -> StoredLayout:
        if not self.four_bits:
            return StoredLayout("codes", 8, 0, True)
        state = self._state(layer)
        unit, values = _TABLES[state.kind]
        ordinary = np.allclose(layer.floats("weight.quant_map") * unit, values, atol=0.51, rtol=0)
        whole = state.shape[1] % state.block == 0  # no block goes on in the next row
        return StoredLayout("table", 4, state.block, True, state.kind if ordinary and whole else "")

    def codes(self, layer: QuantisedLayer) -> AffineCodes | None:
        outputs, inputs = self.shape(layer)
        if self.four_bits:
            return self._table_codes(layer, self._state(layer))
        self._check_rows(layer)
        return AffineCodes(
            bits=8,
            group=inputs,
            codes=layer.data("weight").view(np.uint8) ^ np.uint8(128),  # adds 128
            scales=(layer.floats("SCB") * _INT8_UNIT)[:, None],
            zeros=np.full((outputs, 1), 128, dtype=np.int16),
        )

    def dense(self, layer: QuantisedLayer) -> NDArray[np.float32]:
        shape = self.shape(layer)
        if not self.four_bits:
            self._check_rows(layer)
            values = layer.data("weight").astype(np.float32)
            values *= layer.floats("SCB")[:, None]
            values *= _INT8_UNIT
            return values
        state = self._state(layer)
        pairs = layer.data("weight").reshape(-1)
        table = layer.floats("weight.quant_map")
        values = np.empty((pairs.size, 2), dtype=np.float32)
        values[:, 0] = table[pairs >> 4]
        values[:, 1] = table[pairs & 15]
        flat = values.reshape(-1)[: math.prod(shape)]
        sizes = self._magnitudes(layer, state)
        whole = flat.size // state.block * state.block
        flat[:whole].reshape(-1, state.block)[:] *= sizes[: whole // state.block, None]
        flat[whole:] *= sizes[-1]
        return flat.reshape(shape)

    def _table_codes(self, layer: QuantisedLayer, state: _State) -> AffineCodes:
        unit, values = _TABLES[state.kind]
        pairs = layer.data("weight").reshape(-1)
        codes = np.empty((pairs.size, 2), dtype=np.uint8)
        codes[:, 0], codes[:, 1] = pairs >> 4, pairs & 15
        scales = (self._magnitudes(layer, state) / np.float32(unit)).reshape(state.shape[0], -1)
        zeros = np.zeros(scales.shape, dtype=np.int16)
        table = np.array(values, dtype=np.int16)
        return AffineCodes(4, state.block, codes.reshape(state.shape), scales, zeros, table=table)

    def _magnitudes(self, layer: QuantisedLayer, state: _State) -> NDArray[np.float32]:
        if not state.nested_block:
            return layer.floats("weight.absmax")
        table = layer.floats("weight.nested_quant_map")
        nested = np.repeat(layer.floats("weight.nested_absmax"), state.nested_block)
        codes = layer.data("weight.absmax")
        return table[codes] * nested[: codes.size] + np.float32(state.nested_offset)

    def _check_rows(self, layer: QuantisedLayer) -> None:
        if layer.has("weight_format") and layer.data("weight_format").reshape(-1)[0] != 0:
            raise layer.error("weight_format", "Expected 0, rows of codes as bitsandbytes saves them.")

    def _state(self, layer: QuantisedLayer) -> _State:
        part = next((f"{_STATE}{kind}" for kind in _STATES if layer.has(f"{_STATE}{kind}")), f"{_STATE}{_STATES[0]}")
        layer.check(part, ("U8",))
        stored = layer.data(part).reshape(-1)

        def wrong(reason: str) -> Exception:
            return layer.error(part, f"The quantisation state is invalid: {reason}.")

        if stored.size > _STATE_LIMIT:
            raise wrong(f"it has {stored.size} bytes")
        try:
            values: Any = json.loads(stored.tobytes())
        except (ValueError, RecursionError):
            raise wrong("it is no JSON") from None
        if not isinstance(values, dict):
            raise wrong("it is no object")
        said = cast("dict[str, Any]", values)

        def size(value: object, maximum: int) -> int:
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
                raise wrong(f"expected a number from 1 to {maximum}, found {str(value)[:40]!r}")
            return value

        shape = said.get("shape")
        if not isinstance(shape, list) or len(cast("list[Any]", shape)) != 2:
            raise wrong("'shape' must have two sizes")
        rows, columns = (size(each, _MAX_SIZE) for each in cast("list[Any]", shape))
        nested = "nested_blocksize" in said
        offset = said.get("nested_offset", 0.0)
        if not isinstance(offset, (int, float)) or not abs(offset) < 1e30:
            raise wrong("'nested_offset' must be a number")
        return _State(
            kind=part.removeprefix(_STATE),
            block=size(said.get("blocksize"), _MAX_BLOCK),
            shape=(rows, columns),
            nested_block=size(said.get("nested_blocksize"), _MAX_BLOCK) if nested else 0,
            nested_offset=float(offset),
        )
