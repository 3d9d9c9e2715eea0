"""ImageEncoder: computes the features of an image's tiles, on threads of its own and at a low priority.

A tile's features depend on the tile alone: the same bits whatever is encoded beside it and with any number of threads.
Does not know requests, tokens or caches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.executors.cpu_executor import choose_isa, describe
from headrace.models.packing import aligned_bytes, load_tensors
from headrace.models.precision import parse_plan
from headrace.models.vision.vision_folder import VisionFolder

Floats = NDArray[np.float32]

_NICENESS: Final = 10  # of the encoder's threads: steps of decoding go first


class ImageEncoder:
    def __init__(
        self,
        vision: VisionFolder,
        *,
        threads: int = 1,
        isa: str | None = None,
        arithmetic: str | None = None,
        cache: Path | None = None,
    ) -> None:
        """Load the weights in the background. `encode` waits for them, and raises the error if that fails."""
        self.vision = vision
        self._threads = threads
        self._isa = choose_isa(isa, arithmetic)
        self._cache = cache
        self._thread = ThreadPoolExecutor(1, "headrace-images", initializer=_yield_to_decoding)
        self._weights: Future[_Weights] = self._thread.submit(self._load)

    def submit(self, tiles: Callable[[], Floats]) -> Future[Floats]:
        """Encode what `tiles` returns, which is called in the encoder's thread: [tiles, channels, side, side]. The
        result is [tiles, tokens of a tile, width]."""
        return self._thread.submit(self._encode, tiles)

    def encode(self, tiles: Floats) -> Floats:
        return self.submit(lambda: tiles).result()

    def wait(self) -> None:
        """Wait for the weights. Raise the error if they cannot be loaded."""
        self._weights.result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _load(self) -> _Weights:
        pool = _core.Pool(self._threads)  # its threads inherit this one's priority
        plan = parse_plan("bf16" if self.vision.stores_bf16 else "f32")
        tensors = load_tensors(self.vision.folder, plan, pool, cache=self._cache)
        return _Weights(self.vision, pool, tensors.tensors, self._isa)

    def _encode(self, tiles: Callable[[], Floats]) -> Floats:
        weights = self._weights.result()
        return np.stack([weights.encode(tile) for tile in tiles()])


def _yield_to_decoding() -> None:
    if hasattr(os, "setpriority") and os.uname().sysname == "Linux":  # there, of this thread alone
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)


class _Weights:
    def __init__(
        self, vision: VisionFolder, pool: _core.Pool, tensors: dict[str, _core.Packed | Floats], isa: str
    ) -> None:
        tower = vision.tower
        spec = tower.encoder
        patches = tower.side**2
        self._tower = tower
        self._pool = pool
        self._isa = isa
        self._patch = _packed(vision.patch_weight, pool)
        self._projection = _packed(vision.projection, pool)
        places = _position_ids(tower.side)
        self._places = np.ascontiguousarray(vision.positions[places] + vision.patch_bias)
        self._model = _core.Model(describe(spec), tensors, pool, patches, isa)
        blocks = -(-patches // _core.BLOCK)
        self._kv = _core.Kv(spec.kv_layers, spec.kv_heads, spec.head_size, blocks, "f32")
        self._tables = np.arange(blocks, dtype=np.int32).reshape(1, -1)
        self._rows = np.arange(patches, dtype=np.int32)

    def encode(self, tile: Floats) -> Floats:
        """Return the features of one tile."""
        tower = self._tower
        patches, hidden = len(self._rows), tower.encoder.hidden_size
        rows = np.empty((patches, hidden), dtype=np.float32)
        _core.multiply(self._patch, _patches(tile, tower.patch_size), rows, self._pool, self._isa)
        rows += self._places
        states = np.empty((patches, hidden), dtype=np.float32)
        self._model.step(
            self._kv,
            np.zeros(patches, dtype=np.int32),
            np.array([0, patches], dtype=np.int32),
            np.zeros(1, dtype=np.int32),
            self._tables,
            np.zeros(1, dtype=np.int32),
            self._rows,
            states,
            True,
            features=rows,
            feature_rows=self._rows,
        )
        shuffled = _shuffled(states, tower.side, tower.scale)
        features = np.empty((len(shuffled), tower.width), dtype=np.float32)
        _core.multiply(self._projection, shuffled, features, self._pool, self._isa)
        return features


def _packed(matrix: Floats, pool: _core.Pool) -> _core.Packed:
    outputs, inputs = matrix.shape
    data = aligned_bytes(_core.packed_bytes("f32", outputs, inputs, 0))
    gain = _core.pack(matrix, "f32", "f32", 0, data, pool)
    return _core.Packed("f32", outputs, inputs, 0, gain, data)


def _patches(tile: Floats, size: int) -> Floats:
    """Return a tile's patches as rows, each channel by channel."""
    channels, side = tile.shape[0], tile.shape[1] // size
    cut = tile.reshape(channels, side, size, side, size).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(cut).reshape(side * side, channels * size * size)


def _shuffled(states: Floats, side: int, scale: int) -> Floats:
    """Return squares of `scale` by `scale` features as one row each."""
    less, hidden = side // scale, states.shape[1]
    cut = states.reshape(less, scale, less, scale * hidden).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(cut).reshape(less * less, scale * scale * hidden)


def _position_ids(side: int) -> NDArray[np.intp]:
    """Return the row of the table of positions of each patch: that of its place in the tile, rounded as the reference
    rounds it."""
    bounds = np.array(list(_steps(1.0 / side)), dtype=np.float32)
    places = np.minimum(np.arange(side, dtype=np.float32) * np.float32(1.0 / side), np.float32(1.0 - 1e-6))
    found = np.searchsorted(bounds, places, side="right")
    return (found[:, None] * side + found[None, :]).reshape(-1)


def _steps(step: float) -> Iterator[float]:
    count = int(np.ceil((1.0 - step) / step))
    return (step + step * place for place in range(count))
