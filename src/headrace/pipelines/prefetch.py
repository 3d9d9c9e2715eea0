"""Prefetcher: finds the passages for questions that a user is likely to ask next, and measures how often they are used.

Off unless a pipeline declares `prefetch`. At most two searches run at once in this process, one answer begins at most
five, and results are kept for two minutes in the cache of results.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, Final

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.results.result_cache import ResultLookup
from headrace.observe import metrics
from headrace.pipelines.kept_passages import are_passages_kept, collection_uid
from headrace.pipelines.run_state import RunState
from headrace.pipelines.stage_clock import StageLateError
from headrace.pipelines.stage_services import StageServices
from headrace.pipelines.stages.search import FORMAT, search, search_filters

TTL_S: Final = 120.0
_AT_ONCE: Final = 2
_WAITING: Final = 32  # searches that wait, at most
_SEARCH_S: Final = 5.0
_UNUSED: Final = 4096  # prefetched results whose first use is noticed


class Prefetcher:
    """All of it belongs to one event loop."""

    def __init__(self, services: StageServices) -> None:
        self._services = services
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0
        self._unused: OrderedDict[bytes, bool] = OrderedDict()  # keys of results that no question has used
        self._counts: dict[tuple[str, str], dict[str, int]] = {}  # by pipeline and tenant

    def described(self, name: str, tenant: str) -> dict[str, int]:
        """Return how many searches for a tenant were fetched, used, dropped and failed."""
        return dict(self._counts.get((name, tenant), {}))

    def prefetch(self, state: RunState) -> None:
        """Begin to search for the follow-up questions of a run, in the background."""
        if state.exchange.text_request.cache == "off" or "search" not in state.config.stages:
            return
        state.collection = None  # it may have changed by the time that it is searched
        for question in state.followups[: state.config.prefetch]:
            if self._waiting >= _WAITING:
                self._count(state, "dropped")
                continue
            self._waiting += 1
            self._services.run_background(self._fetch(state, question))

    async def find(self, state: RunState) -> Any:
        """Return the search's result that was found ahead for a run's question, and count their first use."""
        if not state.config.prefetch or state.exchange.text_request.cache == "off":
            return None
        lookup = await self._look(state, state.question)
        if lookup.data is None:
            return None
        if lookup.key is not None and self._unused.pop(lookup.key.digest, False):
            self._count(state, "used")
        found = msgspec.json.decode(lookup.data)
        shows = await are_passages_kept(self._services, state, (hit["id"] for hit in found["hits"]))
        return found if shows else None

    async def _look(self, state: RunState, question: str) -> ResultLookup:
        config = state.config.search
        uid = await collection_uid(self._services, state)
        if uid is None:
            return ResultLookup(kind="prefetch")
        parts = [FORMAT, state.name, uid, config.k, dict(search_filters(state) or {}), question]
        results, tenant = self._services.results, state.exchange.caller.tenant
        return await results.look("prefetch", tenant, parts, tags=state.config.tags, declared=True)

    async def _fetch(self, state: RunState, question: str) -> None:
        services = self._services
        try:
            async with self._room:
                lookup = await self._look(state, question)
                if lookup.key is None or lookup.data is not None:
                    return
                end = services.clock.now() + _SEARCH_S
                found = await services.clock.within(search(services, state, question, _SEARCH_S), end)
                if found.skipped:
                    self._count(state, "failed")
                    return
                await services.results.keep(lookup, msgspec.json.encode(found), ttl_s=TTL_S)
                self._unused[lookup.key.digest] = True
                if len(self._unused) > _UNUSED:
                    self._unused.popitem(last=False)
                self._count(state, "fetched")
        except (ApiError, StageLateError):
            self._count(state, "failed")
        finally:
            self._waiting -= 1

    def _count(self, state: RunState, outcome: str) -> None:
        counts = self._counts.setdefault((state.name, state.exchange.caller.tenant), {})
        counts[outcome] = counts.get(outcome, 0) + 1
        metrics.of(metrics.pipeline_prefetches, state.name, outcome).inc()
