"""`/health` and `/metrics`: whether the server runs and takes requests, and its metrics for Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from headrace.errors import HeadraceError
from headrace.gateway.caches.cache_maintenance import measure
from headrace.observe import metrics
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.route_table import Route

_ENGINE_TIMEOUT_S: Final = 0.5  # for one engine's statistics


def routes(context: EndpointContext) -> tuple[Route, ...]:
    fleet = context.services.fleet

    async def live(call: ApiCall) -> None:
        await context.reply(call, Response.json({"status": "live"}))

    async def ready(call: ApiCall) -> None:
        if context.is_ready and not context.is_draining:
            await context.reply(call, Response.json({"status": "ready", "models": sorted(fleet.served)}))
        else:
            status = "draining" if context.is_draining else "starting"
            await context.reply(call, Response.json({"status": status}, status=503, headers={"retry-after": "1"}))

    async def exposition(call: ApiCall) -> None:
        for name, served in fleet.served.items():
            if served.upstream is not None:
                metrics.upstream(name, served.upstream.state())
            with contextlib.suppress(TimeoutError, HeadraceError):  # an engine that does not answer is left out
                async with asyncio.timeout(_ENGINE_TIMEOUT_S):
                    for replica, statistics in enumerate(await served.engine.stats()):
                        metrics.engine(name, replica, statistics)
        await measure(context.services.caches)
        await context.reply(call, Response(metrics.exposition(), type=metrics.CONTENT_TYPE.encode()))

    return (
        Route("GET", "/health/live", live, "Report whether the server runs.", open=True),
        Route("GET", "/health/ready", ready, "Report whether it takes requests.", open=True),
        Route("GET", "/health", ready, "The same as /health/ready.", open=True),
        Route("GET", "/metrics", exposition, "Metrics for Prometheus.", open=True),
    )
