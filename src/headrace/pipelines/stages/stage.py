"""PipelineStage: the interface of stages that end with one result. The stages tools and generate stream, so they have
functions of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from headrace.pipelines.run_state import RunState
from headrace.pipelines.stage_services import StageServices


class PipelineStage(Protocol):
    """A stage without state of its own: results are put into the RunState."""

    def missing_input(self, state: RunState) -> bool:
        """Return whether there is nothing to work on; the stage is passed over then."""
        ...

    def cache_parts(self, services: StageServices, state: RunState) -> list[Any] | None:
        """Return what the result depends on, beside the tenant and the collection. None: it is never cached."""
        ...

    async def compute(self, services: StageServices, state: RunState, end: float) -> Any:
        """Return the result, of types that JSON has. `end`: when the stage must end, on the services' clock."""
        ...

    def apply(self, state: RunState, result: Any) -> Mapping[str, Any]:
        """Put a result into the state. Return details for the report."""
        ...

    def use_partial(self, state: RunState) -> Mapping[str, Any] | None:
        """Put what is there into the state when the stage is late. None: nothing is there."""
        ...
