"""`GET /v1/capacity`: what the server could take on now, for the models that the caller may use."""

from __future__ import annotations

from headrace.gateway.accounts.access import visible_models
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.route_table import Route


def routes(context: EndpointContext) -> tuple[Route, ...]:
    services = context.services

    async def capacity(call: ApiCall) -> None:
        monitor = services.capacity
        data = monitor.as_json(visible_models(call.caller, services.fleet))
        most = context.config.limits.requests  # of each process
        room = sum(max(0, most - running) for running in await context.running_of_all())
        status = "draining" if context.is_draining else "overloaded" if monitor.overloaded else "ready"
        body = {"object": "capacity", "status": status, "free_requests": room, "data": data}
        await context.reply(call, Response.json(body, headers={"cache-control": "no-store"}))

    return (Route("GET", "/v1/capacity", capacity, "Show what the server could take on now."),)
