"""Whether results that a cache has kept may be shown: those of the very collection that a run searches, whose passages
are all still in it.

The collection itself is asked, so that a document that was deleted before a restart, or by another server with the same
cache, shows nowhere. A collection that does not answer in time costs the cached result, never a wait.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any, Final, TypeVar

from headrace.gateway.api_errors import ApiError
from headrace.pipelines.run_state import RunState
from headrace.pipelines.stage_clock import StageLateError
from headrace.pipelines.stage_services import StageServices
from headrace.pipelines.stages.search import open_collection

_MOST_S: Final = 0.1  # for an answer of the collection's database

T = TypeVar("T")


async def collection_uid(services: StageServices, state: RunState) -> str | None:
    """Return what the keys of a run's results must name: the collection that it searches, empty for a run that
    searches none. None: that cannot be told, so no cached result may be used."""
    if not {"search", "embed"} & set(state.config.stages):
        return ""
    collection = await _in_time(services, open_collection(services, state))
    return None if collection is None else collection.uid


async def are_passages_kept(services: StageServices, state: RunState, ids: Iterable[str]) -> bool:
    """Return whether the collection still has all of these passages. Other ids are those of other sources."""
    passages = list(ids)
    if not passages or not {"search", "embed"} & set(state.config.stages):
        return True

    async def has_all() -> bool:
        return await (await open_collection(services, state)).has_all(passages)

    return bool(await _in_time(services, has_all()))


async def _in_time(services: StageServices, work: Coroutine[Any, Any, T]) -> T | None:
    try:
        return await services.clock.within(work, services.clock.now() + _MOST_S)
    except (ApiError, StageLateError):
        return None
