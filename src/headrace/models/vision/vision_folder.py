"""Opens the image part of a model folder: its spec, its tensors and how it prepares images.

A model without an image part that Headrace computes has none here, and reads text only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.config_json import ConfigJson
from headrace.models.families.decoder import find_prefix, named_sources
from headrace.models.families.vision.towers import has_tower, read_tower
from headrace.models.families.vision.vision_tower import Connector, TowerSpec, TowerTensor
from headrace.models.formats.model_weights import ModelWeights
from headrace.models.gguf.gguf_shards import open_gguf
from headrace.models.gguf.gguf_tokenizer import read_tokenizer
from headrace.models.gguf.gguf_weights import GgufWeights
from headrace.models.gguf.mmproj import Mmproj, find_mmproj, has_mmproj, mmproj_sources, read_mmproj
from headrace.models.model_folder import ModelFolder
from headrace.models.packing import packed_matrix_bytes, packed_size
from headrace.models.precision import AUTO, WeightPlan, check_image_weights, parse_plan
from headrace.models.text.tokenizer_files import read_folder
from headrace.models.vision import patch_layout, square_layout
from headrace.models.vision.clip_layout import read_clip
from headrace.models.vision.encoding_memory import encoding_bytes, most_patches
from headrace.models.vision.image_layout import ImageLayout, check_preprocessor, read_preprocessor
from headrace.models.vision.line_layout import read_lines
from headrace.models.vision.patch_layout import read_patches
from headrace.models.vision.square_layout import read_square
from headrace.models.vision.tiled_layout import read_tiled

_LAYOUTS: Final[dict[Connector, tuple[Callable[[ConfigJson, TowerSpec], ImageLayout], tuple[str, ...]]]] = {
    "shuffle": (read_tiled, ()),
    "pool": (read_square, square_layout.IGNORED),
    "merge": (read_patches, patch_layout.IGNORED),
    "lines": (read_lines, ()),
    "project": (read_clip, ()),
}


class VisionFolder(NamedTuple):
    tower: TowerSpec
    layout: ImageLayout
    folder: ModelFolder  # of the tower

    @property
    def extras(self) -> dict[str, NDArray[np.float32]]:
        """Tensors of `tower.extras`, as matrices and vectors. They are read each time."""
        return {extra.name: _extra(self.folder, extra) for extra in self.tower.extras}

    @property
    def tensor_names(self) -> frozenset[str]:
        """Names in the files of all tensors that features are computed from."""
        parts = (part.name for parts in self.folder.sources.values() for part in parts)
        return frozenset(parts) | {_extra_name(self.folder, extra) for extra in self.tower.extras}

    def within(self, patches: int) -> VisionFolder:
        """Return an image part that scales images down so that it computes at most so many patches in one step."""
        return self._replace(layout=self.layout.within(patches * self.tower.patch_size**2))

    def plan(self, weights: str = AUTO) -> WeightPlan:
        """Return the precision of the tower's products: f32, bf16 or int8. "auto" is bf16 where the files hold it, so
        that f32 would only take more memory, or else f32."""
        return _plan(self.folder, weights)


def has_vision(path: Path) -> bool:
    """Return whether a model has an image part that Headrace computes, or a second GGUF file that may be one."""
    if path.is_file():
        return has_mmproj(path)
    if not path.is_dir() or not (path / "config.json").exists():
        return False
    return has_tower(ConfigJson.read(path / "config.json"))


def read_layout(path: Path, tower: TowerSpec) -> ImageLayout:
    """Read how the model's images are prepared. ModelError for a preparation that Headrace does not do exactly."""
    config = _mmproj(path).preparation if path.is_file() else read_preprocessor(path)
    read, ignored = _LAYOUTS[tower.connector]
    layout = read(config, tower)
    check_preprocessor(config, ignored)
    return layout


def open_vision(path: Path) -> VisionFolder:
    """Open the image part of a model. ModelError if anything in it is wrong."""
    tower, folder = _open_tower(path)
    _check_extras(folder, tower)
    return VisionFolder(tower, read_layout(path, tower), folder)


def tower_bytes(path: Path, weights: str = AUTO) -> int:
    """Return the bytes of the image part's weights in memory, at a precision; 0 for a model whose images are not read.
    Reads no weights."""
    vision = _read_vision(path)
    return 0 if vision is None else _weight_bytes(vision, weights)


def image_bytes(path: Path, weights: str, patches: int) -> int:
    """Return the bytes of the image part's weights, and of the memory in which it encodes the largest image, of at most
    `patches`; 0 for a model whose images are not read. Reads no weights."""
    vision = _read_vision(path)
    if vision is None:
        return 0
    largest = most_patches(vision.tower, vision.within(patches).layout)
    return _weight_bytes(vision, weights) + encoding_bytes(vision.tower, largest)


def _read_vision(path: Path) -> VisionFolder | None:
    if not has_vision(path):
        return None
    try:
        return open_vision(path)
    except ModelError:
        return None  # the server says why when it opens the model, and serves text


def _weight_bytes(vision: VisionFolder, weights: str) -> int:
    tower, folder = vision.tower, vision.folder
    plan = _plan(folder, weights)
    return packed_size(folder.spec, folder.shapes, plan) + sum(_extra_bytes(extra, plan) for extra in tower.extras)


def own_files(path: Path) -> tuple[Path, ...]:
    """Return the weight files that the image part does not share with the text part: that of a GGUF model, if Headrace
    reads it."""
    if not path.is_file() or not has_mmproj(path):
        return ()
    try:
        return _open_mmproj(path)[1].weights.files
    except ModelError:
        return ()


def _extra_bytes(extra: TowerTensor, plan: WeightPlan) -> int:
    if len(extra.shape) < 2 or not extra.is_product:
        return 4 * math.prod(extra.shape)
    return packed_matrix_bytes(extra.shape[0], math.prod(extra.shape[1:]), plan.precision(extra.name))


def _mmproj(path: Path) -> Mmproj:
    found = find_mmproj(path)
    if found is None:
        raise ModelError("There is no image part (mmproj) beside the file.", path=path)
    return read_mmproj(found, open_gguf(path))


def _open_mmproj(path: Path) -> tuple[TowerSpec, ModelFolder]:
    found = _mmproj(path)
    spec, weights = found.tower.encoder, GgufWeights(found.file)
    sources = mmproj_sources(found, weights.names)
    folder = ModelFolder(found.file.path, spec, weights, sources, partial(read_tokenizer, found.file))
    folder.check_shapes()
    return found.tower, folder


def _open_tower(path: Path) -> tuple[TowerSpec, ModelFolder]:
    if path.is_file():
        return _open_mmproj(path)
    config = ConfigJson.read(path / "config.json")
    tower = read_tower(config)
    weights = ModelWeights.open(path)
    names = weights.names
    prefix = find_prefix(names, tower.prefixes, tower.probe)
    spec = tower.encoder
    sources = named_sources(spec, tower.names, names, prefix=prefix, layer=tower.layer)
    folder = ModelFolder(path, spec, weights, sources, partial(read_folder, path, spec.vocab_size))
    folder.check_shapes()
    return tower, folder


def _plan(folder: ModelFolder, weights: str) -> WeightPlan:
    check_image_weights(weights)
    if weights == AUTO:
        stored = folder.weights.dense(folder.sources["layers.0.attn.o"][0].name).dtype
        weights = "bf16" if stored == "bf16" else "f32"
    return parse_plan(weights, embedder=True)


def _check_extras(folder: ModelFolder, tower: TowerSpec) -> None:
    for extra in tower.extras:
        name = _extra_name(folder, extra)
        shape = folder.weights.shape(name)
        if shape != extra.shape:
            found, expected = ("x".join(map(str, each)) for each in (shape, extra.shape))
            raise ModelError(f"Has shape {found}. Expected {expected} from config.json.", path=folder.path, tensor=name)


def _extra_name(folder: ModelFolder, extra: TowerTensor) -> str:
    names = folder.weights.names
    return next((name for name in extra.files if name in names), extra.files[0])


def _extra(folder: ModelFolder, extra: TowerTensor) -> NDArray[np.float32]:
    values = folder.weights.dense(_extra_name(folder, extra)).to_f32() - np.float32(extra.added)
    return np.ascontiguousarray(values.reshape(extra.shape[0], -1) if len(extra.shape) > 1 else values)
