"""PatchTower: computes the features of images of any size, as Qwen-VL does. Does not know files or threads.

Patches turn by their row and column. In layers with spans they see their window alone, so the rows of a window lie side
by side; in the others they see the whole image. Features from the middle of a tower follow those from its end.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.executors.square_tower import CoreTensors, EncoderSteps, Floats, without_embedding
from headrace.engine.executors.tower_product import TowerProduct
from headrace.models.families.vision.vision_tower import TowerSpec
from headrace.models.precision import Precision
from headrace.models.vision.vision_folder import VisionFolder

_EPS: Final = 1e-6  # of the norms before mergers
_KEPT_ROWS: Final = 4096  # patches for which the memory of a step is kept; larger images get theirs and give it back


class PatchTower:
    def __init__(
        self, vision: VisionFolder, pool: _core.Pool, tensors: CoreTensors, isa: str, precision: Precision
    ) -> None:
        tower, extras = vision.tower, vision.extras
        hidden, size = tower.encoder.hidden_size, tower.patch_size
        self._tower = tower
        self._pool = pool
        self._isa = isa
        frames = extras["patch"].reshape(hidden, 3, -1, size * size).sum(axis=2, dtype=np.float64)  # they are equal
        patch = np.ascontiguousarray(frames.reshape(hidden, -1), dtype=np.float32)
        self._patch = TowerProduct(patch, extras.get("patch.bias"), pool, isa)
        self._positions = extras.get("positions")  # of a square of patches, which is laid over each image
        kept = sum(layer.kept for layer in tower.encoder.layers)
        prefixes = ("", *(f"stacked.{place}." for place in range(kept)))
        self._mergers: list[_Merger | _LineMerger] = (
            [_LineMerger(tower, extras, pool, isa, precision)]
            if tower.connector == "lines"
            else [_Merger(extras, prefix, pool, isa, precision) for prefix in prefixes]
        )
        self._tensors = without_embedding(tensors, hidden, pool)
        self._kept: EncoderSteps | None = None

    def encode(self, tile: Floats) -> Floats:
        """Return the features of an image, one for each square of patches, row by row."""
        tower = self._tower
        scale = tower.scale
        squares = (tile.shape[1] // tower.patch_size // scale, tile.shape[2] // tower.patch_size // scale)
        order, spans = _windows(squares, tower.window // scale, scale)
        pixels = _squares(tile, tower.patch_size, scale)[order]
        rows = self._patch.multiply(pixels.reshape(len(order) * scale**2, -1))
        places = _places(squares, scale, order)
        if self._positions is not None:
            rows += laid_over(self._positions, places, (squares[0] * scale, squares[1] * scale))
        steps = self._steps(len(rows))
        states, kept = steps.compute_all(rows, spans=spans, places=places)
        found = [merger.merge(each) for merger, each in zip(self._mergers, (states, *kept), strict=True)]
        features = np.empty((len(order), tower.width), dtype=np.float32)
        features[order] = np.concatenate(found, axis=1)
        return features

    def _steps(self, rows: int) -> EncoderSteps:
        if self._kept is not None and self._kept.rows >= rows:
            return self._kept
        self._kept = None  # its memory and that of a larger one are never held together
        steps = EncoderSteps(self._tower.encoder, self._tensors, self._pool, self._isa, rows)
        if rows <= _KEPT_ROWS:
            self._kept = steps
        return steps


class _Merger:
    """Two products of the patches of a square, after a norm in those of features from the middle of a tower."""

    def __init__(
        self, extras: dict[str, Floats], prefix: str, pool: _core.Pool, isa: str, precision: Precision
    ) -> None:
        norm = extras.get(f"{prefix}norm")
        self._norm = None if norm is None else (norm, extras[f"{prefix}norm.bias"])
        self._merge, self._projection = (
            TowerProduct(extras[f"{prefix}{name}"], extras[f"{prefix}{name}.bias"], pool, isa, precision)
            for name in ("merge", "projection")
        )

    def merge(self, states: Floats) -> Floats:
        rows = states.reshape(-1, self._merge.inputs)
        if self._norm is not None:
            rows = _normed(rows, *self._norm)
        return self._projection.multiply(self._merge.multiply(rows, "gelu"))


class _LineMerger:
    """A product that makes one of a square of patches, if the model has one, then two products of it (Pixtral)."""

    def __init__(
        self, tower: TowerSpec, extras: dict[str, Floats], pool: _core.Pool, isa: str, precision: Precision
    ) -> None:
        self._opening: Final = tower.opening
        self._norm = extras.get("merge_norm")
        self._eps = tower.merge_eps
        self._square: TowerProduct | None = None
        if "square" in extras:
            hidden = tower.encoder.hidden_size
            # The files have the patches of a square side by side within each channel.
            square = extras["square"].reshape(hidden, hidden, -1).transpose(0, 2, 1).reshape(hidden, -1)
            self._square = TowerProduct(np.ascontiguousarray(square), None, pool, isa, precision)
        self._first = TowerProduct(extras["merge"], extras.get("merge.bias"), pool, isa, precision)
        self._second = TowerProduct(extras["projection"], extras.get("projection.bias"), pool, isa, precision)

    def merge(self, states: Floats) -> Floats:
        rows = states
        if self._norm is not None:
            size = np.square(rows, dtype=np.float64).mean(axis=1, keepdims=True) + self._eps
            rows = (rows / np.sqrt(size) * self._norm).astype(np.float32)
        if self._square is not None:
            rows = self._square.multiply(rows.reshape(-1, self._square.inputs))
        return self._second.multiply(self._first.multiply(rows, self._opening))


def _normed(rows: Floats, weight: Floats, bias: Floats) -> Floats:
    values = rows.astype(np.float64)
    values -= values.mean(axis=1, keepdims=True)
    size = np.square(values).mean(axis=1, keepdims=True) + _EPS
    return (values / np.sqrt(size) * weight + bias).astype(np.float32)


def laid_over(table: Floats, places: NDArray[np.int32], sides: tuple[int, int]) -> Floats:
    """Return the vector of each patch from a square table that is stretched over an image of such sides in patches,
    corner to corner: a mean of the four nearest ones."""
    side = math.isqrt(len(table))
    (top, above), (left, before) = (_nearest(places[:, axis], sides[axis], side) for axis in (0, 1))
    bottom, right = np.minimum(top + 1, side - 1), np.minimum(left + 1, side - 1)
    one = np.float32(1)
    corners = (
        (top, left, (one - above) * (one - before)),
        (top, right, (one - above) * before),
        (bottom, left, above * (one - before)),
        (bottom, right, above * before),
    )
    found = np.zeros((len(places), table.shape[1]), dtype=np.float32)
    for row, column, share in corners:
        found += table[row * side + column] * share[:, None]
    return found


def _nearest(places: NDArray[np.int32], count: int, side: int) -> tuple[NDArray[np.intp], Floats]:
    """Return the place at or before each of `count` places in a table of `side`, and how far behind it each is."""
    exact = places.astype(np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
    before = np.floor(exact)
    return before.astype(np.intp), exact - before


def _squares(tile: Floats, size: int, scale: int) -> Floats:
    """Return the pixels of each square of patches, [squares, patches of a square, channel by channel]."""
    channels, height, width = tile.shape
    rows, columns = height // size // scale, width // size // scale
    cut = tile.reshape(channels, rows, scale, size, columns, scale, size).transpose(1, 4, 2, 5, 0, 3, 6)
    return np.ascontiguousarray(cut).reshape(rows * columns, scale * scale, channels * size * size)


def _windows(squares: tuple[int, int], window: int, scale: int) -> tuple[NDArray[np.intp], NDArray[np.int32] | None]:
    """Return the order of squares in which those of a window come together, and the span of each patch in it.

    `window`: squares of a window's side; 0 if there are no windows.
    """
    rows, columns = squares
    if not window:
        return np.arange(rows * columns), None
    across = -(-columns // window)
    numbers = (np.arange(rows)[:, None] // window * across + np.arange(columns) // window).reshape(-1)
    order = np.argsort(numbers, kind="stable")
    counts = np.bincount(numbers) * scale**2
    ends = np.cumsum(counts)
    spans = np.repeat(np.stack([ends - counts, ends], axis=1), counts, axis=0)
    return order, np.ascontiguousarray(spans, dtype=np.int32)


def _places(squares: tuple[int, int], scale: int, order: NDArray[np.intp]) -> NDArray[np.int32]:
    """Return the row and the column of each patch, and a number that no rope turns by."""
    _, columns = squares
    inside = np.arange(scale * scale)
    rows = (order // columns * scale)[:, None] + inside // scale
    across = (order % columns * scale)[:, None] + inside % scale
    places = np.stack([rows, across, np.zeros_like(rows)], axis=-1)
    return np.ascontiguousarray(places.reshape(-1, 3), dtype=np.int32)
