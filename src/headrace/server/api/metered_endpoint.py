"""Calls that write no text on their way through limits and budgets: embeddings, rerank, score.

Owns the order: what a call wants is reserved before anything is computed, and settled however it ends. What such a call
is and does is vectors's.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from headrace.gateway.accounts.access import choose_surface, find_model
from headrace.gateway.accounts.tenant_policies import settings_of
from headrace.gateway.api_errors import as_api_error
from headrace.gateway.flow.services import Services
from headrace.gateway.ledger.budgets import BudgetRefusal
from headrace.gateway.ledger.ledger_records import LedgerEntry
from headrace.gateway.requests.text_request import TokenUsage
from headrace.gateway.serving.exchange import Caller
from headrace.server.api.common_parameters import with_headers
from headrace.server.api.vectors import (
    EMBEDDINGS_PARAMETERS,
    RERANK_PARAMETERS,
    SCORE_PARAMETERS,
    PreparedCall,
    prepare_embeddings,
    prepare_rerank,
    prepare_score,
)
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.body_parameters import ParameterTable
from headrace.server.http.route_table import Route


async def run_metered(
    services: Services, caller: Caller, prepared: PreparedCall, endpoint: str, *, model: str = ""
) -> tuple[dict[str, Any], dict[str, str]]:
    """The answer, and headers beside it. ApiError where it is refused or fails."""
    served = prepared.work.served
    surface = choose_surface(caller, prepared.work.wished, "batch")
    prepared.work.on(surface)
    reservation = await services.limiter.reserve(
        services.limit_scopes.scopes(caller, served.name, surface),
        input_tokens=prepared.input_tokens,
        most_output=0,
        tenant=caller.tenant,
        surface=surface,
        closed=settings_of(caller).fail == "closed",
    )
    headers = reservation.headers()
    if prepared.work.truncated:
        headers["x-headrace-truncated"] = str(len(prepared.work.truncated))
    id = secrets.token_urlsafe(18)
    ended, charged = "finished", False
    try:
        if services.ledger is not None:
            entry = LedgerEntry(
                id=id,
                tenant=caller.tenant,
                endpoint=endpoint,
                model=model or served.name,
                variant=served.name,
                key=caller.key,
                surface=surface,
                prompt_tokens=prepared.input_tokens,
            )
            # Another variant's vectors are of another kind, so none stands in for this one.
            verdict = await services.ledger.reserve(entry, output_tokens=0, most_tokens=0, falls=False)
            if isinstance(verdict, BudgetRefusal):
                raise verdict.error()
            charged = True
        return await prepared.run(), headers
    except BaseException as error:
        ended = as_api_error(error).kind if isinstance(error, Exception) else "gone"
        raise
    finally:
        used = replace(prepared.usage)
        refused = ended != "finished" and used == TokenUsage()  # before anything was computed
        if charged and services.ledger is not None:
            if refused:
                services.ledger.release(id)
            else:
                services.ledger.charge(id, used, ended=ended)
        if refused:
            reservation.release_soon()
        else:
            reservation.settle_soon(used.prompt_tokens, 0, whole=False)


def routes(context: EndpointContext) -> tuple[Route, ...]:
    about = "Order documents by relevance to a query. The same at /rerank."
    rerank = _route(context, "/v1/rerank", RERANK_PARAMETERS, prepare_rerank, about)
    return (
        _route(context, "/v1/embeddings", EMBEDDINGS_PARAMETERS, prepare_embeddings, "Turn texts into vectors."),
        rerank,
        replace(rerank, path="/rerank", listed=False),
        _route(context, "/v1/score", SCORE_PARAMETERS, prepare_score, "Score how likely a text is after another."),
    )


def _route(
    context: EndpointContext,
    path: str,
    table: ParameterTable,
    prepare: Callable[..., Coroutine[Any, Any, PreparedCall]],
    about: str,
) -> Route:
    limits = context.config.limits

    async def handler(call: ApiCall) -> None:
        context.admit()
        given = with_headers(await context.parameters(call, table), call.headers, table)
        call.timeline.enter("compute")
        model = given.get("model", "")
        served = find_model(call.caller, context.services.fleet, model)
        with context.count_running():
            prepared = await prepare(served, call.caller, given, limits)
            work = run_metered(context.services, call.caller, prepared, path, model=model)
            call.charged = True
            result, headers = await call.unless_gone(work)
        await context.reply(call, Response.json(result, headers=headers))

    return Route("POST", path, handler, about, table, reserves=True, lenient=True)
