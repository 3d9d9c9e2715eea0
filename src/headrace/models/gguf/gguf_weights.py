"""Presents the tensors of a GGUF file as other weights are presented: dense, or with their codes where the kernels can
take them. Reads one tensor at a time, and of a tensor that holds all experts of a layer one expert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.config_json import MAX_EXPERTS
from headrace.models.formats.gguf_blocks import EXACT, TABLES, decode_rows, exact_codes
from headrace.models.formats.gguf_file import GgufFile, GgufTensor
from headrace.models.formats.quantised_layer import AffineCodes, StoredLayout
from headrace.models.formats.tensors import DenseTensor

_DENSE: Final[Mapping[str, tuple[Literal["f32", "bf16", "f16"], str]]] = {
    "F32": ("f32", "<f4"),
    "BF16": ("bf16", "<u2"),
    "F16": ("f16", "<u2"),
}
_EXPERTS: Final = {"_exps.weight": 3, "_exps.bias": 2}  # ends of names, and dimensions
_MOST_PARTS: Final = 1 << 20
_DECAYS: Final = ".ssm_a"  # files have -exp of what ours is
_LATENT: Final = ("attn_k_b.weight", "attn_v_b.weight")
_JOINED: Final = "attn_kv_b.weight"
_FRAMES: Final = ("v.patch_embd.weight", "v.patch_embd.weight.1")  # of a video; an image is two of them
_STACKED: Final = "v.patch_embd.frames"
_ONE_ROW: Final = ".ffn_gate_inp_shexp.weight"  # files have it without that dimension


class _Part(NamedTuple):
    """An expert's part of a tensor."""

    whole: str
    expert: int


class GgufWeights:
    """The tensors of a file by their names in it. An expert's part of `NAME_exps.weight` is `NAME_exps.NUMBER.weight`;
    `attn_kv_b` is joined from `attn_k_b` and `attn_v_b` where a file has those, and `v.patch_embd.frames` from both
    frames."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._parts: dict[str, _Part] = {}
        split: set[str] = set()
        for name, entry in file.tensors.items():
            for end, dimensions in _EXPERTS.items():
                if name.endswith(end) and len(entry.shape) == dimensions and entry.shape[0] <= MAX_EXPERTS:
                    split.add(name)
                    stem, leaf = name.rsplit(".", 1)
                    if len(self._parts) + entry.shape[0] > _MOST_PARTS:
                        raise self._error(name, f"The file has more than {_MOST_PARTS} tensors of experts.")
                    self._parts |= {f"{stem}.{each}.{leaf}": _Part(name, each) for each in range(entry.shape[0])}
        self._joined = _joined_names(file)
        split.update(part for parts in self._joined.values() for part in parts)
        self.files = file.paths
        self.names = (frozenset(file.tensors) - split) | self._parts.keys() | self._joined.keys()
        self.total_bytes = sum(entry.stop - entry.start for entry in file.tensors.values())

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._joined:
            keys, values = (self.file.tensors[part].shape for part in self._joined[name])
            if name == _STACKED:
                return *keys[:2], 2, *keys[2:]
            return keys[0] * (keys[2] + values[1]), keys[1]
        return self._entry(name).shape

    def dense(self, name: str) -> DenseTensor:
        if name in self._joined:
            return self._join(name)
        entry = self._entry(name)
        rows = self._rows(name, entry)
        data: NDArray[Any]
        if entry.type in _DENSE:
            dtype, view = _DENSE[entry.type]
            data = rows.view(view)
        else:
            dtype, data = "f32", decode_rows(rows, entry.type)
        found = DenseTensor(
            name=name, dtype=dtype, shape=entry.shape, data=data.reshape(entry.shape), path=self._path(name)
        )
        return self._logarithms(found) if name.endswith(_DECAYS) else found

    def drop_pages(self) -> None:
        """Give back the memory of what was read of the files."""
        self.file.drop_pages()

    def stored_names(self, name: str) -> tuple[str, ...]:
        if name in self._joined:
            return self._joined[name]
        return (self._parts[name].whole if name in self._parts else name,)

    def layout(self, name: str) -> StoredLayout | None:
        """Return how a tensor is quantised; None if it is not."""
        kind = self.block_type(name)
        if kind in _DENSE:
            return None
        exact = EXACT.get(kind)
        if exact is None or name in self._joined:
            return StoredLayout("blocks", 0)
        return StoredLayout(
            kind="table" if exact.table else "codes",
            bits=exact.bits,
            group=exact.group,
            symmetric=not exact.offsets,
            table=exact.table,
            offsets=exact.offsets,
        )

    def codes(self, name: str) -> AffineCodes | None:
        if name in self._joined:
            return None
        entry = self._entry(name)
        exact = EXACT.get(entry.type)
        if exact is None:
            return None
        codes, scales, offsets = exact_codes(self._rows(name, entry), entry.type)
        if not (np.isfinite(scales).all() and (offsets is None or np.isfinite(offsets).all())):
            raise self._error(name, "Contains NaN or infinity. Download the model again.")
        table = TABLES.get(exact.table)
        middle = 1 << (exact.bits - 1) if table is None and offsets is None else 0
        return AffineCodes(
            bits=exact.bits,
            group=exact.group,
            codes=codes,
            scales=scales,
            zeros=np.full(scales.shape, middle, dtype=np.int16),
            table=table,
            offsets=offsets,
        )

    def block_type(self, name: str) -> str:
        """Return the name of a tensor's type, such as Q4_K."""
        return self._entry(self._joined[name][1] if name in self._joined else name).type

    def _rows(self, name: str, entry: GgufTensor) -> NDArray[np.uint8]:
        if name not in self._parts:
            return self.file.rows(name)
        part = self._parts[name]
        count = math.prod(entry.shape[:-1])
        return self.file.rows(part.whole)[part.expert * count : (part.expert + 1) * count]

    def _entry(self, name: str) -> GgufTensor:
        part = self._parts.get(name)
        entry = self.file.tensors.get(name if part is None else part.whole)
        if entry is None:
            raise self._error(name, "The model's files have no such tensor.")
        if part is not None:
            return entry._replace(shape=entry.shape[1:])
        return entry._replace(shape=(1, *entry.shape)) if name.endswith(_ONE_ROW) and len(entry.shape) == 1 else entry

    def _logarithms(self, tensor: DenseTensor) -> DenseTensor:
        values = tensor.to_f32()
        if not (values < 0).all():
            raise self._error(tensor.name, "Expected numbers below zero.")
        return DenseTensor(tensor.name, "f32", tensor.shape, np.log(-values), tensor.path)

    def _join(self, name: str) -> DenseTensor:
        """Return a tensor that the file has in two. A latent gives each head the rest of its key, then its value: the
        file has keys as [heads, rank, size], to multiply queries by, and values as [heads, size, rank]."""
        keys, values = (self.dense(part).to_f32() for part in self._joined[name])
        if name == _STACKED:
            data = np.stack([keys, values], axis=2)
        else:
            data = np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(self.shape(name))
        return DenseTensor(name, "f32", data.shape, data, self._path(name))

    def _error(self, name: str, reason: str) -> ModelError:
        return ModelError(reason, path=self._path(name), tensor=name[:200])

    def _path(self, name: str) -> Path:
        return self.file.path_of(self.stored_names(name)[0])


def _joined_names(file: GgufFile) -> dict[str, tuple[str, ...]]:
    """Return what is joined from keys and values that the file has apart, with the same heads and rank."""
    found: dict[str, tuple[str, ...]] = {}
    first, second = (file.tensors.get(name) for name in _FRAMES)
    if first is not None and second is not None and first.shape == second.shape and len(first.shape) == 4:
        found[_STACKED] = _FRAMES
    for name, entry in file.tensors.items():
        stem = name.removesuffix(_LATENT[0])
        other = file.tensors.get(f"{stem}{_LATENT[1]}")
        if stem == name or other is None or len(entry.shape) != 3 or len(other.shape) != 3:
            continue
        if entry.shape[0] == other.shape[0] and entry.shape[1] == other.shape[2]:
            found[f"{stem}{_JOINED}"] = (name, f"{stem}{_LATENT[1]}")
    return found
