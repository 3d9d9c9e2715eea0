"""The endpoints that answer with text, in whatever dialect: read, run, deliver, settle.

Owns Dialect (how an endpoint reads a body and writes answers) and the delivery of one exchange, whole or as events.
The exchange is settled once, whether it ends with an answer, an error or a disconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec

from headrace.config import RequestLimits
from headrace.gateway.api_errors import ApiError, as_api_error
from headrace.gateway.flow.answer_flow import AnswerFlow
from headrace.gateway.flow.services import Services
from headrace.gateway.flow.text_flow import open_flow
from headrace.gateway.requests.event_writer import EventWriter, NoteWriter
from headrace.gateway.requests.text_request import Choice, ChoiceDelta, NoteDelta, RestartDelta, TextRequest
from headrace.gateway.routing.composite_answerer import collect_choices
from headrace.gateway.serving.exchange import Exchange
from headrace.gateway.serving.upstream_answers.upstream_generation import UpstreamGeneration
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import EVENT_STREAM, ApiCall, GoneError, Response
from headrace.server.http.body_parameters import ParameterTable
from headrace.server.http.route_table import Route
from headrace.server.http.unknown_fields import UnknownFields


class Dialect(msgspec.Struct, frozen=True):
    name: str
    table: ParameterTable
    read: Callable[[bytes, Mapping[str, str], RequestLimits, UnknownFields], TextRequest]
    whole: Callable[[Exchange, Sequence[Choice]], dict[str, Any]]
    events: Callable[[Exchange], EventWriter]
    errors: str = "openai"  # the shape of errors
    stream_type: bytes = EVENT_STREAM  # the content type of a stream
    keep: Callable[[], Awaitable[None]] | None = None  # called when all is written but the last that a client hears
    cut: Callable[[Sequence[Choice]], None] | None = None  # takes what there is of a whole answer that was stopped
    relays: bool = False  # an upstream's own events are ours


# Takes a function to call when an answer is no longer wanted. Returns one that ends the watch.
Watch = Callable[[Callable[[], None]], Callable[[], None]]


async def answer_in_full(
    exchange: Exchange, dialect: Dialect, services: Services, *, watch: Watch | None = None
) -> dict[str, Any]:
    """Return the body of an answer, for a caller without a connection. GoneError where `watch` has ended it."""
    flow = open_flow(exchange, services)
    with _observing(exchange, services), _Settling(flow, None if watch is None else watch(flow.cancel)):
        await flow.begin()
        return await _collect(flow, dialect)


async def answer_into(
    exchange: Exchange, dialect: Dialect, services: Services, write: Callable[[bytes], None], *, watch: Watch
) -> None:
    """Write the events of an answer, for a caller without a connection. An error is written and raised."""
    flow = open_flow(exchange, services)
    events: EventWriter | None = None
    try:
        with _observing(exchange, services), _Settling(flow, watch(flow.cancel)):
            await flow.begin()
            if flow.is_client_gone:
                raise GoneError
            events = dialect.events(exchange)
            write(events.begin())
            await flow.run(_writer(events, write))
            if flow.is_client_gone:
                raise GoneError
            last = events.end()
            if dialect.keep is not None:
                await dialect.keep()
    except GoneError:
        raise
    except Exception as error:
        write((events or dialect.events(exchange)).error(as_api_error(error)))
        raise
    write(last)


def _writer(events: EventWriter, write: Callable[[bytes], None]) -> Callable[[ChoiceDelta], bool]:
    def take(piece: ChoiceDelta) -> bool:
        if data := write_piece(events, piece):
            write(data)
        return True

    return take


def write_piece(events: EventWriter, piece: ChoiceDelta) -> bytes:
    if isinstance(piece, RestartDelta):
        return events.restart(piece)
    if isinstance(piece, NoteDelta):
        return events.note(piece) if isinstance(events, NoteWriter) else b""
    return events.piece(piece)


async def _collect(flow: AnswerFlow, dialect: Dialect) -> dict[str, Any]:
    """Return the body of an answer. GoneError if every client has left."""
    if flow.is_client_gone:
        raise GoneError
    choices: list[Choice] = []
    try:
        await collect_choices(flow, choices)
        if flow.is_client_gone:
            raise GoneError
    except Exception:
        if dialect.cut is not None and choices:
            dialect.cut(choices)
        raise
    body = dialect.whole(flow.exchange, choices)
    if dialect.keep is not None:
        await dialect.keep()
    return body


def text_route(context: EndpointContext, path: str, dialect: Dialect, about: str) -> Route:
    """Return the route of an endpoint that answers with text."""

    async def handler(call: ApiCall) -> None:
        context.admit()
        limits = context.config.limits
        request = await context.read(call, lambda body: dialect.read(body, call.headers, limits, call.unknown))
        exchange = context.exchange(call.caller, request, path, call.timeline)
        await answer_call(context, call, exchange, dialect)

    return Route("POST", path, handler, about, dialect.table, errors=dialect.errors, reserves=True, lenient=True)


async def answer_call(context: EndpointContext, call: ApiCall, exchange: Exchange, dialect: Dialect) -> None:
    """Answer a call, and put the exchange into its log line."""
    with context.count_running():
        try:
            await _deliver(call, exchange, dialect, context.cors_headers(call), context.services)
        finally:
            call.exchange = exchange


async def _deliver(
    call: ApiCall, exchange: Exchange, dialect: Dialect, headers: Mapping[str, str], services: Services
) -> None:
    """Deliver an answer. Raise ApiError before the first byte; send later errors as an event."""
    flow = open_flow(exchange, services)
    try:
        with _Settling(flow, call.watch(flow.cancel)):
            await flow.begin()
            if flow.is_client_gone:
                raise GoneError  # while its prompt was cut into tokens
            if exchange.text_request.stream:
                relayed = flow.relayed() if dialect.relays else None
                if relayed is None:
                    await _stream(call, flow, dialect, headers)
                else:
                    await _relay(call, flow, relayed, dialect, headers)
            else:
                body = await _collect(flow, dialect)
                exchange.timeline.enter("deliver")
                timed = {**headers, **flow.headers(), "server-timing": exchange.server_timing()}
                await call.reply(Response.json(body, headers=timed))
    finally:
        call.charged = flow.is_charged


@contextmanager
def _observing(exchange: Exchange, services: Services) -> Generator[None]:
    """Report a request without a connection to the observer, however it ends."""
    error: ApiError | None = None
    try:
        yield
    except Exception as caught:
        error = None if isinstance(caught, GoneError) else as_api_error(caught)
        raise
    finally:
        services.observer.finish_inside(exchange, error)


class _Settling(AbstractContextManager[None]):
    """Settles at the end, whatever it is, and watches the client no more."""

    def __init__(self, flow: AnswerFlow, unwatch: Callable[[], None] | None = None) -> None:
        self._flow = flow
        self._unwatch = unwatch

    def __exit__(self, kind: object, caught: BaseException | None, trace: object) -> None:
        error: ApiError | None = None
        if isinstance(caught, asyncio.CancelledError):
            error = ApiError("The server has shut down. Try again.", kind="overloaded_error", code="draining")
        elif isinstance(caught, Exception) and not isinstance(caught, GoneError):
            error = as_api_error(caught)
        if self._unwatch is not None:
            self._unwatch()
        self._flow.settle(error)


async def _relay(
    call: ApiCall, flow: AnswerFlow, relayed: UpstreamGeneration, dialect: Dialect, headers: Mapping[str, str]
) -> None:
    """Stream like `_stream`, but pass on an upstream's bytes."""
    first: list[bytes] = []

    def hold(data: bytes) -> bool:
        first.append(data)
        return False

    ended = await relayed.relay(hold, dialect.events)
    if not first or flow.is_client_gone:
        raise GoneError
    await call.begin_events({**headers, **flow.headers()}, follows=True)
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
    flow.exchange.timeline.enter("deliver")
    await call.write(b"", more=False)


async def _stream(call: ApiCall, flow: AnswerFlow, dialect: Dialect, headers: Mapping[str, str]) -> None:
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
        plain = type(piece) is ChoiceDelta
        data = written(piece) if plain else write_piece(events, piece)
        return offer(data) if data else True

    beginning = events.begin() + write_piece(events, first[0])
    await call.begin_events({**headers, **flow.headers()}, dialect.stream_type, follows=True)
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
    flow.exchange.timeline.enter("deliver")
    await call.write(last, more=False)
