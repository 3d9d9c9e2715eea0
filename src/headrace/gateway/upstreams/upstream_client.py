"""The HTTP client of one upstream: sends requests and reads responses at the reader's own pace.

Keeps connections, checks TLS, and uses no redirects, no cookies, and no proxy unless configured. Does not interpret
requests or answers.
"""

from __future__ import annotations

import asyncio
import ssl
import urllib.request
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from headrace.config.upstream_section import UpstreamConfig
from headrace.errors import HeadraceError
from headrace.gateway.upstreams import upstream_errors
from headrace.version import __version__

_MOST_ERROR: Final = 64 * 1024  # bytes read of an error's body
_ERROR_S: Final = 2.0  # time limit for reading it
_SHORT: Final = 5  # characters
_TAIL_S: Final = 1.0  # a connection is kept if its response ends within this time after the answer


class UpstreamReply:
    """A response in progress. Without a reader, nothing is read beyond the buffer."""

    def __init__(self, response: aiohttp.ClientResponse, name: str, clock: Callable[[], float]) -> None:
        self.status = response.status
        self.headers = {key.lower(): value for key, value in response.headers.items()}
        self._response = response
        self._name = name
        self._clock = clock
        self._due = 0.0
        self._armed = 0.0  # when the timer fires; 0 without one
        self._timer: asyncio.TimerHandle | None = None
        self._reading = False
        self._late = False

    async def read(self, due: float) -> bytes:
        """Return the next bytes; empty at the end. Raises TimeoutError at `due`, UpstreamError if the connection broke.

        One timer serves many reads: when it fires, it checks whether `due` has passed.
        """
        self._due = due
        if self._timer is None or due < self._armed:
            self._arm()
        self._reading = True
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, HttpProcessingError, OSError, RuntimeError, ValueError) as error:
            if self._late:
                raise TimeoutError from None
            if isinstance(error, HttpProcessingError):
                raise upstream_errors.invalid_answer(self._name, "does not speak HTTP") from None
            raise upstream_errors.connection_lost(self._name) from None
        finally:
            self._reading = False

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed = self._due
        wait = max(0.0, self._due - self._clock())
        self._timer = asyncio.get_running_loop().call_later(wait, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._reading:
            return
        if self._clock() < self._due:
            self._arm()
            return
        self._late = True
        self._response.close()

    async def rest(self, most: int, due: float) -> bytes:
        """Read until the end, `most` bytes or `due`."""
        parts: list[bytes] = []
        length = 0
        try:
            while length < most and (part := await self.read(due)):
                parts.append(part)
                length += len(part)
        except (TimeoutError, upstream_errors.UpstreamError):
            pass
        return b"".join(parts)[:most]

    def close(self) -> None:
        """Close the connection now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._response.close()

    def release(self) -> None:
        """Return the connection to the pool once the response ends; close it if that takes too long."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._response.content.is_eof():
            closing = asyncio.get_running_loop().call_later(_TAIL_S, self._response.close)
            self._response.content.on_eof(closing.cancel)


class UpstreamClient:
    """Sends requests to one upstream over kept connections."""

    def __init__(self, name: str, config: UpstreamConfig, key: str | None, clock: Callable[[], float]) -> None:
        self._name = name
        self._config = config
        self._clock = clock
        self._base = (config.url or "").rstrip("/")
        self._headers = _headers(config, key)
        self._tls = _tls(config)
        self._session: aiohttp.ClientSession | None = None
        host = urlsplit(config.url or "").netloc
        # Texts to remove from the upstream's messages. Shorter ones would match ordinary words.
        model = "" if config.model in name else config.model
        known = (key or "", *config.headers.values(), self._base, host, host.partition(":")[0], model)
        self.hidden = tuple(text for text in known if len(text) > _SHORT)

    async def post(self, path: str, body: bytes, due: float, headers: Mapping[str, str] | None = None) -> UpstreamReply:
        """Return a response with status 200. Raises UpstreamError for any other, and if none arrives by `due`."""
        reply = await self._request("POST", self._base + path, body, due, headers)
        if reply.status == 200:
            return reply
        try:
            error_body = await reply.rest(_MOST_ERROR, min(due, self._clock() + _ERROR_S))
        finally:
            reply.close()
        after = upstream_errors.parse_retry_after(reply.headers, self._config.retries.after_s)
        raise upstream_errors.error_for_status(
            reply.status, error_body, name=self._name, hidden=self.hidden, retry_after=after
        )

    async def get(self, path: str, due: float) -> int:
        """Return the status of a GET for a path from the server's root. Raises UpstreamError without a response."""
        parts = urlsplit(self._base)
        reply = await self._request("GET", f"{parts.scheme}://{parts.netloc}{path}", None, due)
        await reply.rest(_MOST_ERROR, due)
        reply.release()
        return reply.status

    async def fetch(self, path: str, due: float, most: int) -> tuple[int, bytes]:
        """Return status and body, of at most `most` bytes, of a GET for a path from the server's root."""
        parts = urlsplit(self._base)
        reply = await self._request("GET", f"{parts.scheme}://{parts.netloc}{path}", None, due)
        try:
            return reply.status, await reply.rest(most, due)
        finally:
            reply.release()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _request(
        self, method: str, url: str, body: bytes | None, due: float, headers: Mapping[str, str] | None = None
    ) -> UpstreamReply:
        noted = SimpleNamespace(reused=False)
        try:
            return await self._once(method, url, body, due, noted, headers)
        except upstream_errors.UpstreamError as error:
            # The server closed a kept connection just before this request. Try once more.
            if error.reason != "reset" or not noted.reused:
                raise
        return await self._once(method, url, body, due, noted, headers)

    async def _once(
        self,
        method: str,
        url: str,
        body: bytes | None,
        due: float,
        noted: SimpleNamespace,
        headers: Mapping[str, str] | None,
    ) -> UpstreamReply:
        name = self._name
        session = self._open()
        sent = {**self._headers, **headers} if headers else self._headers
        try:
            async with asyncio.timeout(max(0.0, due - self._clock())):
                response = await session.request(
                    method, url, data=body, headers=sent, allow_redirects=False, trace_request_ctx=noted
                )
        except aiohttp.ConnectionTimeoutError:
            raise upstream_errors.unreachable(name) from None
        except TimeoutError:
            raise upstream_errors.too_slow(name, "to begin its answer") from None
        except aiohttp.ClientConnectorError:
            raise upstream_errors.unreachable(name) from None  # no address, no connection, or an invalid certificate
        except (aiohttp.ClientConnectionError, OSError):
            raise upstream_errors.connection_lost(name) from None
        except (aiohttp.ClientError, ValueError):
            raise upstream_errors.invalid_answer(name, "does not speak HTTP") from None
        return UpstreamReply(response, name, self._clock)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is not None:
            return self._session
        config = self._config
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # the request slots are the bound
                keepalive_timeout=config.idle_s,
                ssl=self._tls,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),  # one tenant's cookies are never sent with another's request
            timeout=aiohttp.ClientTimeout(
                total=None, connect=config.timeouts.connect_s, sock_connect=config.timeouts.connect_s
            ),
            read_bufsize=config.buffer_bytes // 2,  # aiohttp buffers up to twice this much
            trust_env=False,
            proxy=_proxy(config) if config.proxy_env else None,
            trace_configs=[tracing],
        )
        return self._session


async def _note_reuse(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: Any) -> None:
    noted = context.trace_request_ctx
    if noted is not None:
        noted.reused = True


def _headers(config: UpstreamConfig, key: str | None) -> Mapping[str, str]:
    headers = {
        "content-type": "application/json",
        "accept": "text/event-stream, application/json",
        "accept-encoding": "identity",  # compression would delay tokens
        "user-agent": f"headrace/{__version__}",
        **{name.lower(): value for name, value in config.headers.items()},
    }
    if key is not None:
        name = config.key_header.lower()
        headers[name] = f"Bearer {key}" if name == "authorization" else key
    return headers


def _tls(config: UpstreamConfig) -> ssl.SSLContext | bool:
    """Return True for the system's certificates. Raises HeadraceError if the file has none."""
    if not config.ca_file:
        return True
    try:
        return ssl.create_default_context(cafile=config.ca_file)
    except OSError as error:  # includes ssl.SSLError
        raise HeadraceError(f"{config.ca_file}: cannot read certificates: {error.strerror}") from None


def _proxy(config: UpstreamConfig) -> str | None:
    """Return the proxy that the environment names for this address."""
    parts = urlsplit(config.url or "")
    if urllib.request.proxy_bypass(parts.netloc):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")
