"""Puts a rounded product into the tensors of a file: compressed-tensors or bitsandbytes. Writes no file."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.compress.disk_layout import DenseType
from headrace.compress.grids import NF4, NF4_BLOCK, Grid, to_bf16
from headrace.compress.layer_pass import F32
from headrace.compress.nested_scales import NESTED_BLOCK, NESTED_TABLE, nest
from headrace.models.formats.quantised_layer import pack_bits

Stored = dict[str, tuple[str, NDArray[Any]]]  # name -> (type in the file, data)
NAMES: Final = {"bf16": "BF16", "f16": "F16", "f32": "F32"}


def store_dense(name: str, values: F32, kind: DenseType) -> Stored:
    """Return a tensor that is not quantised."""
    return {name: (NAMES[kind], to_disk_type(values, kind))}


def store_bitmask(name: str, values: F32, kind: DenseType, *, two_of_four: bool) -> Stored:
    """Return a tensor with many zeros as compressed-tensors packs it: a bit for each weight, and those that are not 0.
    Of four neighbours two are stored, be they 0 or not."""
    layer = name.removesuffix(".weight")
    mask = values != 0
    if two_of_four:
        fours = mask.reshape(len(mask), -1, 4)
        # Zeros fill up groups that have more than two.
        order = np.argsort(~fours, axis=2, kind="stable")
        mask = np.zeros_like(fours)
        np.put_along_axis(mask, order[:, :, :2], True, axis=2)
        mask = mask.reshape(values.shape)
    stored = to_disk_type(values[mask], kind)
    found: Stored = {
        f"{layer}.compressed": (NAMES[kind], stored.reshape(len(values), -1) if two_of_four else stored),
        f"{layer}.bitmask": ("U8", np.packbits(mask, axis=1, bitorder="little")),
        f"{layer}.shape": ("I64", np.array(values.shape, dtype=np.int64)),
    }
    if not two_of_four:
        counts = np.count_nonzero(mask, axis=1)
        found[f"{layer}.row_offsets"] = ("I64", (np.cumsum(counts) - counts).astype(np.int64))
    return found


def to_disk_type(values: F32, kind: DenseType) -> NDArray[Any]:
    if kind == "bf16":
        return to_bf16(values)
    return values.astype(np.float16 if kind == "f16" else np.float32)


def store_codes(name: str, codes: NDArray[np.uint8], grid: Grid, *, plain_int8: bool = False) -> Stored:
    """Return the tensors that stand for `name`. `plain_int8` stores bytes and not words, as W8A8 has them."""
    spec, layer = grid.spec, name.removesuffix(".weight")
    if spec.kind == "nf4":
        return _store_nf4(layer, codes, grid)
    found = store_dense(f"{layer}.weight_scale", grid.scales, spec.scale_type)
    if spec.kind == "fp8":
        return found | {f"{layer}.weight": ("F8_E4M3", codes)}
    if plain_int8 and spec.bits == 8 and spec.symmetric:
        return found | {f"{layer}.weight": ("I8", (codes ^ np.uint8(128)).view(np.int8))}
    found[f"{layer}.weight_packed"] = ("I32", pack_bits(codes, spec.bits).view(np.int32))
    found[f"{layer}.weight_shape"] = ("I64", np.array(codes.shape, dtype=np.int64))
    if not spec.symmetric:
        packed = pack_bits(np.ascontiguousarray(grid.zeros.T.astype(np.uint8)), spec.bits)
        found[f"{layer}.weight_zero_point"] = ("I32", np.ascontiguousarray(packed.T).view(np.int32))
    return found


def _store_nf4(layer: str, codes: NDArray[np.uint8], grid: Grid) -> Stored:
    flat = codes.reshape(-1, 2)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": NF4_BLOCK,
        "dtype": "bfloat16",
        "shape": list(codes.shape),
    }
    weight = f"{layer}.weight"
    found: Stored = {f"{weight}.absmax": ("F32", np.ascontiguousarray(grid.scales.reshape(-1)))}
    if grid.magnitudes is not None:
        nested = nest(grid.magnitudes)
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": nested.offset}
        found = {
            f"{weight}.absmax": ("U8", nested.codes),
            f"{weight}.nested_absmax": ("F32", nested.largest),
            f"{weight}.nested_quant_map": ("F32", NESTED_TABLE),
        }
    return found | {
        weight: ("U8", (flat[:, :1] << 4) | flat[:, 1:]),
        f"{weight}.quant_map": ("F32", NF4),
        f"{weight}.quant_state.bitsandbytes__nf4": ("U8", np.frombuffer(json.dumps(state).encode(), dtype=np.uint8)),
    }
