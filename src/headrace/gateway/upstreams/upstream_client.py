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

from headrace import __version__
from headrace.config.upstream_section import UpstreamConfig
from headrace.errors import HeadraceError
from headrace.gateway.upstreams import upstream_errors as faults

_MOST_ERROR: Final = 64 * 1024  # bytes of an error's body that are read
_ERROR_S: Final = 2.0  # and how long that may take
_SHORT: Final = 5  # characters
_TAIL_S: Final = 1.0  # that an answer's connection has to come to its end after the answer has, to be kept


class UpstreamReply:
    """An open answer. Nothing is read ahead beyond the buffer while nobody reads."""

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
        """What came next; empty at the end. TimeoutError where nothing came by `due`, UpstreamError where it broke off.

        One timer serves many reads: it looks, when it fires, whether it is time yet.
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
                raise faults.invalid_answer(self._name, "does not speak HTTP") from None
            raise faults.connection_lost(self._name) from None
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
        """All that comes until the end, a bound or a time."""
        parts: list[bytes] = []
        length = 0
        try:
            while length < most and (part := await self.read(due)):
                parts.append(part)
                length += len(part)
        except (TimeoutError, faults.UpstreamError):
            pass
        return b"".join(parts)[:most]

    def close(self) -> None:
        """At once, whatever may still come."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._response.close()

    def let_go(self) -> None:
        """The answer is whole. Its connection is kept for the next one if it comes to its end soon."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._response.content.is_eof():
            closing = asyncio.get_running_loop().call_later(_TAIL_S, self._response.close)
            self._response.content.on_eof(closing.cancel)


class UpstreamClient:
    """The connections to one upstream."""

    def __init__(self, name: str, config: UpstreamConfig, key: str | None, clock: Callable[[], float]) -> None:
        self._name = name
        self._config = config
        self._clock = clock
        self._base = config.url.rstrip("/")
        self._headers = _headers(config, key)
        self._tls = _tls(config)
        self._session: aiohttp.ClientSession | None = None
        host = urlsplit(config.url).netloc
        # What none of the upstream's words may tell. Shorter ones would be found in innocent words.
        model = "" if config.model in name else config.model
        known = (key or "", *config.headers.values(), self._base, host, host.partition(":")[0], model)
        self.hidden = tuple(text for text in known if len(text) > _SHORT)

    async def post(self, path: str, body: bytes, due: float) -> UpstreamReply:
        """The answer's beginning. UpstreamError where none comes by `due`, or it says that something is wrong."""
        reply = await self._request("POST", self._base + path, body, due)
        if reply.status == 200:
            return reply
        try:
            said = await reply.rest(_MOST_ERROR, min(due, self._clock() + _ERROR_S))
        finally:
            reply.close()
        after = faults.parse_retry_after(reply.headers, self._config.retries.after_s)
        raise faults.error_for_status(reply.status, said, name=self._name, hidden=self.hidden, retry_after=after)

    async def get(self, path: str, due: float) -> int:
        """The status of a page of the server's, by its path from the root. UpstreamError where there is none."""
        parts = urlsplit(self._base)
        reply = await self._request("GET", f"{parts.scheme}://{parts.netloc}{path}", None, due)
        await reply.rest(_MOST_ERROR, due)
        reply.let_go()
        return reply.status

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _request(self, method: str, url: str, body: bytes | None, due: float) -> UpstreamReply:
        noted = SimpleNamespace(reused=False)
        try:
            return await self._once(method, url, body, due, noted)
        except faults.UpstreamError as error:
            # A kept connection that the server was just about to close: no fault of anybody's.
            if error.reason != "reset" or not noted.reused:
                raise
        return await self._once(method, url, body, due, noted)

    async def _once(
        self, method: str, url: str, body: bytes | None, due: float, noted: SimpleNamespace
    ) -> UpstreamReply:
        name = self._name
        session = self._open()
        try:
            async with asyncio.timeout(max(0.0, due - self._clock())):
                response = await session.request(
                    method, url, data=body, headers=self._headers, allow_redirects=False, trace_request_ctx=noted
                )
        except aiohttp.ConnectionTimeoutError:
            raise faults.unreachable(name) from None
        except TimeoutError:
            raise faults.too_slow(name, "to begin its answer") from None
        except aiohttp.ClientConnectorError:
            raise faults.unreachable(name) from None  # no address, no connection, or a certificate that is not right
        except (aiohttp.ClientConnectionError, OSError):
            raise faults.connection_lost(name) from None
        except (aiohttp.ClientError, ValueError):
            raise faults.invalid_answer(name, "does not speak HTTP") from None
        return UpstreamReply(response, name, self._clock)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is not None:
            return self._session
        config = self._config
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # the places before it are the bound
                keepalive_timeout=config.idle_s,
                ssl=self._tls,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),  # what the server tells one tenant is not sent with another's request
            timeout=aiohttp.ClientTimeout(
                total=None, connect=config.timeouts.connect_s, sock_connect=config.timeouts.connect_s
            ),
            read_bufsize=config.buffer_bytes // 2,  # it reads on until there is twice as much
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
        "accept-encoding": "identity",  # tokens are not to wait in a compressor
        "user-agent": f"headrace/{__version__}",
        **{name.lower(): value for name, value in config.headers.items()},
    }
    if key is not None:
        name = config.key_header.lower()
        headers[name] = f"Bearer {key}" if name == "authorization" else key
    return headers


def _tls(config: UpstreamConfig) -> ssl.SSLContext | bool:
    """True: the system's certificates. HeadraceError for a file that has none."""
    if not config.ca_file:
        return True
    try:
        return ssl.create_default_context(cafile=config.ca_file)
    except OSError as error:  # what ssl raises is one, too
        raise HeadraceError(f"{config.ca_file}: cannot read certificates: {error.strerror}") from None


def _proxy(config: UpstreamConfig) -> str | None:
    """What the environment names for this address."""
    parts = urlsplit(config.url)
    if urllib.request.proxy_bypass(parts.netloc):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")
