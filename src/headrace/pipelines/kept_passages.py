"""Whether results that a cache has kept may be shown: those of the very collection that a run searches, whose passages
are all still in it.

The collection itself is asked, so that a document that was deleted before a restart shows nowhere, and keys have its
identity, so that servers with a shared cache do not mix their collections. A collection that does not answer in half a
second costs the cached result.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any, Final, TypeVar

from headrace.gateway.api_errors import ApiError
from headrace.pipelines.run_state import RunState
from headrace.pipelines.stage_clock import StageLateError
from headrace.pipelines.stage_services import StageServices
from headrace.pipelines.stages.search import open_collection

_MOST_S: Final = 0.5  # for an answer of the collection's database
_LEAST_S: Final = 0.05  # the same for a run whose time is over

T = TypeVar("T")


async def collection_uid(services: StageServices, state: RunState) -> str | None:
    """Return what the keys of a run's results must name: the collection that it searches, empty for a run that
    searches none. None: that cannot be told, so no cached result may be used."""
    if not {"search", "embed"} & set(state.config.stages):
        return ""
    collection = await _in_time(services, state, open_collection(services, state))
    return None if collection is None else collection.uid


async def are_passages_kept(services: StageServices, state: RunState, ids: Iterable[str]) -> bool:
    """Return whether the collection still has all of these passages. Other ids are those of other sources."""
    passages = list(ids)
    if not passages or not {"search", "embed"} & set(state.config.stages):
        return True

    async def has_all() -> bool:
        return await (await open_collection(services, state)).has_all(passages)

    return bool(await _in_time(services, state, has_all()))


async def _in_time(services: StageServices, state: RunState, work: Coroutine[Any, Any, T]) -> T | None:
    now = services.clock.now()
    try:
        return await services.clock.within(work, max(now + _LEAST_S, min(now + _MOST_S, state.deadline)))
    except (ApiError, StageLateError):
        return None
