"""Toolbox: the declared tools. Offers a tenant the ones that it may use, and calls them within bounds.

Nothing is offered to a tenant that did not opt in. A call's time and the bytes of its result are bounded, a tool with
effects needs an approval for each call, and results are cached for one tenant only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
import structlog

from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.results.result_cache import ResultCache, ResultLookup
from headrace.observe import metrics
from headrace.pipelines.stage_clock import StageClock, StageLateError
from headrace.pipelines.tools.approvals import Approvals
from headrace.pipelines.tools.tool import ToolError, ToolSource, ToolSpec

log: Final = structlog.stdlib.get_logger("headrace.tools")

Outcome = Literal["done", "cached", "failed", "late", "refused", "repeated"]
ALL: Final = "*"


class ToolResult(msgspec.Struct, frozen=True):
    text: str
    outcome: Outcome


class Toolbox:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        sources: Mapping[str, ToolSource],
        results: ResultCache,
        clock: StageClock,
        approvals: Approvals | None = None,
    ) -> None:
        self.approvals = approvals or Approvals()
        self._sources = dict(sources)
        self._results = results
        self._clock = clock

    async def offer(self, names: Sequence[str], allowed: Sequence[str], end: float) -> list[ToolSpec]:
        """Return the tools of these sources that are allowed. A source that cannot list its tools has none."""
        permitted = [name for name in names if name in self._sources and (name in allowed or ALL in allowed)]
        found = await asyncio.gather(*(self._list(name, end) for name in permitted))
        return [spec for specs in found for spec in specs]

    async def _list(self, name: str, end: float) -> list[ToolSpec]:
        try:
            return await self._clock.within(self._sources[name].tools(), end)
        except (ToolError, ApiError, StageLateError, OSError) as error:
            log.warning("a tool's operations cannot be listed", tool=name, error=str(error) or type(error).__name__)
            return []

    async def call(
        self, spec: ToolSpec, arguments: Mapping[str, Any], *, tenant: str, end: float, caches: bool = True
    ) -> ToolResult:
        """Call a tool. Its failure is a result, which the model reads."""
        result = await self._call(spec, arguments, tenant, end, caches=caches and spec.cache_s > 0 and not spec.effects)
        metrics.of(metrics.tool_calls, spec.name.partition("__")[0], result.outcome).inc()
        return result

    async def _call(
        self, spec: ToolSpec, arguments: Mapping[str, Any], tenant: str, end: float, *, caches: bool
    ) -> ToolResult:
        lookup = ResultLookup()
        if caches:
            parts = [spec.name, dict(arguments)]
            lookup = await self._results.look(
                spec.kind, tenant, parts, tags=spec.tags, declared=True, fresh_s=spec.cache_s
            )
        if lookup.data is not None:
            return ToolResult(lookup.data.decode(), "cached")
        try:
            until = min(end, self._clock.now() + spec.timeout_s)
            text = await self._clock.within(spec.call(arguments, tenant), until)
        except StageLateError:
            return ToolResult("The tool did not answer in time.", "late")
        except (ToolError, ApiError) as error:
            return ToolResult(f"Error: {error}"[:1000], "failed")
        except Exception as error:
            log.error("a tool failed", tool=spec.name, exc_info=error)
            return ToolResult("Error: the tool failed.", "failed")
        text = cut_bytes(text, spec.result_bytes)
        if caches:
            await self._results.keep(lookup, text.encode(), ttl_s=spec.cache_s)
        return ToolResult(text, "done")

    async def close(self) -> None:
        await asyncio.gather(*(source.close() for source in self._sources.values()), return_exceptions=True)


def cut_bytes(text: str, most: int) -> str:
    raw = text.encode(errors="replace")
    return text if len(raw) <= most else raw[:most].decode(errors="ignore") + "\n[cut]"
