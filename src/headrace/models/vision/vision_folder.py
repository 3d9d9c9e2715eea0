"""Opens the image part of a model folder: its spec, its tensors and how it prepares images.

A model without an image part that Headrace computes has none here, and reads text only.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.config_json import ConfigJson
from headrace.models.families.decoder import find_prefix, named_sources
from headrace.models.families.family import architecture_of
from headrace.models.families.vision.vision_tower import ARCHITECTURES, TOWER_NAMES, TowerSpec, read_tower
from headrace.models.formats.model_weights import ModelWeights
from headrace.models.model_folder import ModelFolder
from headrace.models.text.tokenizer_files import read_folder
from headrace.models.vision.image_layout import ImageLayout, read_layout

_TOWERS = ("model.vision_model.", "vision_model.")
_PROJECTIONS = ("model.connector.modality_projection.", "connector.modality_projection.")


class VisionFolder(NamedTuple):
    tower: TowerSpec
    layout: ImageLayout
    folder: ModelFolder  # of the tower
    patch_weight: NDArray[np.float32]  # [hidden, channels * patch * patch]
    patch_bias: NDArray[np.float32]
    positions: NDArray[np.float32]  # [patches, hidden]
    projection: NDArray[np.float32]  # [width, hidden * scale * scale]

    @property
    def stores_bf16(self) -> bool:
        """Whether the files hold the tower in bf16, so that f32 would only take more memory."""
        name = self.folder.sources["layers.0.mlp.up"][0].name
        return self.folder.weights.dense(name).dtype == "bf16"


def has_vision(path: Path) -> bool:
    """Return whether a model reads images."""
    if not path.is_dir() or not (path / "config.json").exists():
        return False
    return architecture_of(ConfigJson.read(path / "config.json")) in ARCHITECTURES


def open_vision(path: Path) -> VisionFolder:
    """Open the image part of a model. ModelError if anything in it is wrong."""
    config = ConfigJson.read(path / "config.json")
    tower = read_tower(config)
    if config.has("quantization_config"):
        raise config.error("quantization_config", "Headrace does not read the image part of quantised files.")
    weights = ModelWeights.open(path)
    names = weights.names
    prefix = find_prefix(names, _TOWERS, "embeddings.patch_embedding.weight")
    spec = tower.encoder
    sources = named_sources(spec, TOWER_NAMES, names, prefix=prefix, layer="encoder.layers")
    folder = ModelFolder(path, spec, weights, sources, partial(read_folder, path, spec.vocab_size))
    folder.check_shapes()

    def tensor(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        if weights.shape(name) != shape:
            found = "x".join(map(str, weights.shape(name)))
            expected = "x".join(map(str, shape))
            raise ModelError(f"Has shape {found}. Expected {expected} from config.json.", path=path, tensor=name)
        values = weights.dense(name).to_f32()
        return np.ascontiguousarray(values.reshape(shape[0], -1) if len(shape) > 1 else values)

    patch = f"{prefix}embeddings.patch_embedding"
    size = tower.patch_size
    projection = find_prefix(names, _PROJECTIONS, "proj.weight")
    return VisionFolder(
        tower=tower,
        layout=read_layout(path, tower),
        folder=folder,
        patch_weight=tensor(f"{patch}.weight", (spec.hidden_size, tower.channels, size, size)),
        patch_bias=tensor(f"{patch}.bias", (spec.hidden_size,)),
        positions=tensor(f"{prefix}embeddings.position_embedding.weight", (spec.vocab_size, spec.hidden_size)),
        projection=tensor(f"{projection}proj.weight", (tower.width, tower.shuffled_size)),
    )
