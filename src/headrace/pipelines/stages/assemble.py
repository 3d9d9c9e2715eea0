"""The assemble stage: chooses and orders the passages that the model reads, and numbers them.

The flow's `shape` stage selects once more from this selection, which changes nothing: the numbers stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from headrace.gateway.degradation.shaping.sources import select_sources
from headrace.gateway.requests.text_request import SourceText
from headrace.pipelines.collections.hits import Hit
from headrace.pipelines.run_state import RunState
from headrace.pipelines.stage_services import StageServices

_WHEN_LATE: Final = 2  # passages that are taken as they are


class Assemble:
    def missing_input(self, state: RunState) -> bool:
        return not state.hits

    def cache_parts(self, services: StageServices, state: RunState) -> None:
        """Choosing costs less than reading a cache."""

    async def compute(self, services: StageServices, state: RunState, end: float) -> list[str]:
        """Return the ids of the passages in order."""
        sources = choose(services, state, [as_source(hit) for hit in _ordered(state)])
        if state.config.assemble.order == "warm":
            sources = services.warm.warm_first(state, sources)
        state.show_sources(sources)
        return [source.id for source in sources]

    def apply(self, state: RunState, result: list[str]) -> Mapping[str, Any]:
        return {"sources": len(result)}

    def use_partial(self, state: RunState) -> Mapping[str, Any]:
        """Take the first passages as they are."""
        state.show_sources([as_source(hit) for hit in state.hits[:_WHEN_LATE]])
        return {"sources": len(state.sources)}


def choose(services: StageServices, state: RunState, sources: Sequence[SourceText]) -> tuple[SourceText, ...]:
    """Select sources within the bounds of [shaping], in the order given."""
    count = services.models.token_counter(state.exchange.caller, state.model)
    most = min(services.shaping.sources_tokens, state.exchange.served.context // 2)
    return select_sources(sources, services.shaping, count, total_tokens=most).sources


def as_source(hit: Hit) -> SourceText:
    """Return what the model reads of a passage. It has no score, so that the order is kept."""
    return SourceText(hit.id, f"{hit.heading}\n{hit.text}" if hit.heading else hit.text)


def _ordered(state: RunState) -> list[Hit]:
    config = state.config.assemble
    hits = [hit for hit in state.hits if config.least_score is None or hit.score >= config.least_score]
    hits = hits[: config.keep]
    return sorted(hits, key=lambda hit: hit.id) if config.order == "stable" else hits
