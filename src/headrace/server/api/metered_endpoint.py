"""The endpoints that write no text: embeddings, rerank, score. What such a call is and does is vectors's; limits and
budgets are metered_evaluation's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from headrace.gateway.accounts.access import find_model
from headrace.gateway.flow.metered_evaluation import run_metered
from headrace.gateway.flow.services import Services
from headrace.gateway.serving.exchange import Caller
from headrace.server.api.common_parameters import with_headers
from headrace.server.api.vectors import METERED_CALLS, PreparedCall
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.route_table import Route


async def run_prepared(
    services: Services, caller: Caller, prepared: PreparedCall, endpoint: str, *, model: str = ""
) -> tuple[dict[str, Any], dict[str, str]]:
    """The answer, and headers beside it. ApiError where it is refused or fails."""
    return await run_metered(services, caller, prepared.work, prepared.run, endpoint, model=model)


def routes(context: EndpointContext) -> tuple[Route, ...]:
    about = "Order documents by relevance to a query. The same at /rerank."
    rerank = _route(context, "/v1/rerank", about)
    return (
        _route(context, "/v1/embeddings", "Turn texts into vectors."),
        rerank,
        replace(rerank, path="/rerank", listed=False),
        _route(context, "/v1/score", "Score how likely a text is after another."),
    )


async def evaluate(
    context: EndpointContext, call: ApiCall, path: str, parameters: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run a call with the parameters of its body. Return the answer, and headers beside it."""
    table, prepare = METERED_CALLS[path]
    given = with_headers(parameters, call.headers, table)
    call.timeline.enter("compute")
    model = given.get("model", "")
    served = find_model(call.caller, context.services.fleet, model)
    with context.count_running():
        prepared = await prepare(served, call.caller, given, context.config.limits)
        work = run_prepared(context.services, call.caller, prepared, path, model=model)
        call.charged = True
        return await call.unless_gone(work)


def _route(context: EndpointContext, path: str, about: str) -> Route:
    table = METERED_CALLS[path].table

    async def handler(call: ApiCall) -> None:
        context.admit()
        result, headers = await evaluate(context, call, path, await context.parameters(call, table))
        await context.reply(call, Response.json(result, headers=headers))

    return Route("POST", path, handler, about, table, reserves=True, lenient=True)
