"""ClipTower: computes the features of square tiles of one size, as LLaVA does.

A tile's rows are its class and its patches, at learned positions. Does not know files or threads.
"""

from __future__ import annotations

import numpy as np

import headrace._core as _core
from headrace.engine.executors.square_tower import CoreTensors, EncoderSteps, Floats, patches_of, without_embedding
from headrace.engine.executors.tower_product import TowerProduct
from headrace.models.precision import Precision
from headrace.models.vision.image_layout import ImageGrid
from headrace.models.vision.vision_folder import VisionFolder


class ClipTower:
    def __init__(
        self, vision: VisionFolder, pool: _core.Pool, tensors: CoreTensors, isa: str, precision: Precision
    ) -> None:
        tower, extras = vision.tower, vision.extras
        hidden = tower.encoder.hidden_size
        self._tower = tower
        self._patch = TowerProduct(extras["patch"], None, pool, isa)
        self._class = extras["class"]
        self._positions = extras["positions"]
        self._line_end = extras.get("line_end")
        self._first = TowerProduct(extras["merge"], extras.get("merge.bias"), pool, isa, precision)
        self._second = TowerProduct(extras["projection"], extras.get("projection.bias"), pool, isa, precision)
        own = without_embedding(tensors, hidden, pool)
        self._steps = EncoderSteps(tower.encoder, own, pool, isa, len(self._positions))

    def encode(self, tile: Floats) -> Floats:
        tower = self._tower
        patches = self._patch.multiply(patches_of(tile, tower.patch_size))
        states = self._steps.compute(np.concatenate([self._class[None], patches]) + self._positions)
        return self._second.multiply(self._first.multiply(states[not tower.keeps_class :], tower.opening))

    def packed(self, features: Floats, grid: ImageGrid) -> Floats:
        """Return the features of an image's tokens from those of its tiles: those of the whole, then those of the tiles
        side by side, without padding, and with a line end after each row of them."""
        if grid.kept is None or self._line_end is None:
            return features
        side, width = self._tower.side, features.shape[-1]
        cut = features[1:].reshape(grid.rows, grid.columns, side, side, width).transpose(0, 2, 1, 3, 4)
        cut = cut.reshape(grid.rows * side, grid.columns * side, width)
        rows, columns = grid.kept
        top, left = (cut.shape[0] - rows) // 2, (cut.shape[1] - columns) // 2
        cut = cut[top : top + rows, left : left + columns]
        ends = np.broadcast_to(self._line_end, (rows, 1, width))
        lines = np.concatenate([cut, ends], axis=1).reshape(-1, width)
        return np.concatenate([features[0], lines])
