"""EndpointContext: what every endpoint may use. Knows no endpoint and no route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

from headrace.config import Config
from headrace.gateway.accounts.access import find_model
from headrace.gateway.accounts.tenant_policies import limit_scopes, settings_of
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.flow.answer_flow import PIPELINE_PREFIX
from headrace.gateway.flow.services import Services
from headrace.gateway.limits.request_charges import RequestCharges
from headrace.gateway.requests.text_request import PipelineOptions, TextRequest
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.observe import metrics
from headrace.observe.traces.timeline import Timeline
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.body_intake import UNCOUNTED_BYTES, BodyIntake, payer_of
from headrace.server.http.body_parameters import ParameterTable, parse_body
from headrace.server.http.bounded_json import is_small
from headrace.server.http.unknown_fields import STRICT_HEADER, UnknownFields, strict_by_header

T = TypeVar("T")

# Response headers that a page of another origin may read, beside those that browsers always show.
_EXPOSED: Final = (
    "x-request-id, request-id, x-should-retry, retry-after, retry-after-ms, server-timing, "
    "x-headrace-cache, x-headrace-capacity-tokens-per-s, x-headrace-capacity-ttft-ms, x-headrace-degraded, "
    "x-headrace-fast, x-headrace-golden, x-headrace-ignored, x-headrace-route, x-headrace-run, x-headrace-shaped, "
    "x-headrace-skipped, x-headrace-truncated, "
    "x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)


class EndpointContext:
    """All of it belongs to one event loop."""

    def __init__(self, config: Config, services: Services) -> None:
        self.config = config
        self.services = services
        self.is_ready = False  # every engine has started
        self.is_draining = False  # no new request is admitted
        # The metrics of this server's other processes.
        self.other_metrics: Callable[[], Awaitable[list[list[metrics.Family]]]] | None = None
        self.running = 0  # requests that engines and upstreams work for, of this process
        self.other_running: Callable[[], Awaitable[list[int]]] | None = None  # the same of the other processes
        self._counter = _RunningCounter(self)
        self.bodies = BodyIntake(config.server)
        self.charges = RequestCharges(services.limiter, address_requests_per_s=config.server.address_requests_per_s)

    def admit(self) -> None:
        """Raise ApiError if the server starts, shuts down or runs its maximum of requests."""
        if not self.is_ready:
            raise _unavailable("The models are being loaded. Retry in a second.", "starting")
        if self.is_draining:
            raise _unavailable("The server is shutting down. Retry on another server.", "draining")
        if self.running >= self.config.limits.requests:
            raise _unavailable(f"The server already runs {self.running} requests. Retry later.", "too_many_requests")

    async def running_of_all(self) -> list[int]:
        """Return the running requests of each process of this server that answers, this one first."""
        return [self.running, *(await self.other_running() if self.other_running is not None else ())]

    def count_running(self) -> AbstractContextManager[None]:
        """Count one more running request for the length of a `with` block."""
        return self._counter

    def exchange(
        self, caller: Caller, request: TextRequest, endpoint: str, timeline: Timeline | None = None
    ) -> Exchange:
        """Build the exchange. ApiError if the model does not exist or the caller may not use it. `timeline`: of the
        call that it answers."""
        pipelines = self.services.pipelines
        if pipelines is not None and request.model.startswith(PIPELINE_PREFIX):
            served = pipelines.find(caller, request.model.removeprefix(PIPELINE_PREFIX))
        else:
            if request.pipeline != PipelineOptions():
                raise invalid_request("'pipeline' is for models named pipeline/NAME.", "pipeline")
            served = find_model(caller, self.services.fleet, request.model, request.profile)
        timeline = Timeline() if timeline is None else timeline
        return Exchange(
            caller=caller,
            text_request=request,
            served=served,
            endpoint=endpoint,
            arrival=timeline.began,
            timeline=timeline,
        )

    async def charge(self, caller: Caller) -> None:
        """Count a call that reserves no tokens. LimitError if a limit on requests has no room."""
        closed = settings_of(caller).fail == "closed"
        await self.charges.charge(limit_scopes(caller, "", ""), caller.tenant, closed=closed)

    async def read(self, call: ApiCall, parse: Callable[[bytes], T]) -> T:
        """Return what `parse` makes of the request's body. A large body is read at a bounded pace and parsed in a
        thread; ApiError if it is too long, too slow, or too many are in memory already."""
        server = self.config.server
        body = call.take_body(server.body_bytes)
        if body is not None and is_small(body):
            return parse(body)
        payer = payer_of(call)
        if body is not None and len(body) <= UNCOUNTED_BYTES:
            return await self.parse(payer, body, parse)
        with self.bodies.hold(payer) as hold:
            if body is None:
                chunks: list[bytes] = []
                async for chunk in call.chunks(server.body_bytes, server.body_s):
                    chunks.append(chunk)
                    await hold.take(len(chunk))
                body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
                del chunks
            else:
                await hold.take(len(body))
            return await self.parse(payer, body, parse)

    def unknown_fields(self, headers: Mapping[str, str]) -> UnknownFields:
        """Return the policy for unknown fields of one request: the client's own, or the configuration's."""
        given = headers.get(STRICT_HEADER)
        strict = self.config.server.strict_parameters if given is None else strict_by_header(given)
        return UnknownFields(strict=strict, hide=self.services.accounts.directory.hidden)

    async def parameters(self, call: ApiCall, table: ParameterTable, *, optional: bool = False) -> dict[str, Any]:
        """Return the parameters of the request's body. `optional`: there may be no body."""
        limits = self.config.limits
        return await self.read(
            call, lambda body: parse_body(body or b"{}" if optional else body, table, limits, call.unknown)
        )

    async def paced(self, call: ApiCall, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the chunks of a body that is not kept in memory, at the pace of its payer."""
        async for chunk in chunks:
            await self.bodies.pace(payer_of(call), len(chunk))
            yield chunk

    async def parse(self, payer: str, body: bytes, parse: Callable[[bytes], T]) -> T:
        """Return what `parse` makes of a body, computed in a thread if that takes long. The threads are shared fairly
        between payers."""
        if is_small(body):
            return parse(body)
        async with self.bodies.turn(payer):
            return await asyncio.to_thread(parse, body)

    async def reply(self, call: ApiCall, response: Response) -> None:
        response.headers |= self.cors_headers(call)
        await call.reply(response)

    def cors_headers(self, call: ApiCall) -> dict[str, str]:
        """Return the headers that let a page of the request's origin read the response; none for other origins."""
        origin = call.headers.get("origin")
        origins = self.config.server.cors_origins
        if origin is None or not ("*" in origins or origin in origins):
            return {}
        return {
            "access-control-allow-origin": "*" if "*" in origins else origin,
            "access-control-expose-headers": _EXPOSED,
            "vary": "origin",
        }


class _RunningCounter(AbstractContextManager[None]):
    """Has no state of its own, so that all requests share one."""

    def __init__(self, context: EndpointContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._count(1)

    def __exit__(self, *_: object) -> None:
        self._count(-1)

    def _count(self, change: int) -> None:
        self._context.running += change
        metrics.running.set(self._context.running)


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(message, kind="overloaded_error", code=code, retry_after=1.0)
