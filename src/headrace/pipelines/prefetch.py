"""Prefetcher: finds the passages for questions that a user is likely to ask next, and measures how often they are used.

Off unless a pipeline declares `prefetch`. At most two searches run at once in this process, one answer begins at most
five, and results are kept for two minutes in the pipelines' bounded cache.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.observe import metrics
from headrace.pipelines.run_state import RunState
from headrace.pipelines.stage_cache import CachedStage, StageCache
from headrace.pipelines.stage_clock import StageLateError
from headrace.pipelines.stage_services import StageServices
from headrace.pipelines.stages.search import search, search_filters

TTL_S: Final = 120.0
_AT_ONCE: Final = 2
_WAITING: Final = 32  # searches that wait, at most
_SEARCH_S: Final = 5.0


class Prefetcher:
    """All of it belongs to one event loop."""

    def __init__(self, services: StageServices) -> None:
        self._services = services
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0
        self.counts: dict[str, dict[str, int]] = {}  # by pipeline: fetched, used, dropped, failed

    def prefetch(self, state: RunState) -> None:
        """Begin to search for the follow-up questions of a run, in the background."""
        if state.exchange.text_request.cache == "off" or "search" not in state.config.stages:
            return
        for question in state.followups[: state.config.prefetch]:
            if self._waiting >= _WAITING:
                self._count(state, "dropped")
                continue
            self._waiting += 1
            self._services.run_background(self._fetch(state, question))

    def count_use(self, state: RunState, entry: CachedStage) -> None:
        """Count a prefetched result the first time that a question uses it."""
        entry.tag = ""
        self._count(state, "used")

    async def _fetch(self, state: RunState, question: str) -> None:
        services, config = self._services, state.config.search
        parts = [config.collection, config.k, dict(search_filters(state) or {}), question]
        key = StageCache.key(state.exchange.caller.tenant, f"{state.name}/search", *parts)
        try:
            async with self._room:
                if services.cache.get(key) is not None:
                    return
                end = services.clock.now() + _SEARCH_S
                hits = await services.clock.within(search(services, state, question, _SEARCH_S), end)
                services.cache.put(key, msgspec.json.encode(hits), max(TTL_S, config.cache_s), tag="prefetch")
                self._count(state, "fetched")
        except (ApiError, StageLateError):
            self._count(state, "failed")
        finally:
            self._waiting -= 1

    def _count(self, state: RunState, outcome: str) -> None:
        counts = self.counts.setdefault(state.name, {})
        counts[outcome] = counts.get(outcome, 0) + 1
        metrics.of(metrics.pipeline_prefetches, state.name, outcome).inc()
