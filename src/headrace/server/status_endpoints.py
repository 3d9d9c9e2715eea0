"""`/health`, `/ping`, `/version` and `/metrics`: whether the server takes requests, its version and its metrics."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from headrace.errors import HeadraceError
from headrace.gateway.accounts.directory import IdentifiedCaller
from headrace.gateway.api_errors import ApiError
from headrace.gateway.caches.cache_maintenance import measure
from headrace.observe import metrics
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.route_table import Route
from headrace.version import __version__

_ENGINE_TIMEOUT_S: Final = 0.5  # for one engine's statistics


def routes(context: EndpointContext) -> tuple[Route, ...]:
    fleet = context.services.fleet

    async def live(call: ApiCall) -> None:
        await context.reply(call, Response.json({"status": "live"}))

    async def ready(call: ApiCall) -> None:
        models = {name: served.responsive for name, served in fleet.served.items()}
        if context.is_draining:
            status = "draining"
        elif not context.is_ready:
            status = "starting"
        else:
            status = "ready" if any(models.values()) else "unavailable"
            if status == "ready" and context.services.capacity.overloaded:
                status = "overloaded"
        if status in ("draining", "starting"):
            body: dict[str, object] = {"status": status}
        else:
            body = {"status": status, "models": sorted(name for name, responsive in models.items() if responsive)}
            if unavailable := sorted(name for name, responsive in models.items() if not responsive):
                body["unavailable"] = unavailable
        if status == "ready":
            await context.reply(call, Response.json(body))
        else:
            await context.reply(call, Response.json(body, status=503, headers={"retry-after": "1"}))

    async def version(call: ApiCall) -> None:
        await context.reply(call, Response.json({"version": __version__}))

    return (
        Route("GET", "/health/live", live, "Report whether the server runs.", open=True),
        Route("GET", "/health/ready", ready, "Report whether it takes requests.", open=True),
        Route("GET", "/health", ready, "The same as /health/ready.", open=True),
        Route("GET", "/ping", ready, "The same as /health/ready.", open=True),
        Route("POST", "/ping", ready, "The same as /health/ready.", open=True),
        Route("GET", "/version", version, "Report the version of Headrace."),
    )


def metrics_route(context: EndpointContext) -> Route:
    fleet, needs_key = context.services.fleet, context.config.server.metrics_need_key

    async def exposition(call: ApiCall) -> None:
        if needs_key and not (isinstance(call.caller, IdentifiedCaller) and call.caller.admin):
            message = "The metrics show all tenants. Use an API key with access to the admin API."
            raise ApiError(message, kind="permission_error", code="no_admin")
        for name, served in fleet.served.items():
            if served.upstream is not None:
                metrics.upstream(name, served.upstream.state())
            with contextlib.suppress(TimeoutError, HeadraceError):  # an engine that does not answer is left out
                async with asyncio.timeout(_ENGINE_TIMEOUT_S):
                    for replica, statistics in enumerate(await served.engine.stats()):
                        metrics.engine(name, replica, statistics)
        metrics.workers(
            (name, replica.address, replica.state, replica.requests)
            for name in fleet.served
            for replica in fleet.replicas(name)
            if "://" in replica.address  # the sockets of this machine's are private
        )
        await measure(context.services.caches)
        others = [] if context.other_metrics is None else await context.other_metrics()
        text = metrics.exposition_of([metrics.families(), *others]) if others else metrics.exposition()
        await context.reply(call, Response(text, type=metrics.CONTENT_TYPE.encode()))

    return Route("GET", "/metrics", exposition, "Metrics for Prometheus.", open=not needs_key)
