"""Caches the vectors of texts, one entry per text, so that a call computes only the texts that are new."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.gateway.caches.results.result_cache import ResultCache, ResultLookup

if TYPE_CHECKING:
    from headrace.gateway.serving.served_variant import ServedVariant

Floats = NDArray[np.float32]


class CachedVectors:
    """The cached vectors of one tenant by one model. Serves one call; see VectorCache."""

    def __init__(self, cache: ResultCache, tenant: str, served: ServedVariant) -> None:
        self._cache = cache
        self._tenant = tenant
        self._model = (served.name, served.fingerprint)
        self._lookups: list[ResultLookup] = []

    async def find(self, texts: Sequence[Any]) -> list[Floats | None]:
        self._lookups = await asyncio.gather(
            *(self._cache.look("embedding", self._tenant, (*self._model, text)) for text in texts)
        )
        return [None if each.data is None else np.frombuffer(each.data, dtype="<f4") for each in self._lookups]

    async def keep(self, places: Sequence[int], rows: Floats) -> None:
        pairs = zip(places, rows.astype("<f4"), strict=True)
        await asyncio.gather(*(self._cache.keep(self._lookups[place], row.tobytes()) for place, row in pairs))
