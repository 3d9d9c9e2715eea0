"""ApiCall: one HTTP request as an endpoint sees it (headers, path, query, bounded body, disconnects), and Response.

Speaks plain ASGI and knows no endpoint. RequestCycle is the server's side of the same request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec

from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.observe.traces.timeline import Timeline
from headrace.server.http.content_encoding import Inflater, inflater_for
from headrace.server.http.request_cycle import BEGAN, BODY, FOLLOWS, GONE, PUSH
from headrace.server.http.unknown_fields import IGNORED_HEADER, STRICT, UnknownFields

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

T = TypeVar("T")

JSON = b"application/json"
LOCAL: Final = "headrace.local"  # marks the ASGI scope of calls on the admin socket
OPENAI: Final = "openai"  # the shape of errors
ANTHROPIC: Final = "anthropic"
OLLAMA: Final = "ollama"
EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"
_TURN: Final = 1024 * 1024  # bytes inflated before other requests get a turn of the event loop
_encode = msgspec.json.Encoder().encode


class GoneError(Exception):
    """The client left before its request was complete or answered."""


class Response(msgspec.Struct):
    body: bytes
    status: int = 200
    type: bytes = JSON
    headers: dict[str, str] = {}

    @classmethod
    def json(cls, value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
        return cls(_encode(value), status, headers=headers or {})


class ApiCall:
    __slots__ = (
        "_offered",
        "_push",
        "_receive",
        "_send",
        "_take",
        "_when_gone",
        "caller",
        "charged",
        "errors",
        "exchange",
        "headers",
        "id",
        "params",
        "scope",
        "started",
        "status",
        "timeline",
        "unknown",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, id: str) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        # Our edge's extensions, which avoid coroutines; other ASGI servers have none.
        extensions: Mapping[str, Any] = scope.get("extensions", {})
        self._push: Callable[[bytes], bool] | None = extensions.get(PUSH)
        self._take: Callable[[], bytes | None] | None = extensions.get(BODY)
        self._when_gone: Callable[[Callable[[], None] | None], None] | None = extensions.get(GONE)
        self._offered = b""  # waits to be sent, on servers without PUSH
        self.id = id  # the request id, in the response headers and the log
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.errors = _client_dialect(scope["path"], self.headers)  # the shape of errors
        self.params: dict[str, str] = {}  # parameters of the path
        self.caller = Caller()
        self.charged = False  # its reservation counts as a request
        self.started = False  # the response's status has been sent
        self.status = 0
        self.exchange: Exchange | None = None  # of a call for text, once it has ended
        self.timeline = Timeline(scope.get(BEGAN), self.headers.get("traceparent"))
        self.unknown: UnknownFields = STRICT  # what becomes of unknown fields of its body

    def query(self) -> dict[str, str]:
        try:
            pairs = parse_qsl(self.scope["query_string"].decode("ascii"), keep_blank_values=True, max_num_fields=32)
        except (UnicodeDecodeError, ValueError):
            raise invalid_request("The query string is not valid ASCII, or has more than 32 fields.") from None
        return dict(pairs)

    def take_body(self, most: int) -> bytes | None:
        """Return the whole body if it has arrived and is not compressed, else None. ApiError beyond `most` bytes."""
        whole = None if self._take is None or "content-encoding" in self.headers else self._take()
        if whole is not None and len(whole) > most:
            raise _too_large(most)
        return whole

    async def body(self, most: int, seconds: float) -> bytes:
        """Return the whole body, inflated. ApiError beyond `most` bytes, and if it takes longer than `seconds`."""
        if (whole := self.take_body(most)) is not None:
            return whole
        chunks: list[bytes] = []
        async for chunk in self.chunks(most, seconds):
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def chunks(self, most: int, seconds: float) -> AsyncIterator[bytes]:
        """Yield the body as it comes, inflated. The time that the caller spends on a chunk counts towards `seconds`.

        ApiError 415 for an unknown content-encoding, and 413 beyond `most` bytes, received or inflated.
        """
        inflater = inflater_for(self.headers.get("content-encoding"))
        received = self._received(most, seconds)
        return received if inflater is None else _inflated(received, inflater, most)

    async def _received(self, most: int, seconds: float) -> AsyncIterator[bytes]:
        declared = self.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > most):
            raise _too_large(most)
        received = 0
        end = asyncio.get_running_loop().time() + seconds
        while True:
            try:
                # Around this wait alone: around the yield, the timeout would interrupt the caller's own work.
                async with asyncio.timeout_at(end):
                    message = await self._receive()
            except TimeoutError:
                raise ApiError(
                    f"The request body did not arrive within {seconds:g} s.", status=408, code="request_timeout"
                ) from None
            if message["type"] == "http.disconnect":
                raise GoneError
            chunk: bytes = message.get("body", b"")
            received += len(chunk)
            if received > most:
                raise _too_large(most)
            if chunk:
                yield chunk
            if not message.get("more_body", False):
                return

    async def raw_chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it was sent, without bounds: for another process that has them."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise GoneError
            if chunk := message.get("body", b""):
                yield chunk
            if not message.get("more_body", False):
                return

    async def gone(self) -> None:
        """Return when the client has left. Call it after the body was read."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back when the client has left. Return a function that ends the watch. Read the body first."""
        if (when_gone := self._when_gone) is not None:
            when_gone(callback)
            return lambda: when_gone(None)
        watch = asyncio.ensure_future(self.gone())
        watch.add_done_callback(lambda done: None if done.cancelled() else callback())

        def end() -> None:
            watch.cancel()

        return end

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the work's result. GoneError, and the work is cancelled, if the client leaves before."""
        working = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self.gone())
        try:
            await asyncio.wait({working, watch}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise GoneError
        finally:
            for task in (working, watch):
                task.cancel()
            await asyncio.gather(working, watch, return_exceptions=True)

    async def reply(self, reply: Response) -> None:
        headers = [
            (b"content-type", reply.type),
            (b"content-length", str(len(reply.body)).encode()),
            *self._own_headers(),
            *_encoded(reply.headers),
        ]
        await self._begin(reply.status, headers, follows=True)
        body = b"" if self.scope["method"] == "HEAD" else reply.body
        await self._send({"type": "http.response.body", "body": body})

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        id = self.id.encode()
        headers = [(b"x-request-id", id)]
        if self.errors == ANTHROPIC:
            headers.append((b"request-id", id))  # where Anthropic's clients look
        if ignored := self.unknown.header:
            headers.append((IGNORED_HEADER.encode(), ignored.encode()))
        return headers

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]], *, follows: bool = False) -> None:
        message: dict[str, Any] = {"type": "http.response.start", "status": status, "headers": headers}
        if follows:
            message[FOLLOWS] = True
        await self._send(message)
        self.started, self.status = True, status

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Start a response with exactly these headers."""
        await self._begin(status, headers)

    async def begin_events(
        self, headers: Mapping[str, str], type: bytes = EVENT_STREAM, *, follows: bool = False
    ) -> None:
        """Start a response that is sent in pieces, by default server-sent events. `follows`: the first one follows at
        once, and is sent together with the head."""
        raw = [
            (b"content-type", type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # tells nginx not to buffer
            *self._own_headers(),
            *_encoded(headers),
        ]
        await self._begin(200, raw, follows=follows)

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Wait while the client does not read; the server cuts the connection if that takes too long."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    @property
    def offer(self) -> Callable[[bytes], bool]:
        """Write without waiting. False: await `room` before you write anything else."""
        return self._keep if self._push is None else self._push

    def _keep(self, data: bytes) -> bool:
        self._offered += data
        return False

    async def room(self) -> None:
        """Wait until the client has read enough."""
        data, self._offered = self._offered, b""
        await self.write(data)

    async def begin_download(self, length: int, type: str, filename: str, headers: Mapping[str, str]) -> None:
        raw = [
            (b"content-type", type.encode("latin-1")),
            (b"content-length", str(length).encode()),
            (b"content-disposition", f'attachment; filename="{filename}"'.encode("latin-1", "replace")),
            (b"x-content-type-options", b"nosniff"),
            *self._own_headers(),
            *_encoded(headers),
        ]
        await self._begin(200, raw)


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def _inflated(received: AsyncIterator[bytes], inflater: Inflater, most: int) -> AsyncIterator[bytes]:
    total = 0
    turn = _TURN
    async for chunk in received:
        for piece in inflater.inflate(chunk):
            total += len(piece)
            if total > most:
                raise _too_large(most)
            yield piece
            if total > turn:
                turn = total + _TURN
                await asyncio.sleep(0)
    inflater.finish()


def _client_dialect(path: str, headers: Mapping[str, str]) -> str:
    """Return the shape of errors for a client, on paths that no dialect owns."""
    if path.startswith("/api/"):
        return OLLAMA
    speaks_anthropic = "anthropic-version" in headers or path == "/v1/messages" or path.startswith("/v1/messages/")
    return ANTHROPIC if speaks_anthropic else OPENAI


def _too_large(most: int) -> ApiError:
    return ApiError(f"The request body is longer than the limit of {most} bytes.", status=413, code="request_too_large")


def error_reply(error: ApiError, dialect: str, request_id: str | None = None) -> Response:
    match dialect:
        case "anthropic":
            body = error.anthropic(request_id)
        case "ollama":
            body = error.ollama()
        case _:
            body = error.openai()
    headers = dict(error.headers)
    if error.retry_after is not None:
        # Round up, but not for the error of a float sum.
        millis = max(1, -(-round(error.retry_after * 1e6) // 1000))
        headers["retry-after"] = str(-(-millis // 1000))  # every client understands whole seconds
        headers["retry-after-ms"] = str(millis)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response.json(body, status=error.status, headers=headers)
