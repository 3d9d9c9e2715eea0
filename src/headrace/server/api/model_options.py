"""`GET /v1/models/{model}/options`: what is faster than a model, and its measured price."""

from __future__ import annotations

from headrace.gateway.accounts.access import find_model, visible_models
from headrace.gateway.api_errors import ApiError
from headrace.lab.online.faster_options import FasterOptions
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.route_table import Route


def routes(context: EndpointContext, faster: FasterOptions | None) -> tuple[Route, ...]:
    """`faster`: None in a front process, which relays these calls."""
    fleet = context.services.fleet

    async def options(call: ApiCall) -> None:
        served = find_model(call.caller, fleet, call.params["model"])
        if served.kind != "decoder":
            raise ApiError(f"'{served.name}' {served.purpose}. It has no faster options.", parameter="model")
        assert faster is not None
        allowed = [each.name for each in visible_models(call.caller, fleet) if each.kind == "decoder"]
        body = faster.as_json(served.name, served.surface, allowed)
        await context.reply(call, Response.json(body, headers={"cache-control": "no-store"}))

    about = "Show what is faster than a model, with its measured latency, cost and quality."
    return (Route("GET", "/v1/models/{model}/options", options, about),)
