"""Channel: typed calls over a Unix socket between the main process and a front process, in both directions.

A frame is a length and a msgpack array: a call [number, name, arguments], a notice with the number 0, or an answer
[-number, error, result]. Frames of one side are handled in their order up to the first wait. Knows no call.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar, cast

import msgspec

from headrace.gateway.api_errors import ApiError, as_api_error

log: Final = logging.getLogger(__name__)

MOST_FRAME: Final = 64 * 1024 * 1024  # bytes
_HEAD: Final = struct.Struct("!I")
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_frame: Final = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw, msgspec.Raw]).decode
_decode_name: Final = msgspec.msgpack.Decoder(str).decode
T = TypeVar("T")


class _Failure(msgspec.Struct):
    """An ApiError on its way."""

    message: str
    kind: str
    parameter: str | None
    code: str | None
    status: int
    retry_after: float | None
    headers: dict[str, str]

    @classmethod
    def of(cls, error: ApiError) -> _Failure:
        return cls(
            error.message, error.kind, error.parameter, error.code, error.status, error.retry_after, dict(error.headers)
        )

    def error(self) -> ApiError:
        return ApiError(
            self.message,
            kind=self.kind,
            parameter=self.parameter,
            code=self.code,
            status=self.status,
            retry_after=self.retry_after,
            headers=self.headers,
        )


_decode_failure: Final = msgspec.msgpack.Decoder(_Failure | None).decode


class CallHandler(msgspec.Struct, frozen=True):
    """What a side does for a call. `arguments` is the type of its array of arguments."""

    arguments: Any
    work: Callable[..., Any]  # may be a coroutine function


def lost_error() -> ApiError:
    return ApiError(
        "The server's main process is not available. Try again.",
        kind="overloaded_error",
        code="main_process_lost",
        retry_after=1.0,
    )


class Channel(asyncio.Protocol):
    """One end. All of it belongs to one event loop."""

    def __init__(self, handlers: Mapping[str, CallHandler], lost: Callable[[], None] = lambda: None) -> None:
        """`lost` is called once when the other end is gone."""
        self._handlers = handlers
        self._lost = lost
        self._decoders = {name: msgspec.msgpack.Decoder(each.arguments).decode for name, each in handlers.items()}
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._numbers = itertools.count(1)
        self._answers: dict[int, tuple[asyncio.Future[Any], Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        for future, _ in self._answers.values():
            if not future.done():
                future.set_exception(lost_error())
        self._answers.clear()
        self._lost()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def call(self, name: str, *arguments: object, type: Any = Any) -> Any:
        """Return the other side's answer, of this type. ApiError as it raised one, or if it is gone."""
        if not self.is_open:
            raise lost_error()
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = future, type
        try:
            self._send((number, name, arguments))
            return await future
        finally:
            self._answers.pop(number, None)

    def notify(self, name: str, *arguments: object) -> None:
        """Tell the other side without waiting. Nothing is told if it is gone."""
        if self.is_open:
            self._send((0, name, arguments))

    def _send(self, frame: tuple[int, object, object]) -> None:
        data = _encode(frame)
        assert self._transport is not None
        self._transport.write(_HEAD.pack(len(data)) + data)

    def data_received(self, data: bytes) -> None:
        self._data += data
        start = 0
        while len(self._data) - start >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._data, start)
            end = start + _HEAD.size + length
            if length > MOST_FRAME:
                log.error("a frame of %d bytes from another process of this server", length)
                self.close()
                return
            if len(self._data) < end:
                break
            self._take(bytes(self._data[start + _HEAD.size : end]))
            start = end
        del self._data[:start]

    def _take(self, data: bytes) -> None:
        number, middle, last = _decode_frame(data)
        if number < 0:
            waiting = self._answers.get(-number)
            if waiting is None or waiting[0].done():
                return
            failure = _decode_failure(middle)
            if failure is not None:
                waiting[0].set_exception(failure.error())
            else:
                waiting[0].set_result(msgspec.msgpack.decode(last, type=waiting[1]))
            return
        name = _decode_name(middle)
        try:
            result = self._handlers[name].work(*self._decoders[name](last))
        except Exception as error:
            self._fail(number, name, error)
            return
        if asyncio.iscoroutine(result):
            task = asyncio.get_running_loop().create_task(self._finish(number, name, result))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif number:
            self._answer(number, None, result)

    async def _finish(self, number: int, name: str, work: Awaitable[Any]) -> None:
        try:
            result = await work
        except Exception as error:
            self._fail(number, name, error)
            return
        if number:
            self._answer(number, None, result)

    def _fail(self, number: int, name: str, error: Exception) -> None:
        if not isinstance(error, ApiError):
            log.error("a call %s from another process failed", name, exc_info=error)
        if number:
            self._answer(number, _Failure.of(as_api_error(error)), None)

    def _answer(self, number: int, failure: _Failure | None, result: object) -> None:
        if self.is_open:
            self._send((-number, failure, result))
