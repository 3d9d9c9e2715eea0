"""Writes the container of a GGUF file (version 3): metadata, a table of tensors, and their bytes. Does not know what a
key or a tensor is for."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.models.formats.atomic_file import new_file
from headrace.models.formats.gguf_blocks import BLOCKS, TYPE_NAMES
from headrace.models.formats.gguf_file import MAGIC

_VERSION: Final = 3
_ALIGNMENT: Final = 32
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_NUMBERS: Final = {name: number for number, name in TYPE_NAMES.items()}

# Whole numbers are written as u32, real ones as f32, arrays of numpy as i32 or f32.
Value = bool | int | float | str | list[str] | NDArray[np.int32] | NDArray[np.float32]


class NewTensor(NamedTuple):
    type: str  # such as "Q4_K"
    shape: tuple[int, ...]  # outputs first
    read: Callable[[], Iterable[NDArray[Any]]]  # its bytes in pieces


def write_gguf(path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, NewTensor]) -> None:
    """Write a file that appears complete or not at all. Raises ValueError if a tensor's pieces do not fill it."""
    header = bytearray(MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        header += _text(key) + _value(value)
    offset = 0
    sizes: list[int] = []
    for name, tensor in tensors.items():
        header += _text(name) + struct.pack("<I", len(tensor.shape))
        header += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        header += struct.pack("<IQ", _NUMBERS[tensor.type], offset)
        block = BLOCKS[tensor.type]
        sizes.append(int(np.prod(tensor.shape)) // block.weights * block.bytes)
        offset += _padded(sizes[-1])
    with new_file(path) as file:
        file.write(header)
        file.write(bytes(_padded(len(header)) - len(header)))
        for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
            left = size
            for piece in tensor.read():
                left -= piece.nbytes
                file.write(np.ascontiguousarray(piece).view(np.uint8).data.cast("B"))
            if left:
                raise ValueError(f"tensor '{name}': {size - left} bytes do not fill {tensor.type} {tensor.shape}.")
            file.write(bytes(_padded(size) - size))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", _BOOL, value)
        case int():
            return struct.pack("<II", _U32, value)
        case float():
            return struct.pack("<If", _F32, value)
        case str():
            return struct.pack("<I", _STRING) + _text(value)
        case list():
            return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
        case _:
            kind = _F32 if value.dtype.kind == "f" else _I32
            return struct.pack("<IIQ", _ARRAY, kind, len(value)) + value.astype(f"<{value.dtype.kind}4").tobytes()
