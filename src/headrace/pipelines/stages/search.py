"""The search stage: passages of a collection. The collection skips its own late parts when it is given a deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from headrace.gateway.api_errors import invalid_request
from headrace.pipelines.collections.hits import Filters, Hit, Passages, SearchableCollection
from headrace.pipelines.run_state import RunState
from headrace.pipelines.stage_services import StageServices

FORMAT: Final = 2  # of results that caches keep
_SHARE: Final = 0.9  # of the stage's time, that the collection may take: the rest is for the way there and back
_WHY: Final = {"deadline": "late"}  # a collection's reasons in the words of a stage
_PASSAGE_CHARS: Final = 20_000  # of one passage


class Search:
    def missing_input(self, state: RunState) -> bool:
        return not state.question

    def cache_parts(self, services: StageServices, state: RunState) -> list[Any]:
        return [FORMAT, state.config.search.k, dict(search_filters(state) or {}), state.question]

    async def compute(self, services: StageServices, state: RunState, end: float) -> dict[str, Any]:
        return msgspec.to_builtins(await search(services, state, state.question, end - services.clock.now()))

    def apply(self, state: RunState, result: Any) -> Mapping[str, Any]:
        found = msgspec.convert(result, Passages)
        state.hits = found.hits
        details: dict[str, Any] = {"passages": len(found.hits)}
        if found.skipped:
            details["skipped"] = {way: _WHY.get(why, why) for way, why in found.skipped.items()}
        return details

    def use_partial(self, state: RunState) -> None:
        """The collection has returned what it had, or nothing."""


async def search(services: StageServices, state: RunState, question: str, seconds: float) -> Passages:
    """Return the passages for a question, bounded in number and length."""
    config, caller = state.config.search, state.exchange.caller
    found = await (await open_collection(services, state)).search(
        question,
        k=config.k,
        filters=search_filters(state),
        deadline_s=max(0.001, seconds * _SHARE),
        tenant=caller.tenant,
        caller=caller,
        vector=state.vector if question == state.question else None,
    )
    return replace(found, hits=bounded_hits(found.hits, config.k))


async def open_collection(services: StageServices, state: RunState) -> SearchableCollection:
    """Return the collection that a run searches, opened once."""
    if services.retriever is None:
        raise invalid_request("This server has no collections.", "model", code="collection_not_found")
    if state.collection is None:
        state.collection = await services.retriever.open(state.exchange.caller, state.config.search.collection)
    return state.collection


def search_filters(state: RunState) -> Filters | None:
    """Return the filters of the pipeline and, where it lets clients filter, of the request. The pipeline's win."""
    own, given = state.config.search.filters, state.exchange.text_request.pipeline.filters
    return {**given, **own} or None


def bounded_hits(hits: Sequence[Hit], most: int) -> list[Hit]:
    """Cut what a search returns beyond what was asked for, in number and length."""
    return [
        hit if len(hit.text) <= _PASSAGE_CHARS else replace(hit, text=hit.text[:_PASSAGE_CHARS]) for hit in hits[:most]
    ]
