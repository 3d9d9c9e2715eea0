"""PatchTower: computes the features of images of any size, as Qwen-VL does. Does not know files or threads.

Patches turn by their row and column. In layers with spans they see their window alone, so the rows of a window lie side
by side; in the others they see the whole image.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.executors.square_tower import CoreTensors, EncoderSteps, Floats, pack_f32
from headrace.models.vision.vision_folder import VisionFolder

_KEPT_ROWS: Final = 4096  # patches for which the memory of a step is kept; larger images get theirs and give it back


class PatchTower:
    def __init__(self, vision: VisionFolder, pool: _core.Pool, tensors: CoreTensors, isa: str) -> None:
        tower, extras = vision.tower, vision.extras
        hidden, size = tower.encoder.hidden_size, tower.patch_size
        self._tower = tower
        self._pool = pool
        self._isa = isa
        frames = extras["patch"].reshape(hidden, 3, -1, size * size).sum(axis=2, dtype=np.float64)  # they are equal
        self._patch = pack_f32(np.ascontiguousarray(frames.reshape(hidden, -1), dtype=np.float32), pool)
        self._merge, self._merge_bias = pack_f32(extras["merge"], pool), extras["merge.bias"]
        self._projection, self._projection_bias = pack_f32(extras["projection"], pool), extras["projection.bias"]
        self._tensors = {**tensors, "embed": pack_f32(np.zeros((1, hidden), dtype=np.float32), pool)}
        self._kept: EncoderSteps | None = None

    def encode(self, tile: Floats) -> Floats:
        """Return the features of an image, one for each square of patches, row by row."""
        tower = self._tower
        scale, hidden = tower.scale, tower.encoder.hidden_size
        squares = (tile.shape[1] // tower.patch_size // scale, tile.shape[2] // tower.patch_size // scale)
        order, spans = _windows(squares, tower.window // scale, scale)
        pixels = _squares(tile, tower.patch_size, scale)[order]
        rows = np.empty((len(order) * scale**2, hidden), dtype=np.float32)
        self._multiply(self._patch, pixels.reshape(len(rows), -1), rows)
        steps = self._steps(len(rows))
        states = steps.compute(rows, spans=spans, places=_places(squares, scale, order))
        merged = np.empty((len(order), hidden * scale**2), dtype=np.float32)
        self._multiply(self._merge, states.reshape(merged.shape), merged, self._merge_bias, "gelu")
        ordered = np.empty((len(order), tower.width), dtype=np.float32)
        self._multiply(self._projection, merged, ordered, self._projection_bias)
        features = np.empty_like(ordered)
        features[order] = ordered
        return features

    def _multiply(
        self,
        weights: _core.Packed,
        rows: Floats,
        out: Floats,
        bias: Floats | None = None,
        activation: Literal["", "gelu"] = "",
    ) -> None:
        _core.multiply(weights, np.ascontiguousarray(rows), out, self._pool, self._isa, bias, activation)

    def _steps(self, rows: int) -> EncoderSteps:
        if self._kept is not None and self._kept.rows >= rows:
            return self._kept
        steps = EncoderSteps(self._tower.encoder, self._tensors, self._pool, self._isa, rows)
        if rows <= _KEPT_ROWS:
            self._kept = steps
        return steps


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
