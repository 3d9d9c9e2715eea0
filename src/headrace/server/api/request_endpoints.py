"""`/v1/requests/{id}`: the stages of a recent request of the caller's own tenant."""

from __future__ import annotations

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
        record = recent.find(call.caller.tenant, id)
        await context.reply(call, Response.json(waterfall(found_record(record, id, context))))

    about = "Show where the time of one of your recent requests went."
    return (Route("GET", "/v1/requests/{request}", retrieve, about),)


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
