"""`/v1/models`: the models that the caller may use."""

from __future__ import annotations

from headrace.gateway.accounts.access import find_model, visible_models
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.route_table import Route


def routes(context: EndpointContext) -> tuple[Route, ...]:
    fleet = context.services.fleet

    async def list_models(call: ApiCall) -> None:
        data = [served.described() for served in visible_models(call.caller, fleet)]
        await context.reply(call, Response.json({"object": "list", "data": data}))

    async def retrieve(call: ApiCall) -> None:
        served = find_model(call.caller, fleet, call.params["model"])
        await context.reply(call, Response.json(served.described()))

    return (
        Route("GET", "/v1/models", list_models, "List the served models."),
        Route("GET", "/v1/models/{model}", retrieve, "Retrieve one model."),
    )
