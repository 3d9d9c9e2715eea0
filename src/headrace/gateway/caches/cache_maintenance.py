"""Upkeep of the answer caches: removes expired entries and reports sizes. Does not decide what expires."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final, Protocol

from headrace.gateway.caches.exact.entry_store import CacheSize
from headrace.observe import metrics

log: Final = logging.getLogger(__name__)

_SWEEP_S: Final = 60.0


class AnswerCache(Protocol):
    async def sweep(self) -> Any: ...

    async def size(self) -> CacheSize | None: ...


async def sweep_forever(caches: Mapping[str, AnswerCache]) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        for name, cache in caches.items():
            try:
                await cache.sweep()
            except Exception as error:
                log.warning("expired entries of the %s cache were not removed: %s", name, error)


async def measure(caches: Mapping[str, AnswerCache]) -> None:
    """Set the metrics of the caches' sizes."""
    for name, cache in caches.items():
        if (size := await cache.size()) is not None:
            metrics.cache_entries.labels(name).set(size.entries)
            metrics.cache_bytes.labels(name).set(size.bytes)
