"""The rerank stage: orders the passages by a model's scores, in batches, so that a late stage has ranked some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from headrace.gateway.api_errors import ApiError
from headrace.pipelines.run_state import RunState
from headrace.pipelines.stage_services import StageServices


class Rerank:
    def missing_input(self, state: RunState) -> bool:
        return not state.hits

    def cache_parts(self, services: StageServices, state: RunState) -> list[Any] | None:
        """Scores depend on the model's weights, not only on its name."""
        name = state.config.rerank.model
        assert name is not None  # checked with the configuration
        try:
            served = services.models.find(state.exchange.caller, name)
        except ApiError:
            return None  # `compute` reports it
        return [served.name, served.fingerprint, state.question, [[hit.id, hit.text] for hit in state.hits]]

    async def compute(self, services: StageServices, state: RunState, end: float) -> list[float]:
        config = state.config.rerank
        assert config.model is not None  # checked with the configuration
        state.ranked.clear()
        for start in range(0, len(state.hits), config.batch):
            texts = [hit.text for hit in state.hits[start : start + config.batch]]
            scores = await services.models.rank(state.exchange, config.model, state.question, texts, state.surface)
            state.ranked.extend(scores[: len(texts)])
        return list(state.ranked)

    def apply(self, state: RunState, result: list[float]) -> Mapping[str, Any]:
        """Order the ranked passages by score; those without one follow as they were."""
        hits, keep = state.hits, state.config.rerank.keep
        order = sorted(range(min(len(result), len(hits))), key=lambda place: -result[place])
        ranked = [
            replace(hits[place], score=result[place], scores={**hits[place].scores, "rerank": result[place]})
            for place in order
        ]
        state.hits = [*ranked, *hits[len(result) :]][:keep]
        return {"ranked": len(ranked), "passages": len(state.hits)}

    def use_partial(self, state: RunState) -> Mapping[str, Any] | None:
        return self.apply(state, state.ranked) if state.ranked else None
