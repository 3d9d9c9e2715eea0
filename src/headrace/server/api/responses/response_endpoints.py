"""`/v1/responses` and what is below it: create, retrieve, follow, cancel and delete responses, and list their items."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.gateway.api_errors import invalid_request
from headrace.server.api.list_query import parse_list_query
from headrace.server.api.responses.background_responses import BackgroundResponses, EventLog
from headrace.server.api.responses.response_history import KeptAnswer, ResponseHistory
from headrace.server.api.responses.responses import read_response_request
from headrace.server.api.responses.responses_parameters import RESPONSE_PARAMETERS
from headrace.server.api.text_endpoint import answer_call
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.route_table import Route


def routes(context: EndpointContext, history: ResponseHistory, background: BackgroundResponses) -> tuple[Route, ...]:
    store = history.responses

    async def create(call: ApiCall) -> None:
        context.admit()
        tenant = call.caller.tenant
        limits = context.config.limits
        found = await context.read(call, lambda body: read_response_request(body, call.headers, limits, call.unknown))
        request = await history.with_earlier(found, tenant)
        timeline = None if request.background else call.timeline
        exchange = context.exchange(call.caller, request.text_request, "/v1/responses", timeline)
        if not request.background:
            await answer_call(context, call, exchange, KeptAnswer(request, history, tenant).dialect())
            return
        body = await background.start(tenant, request, exchange)
        if request.text_request.stream:
            await _follow(context, call, background.event_log(body["id"], tenant), 0)
        else:
            await context.reply(call, Response.json(body))

    async def retrieve(call: ApiCall) -> None:
        id, tenant = call.params["response"], call.caller.tenant
        query = _retrieval_query(call)
        if query["stream"]:
            await store.get(id, tenant)  # so that an unknown response is a 404
            await _follow(context, call, background.event_log(id, tenant), query["starting_after"] + 1)
            return
        body = background.unfinished(id, tenant) or (await store.get(id, tenant)).body
        await context.reply(call, Response.json(body))

    async def cancel(call: ApiCall) -> None:
        body = await background.cancel(call.params["response"], call.caller.tenant)
        await context.reply(call, Response.json(body))

    async def delete(call: ApiCall) -> None:
        id = call.params["response"]
        await background.delete(id, call.caller.tenant)
        await context.reply(call, Response.json({"id": id, "object": "response", "deleted": True}))

    async def list_items(call: ApiCall) -> None:
        query = parse_list_query(call, ("after", "limit", "order"))
        page = await store.items(call.params["response"], call.caller.tenant, **query)
        await context.reply(call, Response.json(page.as_json(lambda item: item)))

    one = "/v1/responses/{response}"
    return (
        Route(
            "POST",
            "/v1/responses",
            create,
            "Create a response that can be continued.",
            RESPONSE_PARAMETERS,
            reserves=True,
            lenient=True,
        ),
        Route("GET", one, retrieve, "Retrieve a stored response, or follow one that runs in the background."),
        Route("DELETE", one, delete, "Delete a stored response."),
        Route("POST", f"{one}/cancel", cancel, "Cancel a response that runs in the background."),
        Route("GET", f"{one}/input_items", list_items, "List the conversation before a response."),
    )


def _retrieval_query(call: ApiCall) -> dict[str, Any]:
    given = parse_list_query(call, ("stream", "starting_after"))
    after = given.get("starting_after", "-1")
    if after != "-1" and not (after.isascii() and after.isdigit() and len(after) < 9):
        raise invalid_request(f"'starting_after' is '{after[:20]}'. Expected a sequence number.", "starting_after")
    if given.get("stream", "false") not in ("true", "false"):
        raise invalid_request(f"'stream' is '{given['stream'][:20]}'. Expected true or false.", "stream")
    return {"stream": given.get("stream") == "true", "starting_after": int(after)}


async def _follow(context: EndpointContext, call: ApiCall, log: EventLog, place: int) -> None:
    """Send the events of a background response from a sequence number on, until it ends or the client leaves."""
    news = asyncio.Event()
    is_gone = False

    def leave() -> None:
        nonlocal is_gone
        is_gone = True
        news.set()

    log.readers.add(news)
    unwatch = call.watch(leave)
    try:
        await call.begin_events(context.cors_headers(call))
        while not (is_gone or log.has_overflowed):
            news.clear()
            if events := log.events[place:]:
                place += len(events)
                await call.write(b"".join(events))
            elif log.has_ended:
                break
            else:
                await news.wait()
        if not is_gone:
            await call.write(b"", more=False)
    finally:
        unwatch()
        log.readers.discard(news)
