"""ImageEncoder: computes the features of an image's tiles, on threads of its own and at a low priority.

A tile's features depend on the tile alone: the same bits whatever is encoded beside it and with any number of threads.
Does not know requests, tokens or caches.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

import headrace._core as _core
from headrace.engine.executors.clip_tower import ClipTower
from headrace.engine.executors.cpu_executor import choose_isa
from headrace.engine.executors.patch_tower import PatchTower
from headrace.engine.executors.square_tower import SquareTower
from headrace.engine.interface.image_rows import AbandonedError
from headrace.models.families.vision.vision_tower import Connector
from headrace.models.packing import load_tensors
from headrace.models.precision import AUTO
from headrace.models.vision.image_layout import ImageGrid
from headrace.models.vision.image_part_digest import image_part_digest
from headrace.models.vision.vision_folder import VisionFolder

Floats = NDArray[np.float32]
Tower = SquareTower | PatchTower | ClipTower

_TOWERS: Final[dict[Connector, type[SquareTower] | type[PatchTower] | type[ClipTower]]] = {
    "shuffle": SquareTower,
    "pool": SquareTower,
    "merge": PatchTower,
    "lines": PatchTower,
    "project": ClipTower,
}
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
        weights: str = AUTO,
    ) -> None:
        """Load the weights in the background. `encode` waits for them, and raises the error if that fails."""
        self.vision = vision
        self._threads = threads
        self._isa = choose_isa(isa, arithmetic)
        self._cache = cache
        self.weights = weights
        self._plan = vision.plan(weights)
        self.digest = image_part_digest(vision, self._plan)  # of everything but the image that features depend on
        self._thread = ThreadPoolExecutor(1, "headrace-images", initializer=_yield_to_decoding)
        self._weights: Future[Tower] = self._thread.submit(self._load)

    def submit(
        self,
        tiles: Callable[[], Floats],
        grid: ImageGrid | None = None,
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> Future[Floats]:
        """Encode what `tiles` returns, which is called in the encoder's thread: [tiles, channels, height, width]. The
        result is [runs of tokens, tokens of a run, width] as the grid says, or else one run for each tile. It is
        AbandonedError if `is_abandoned` returns True before a tile begins."""
        return self._thread.submit(self._encode, tiles, grid, is_abandoned)

    def encode(self, tiles: Floats, grid: ImageGrid | None = None) -> Floats:
        return self.submit(lambda: tiles, grid).result()

    def wait(self) -> None:
        """Wait for the weights. Raise the error if they cannot be loaded."""
        self._weights.result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _load(self) -> Tower:
        pool = _core.Pool(self._threads)  # its threads inherit this one's priority
        tensors = load_tensors(self.vision.folder, self._plan, pool, cache=self._cache)
        opened = _TOWERS[self.vision.tower.connector]
        return opened(self.vision, pool, tensors.tensors, self._isa, self._plan.default)

    def _encode(self, tiles: Callable[[], Floats], grid: ImageGrid | None, is_abandoned: Callable[[], bool]) -> Floats:
        tower = self._weights.result()
        _go_on(is_abandoned)
        found: list[Floats] = []
        for tile in tiles():
            _go_on(is_abandoned)
            found.append(tower.encode(tile))
        features = np.stack(found)
        if grid is None:
            return features
        if isinstance(tower, ClipTower):
            features = tower.packed(features, grid)
        return features.reshape(grid.runs, grid.tile_tokens, -1)


def _go_on(is_abandoned: Callable[[], bool]) -> None:
    if is_abandoned():
        raise AbandonedError


def _yield_to_decoding() -> None:
    if hasattr(os, "setpriority") and os.uname().sysname == "Linux":  # there, of this thread alone
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
