"""FeatureCache: the features of images, least recently used out first, within a bound of bytes.

Entries belong to a tenant: what one tenant has sent is never found by another. Belongs to one event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from headrace.observe import metrics


class FeatureKey(NamedTuple):
    tenant: str
    digest: bytes  # of the image's file


Tiles = tuple[bytes, ...]  # features of each tile, as the engine takes them


class FeatureCache:
    def __init__(self, most_bytes: int, model: str) -> None:
        self._most = most_bytes
        self._model = model
        self._kept: OrderedDict[FeatureKey, Tiles] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: FeatureKey) -> Tiles | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        metrics.image_features.labels(self._model, "miss" if found is None else "hit").inc()
        return found

    def keep(self, key: FeatureKey, tiles: Tiles) -> None:
        size = sum(map(len, tiles))
        if size > self._most or key in self._kept:
            return
        self._kept[key] = tiles
        self.bytes += size
        while self.bytes > self._most:
            _, gone = self._kept.popitem(last=False)
            self.bytes -= sum(map(len, gone))
        metrics.image_feature_bytes.labels(self._model).set(self.bytes)
