"""Upkeep of the answer caches: removes expired entries and reports sizes. Does not decide what expires."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final, Protocol

from headrace.gateway.caches.exact.entry_store import CacheSize
from headrace.observe import metrics
from headrace.observe.outage_log import OutageLog

log: Final = logging.getLogger(__name__)

_SWEEP_S: Final = 60.0


class AnswerCache(Protocol):
    async def sweep(self) -> Any: ...

    async def size(self) -> CacheSize | None: ...


async def sweep_forever(caches: Mapping[str, AnswerCache]) -> None:
    outages = {
        name: OutageLog(log, f"expired entries of the {name} cache were not removed", level=logging.WARNING)
        for name in caches
    }
    while True:
        await asyncio.sleep(_SWEEP_S)
        for name, cache in caches.items():
            try:
                await cache.sweep()
                outages[name].succeeded()
            except Exception as error:
                outages[name].failed(error)


async def measure(caches: Mapping[str, AnswerCache]) -> None:
    """Set the metrics of the caches' sizes."""
    for name, cache in caches.items():
        if (size := await cache.size()) is not None:
            metrics.cache_entries.labels(name).set(size.entries)
            metrics.cache_bytes.labels(name).set(size.bytes)
