"""A lightweight HTTP/1.1 client with keep-alive, timeouts and classified errors.

A server's failure never raises: it is recorded in the TimedResponse.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from headrace.bench.client.http_connection import ClientConnection
from headrace.bench.client.timed_response import TimedResponse
from headrace.errors import RequestError

AGENT: Final = "headrace-bench"


class Target(msgspec.Struct, frozen=True):
    host: str
    port: int
    base: str  # path before /v1, such as "" or "/proxy"
    secure: bool
    name: str  # for the Host header

    @classmethod
    def of(cls, url: str) -> Target:
        """Parse a server's URL. Raises RequestError."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
            raise RequestError(
                f"Invalid server URL '{url}'. Expected http://HOST:PORT or https://HOST.", parameter="url"
            )
        secure = parts.scheme == "https"
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        name = host if port is None else f"{host}:{port}"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if secure else 80), base, secure, name)

    @property
    def url(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.name}{self.base}"


def head_of(target: Target, method: str, path: str, headers: Mapping[str, str]) -> bytes:
    """Build a request's head except for the content length. Raises RequestError for an invalid header."""
    for name, value in headers.items():
        if not name.isascii() or not value.isascii() or not f"{name}{value}".isprintable() or not name or " " in name:
            raise RequestError(f"Invalid header '{name}'.", parameter="header")
    lines = {"host": target.name, "accept": "*/*", "user-agent": AGENT, "content-type": "application/json"}
    lines |= {name.lower(): value for name, value in headers.items()}
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {target.base}{path} HTTP/1.1\r\n{text}".encode()


def request_of(head: bytes, body: bytes) -> bytes:
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


class HttpClient:
    """Not thread-safe: belongs to one event loop."""

    def __init__(
        self,
        target: Target,
        *,
        timeout: float,
        connect_timeout: float,
        most_kept: int,
        insecure: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`timeout`: seconds per response; `most_kept`: idle connections; `insecure` accepts any certificate."""
        self.target = target
        self.clock = clock
        self.opened = 0  # connections opened so far
        self.stale = 0  # idle connections that the server had closed
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._most_kept = most_kept
        self._idle: list[ClientConnection] = []
        self._ssl = _context(insecure) if target.secure else None
        self._address: str | None = None  # resolved once

    async def send(self, request: bytes, answer: TimedResponse) -> None:
        """Send a request and wait until `answer` is complete or failed."""
        answer.start = self.clock()
        connection: ClientConnection | None = None
        try:
            async with asyncio.timeout(self._timeout):
                while (connection := self._take_idle()) is not None:
                    if await connection.send(request, answer):
                        break
                    self.stale += 1
                if connection is None:
                    connection = await self._open()
                    answer.connect = self.clock() - answer.start
                    await connection.send(request, answer)
        except TimeoutError:
            answer.end = self.clock()
            answer.fail("timeout", f"no complete response within {self._timeout:g} s")
        except _ConnectError as error:
            answer.end = self.clock()
            answer.fail(error.kind, error.why)
        finally:
            if connection is not None:
                if connection.reusable and len(self._idle) < self._most_kept:
                    self._idle.append(connection)
                else:
                    connection.abort()

    async def fetch(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> TimedResponse:
        """Return a whole response, whatever its status, with its body unread."""
        answer = TimedResponse(stream=False)
        raw = b"" if body is None else msgspec.json.encode(body)
        await self.send(request_of(head_of(self.target, method, path, headers or {}), raw), answer)
        return answer

    async def warm(self, count: int) -> None:
        """Open connections in advance, as far as the server allows."""
        missing = min(count, self._most_kept) - len(self._idle)
        opened = await asyncio.gather(*(self._open() for _ in range(max(0, missing))), return_exceptions=True)
        self._idle += [connection for connection in opened if isinstance(connection, ClientConnection)]

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _take_idle(self) -> ClientConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _open(self) -> ClientConnection:
        target = self.target
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                transport, connection = await loop.create_connection(
                    lambda: ClientConnection(self.clock),
                    self._address or target.host,
                    target.port,
                    ssl=self._ssl,
                    server_hostname=target.host if target.secure else None,
                )
        except ConnectionRefusedError:
            raise _ConnectError("refused", f"{target.host}:{target.port} refuses connections") from None
        except TimeoutError:
            raise _ConnectError("timeout", f"no connection within {self._connect_timeout:g} s") from None
        except ssl.SSLError as error:
            raise _ConnectError("tls", str(error)) from None
        except ConnectionResetError as error:
            raise _ConnectError("reset", str(error)) from None
        except (OSError, socket.gaierror) as error:
            # If a name has several addresses, one message contains all their errors.
            refused = f"[Errno {errno.ECONNREFUSED}]" in str(error)
            raise _ConnectError("refused" if refused else "unreachable", str(error)) from None
        self.opened += 1
        self._address = transport.get_extra_info("peername")[0]
        return connection


class _ConnectError(Exception):
    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind
        self.why = why


def _context(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
