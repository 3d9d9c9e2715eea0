"""Reads a LoRA adapter in PEFT's layout and maps its modules to a model's products.

Every tensor of the file must belong to a product that can be changed: an adapter is served whole or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.adapters.adapter_config import ADAPTER_CONFIG, PeftConfig, read_adapter_config
from headrace.models.adapters.adapter_modules import AdapterModule, adapter_modules
from headrace.models.formats.model_weights import content_digest
from headrace.models.formats.safetensors_file import SafetensorsFile
from headrace.models.model_folder import ModelFolder
from headrace.models.packing import PANEL
from headrace.models.weight_cache import cache_folder

__all__ = ["ADAPTER_CONFIG", "ADAPTER_FILE", "AdapterWeights", "ProductPart", "adapter_digest", "read_adapter"]

ADAPTER_FILE: Final = "adapter_model.safetensors"
_TENSOR: Final = re.compile(
    r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>A|B|magnitude_vector)(?:\.weight)?$"
)
_PRODUCT: Final = re.compile(
    r"^layers\.(?P<layer>\d+)\."
    r"(?:attn\.(?P<attn>qkv|o)|mlp\.(?P<mlp>gate_up|up|down)|recurrent\.(?P<recurrent>in|out))$"
)
_PICKLED: Final = ("adapter_model.bin", "adapter_model.pt")

F32 = NDArray[np.float32]


class ProductPart(msgspec.Struct, frozen=True):
    """One module: rows of a canonical product. Weights are as the product's rows are ordered."""

    module: str
    tensor: str  # canonical
    rows: slice
    outputs: int  # of the product
    down: F32  # [rank, inputs]
    up: F32  # [rows, rank], scaled
    magnitudes: F32 | None = None  # [rows], of DoRA: lengths that the changed weights' rows are given


class AdapterWeights(msgspec.Struct, frozen=True):
    path: Path
    config: PeftConfig
    parts: tuple[ProductPart, ...]

    @property
    def bytes(self) -> int:
        return sum(part.down.nbytes + part.up.nbytes for part in self.parts)


def adapter_digest(path: Path, *, cache: bool = True) -> str:
    """Return a digest of the adapter's two files. It names the adapter wherever its KV or its answers are kept."""
    read_adapter_config(path)
    _check_file(path)
    index = cache_folder() / "digests" if cache else None
    return content_digest([path / ADAPTER_CONFIG, path / ADAPTER_FILE], index_dir=index)


def read_adapter(path: Path, folder: ModelFolder) -> AdapterWeights:
    """Read an adapter for a model. ModelError for one that the model cannot be served with."""
    config = read_adapter_config(path)
    _check_file(path)
    if folder.spec.kind != "decoder":
        raise ModelError(f"{folder.spec.architecture} is no decoder. Only decoders take adapters.", path=path)
    if folder.spec.recurrent is not None and folder.spec.recurrent.kind == "delta":
        raise ModelError(f"{folder.spec.architecture} has gated delta nets and takes no adapters.", path=path)
    file = SafetensorsFile.open(path / ADAPTER_FILE)
    sides = _sides(file)
    modules = adapter_modules(folder)
    known = {module.name: module for module in modules}
    unread = _unread(folder, known)
    parts = tuple(
        _part(file, name, names, config, module, folder)
        for name, names in sides.items()
        if name not in unread
        for module in _known(known, name, names, file, folder, modules)
    )
    if not parts:
        raise ModelError("The file has no tensors.", path=file.path)
    return AdapterWeights(path, config, parts)


def panel_columns(part: ProductPart) -> NDArray[np.int32]:
    """Return where each row of the part is in the packed product, whose gates and values alternate by panels."""
    rows = np.arange(part.rows.start, part.rows.stop, dtype=np.int32)
    if not part.tensor.endswith(".gate_up"):
        return rows
    inner = part.outputs // 2
    place = rows % inner
    return (place // PANEL * (2 * PANEL) + place % PANEL + np.where(rows >= inner, PANEL, 0)).astype(np.int32)


def product_of(tensor: str) -> tuple[int, str] | None:
    """Return the layer and the core's name of a canonical product that adapters may change."""
    found = _PRODUCT.match(tensor)
    if found is None:
        return None
    name = found["attn"] or found["mlp"] or found["recurrent"]
    return int(found["layer"]), "up" if name == "gate_up" else name


def _check_file(path: Path) -> None:
    if (path / ADAPTER_FILE).is_file():
        return
    pickled = next((name for name in _PICKLED if (path / name).exists()), None)
    if pickled is not None:
        raise ModelError(f"Files like {pickled} can run code and are never loaded. Save it as safetensors.", path=path)
    raise ModelError(f"The folder has no {ADAPTER_FILE}.", path=path)


def _sides(file: SafetensorsFile) -> dict[str, dict[str, str]]:
    """Return each module's tensors in the file, by their side."""
    sides: dict[str, dict[str, str]] = {}
    for name in file.tensors:
        found = _TENSOR.match(name)
        if found is None:
            raise ModelError("This is no part of a LoRA adapter that can be served.", path=file.path, tensor=name)
        sides.setdefault(found["module"], {})[found["side"]] = name
    return sides


def _unread(folder: ModelFolder, known: dict[str, AdapterModule]) -> frozenset[str]:
    """Return the keys and values of layers that read another layer's. transformers has their modules, so PEFT saves
    adapters for them, but computes nothing with them."""
    queries = {module.tensor: name for name, module in known.items() if module.leaf == "q_proj"}
    stems = (
        queries[f"layers.{index}.attn.qkv"].removesuffix("q_proj")
        for index, layer in enumerate(folder.spec.layers)
        if layer.shares is not None
    )
    return frozenset(f"{stem}{leaf}" for stem in stems for leaf in ("k_proj", "v_proj"))


def _known(
    known: dict[str, AdapterModule],
    module: str,
    names: dict[str, str],
    file: SafetensorsFile,
    folder: ModelFolder,
    modules: Sequence[AdapterModule],
) -> list[AdapterModule]:
    """Return the rows that a module of the file changes: those of keys may be those of values too."""
    found = known.get(module)
    tensor = next(iter(names.values()))
    if found is None:
        leaves = ", ".join(sorted({each.leaf for each in known.values() if product_of(each.tensor) is not None}))
        raise ModelError(
            f"{folder.spec.architecture} has no module '{module[:200]}' that an adapter can change. Adapters may "
            f"target {leaves}.",
            path=file.path,
            tensor=tensor,
        )
    if product_of(found.tensor) is None:
        raise ModelError(f"The module '{module[:200]}' cannot be changed by an adapter.", path=file.path, tensor=tensor)
    if found.leaf != "k_proj":
        return [found]
    return [each for each in modules if each.name == module]


def _part(
    file: SafetensorsFile,
    name: str,
    names: dict[str, str],
    config: PeftConfig,
    module: AdapterModule,
    folder: ModelFolder,
) -> ProductPart:
    for side in ("A", "B"):
        if side not in names:
            raise ModelError(
                f"The tensor lora_{side} of '{name}' is missing.", path=file.path, tensor=next(iter(names.values()))
            )
    decomposed = "magnitude_vector" in names
    if decomposed != config.weight_decomposed:
        raise ModelError(
            f"'use_dora' is {str(config.weight_decomposed).lower()}, but '{name}' has "
            f"{'a' if decomposed else 'no'} magnitude vector.",
            path=file.path,
            tensor=names["A"],
        )
    rank, rows = config.rank_of(name), module.rows.stop - module.rows.start
    outputs, inputs = folder.shapes[module.tensor]
    down = _values(file, names["A"], (rank, inputs))
    up = _values(file, names["B"], (rows, rank)) * np.float32(config.scale_of(name))
    magnitudes = _values(file, names["magnitude_vector"], (rows,)) if decomposed else None
    order = module.part.row_order(rows)
    if order is not None:
        up = up[order]
        magnitudes = None if magnitudes is None else magnitudes[order]
    return ProductPart(name, module.tensor, module.rows, outputs, down, up, magnitudes)


def _values(file: SafetensorsFile, name: str, shape: tuple[int, ...]) -> F32:
    tensor = file.dense(name)
    found = tensor.shape
    if len(shape) == 1 and len(found) > 1:
        found = tuple(size for size in found if size != 1)  # older files have [1, outputs]
    if found != shape:
        raise ModelError(f"The shape is {list(tensor.shape)}, expected {list(shape)}.", path=file.path, tensor=name)
    values = np.ascontiguousarray(tensor.to_f32().reshape(shape))
    if not np.isfinite(values).all():
        raise ModelError("The tensor has values that are not finite.", path=file.path, tensor=name)
    return values
