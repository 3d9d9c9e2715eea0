"""`/v1/requests/{id}`: the stages of a recent request of the caller's own tenant."""

from __future__ import annotations

import contextlib
from typing import Any

from headrace.gateway.api_errors import ApiError
from headrace.observe.traces.request_record import RequestRecord
from headrace.observe.traces.waterfall import waterfall
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.route_table import Route


def routes(context: EndpointContext) -> tuple[Route, ...]:
    recent = context.services.observer.recent

    async def retrieve(call: ApiCall) -> None:
        id = call.params["request"]
        record = found_record(recent.find(call.caller.tenant, id), id, context)
        await context.reply(call, Response.json(await with_outcomes(record, context)))

    about = "Show where the time of one of your recent requests went."
    return (Route("GET", "/v1/requests/{request}", retrieve, about),)


async def with_outcomes(record: RequestRecord, context: EndpointContext) -> dict[str, Any]:
    """Return the waterfall of a request, and the outcomes that feedback attached to it."""
    outcomes: dict[str, float] = {}
    keeper = context.services.keeper
    if keeper is not None and record.id:
        with contextlib.suppress(ApiError):  # storage does not work
            outcomes = await keeper.feedback.of_request(record.tenant, record.id)
    return {**waterfall(record), "outcomes": outcomes}


def found_record(record: RequestRecord | None, id: str, context: EndpointContext) -> RequestRecord:
    if record is None:
        most = context.config.observe.recent_requests
        raise ApiError(
            f"No recent request '{context.services.accounts.directory.hidden(id[:200])}'. The server keeps the last "
            f"{most} requests; pass the id of a response, or its x-request-id header.",
            kind="not_found_error",
            code="request_not_found",
        )
    return record
