"""The embed stage: the question's vector, by the encoder of the collection that the search stage searches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.pipelines.collections.hits import QueryVector
from headrace.pipelines.run_state import RunState
from headrace.pipelines.stage_services import StageServices
from headrace.pipelines.stages.search import open_collection


class Embed:
    def missing_input(self, state: RunState) -> bool:
        return not state.question

    def cache_parts(self, services: StageServices, state: RunState) -> list[Any]:
        return [state.question]

    async def compute(self, services: StageServices, state: RunState, end: float) -> Any:
        collection = await open_collection(services, state)
        return msgspec.to_builtins(await collection.embed_query(state.question, state.exchange.caller))

    def apply(self, state: RunState, result: Any) -> Mapping[str, Any]:
        state.vector = None if result is None else msgspec.convert(result, QueryVector)
        return {"dimensions": 0 if state.vector is None else len(state.vector.values)}

    def use_partial(self, state: RunState) -> None:
        """There is no part of a vector."""
