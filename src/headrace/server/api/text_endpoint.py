"""The endpoints that answer with text, in whatever dialect: read, run, deliver, settle.

Owns Dialect (how an endpoint reads a body and writes answers) and the delivery of one exchange, whole or as events.
The exchange is settled once, whether it ends with an answer, an error or a disconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from headrace.config import RequestLimits
from headrace.gateway.api_errors import ApiError, as_api_error
from headrace.gateway.flow.services import Services
from headrace.gateway.flow.text_flow import TextFlow
from headrace.gateway.requests.event_writer import EventWriter
from headrace.gateway.requests.text_request import Choice, ChoiceDelta, RestartDelta, TextRequest
from headrace.gateway.routing.composite_answerer import collect_choices
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.upstream_answers.upstream_generation import UpstreamGeneration
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, GoneError, Response
from headrace.server.http.body_parameters import ParameterTable
from headrace.server.http.route_table import Route


class Dialect(msgspec.Struct, frozen=True):
    name: str
    table: ParameterTable
    read: Callable[[bytes, Mapping[str, str], RequestLimits], TextRequest]
    whole: Callable[[Exchange, Sequence[Choice]], dict[str, Any]]
    events: Callable[[Exchange], EventWriter]
    errors: str = "openai"  # the shape of errors
    keep: Callable[[], Awaitable[None]] | None = None  # called when all is written but the last that a client hears
    relays: bool = False  # an upstream's own events are ours


async def answer_in_full(exchange: Exchange, dialect: Dialect, services: Services) -> dict[str, Any]:
    """The body of an answer, for a caller that has no connection to watch, such as a batch."""
    flow = TextFlow(exchange, services)
    with _settling(flow):
        await flow.begin()
        body = dialect.whole(exchange, await collect_choices(flow))
        if dialect.keep is not None:
            await dialect.keep()
        return body


def text_route(context: EndpointContext, path: str, dialect: Dialect, about: str) -> Route:
    """Return the route of an endpoint that answers with text."""

    async def handler(call: ApiCall) -> None:
        context.admit()
        request = dialect.read(await context.body(call), call.headers, context.config.limits)
        await answer_call(context, call, context.exchange(call.caller, request, path), dialect)

    return Route("POST", path, handler, about, dialect.table, errors=dialect.errors)


async def answer_call(context: EndpointContext, call: ApiCall, exchange: Exchange, dialect: Dialect) -> None:
    """Answer a call, and put the exchange into its log line."""
    with context.count_running():
        try:
            await _deliver(call, exchange, dialect, context.cors_headers(call), context.services)
        finally:
            call.log_fields = exchange.log_line()


async def _deliver(
    call: ApiCall, exchange: Exchange, dialect: Dialect, headers: Mapping[str, str], services: Services
) -> None:
    """ApiError before the first byte is the caller's to report; after it, it is sent as an event."""
    flow = TextFlow(exchange, services)
    with _settling(flow, call.watch(flow.cancel)):
        await flow.begin()
        if flow.is_client_gone:
            raise GoneError  # while its prompt was cut into tokens
        if exchange.asked.stream:
            relayed = flow.relayed() if dialect.relays else None
            if relayed is None:
                await _stream(call, flow, dialect, headers)
            else:
                await _relay(call, flow, relayed, dialect, headers)
        else:
            choices = await collect_choices(flow)
            if flow.is_client_gone:
                raise GoneError
            body = dialect.whole(exchange, choices)
            if dialect.keep is not None:
                await dialect.keep()
            timed = {**headers, **flow.headers(), "server-timing": exchange.server_timing()}
            await call.reply(Response.json(body, headers=timed))


@contextmanager
def _settling(flow: TextFlow, unwatch: Callable[[], None] | None = None) -> Generator[None]:
    """Settles at the end, whatever it is, and watches the client no more."""
    error: ApiError | None = None
    try:
        yield
    except GoneError:
        raise
    except Exception as caught:
        error = as_api_error(caught)
        raise
    except asyncio.CancelledError:
        error = ApiError("the server has ended", kind="overloaded_error", code="draining")
        raise
    finally:
        if unwatch is not None:
            unwatch()
        flow.settle(error)


async def _relay(
    call: ApiCall, flow: TextFlow, relayed: UpstreamGeneration, dialect: Dialect, headers: Mapping[str, str]
) -> None:
    """As _stream, with an upstream's bytes."""
    first: list[bytes] = []

    def hold(data: bytes) -> bool:
        first.append(data)
        return False

    ended = await relayed.relay(hold, dialect.events)
    if not first or flow.is_client_gone:
        raise GoneError
    await call.begin_events({**headers, **flow.headers()})
    try:
        await call.write(b"".join(first))
        while not ended:
            ended = await relayed.relay(call.offer, dialect.events)
            if not ended:
                await call.room()
        if flow.is_client_gone:
            raise GoneError
    except GoneError:
        raise
    except Exception as error:
        await call.write(dialect.events(flow.exchange).error(as_api_error(error)), more=False)
        raise
    await call.write(b"", more=False)


async def _stream(call: ApiCall, flow: TextFlow, dialect: Dialect, headers: Mapping[str, str]) -> None:
    """An error that is raised once the reply has begun was told to the client already."""
    first: list[ChoiceDelta] = []

    def hold(piece: ChoiceDelta) -> bool:
        first.append(piece)
        return False

    await flow.run(hold)  # what is refused has its own status, so nothing is sent before
    if not first:
        raise GoneError
    events = dialect.events(flow.exchange)  # it is known by now which variant answers
    written, offer = events.piece, call.offer

    def write(piece: ChoiceDelta) -> bool:
        data = events.restart(piece) if isinstance(piece, RestartDelta) else written(piece)
        return offer(data) if data else True

    beginning = events.begin() + events.piece(first[0])
    await call.begin_events({**headers, **flow.headers()})
    try:
        await call.write(beginning)
        while not await flow.run(write):
            await call.room()
        if flow.is_client_gone:
            raise GoneError
        last = events.end()
        if dialect.keep is not None:
            await dialect.keep()
    except GoneError:
        raise
    except Exception as error:
        await call.write(events.error(as_api_error(error)), more=False)
        raise
    await call.write(last, more=False)
