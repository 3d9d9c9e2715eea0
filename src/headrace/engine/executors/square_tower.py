"""SquareTower: computes the features of square tiles of one size, [channels, side, side] -> [tokens, width].

A tower is a ModelSpec that the core computes; before it, patches become rows, and after it the connector makes its
features the text part's. Does not know files or threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.executors.cpu_executor import describe
from headrace.engine.executors.tower_product import F32, TowerProduct
from headrace.models.families.vision.vision_tower import TowerSpec
from headrace.models.packing import pack_matrix
from headrace.models.precision import Precision
from headrace.models.spec import ModelSpec
from headrace.models.vision.vision_folder import VisionFolder

Floats = NDArray[np.float32]
CoreTensors = dict[str, _core.Packed | Floats]


class SquareTower:
    """A SigLIP tower: learned positions of the patches of a square tile of one size."""

    def __init__(
        self, vision: VisionFolder, pool: _core.Pool, tensors: CoreTensors, isa: str, precision: Precision
    ) -> None:
        tower, extras = vision.tower, vision.extras
        patches = tower.side**2
        self._tower = tower
        self._patch = TowerProduct(extras["patch"], None, pool, isa)
        places = _bucketed_places(tower.side) if tower.connector == "shuffle" else np.arange(patches)
        self._places = np.ascontiguousarray(extras["positions"][places] + extras["patch.bias"])
        self._steps = EncoderSteps(tower.encoder, tensors, pool, isa, patches)
        projection = extras["projection"]
        if tower.connector == "pool":
            self._norm = 1.0 + extras["norm"].astype(np.float64)
            projection = np.ascontiguousarray(projection.T)
        self._projection = TowerProduct(projection, None, pool, isa, precision)

    def encode(self, tile: Floats) -> Floats:
        tower = self._tower
        rows = self._patch.multiply(patches_of(tile, tower.patch_size))
        rows += self._places
        states = self._steps.compute(rows)
        joined = _shuffled(states, tower) if tower.connector == "shuffle" else self._pooled(states)
        return self._projection.multiply(joined)

    def _pooled(self, states: Floats) -> Floats:
        """Return the means of squares of features, normalised."""
        tower = self._tower
        means = _squares(states, tower).mean(axis=2, dtype=np.float64)
        size = np.square(means).mean(axis=1, keepdims=True) + tower.encoder.norm_eps
        return (means / np.sqrt(size) * self._norm).astype(np.float32)


class EncoderSteps:
    """The core's model of an encoder, which computes all rows of a sequence in one step."""

    def __init__(self, spec: ModelSpec, tensors: CoreTensors, pool: _core.Pool, isa: str, rows: int) -> None:
        self._model = _core.Model(describe(spec), tensors, pool, rows, isa)
        blocks = -(-rows // _core.BLOCK)
        self._kv = _core.Kv(spec.kv_shapes, blocks, "f32")
        self._tables = np.arange(blocks, dtype=np.int32).reshape(1, -1)
        self._one = np.zeros(1, dtype=np.int32)
        kept = [index + 1 for index, layer in enumerate(spec.layers) if layer.kept]  # what the next ones begin with
        self._kept = np.array(kept, dtype=np.int32) if kept else None
        self.rows = rows

    @property
    def bytes(self) -> int:
        """The memory of a step: of keys and values, and of the core's rows."""
        return self._kv.bytes_per_block * self._tables.size + self._model.scratch_bytes

    def compute(
        self, rows: Floats, *, spans: NDArray[np.int32] | None = None, places: NDArray[np.int32] | None = None
    ) -> Floats:
        """Return the hidden states of rows, [rows, hidden]."""
        return self.compute_all(rows, spans=spans, places=places)[0]

    def compute_all(
        self, rows: Floats, *, spans: NDArray[np.int32] | None = None, places: NDArray[np.int32] | None = None
    ) -> tuple[Floats, Floats]:
        """Return the hidden states of rows, and the outcome of the layers that are kept, [layers, rows, hidden]."""
        states = np.empty_like(rows)
        count = len(rows)
        layers = 0 if self._kept is None else len(self._kept)
        kept = np.empty((layers * count, rows.shape[1]), dtype=np.float32)
        numbers = np.arange(count, dtype=np.int32)
        self._model.step(
            self._kv,
            np.zeros(count, dtype=np.int32),
            np.array([0, count], dtype=np.int32),
            self._one,
            self._tables,
            self._one,
            numbers,
            states,
            True,
            features=rows,
            feature_rows=numbers,
            spans=spans,
            places=places,
            kept=kept if layers else None,
            kept_layers=self._kept,
        )
        return states, kept.reshape(layers, *rows.shape)


def without_embedding(tensors: CoreTensors, hidden: int, pool: _core.Pool) -> CoreTensors:
    """Return tensors with the embedding that the core wants of every model, for rows that begin with features alone."""
    return {**tensors, "embed": pack_matrix(np.zeros((1, hidden), dtype=np.float32), F32, pool)}


def patches_of(tile: Floats, size: int) -> Floats:
    """Return a tile's patches as rows, each channel by channel."""
    channels, side = tile.shape[0], tile.shape[1] // size
    cut = tile.reshape(channels, side, size, side, size).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(cut).reshape(side * side, channels * size * size)


def _squares(states: Floats, tower: TowerSpec) -> Floats:
    """Return the features of each square of patches that becomes one: [tokens, hidden, patches of a square]."""
    less, scale, hidden = tower.side // tower.scale, tower.scale, states.shape[1]
    cut = states.reshape(less, scale, less, scale, hidden).transpose(0, 2, 4, 1, 3)
    return cut.reshape(less * less, hidden, scale * scale)


def _shuffled(states: Floats, tower: TowerSpec) -> Floats:
    """Return squares of features as one row each, patch by patch."""
    squares = _squares(states, tower).transpose(0, 2, 1)
    return np.ascontiguousarray(squares).reshape(len(squares), -1)


def _bucketed_places(side: int) -> NDArray[np.intp]:
    """Return the row of the table of positions of each patch: that of its place in the tile, rounded as the reference
    rounds it."""
    bounds = np.array(list(_steps(1.0 / side)), dtype=np.float32)
    places = np.minimum(np.arange(side, dtype=np.float32) * np.float32(1.0 / side), np.float32(1.0 - 1e-6))
    found = np.searchsorted(bounds, places, side="right")
    return (found[:, None] * side + found[None, :]).reshape(-1)


def _steps(step: float) -> Iterator[float]:
    count = int(np.ceil((1.0 - step) / step))
    return (step + step * place for place in range(count))
