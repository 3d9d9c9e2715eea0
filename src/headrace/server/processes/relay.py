"""Relays calls of a front process to the main process, which owns what they are about, over a Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Final

import aiohttp

from headrace.server.http.api_call import ApiCall, GoneError
from headrace.server.processes.channel import lost_error

CLIENT_HEADER: Final = b"x-headrace-client"  # the address and the port of the client, on the main process's socket only
_DROPPED: Final = frozenset({"connection", "content-length", "transfer-encoding", "expect", CLIENT_HEADER.decode()})
_DROPPED_OF_ANSWERS: Final = frozenset({b"connection", b"transfer-encoding", b"date", b"keep-alive"})
Message = MutableMapping[str, Any]


class MainProcessRelay:
    """All of it belongs to one event loop."""

    def __init__(self, path: str) -> None:
        """`path`: of the main process's socket."""
        self._path = path
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, call: ApiCall) -> None:
        """Relay a call until it is answered or its client leaves."""
        working = asyncio.ensure_future(self._relay(call))

        def end() -> None:
            working.cancel()

        unwatch = call.watch(end)
        try:
            await working
        except asyncio.CancelledError:
            if not working.cancelled():
                raise
            raise GoneError from None
        finally:
            unwatch()
            working.cancel()

    async def _relay(self, call: ApiCall) -> None:
        """Pass a call on as it came, and its answer as it comes. The main process identifies, counts and logs it."""
        scope = call.scope
        if self._session is None:
            connector = aiohttp.UnixConnector(self._path, limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None),
                skip_auto_headers=("accept", "accept-encoding", "user-agent", "content-type"),
            )
        path = scope["raw_path"].decode("ascii", "replace")
        query = scope["query_string"].decode("ascii", "replace")
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name.decode("latin-1") not in _DROPPED
        ]
        client = scope.get("client")
        if isinstance(client, tuple):
            headers.append((CLIENT_HEADER.decode(), f"{client[0]} {client[1]}"))  # pyright: ignore[reportUnknownArgumentType]
        length = call.headers.get("content-length")
        has_body = length not in (None, "0") or "transfer-encoding" in call.headers
        if has_body and length is not None:
            headers.append(("content-length", length))
        try:
            async with self._session.request(
                scope["method"],
                _url(path + (f"?{query}" if query else "")),
                headers=headers,
                data=_body(call) if has_body else None,
                allow_redirects=False,
            ) as answer:
                await self._pass_on(call, answer)
        except (aiohttp.ClientError, OSError) as error:
            if call.started:
                raise GoneError from error  # the client sees that the answer is cut
            raise lost_error() from None

    async def _pass_on(self, call: ApiCall, answer: aiohttp.ClientResponse) -> None:
        headers = [(name.lower(), value) for name, value in answer.raw_headers]
        await call.begin(answer.status, [each for each in headers if each[0] not in _DROPPED_OF_ANSWERS])
        async for data in answer.content.iter_any():
            await call.write(data)
        await call.write(b"", more=False)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def _body(call: ApiCall) -> AsyncIterator[bytes]:
    async for chunk in call.raw_chunks():
        yield chunk


def _url(path: str) -> Any:
    import yarl

    return yarl.URL("http://main" + path, encoded=True)


def taking_relayed(
    application: Callable[[Message, Any, Any], Awaitable[None]],
) -> Callable[[Message, Any, Any], Awaitable[None]]:
    """Return an application for the socket that front processes relay to: its calls have their clients' addresses."""

    async def relayed(scope: Message, receive: Any, send: Any) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        scope["client"] = None
        for name, value in headers:
            if name == CLIENT_HEADER:
                host, _, port = value.decode("latin-1").rpartition(" ")
                scope["client"] = host, int(port)
        scope["headers"] = [each for each in headers if each[0] != CLIENT_HEADER]
        await application(scope, receive, send)

    return relayed
