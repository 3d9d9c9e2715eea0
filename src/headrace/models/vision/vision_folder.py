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
from headrace.models.model_folder import ModelFolder
from headrace.models.packing import packed_size
from headrace.models.precision import WeightPlan, parse_plan
from headrace.models.text.tokenizer_files import read_folder
from headrace.models.vision import patch_layout, square_layout
from headrace.models.vision.image_layout import ImageLayout, check_preprocessor, read_preprocessor
from headrace.models.vision.patch_layout import read_patches
from headrace.models.vision.square_layout import read_square
from headrace.models.vision.tiled_layout import read_tiled

_LAYOUTS: Final[dict[Connector, tuple[Callable[[ConfigJson, TowerSpec], ImageLayout], tuple[str, ...]]]] = {
    "shuffle": (read_tiled, ()),
    "pool": (read_square, square_layout.IGNORED),
    "merge": (read_patches, patch_layout.IGNORED),
}


class VisionFolder(NamedTuple):
    tower: TowerSpec
    layout: ImageLayout
    folder: ModelFolder  # of the tower
    extras: dict[str, NDArray[np.float32]]  # of `tower.extras`, as matrices and vectors

    @property
    def plan(self) -> WeightPlan:
        return _plan(self.folder)


def has_vision(path: Path) -> bool:
    """Return whether a model reads images."""
    if not path.is_dir() or not (path / "config.json").exists():
        return False
    return has_tower(ConfigJson.read(path / "config.json"))


def read_layout(folder: Path, tower: TowerSpec) -> ImageLayout:
    """Read how the model's images are prepared. ModelError for a preparation that Headrace does not do exactly."""
    config = read_preprocessor(folder)
    read, ignored = _LAYOUTS[tower.connector]
    layout = read(config, tower)
    check_preprocessor(config, ignored)
    return layout


def open_vision(path: Path) -> VisionFolder:
    """Open the image part of a model. ModelError if anything in it is wrong."""
    tower, folder, weights = _open_tower(path)
    extras = {extra.name: _extra(path, weights, extra) for extra in tower.extras}
    return VisionFolder(tower, read_layout(path, tower), folder, extras)


def tower_bytes(path: Path) -> int:
    """Return the bytes of the image part's weights in memory; 0 for a model whose images are not read. Reads no
    weights."""
    if not has_vision(path):
        return 0
    try:
        tower, folder, _ = _open_tower(path)
        read_layout(path, tower)
    except ModelError:
        return 0  # the server says why when it opens the model, and serves text
    plan = _plan(folder)
    return packed_size(folder.spec, folder.shapes, plan) + sum(4 * math.prod(extra.shape) for extra in tower.extras)


def _open_tower(path: Path) -> tuple[TowerSpec, ModelFolder, ModelWeights]:
    config = ConfigJson.read(path / "config.json")
    tower = read_tower(config)
    if config.has("quantization_config"):
        raise config.error("quantization_config", "Headrace does not read the image part of quantised files.")
    weights = ModelWeights.open(path)
    names = weights.names
    prefix = find_prefix(names, tower.prefixes, tower.probe)
    spec = tower.encoder
    sources = named_sources(spec, tower.names, names, prefix=prefix, layer=tower.layer)
    folder = ModelFolder(path, spec, weights, sources, partial(read_folder, path, spec.vocab_size))
    folder.check_shapes()
    return tower, folder, weights


def _plan(folder: ModelFolder) -> WeightPlan:
    """Return bf16 if the files hold the tower in it, so that f32 would only take more memory."""
    return parse_plan("bf16" if _stores_bf16(folder) else "f32")


def _stores_bf16(folder: ModelFolder) -> bool:
    return folder.weights.dense(folder.sources["layers.0.attn.o"][0].name).dtype == "bf16"


def _extra(path: Path, weights: ModelWeights, extra: TowerTensor) -> NDArray[np.float32]:
    name = next((name for name in extra.files if name in weights.names), extra.files[0])
    shape = weights.shape(name)
    if shape != extra.shape:
        found, expected = ("x".join(map(str, each)) for each in (shape, extra.shape))
        raise ModelError(f"Has shape {found}. Expected {expected} from config.json.", path=path, tensor=name)
    values = weights.dense(name).to_f32()
    return np.ascontiguousarray(values.reshape(shape[0], -1) if len(shape) > 1 else values)
