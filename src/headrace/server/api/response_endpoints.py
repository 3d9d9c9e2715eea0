"""`/v1/responses` and what is below it: answers that may be kept, and gone on from.

Owns the routes, and when a response is kept: before the client hears of its end, so that it can go on from it at once.
Its shape is responses's, the keeping response_store's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from headrace.config import RequestLimits
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.event_writer import EventWriter
from headrace.gateway.requests.text_request import Choice, TextRequest
from headrace.gateway.serving.exchange import Exchange
from headrace.server.api.list_query import parse_list_query
from headrace.server.api.response_store import ResponseStore
from headrace.server.api.responses import (
    ResponseRequest,
    ResponseStream,
    read_response_request,
    response_body,
    with_history,
)
from headrace.server.api.responses_parameters import RESPONSE_PARAMETERS
from headrace.server.api.text_endpoint import Dialect, answer_call
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.route_table import Route

log = structlog.stdlib.get_logger("headrace.responses")


class StoredAnswer:
    """One response: its dialect, and what is kept of it."""

    def __init__(self, found: ResponseRequest, store: ResponseStore, tenant: str) -> None:
        self._found = found
        self._store = store
        self._tenant = tenant
        self._body: dict[str, Any] | None = None
        self._stream: ResponseStream | None = None

    def dialect(self) -> Dialect:
        return Dialect("response", RESPONSE_PARAMETERS, self._read, self._whole, self._events, keep=self._keep)

    def _read(self, *_: object) -> TextRequest:
        return self._found.asked

    def _whole(self, exchange: Exchange, choices: Sequence[Choice]) -> dict[str, Any]:
        self._body = response_body(exchange, choices, self._found)
        return self._body

    def _events(self, exchange: Exchange) -> EventWriter:
        self._stream = ResponseStream(exchange, self._found)
        return self._stream

    async def _keep(self) -> None:
        body = self._body if self._stream is None else self._stream.response
        if not self._found.store or body is None:
            return
        try:
            await self._store.put(body["id"], self._tenant, self._found.items, body)
        except ApiError as error:
            # The answer is there and is not lost for want of a disk; it says that it was not kept.
            log.warning("a response was not kept", reason=error.message)
            body["store"] = False


async def read_with_history(
    body: bytes, headers: Mapping[str, str], limits: RequestLimits, store: ResponseStore, tenant: str
) -> ResponseRequest:
    """Read a request, with the conversation of the response that it continues."""
    found = read_response_request(body, headers, limits)
    if found.previous is None:
        return found
    earlier = await store.get(found.previous, tenant)
    return with_history(found, [*earlier.items, *earlier.body["output"]])


def routes(context: EndpointContext, store: ResponseStore) -> tuple[Route, ...]:
    async def create(call: ApiCall) -> None:
        context.admit()
        tenant = call.caller.tenant
        request = await read_with_history(await context.body(call), call.headers, context.config.limits, store, tenant)
        exchange = context.exchange(call.caller, request.asked, "/v1/responses")
        await answer_call(context, call, exchange, StoredAnswer(request, store, tenant).dialect())

    async def retrieve(call: ApiCall) -> None:
        response = await store.get(call.params["response"], call.caller.tenant)
        await context.reply(call, Response.json(response.body))

    async def delete(call: ApiCall) -> None:
        id = call.params["response"]
        await store.delete(id, call.caller.tenant)
        await context.reply(call, Response.json({"id": id, "object": "response", "deleted": True}))

    async def list_items(call: ApiCall) -> None:
        query = parse_list_query(call, ("after", "limit", "order"))
        page = await store.items(call.params["response"], call.caller.tenant, **query)
        await context.reply(call, Response.json(page.as_json(lambda item: item)))

    return (
        Route("POST", "/v1/responses", create, "Create a response that can be continued.", RESPONSE_PARAMETERS),
        Route("GET", "/v1/responses/{response}", retrieve, "Retrieve a stored response."),
        Route("DELETE", "/v1/responses/{response}", delete, "Delete a stored response."),
        Route("GET", "/v1/responses/{response}/input_items", list_items, "List the conversation before a response."),
    )
