"""Packs a model folder into the tensors that the core takes: products in a precision, everything else as f32 vectors.

Saves them in a file that the next start maps. Its name is a digest of the weight files, the spec, the plan and the
layout's version, so a change of any of them packs again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.errors import ModelError
from headrace.models.distance_buckets import spread_buckets
from headrace.models.families import TensorPart
from headrace.models.formats.model_weights import content_digest
from headrace.models.formats.pack_file import PackFile, PackWriter
from headrace.models.formats.quantised_layer import runs
from headrace.models.formats.tensors import DenseTensor
from headrace.models.model_folder import ModelFolder
from headrace.models.precision import Precision, WeightFormat, WeightPlan
from headrace.models.spec import PANEL, ModelSpec
from headrace.models.tensor_shapes import is_kept_exact, is_product
from headrace.models.weight_cache import cache_limit, delete_abandoned, evict_until_fits, has_room

VERSION: Final = 4  # increase it when this file changes tensors before the core packs them

CoreTensor = _core.Packed | NDArray[np.float32]


class LoadedTensors(msgspec.Struct):
    tensors: dict[str, CoreTensor]
    bytes: int
    mapped: bool  # read from an existing packed file


class _PackedTensor(msgspec.Struct):
    """A tensor as bytes, with the metadata to read them back."""

    name: str
    meta: dict[str, Any]
    data: NDArray[np.uint8]


def load_tensors(
    folder: ModelFolder,
    plan: WeightPlan,
    pool: _core.Pool,
    *,
    cache: Path | None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedTensors:
    """Load the packed tensors from the cache folder, or pack them now and save them if there is room."""
    plan.check_patterns(name for name in folder.shapes if is_product(name))
    if cache is None:
        return _collect(_pieces(folder, plan, pool, progress), mapped=False)
    path = packed_file(folder, plan, cache)
    opened = _open_packed(path)
    if opened is not None:
        return opened
    try:
        if not write_packed(folder, plan, pool, path, progress):
            return _collect(_pieces(folder, plan, pool, progress), mapped=False)
    except OSError:
        # An unwritable cache (full, read-only) only costs time at the next start.
        return _collect(_pieces(folder, plan, pool, progress), mapped=False)
    opened = _open_packed(path)
    if opened is None:  # another process needed the room, or the disk is broken
        return _collect(_pieces(folder, plan, pool, progress), mapped=False)
    return msgspec.structs.replace(opened, mapped=False)


def packed_file(folder: ModelFolder, plan: WeightPlan, cache: Path) -> Path:
    """Return where the cache folder has the packed weights, or would have them."""
    return cache / "packed" / f"{_key(folder, plan, cache / 'digests')}.pack"


def is_packed(path: Path) -> bool:
    """Return whether a packed file is there and whole."""
    return _open_packed(path) is not None


def write_packed(
    folder: ModelFolder,
    plan: WeightPlan,
    pool: _core.Pool,
    path: Path,
    progress: Callable[[int, int], None] | None = None,
) -> bool:
    """Pack a folder's weights into a file of the cache. Return False if the cache may not be so large; OSError if it
    cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    delete_abandoned(path.parent)
    size = packed_size(folder.spec, folder.shapes, plan)
    if not evict_until_fits(path.parent, size, cache_limit(path.parent)) or not has_room(path.parent, size):
        return False
    with PackWriter(path, {"layout": _core.LAYOUT, "model": folder.path.name}) as writer:
        for piece in _pieces(folder, plan, pool, progress):
            writer.add(piece.name, piece.meta, piece.data)
    return True


def packed_size(spec: ModelSpec, shapes: dict[str, tuple[int, ...]], plan: WeightPlan) -> int:
    """Return the bytes of the packed tensors under a plan."""
    total = 0
    for name, shape in shapes.items():
        if is_product(name) or is_kept_exact(name):
            precision = _precision(name, plan, spec, shape[1])
            rows = _panel_rows(shape[0]) if name.endswith(".gate_up") else shape[0]
            total += _packed_bytes(precision, rows, shape[1])
        else:
            total += 4 * int(np.prod(shape))
    return total


def packed_matrix_bytes(outputs: int, inputs: int, precision: Precision) -> int:
    """Return the bytes of what `pack_matrix` returns."""
    return _packed_bytes(_fitting(precision, inputs), outputs, inputs)


def _packed_bytes(precision: Precision, outputs: int, inputs: int) -> int:
    return _core.packed_bytes(
        precision.format,
        outputs,
        inputs,
        precision.group,
        asymmetric=precision.zeros,
        multiples=precision.multiples,
        offsets=precision.offsets,
    )


def _precision(name: str, plan: WeightPlan, spec: ModelSpec, inputs: int) -> Precision:
    if is_kept_exact(name):
        return Precision("f32")
    return _fitting(plan.precision(name, tied=spec.tied), inputs)


def _fitting(precision: Precision, inputs: int) -> Precision:
    """Return a precision without rotation where the rows cannot be rotated."""
    fits = inputs % _core.ROTATION_UNIT == 0
    return precision if fits or not precision.rotated else msgspec.structs.replace(precision, rotated=False)


def _key(folder: ModelFolder, plan: WeightPlan, digests: Path) -> str:
    facts = (_core.LAYOUT, VERSION, content_digest(folder.weights.files, index_dir=digests), folder.spec, plan)
    return hashlib.sha256(msgspec.msgpack.encode(facts)).hexdigest()[:40]


def _collect(pieces: Iterator[_PackedTensor], *, mapped: bool) -> LoadedTensors:
    tensors: dict[str, CoreTensor] = {}
    total = 0
    for piece in pieces:
        tensors[piece.name] = _tensor(piece)
        total += piece.data.size
    return LoadedTensors(tensors, total, mapped)


def _open_packed(path: Path) -> LoadedTensors | None:
    try:
        file = PackFile.open(path)
        opened = _collect(
            (_PackedTensor(name, file.entry_meta(name), file.data(name)) for name in file.names), mapped=True
        )
    except (ModelError, ValueError, KeyError, TypeError):
        return None  # missing or damaged: pack again
    with contextlib.suppress(OSError):
        os.utime(path)  # eviction removes the least recently used file
    return opened


def _tensor(piece: _PackedTensor) -> CoreTensor:
    meta = piece.meta
    if meta["kind"] == "vector":
        return piece.data.view(np.float32)
    return _core.Packed(
        meta["format"],
        meta["outputs"],
        meta["inputs"],
        meta["group"],
        meta["gain"],
        piece.data,
        asymmetric=meta["asymmetric"],
        multiples=meta["multiples"],
        rotated=meta["rotated"],
        float_rows=meta["float_rows"],
        offsets=meta["offsets"],
    )


def _pieces(
    folder: ModelFolder, plan: WeightPlan, pool: _core.Pool, progress: Callable[[int, int], None] | None
) -> Iterator[_PackedTensor]:
    for index, name in enumerate(folder.shapes):
        if progress is not None:
            progress(index, len(folder.shapes))
        folder.weights.drop_pages()  # otherwise the process keeps the whole model beside the packed one
        precision = _precision(name, plan, folder.spec, folder.shapes[name][-1])
        if is_product(name) and precision.stored:
            yield _packed_codes(name, folder, precision)
            continue
        tensor = folder.tensor(name)
        bad = _core.find_nonfinite(tensor.data, tensor.dtype, pool)
        if bad >= 0:
            raise ModelError(
                f"Contains NaN or infinity, first at value {bad}. Download or convert the model again.",
                path=tensor.path,
                tensor=_source_name(folder, name),
            )
        if is_product(name) or is_kept_exact(name):
            yield _packed(name, tensor, precision, pool)
        else:
            yield _vector(name, tensor, folder.spec)
    folder.weights.drop_pages()


def pack_matrix(weights: NDArray[np.float32], precision: Precision, pool: _core.Pool) -> _core.Packed:
    """Round and pack one matrix as loading does. What it unpacks to is what the engine computes with."""
    source = np.ascontiguousarray(weights, dtype=np.float32)
    outputs, inputs = source.shape
    precision = _fitting(precision, inputs)
    out = aligned_bytes(_packed_bytes(precision, outputs, inputs))
    gain = _core.pack(
        source, "f32", precision.format, precision.group, out, pool, precision.multiples, precision.rotated
    )
    return _core.Packed(
        precision.format,
        outputs,
        inputs,
        precision.group,
        gain,
        out,
        multiples=precision.multiples,
        rotated=precision.rotated,
        float_rows=precision.float_rows,
    )


def pack_layers(
    spec: ModelSpec, tensors: Mapping[str, NDArray[np.float32]], precision: Precision, pool: _core.Pool
) -> LoadedTensors:
    """Pack canonical tensors that are in memory: every product in one precision."""
    pieces: list[_PackedTensor] = []
    for name, values in tensors.items():
        tensor = DenseTensor(name=name, dtype="f32", shape=values.shape, data=values, path=Path())
        if is_product(name):
            pieces.append(_packed(name, tensor, _fitting(precision, values.shape[1]), pool))
        else:
            pieces.append(_vector(name, tensor, spec))
    return _collect(iter(pieces), mapped=False)


def _source_name(folder: ModelFolder, name: str) -> str:
    return " + ".join(part.name for part in folder.sources[name])


def _packed(name: str, tensor: DenseTensor, precision: Precision, pool: _core.Pool) -> _PackedTensor:
    source = _panels(tensor.data) if name.endswith(".gate_up") else np.ascontiguousarray(tensor.data)
    outputs, inputs = source.shape
    out = aligned_bytes(_packed_bytes(precision, outputs, inputs))
    gain = _core.pack(
        source, tensor.dtype, precision.format, precision.group, out, pool, precision.multiples, precision.rotated
    )
    return _PackedTensor(name, _meta(precision, outputs, inputs, gain), out)


def _packed_codes(name: str, folder: ModelFolder, precision: Precision) -> _PackedTensor:
    """Pack a tensor of a quantised file with its own codes: nothing is rounded but scales and offsets, to f16; the
    scales of FP8 are not."""
    parts = [_stored_part(folder, part, precision) for part in folder.sources[name]]
    codes, scales, bases = (np.concatenate(each) for each in zip(*parts, strict=True))
    if name.endswith(".gate_up"):
        codes, scales, bases = _panels(codes), _panels(scales), _panels(bases)
    outputs, inputs = codes.shape
    out = aligned_bytes(_packed_bytes(precision, outputs, inputs))
    bases = np.ascontiguousarray(bases)
    gain = _core.pack_codes(
        codes,
        np.ascontiguousarray(scales),
        bases if precision.zeros else None,
        precision.format,
        precision.group,
        out,
        offsets=bases if precision.offsets else None,
    )
    return _PackedTensor(name, _meta(precision, outputs, inputs, gain), out)


def _stored_part(
    folder: ModelFolder, part: TensorPart, precision: Precision
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[Any]]:
    codes, scales, bases = _stored_codes(folder, part.name, precision)
    order = part.row_order(len(codes))
    if order is not None:
        codes, scales, bases = codes[order], scales[order], bases[order]
    inputs = part.input_order(codes.shape[1])
    if inputs is None:
        return codes, scales, bases
    group = codes.shape[1] // scales.shape[1]
    groups = inputs[::group] // group
    # numpy lays out what it takes by columns column by column; the core takes rows.
    return np.ascontiguousarray(codes[:, inputs]), scales[:, groups], bases[:, groups]


def _stored_codes(
    folder: ModelFolder, name: str, precision: Precision
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[Any]]:
    """Return codes, scales, and zeros or offsets of a part, in groups of the precision."""
    stored = folder.weights.codes(name)
    assert stored is not None, name
    inputs = stored.codes.shape[1]
    first = runs(inputs, stored.group)[:: precision.group or inputs]  # the stored group of each group
    if stored.offsets is not None:
        return stored.codes, stored.scales[:, first], stored.offsets[:, first]
    zeros = stored.zeros[:, first]
    if precision.zeros or stored.table is not None:
        return stored.codes, stored.scales[:, first], zeros
    middle = 1 << (stored.bits - 1)
    if (zeros != middle).any():
        raise ModelError(
            f"Has zeros other than {middle}, but quantization_config says that it is symmetric. Correct it ('sym' is "
            "false then), or pass --weights.",
            path=folder.path,
            tensor=name,
        )
    return stored.codes + np.uint8(precision.zero - middle), stored.scales[:, first], zeros


def _meta(precision: Precision, outputs: int, inputs: int, gain: float) -> dict[str, Any]:
    format_name: WeightFormat = precision.format
    return {
        "kind": "packed",
        "format": format_name,
        "outputs": outputs,
        "inputs": inputs,
        "group": precision.group,
        "asymmetric": precision.zeros,
        "multiples": precision.multiples,
        "rotated": precision.rotated,
        "float_rows": precision.float_rows,
        "offsets": precision.offsets,
        "gain": gain,
    }


def _vector(name: str, tensor: DenseTensor, spec: ModelSpec) -> _PackedTensor:
    values = tensor.to_f32()
    if name == "positions":
        values = values[spec.position_offset :]
    elif name == "distances":
        values = spread_buckets(values, spec.max_distance)
    elif name.endswith(("norm", "norm.weight")) and spec.norm_offset and not _is_plain_norm(name):
        values = values + np.float32(spec.norm_offset)
    elif name.endswith(".gate_up.bias"):
        values = _panels(values)
    if name in ("norm", "norm.bias") and spec.logit_scale != 1.0:
        values = values * np.float32(spec.logit_scale)
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    return _PackedTensor(name, {"kind": "vector"}, flat.view(np.uint8))


def _is_plain_norm(name: str) -> bool:
    """Whether `norm_offset` does not concern a norm: it is of a layer after pooling, or within a recurrent layer."""
    return name.startswith("pooled.") or ".recurrent." in name


def _panel_rows(rows: int) -> int:
    return 2 * (-(-(rows // 2) // PANEL) * PANEL)


def _panels(gate_up: NDArray[Any]) -> NDArray[Any]:
    """Interleave panels of gate rows and up rows, so that one pass computes both sides of the gate."""
    inner = gate_up.shape[0] // 2
    padded = _panel_rows(gate_up.shape[0]) // 2
    halves = np.zeros((2, padded, *gate_up.shape[1:]), dtype=gate_up.dtype)
    halves[:, :inner] = gate_up.reshape(2, inner, *gate_up.shape[1:])
    panels = halves.reshape(2, padded // PANEL, PANEL, *gate_up.shape[1:]).swapaxes(0, 1)
    return np.ascontiguousarray(panels).reshape(2 * padded, *gate_up.shape[1:])


def aligned_bytes(count: int) -> NDArray[np.uint8]:
    """Allocate uninitialised bytes aligned to 64, for the core's vector loads."""
    raw = np.empty(count + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count]
