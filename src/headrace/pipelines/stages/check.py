"""The check stage: sums up the citations that were checked while the answer streamed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.pipelines.run_state import RunState
from headrace.pipelines.stage_services import StageServices


class Check:
    def missing_input(self, state: RunState) -> bool:
        return state.citations is None or not state.sources

    def cache_parts(self, services: StageServices, state: RunState) -> None:
        """An answer is checked once."""

    async def compute(self, services: StageServices, state: RunState, end: float) -> dict[str, Any]:
        check = state.citations
        assert check is not None
        least = state.config.check.least_support
        return {
            "citations": len(check.citations),
            "unsupported": sum(each.support < least for each in check.citations),
            "unknown": len(check.unknown),
        }

    def apply(self, state: RunState, result: dict[str, Any]) -> Mapping[str, Any]:
        return result

    def use_partial(self, state: RunState) -> None:
        """There is no part of a check."""
