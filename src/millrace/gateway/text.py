"""The endpoints that answer with text, in whatever dialect: read, run, deliver, settle.

Owns Dialect (how an endpoint reads a body and writes answers) and the delivery of one exchange, whole or as events.
Settling happens once on every way out: an answer, an error, a client that left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.config import Limits
from millrace.gateway.asked import Asked, Choice, Piece
from millrace.gateway.call import Call, GoneError, Reply
from millrace.gateway.errors import ApiError, as_api_error
from millrace.gateway.exchange import Exchange
from millrace.gateway.flow import Answering
from millrace.gateway.parameters import Table


class Events(Protocol):
    """Writes an exchange's pieces as server-sent events."""

    def begin(self) -> bytes: ...

    def piece(self, piece: Piece) -> bytes: ...

    def end(self) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    table: Table
    read: Callable[[bytes, Mapping[str, str], Limits], Asked]
    whole: Callable[[Exchange, Sequence[Choice]], dict[str, Any]]
    events: Callable[[Exchange], Events]
    errors: str = "openai"  # the shape of errors
    keep: Callable[[], Awaitable[None]] | None = None  # called when all is written but the last that a client hears


async def answer_whole(exchange: Exchange, dialect: Dialect) -> dict[str, Any]:
    """The body of an answer, for a caller that has no connection to watch, such as a batch."""
    answering = Answering(exchange)
    with _settling(answering):
        await answering.begin()
        body = dialect.whole(exchange, await answering.choices())
        if dialect.keep is not None:
            await dialect.keep()
        return body


async def deliver(call: Call, exchange: Exchange, dialect: Dialect, headers: Mapping[str, str]) -> None:
    """Answers a call. ApiError before the first byte is the caller's to tell; after it, it is an event."""
    answering = Answering(exchange)
    watch = asyncio.ensure_future(call.gone())
    watch.add_done_callback(lambda done: None if done.cancelled() else answering.cancel())
    with _settling(answering, watch):
        await answering.begin()
        if answering.gone:
            raise GoneError  # while its prompt was cut into tokens
        if exchange.asked.stream:
            await _stream(call, answering, dialect, headers)
        else:
            choices = await answering.choices()
            if answering.gone:
                raise GoneError
            body = dialect.whole(exchange, choices)
            if dialect.keep is not None:
                await dialect.keep()
            timed = {**headers, "server-timing": exchange.server_timing()}
            await call.reply(Reply.json(body, headers=timed))


@contextmanager
def _settling(answering: Answering, watch: asyncio.Future[None] | None = None) -> Generator[None]:
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
        if watch is not None:
            watch.cancel()
        answering.settle(error)


async def _stream(call: Call, answering: Answering, dialect: Dialect, headers: Mapping[str, str]) -> None:
    """An error that is raised once the reply has begun was told to the client already."""
    events = dialect.events(answering.exchange)
    written, offer = events.piece, call.offer
    first: list[Piece] = []

    def hold(piece: Piece) -> bool:
        first.append(piece)
        return False

    def write(piece: Piece) -> bool:
        data = written(piece)
        return offer(data) if data else True

    await answering.run(hold)  # what is refused has its own status, so nothing is sent before
    if not first:
        raise GoneError
    beginning = events.begin() + events.piece(first[0])
    await call.begin_events(headers)
    try:
        await call.write(beginning)
        while not await answering.run(write):
            await call.room()
        if answering.gone:
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
