"""TraceExporter: chooses the requests whose traces are worth keeping, and sends them to an OpenTelemetry collector.

Chosen are those whose client asks for it, a share of all by their trace ids, those that fail, and the slowest of each
minute. What waits is bounded; a collector that is down costs dropped traces, never a request.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

from headrace.observe import metrics
from headrace.observe.outage_log import OutageLog
from headrace.observe.traces.otlp import encode_traces
from headrace.observe.traces.request_record import RequestRecord
from headrace.observe.traces.trace_context import is_sampled

log: Final = logging.getLogger(__name__)

_EVERY_S: Final = 2.0
_BATCH: Final = 128  # traces of one call
_TIMEOUT_S: Final = 10.0
_MINUTE_S: Final = 60.0

# (url, body, headers, timeout in seconds) → HTTP status. May raise any exception.
Post = Callable[[str, bytes, Mapping[str, str], float], Awaitable[int]]


class TraceOptions(Protocol):
    """The section [observe.traces] of the configuration."""

    @property
    def url(self) -> str | None: ...

    @property
    def service(self) -> str: ...

    @property
    def sample(self) -> float: ...

    @property
    def errors(self) -> bool: ...

    @property
    def slowest_per_minute(self) -> int: ...

    @property
    def buffer(self) -> int: ...


class TraceExporter:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        options: TraceOptions,
        *,
        version: str,
        authorization: str = "",
        post: Post | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._version = version
        self._url = (options.url or "").rstrip("/") + "/v1/traces"
        self._headers = {"content-type": "application/json"}
        if authorization:
            self._headers["authorization"] = authorization
        self._post = _post if post is None else post
        self._clock = clock
        self._waiting: deque[RequestRecord] = deque()
        self._slowest: list[tuple[float, int, RequestRecord]] = []  # a heap, the quickest of them first
        self._minute_ends = clock() + _MINUTE_S
        self._number = 0
        self._woken = asyncio.Event()

    def take(self, record: RequestRecord) -> None:
        """Keep a finished request if it is worth it."""
        options = self._options
        self._number += 1
        if self._clock() >= self._minute_ends:
            self._keep_slowest()
        if (record.error and options.errors) or is_sampled(record.timeline.context, options.sample):
            self._keep(record)
        elif (most := options.slowest_per_minute) > 0:
            entry = (record.seconds, self._number, record)
            if len(self._slowest) < most:
                heapq.heappush(self._slowest, entry)
            elif entry > self._slowest[0]:
                heapq.heapreplace(self._slowest, entry)

    def _keep(self, record: RequestRecord) -> None:
        if len(self._waiting) >= self._options.buffer:
            self._waiting.popleft()
            metrics.of(metrics.dropped, "traces").inc()
        self._waiting.append(record)
        if len(self._waiting) >= _BATCH:
            self._woken.set()

    def _keep_slowest(self) -> None:
        self._minute_ends = self._clock() + _MINUTE_S
        slowest, self._slowest = self._slowest, []
        for _, _, record in sorted(slowest):
            self._keep(record)

    async def run(self) -> None:
        """Send what is kept, until cancelled."""
        outage = OutageLog(log, "traces cannot be sent")
        while True:
            try:
                async with asyncio.timeout(_EVERY_S):
                    await self._woken.wait()
            except TimeoutError:
                pass
            self._woken.clear()
            if self._slowest and self._clock() >= self._minute_ends:
                self._keep_slowest()
            try:
                while self._waiting:
                    await self._send()
                outage.succeeded()
            except Exception as error:  # of the network, or what the collector answered
                outage.failed(error)

    async def _send(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
        body = encode_traces(batch, service=self._options.service, version=self._version)
        try:
            status = await self._post(self._url, body, self._headers, _TIMEOUT_S)
            if status in (429, 502, 503, 504):  # those that OTLP calls retryable
                raise ConnectionError(f"the collector answered {status}")
        except Exception:
            self._waiting.extendleft(reversed(batch))
            while len(self._waiting) > self._options.buffer:
                self._waiting.popleft()
                metrics.of(metrics.dropped, "traces").inc()
            raise
        outcome = "sent" if 200 <= status < 300 else "rejected"
        metrics.of(metrics.traces, outcome).inc(len(batch))
        if outcome == "rejected":
            log.warning("the collector of traces answered %d to %d traces", status, len(batch))

    async def close(self) -> None:
        """Send what still waits, within bounded time."""
        self._keep_slowest()
        try:
            async with asyncio.timeout(_EVERY_S):
                while self._waiting:
                    await self._send()
        except Exception as error:
            metrics.of(metrics.dropped, "traces").inc(len(self._waiting))
            log.warning("%d traces were not sent: %s", len(self._waiting), type(error).__name__)


async def _post(url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> int:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=seconds)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url, data=body, headers=headers, allow_redirects=False) as response,
    ):
        await response.read()
        return response.status
