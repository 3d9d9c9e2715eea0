"""`/v1/responses` and what is below it: answers that may be kept, and gone on from.

Owns the routes, and when a response is kept: before the client hears of its end, so that it can go on from it at once.
Its shape is responses's, the keeping response_store's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
from headrace.server.api.text_endpoint import Dialect
from headrace.server.http.api_call import ApiCall, Response

if TYPE_CHECKING:
    from headrace.server.app import App
    from headrace.server.http.route import Route

log = structlog.stdlib.get_logger("headrace.responses")


class Answered:
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


async def read(
    body: bytes, headers: Mapping[str, str], limits: RequestLimits, store: ResponseStore, tenant: str
) -> ResponseRequest:
    """What is asked, after the conversation that it goes on from."""
    found = read_response_request(body, headers, limits)
    if found.previous is None:
        return found
    earlier = await store.get(found.previous, tenant)
    return with_history(found, [*earlier.items, *earlier.body["output"]])


def routes(app_of: Callable[[], App], store: ResponseStore) -> tuple[Route, ...]:
    """`app_of`: gives the application, which is made after its routes."""
    from headrace.server.http.route import Route

    async def create(call: ApiCall) -> None:
        app = app_of()
        app.admit()
        tenant = call.caller.tenant
        found = await read(await app.body(call), call.headers, app.config.limits, store, tenant)
        exchange = app.exchange(call.caller, found.asked, "/v1/responses")
        answered = Answered(found, store, tenant)
        await app.answer(call, exchange, answered.dialect())

    async def retrieve(call: ApiCall) -> None:
        found = await store.get(call.params["response"], call.caller.tenant)
        await app_of().reply(call, Response.json(found.body))

    async def delete(call: ApiCall) -> None:
        id = call.params["response"]
        await store.delete(id, call.caller.tenant)
        await app_of().reply(call, Response.json({"id": id, "object": "response", "deleted": True}))

    async def items(call: ApiCall) -> None:
        asked = parse_list_query(call, ("after", "limit", "order"))
        page = await store.items(call.params["response"], call.caller.tenant, **asked)
        await app_of().reply(call, Response.json(page.as_json(lambda item: item)))

    return (
        Route("POST", "/v1/responses", create, "Answer, in items that can be gone on from.", RESPONSE_PARAMETERS),
        Route("GET", "/v1/responses/{response}", retrieve, "A stored response."),
        Route("DELETE", "/v1/responses/{response}", delete, "Remove it."),
        Route("GET", "/v1/responses/{response}/input_items", items, "The conversation up to it."),
    )
