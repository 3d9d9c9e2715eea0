"""BackgroundResponses: runs responses that no connection waits for, and lets clients follow, poll and cancel them.

A response is stored before its client hears of it, and again when it has ended. Bounded: the responses that run at
once, those that wait, and the events that are held for clients that follow a stream. What a server leaves unfinished
when it ends is marked as failed by the next one.

    queued ─▶ in_progress ─▶ completed, incomplete, failed
        └───────────┴──────▶ cancelled
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec
import structlog

from headrace.gateway.api_errors import ApiError, as_api_error, invalid_request
from headrace.gateway.serving.exchange import Exchange
from headrace.observe import metrics
from headrace.server.api.responses.response_history import KeptAnswer, ResponseHistory
from headrace.server.api.responses.responses import ResponseRequest, failed_response, response_shell
from headrace.server.api.text_endpoint import answer_in_full, answer_into
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import GoneError
from headrace.tasks import end_tasks

log: Final = structlog.stdlib.get_logger("headrace.responses")

_EVENT_BYTES: Final = 4 * 1024 * 1024  # 4 MiB of events that are held for one response
_INTERRUPTED: Final = {
    "code": "server_error",
    "message": "The server ended before the response was complete. Create it again.",
}


class EventLog:
    """The events of one streamed response. Their places are their sequence numbers."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.has_overflowed = False  # too long to be held: it cannot be followed any more
        self.has_ended = False
        self.readers: set[asyncio.Event] = set()  # set when something changes
        self._bytes = 0

    def add(self, data: bytes) -> None:
        """Add events as a dialect writes them, each ended by an empty line."""
        self._bytes += len(data)
        if self._bytes > _EVENT_BYTES:
            self.has_overflowed = True
            self.events.clear()
        else:
            self.events += [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]
        self._wake()

    def end(self) -> None:
        self.has_ended = True
        self._wake()

    def _wake(self) -> None:
        for reader in self.readers:
            reader.set()


class _Run(msgspec.Struct):
    id: str
    tenant: str
    body: dict[str, Any]  # as a client that polls gets it
    log: EventLog | None  # of a streamed response
    bytes: int = 0  # of the response as stored, which says how much of it is in memory
    ended: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    is_cancelled: bool = False
    on_cancel: Callable[[], None] | None = None
    task: asyncio.Task[None] | None = None

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back when the run is cancelled. Return a function that ends the watch."""
        self.on_cancel = callback
        if self.is_cancelled:
            callback()

        def end() -> None:
            self.on_cancel = None

        return end


class BackgroundResponses:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        context: EndpointContext,
        history: ResponseHistory,
        *,
        running: int,  # at once
        unfinished: int = 1000,  # that wait or run
        unfinished_of_tenant: int = 100,
        unfinished_bytes: int = 256 * 1024**2,  # 256 MiB
        unfinished_bytes_of_tenant: int = 64 * 1024**2,  # 64 MiB
        held: int = 32,  # ended streams whose events can still be read
    ) -> None:
        self._context = context
        self._history = history
        self._slots = asyncio.Semaphore(running)
        self._running_of_tenant = running - running // 4  # so that no tenant takes all slots
        self._tenant_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._resuming: asyncio.Task[int] | None = None
        self._unfinished = unfinished
        self._unfinished_of_tenant = unfinished_of_tenant
        self._unfinished_bytes = unfinished_bytes
        self._unfinished_bytes_of_tenant = unfinished_bytes_of_tenant
        self._held = held
        self._live: dict[tuple[str, str], _Run] = {}  # by tenant and id
        self._logs: dict[tuple[str, str], EventLog] = {}  # of streamed responses, running or ended, oldest first

    async def start(self, tenant: str, request: ResponseRequest, exchange: Exchange) -> dict[str, Any]:
        """Store a response, run it in the background and return it as it is now: queued."""
        own = sum(of == tenant for of, _ in self._live)
        if len(self._live) >= self._unfinished or own >= self._unfinished_of_tenant:
            raise _too_many(f"You have {own} unfinished background responses, and the server {len(self._live)}.")
        body = response_shell(exchange, request, "queued", [])
        run = _Run(body["id"], tenant, body, EventLog() if request.text_request.stream else None)
        key = (tenant, run.id)
        self._live[key] = run
        metrics.background_responses.set(len(self._live))
        try:
            run.bytes = await self._history.responses.put(run.id, tenant, request.items, dict(body), unfinished=True)
            if self._has_too_many_bytes(tenant):
                await self._history.responses.delete(run.id, tenant)
                raise _too_many("The unfinished background responses are too long to be held together.")
        except BaseException:
            self._forget(run)
            raise
        if run.log is not None:
            self._hold_log(key, run.log)
        run.task = asyncio.create_task(self._run(run, request, exchange))
        return dict(body)

    def _has_too_many_bytes(self, tenant: str) -> bool:
        own = sum(run.bytes for (of, _), run in self._live.items() if of == tenant)
        everybody = sum(run.bytes for run in self._live.values())
        return own > self._unfinished_bytes_of_tenant or everybody > self._unfinished_bytes

    def unfinished(self, id: str, tenant: str) -> dict[str, Any] | None:
        """Return a response that waits or runs; None if there is none of this id."""
        run = self._live.get((tenant, id))
        return None if run is None else dict(run.body)

    def event_log(self, id: str, tenant: str) -> EventLog:
        """Return the events of a response. ApiError if the server does not hold them."""
        found = self._logs.get((tenant, id))
        if found is None or found.has_overflowed:
            raise invalid_request(
                "The events of this response are not available. Retrieve it without 'stream'.",
                "stream",
                code="events_not_available",
            )
        return found

    async def cancel(self, id: str, tenant: str) -> dict[str, Any]:
        """Cancel a background response and return it. One that has ended stays as it is."""
        run = self._live.get((tenant, id))
        if run is not None:
            await self._end(run)
        body = (await self._history.responses.get(id, tenant)).body
        if not body["background"]:
            raise invalid_request("Only a response with `background: true` can be cancelled.", "response_id")
        return body

    async def delete(self, id: str, tenant: str) -> None:
        """Delete a stored response. One that waits or runs is cancelled first."""
        run = self._live.get((tenant, id))
        if run is not None:
            await self._end(run)
        self._logs.pop((tenant, id), None)
        await self._history.responses.delete(id, tenant)

    def resume(self) -> None:
        """Mark what an earlier server left unfinished as failed, as soon as storage works."""
        responses = self._history.responses
        work = responses.fail_unfinished(_INTERRUPTED, lambda tenant, id: (tenant, id) in self._live)
        self._resuming = asyncio.create_task(work)

    async def drain(self, seconds: float, hurry: asyncio.Event) -> None:
        """Let the responses that run finish, for at most `seconds` or until `hurry` is set."""
        running = {run.task for run in self._live.values() if run.task and run.body["status"] == "in_progress"}
        if running:
            hurried = asyncio.create_task(hurry.wait())
            finished = asyncio.create_task(asyncio.wait(running))
            await asyncio.wait({finished, hurried}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in (finished, hurried):
                task.cancel()
            await asyncio.gather(finished, hurried, return_exceptions=True)

    async def close(self) -> None:
        """Cancel what is left. The next server marks it as failed."""
        await end_tasks([self._resuming, *(run.task for run in self._live.values())])

    async def _end(self, run: _Run) -> None:
        """Cancel a run, and wait until its end is stored."""
        run.is_cancelled = True
        if run.on_cancel is not None:
            run.on_cancel()
        elif run.body["status"] == "queued" and run.task is not None:
            run.task.cancel()
        await run.ended.wait()

    async def _run(self, run: _Run, request: ResponseRequest, exchange: Exchange) -> None:
        context = self._context
        answer = KeptAnswer(request, self._history, run.tenant)
        own_slots = self._tenant_slots.get(run.tenant) or asyncio.Semaphore(self._running_of_tenant)
        exchange.timeline.enter("wait")
        self._tenant_slots[run.tenant] = own_slots  # it goes with the last run that refers to it
        try:
            async with own_slots, self._slots:
                if context.is_draining:
                    return  # the next server marks it
                run.body["status"] = "in_progress"
                with context.count_running():
                    await self._answer(run, answer, exchange)
        except (GoneError, asyncio.CancelledError):
            if not run.is_cancelled:
                raise  # the server ends; the next one marks it
            await self._finish(run, response_shell(exchange, request, "cancelled", answer.output_so_far()))
        except Exception as caught:
            error = as_api_error(caught)
            if error.status >= 500 and not isinstance(caught, ApiError):
                log.error("a background response failed", response=run.id, exc_info=caught)
            await self._finish(run, failed_response(exchange, request, error, answer.output_so_far()))
        finally:
            self._forget(run)
            if context.config.log.requests:
                log.info("background", response=run.id, **exchange.log_line(exchange.stages()))

    async def _answer(self, run: _Run, answer: KeptAnswer, exchange: Exchange) -> None:
        services, dialect = self._context.services, answer.dialect()
        if run.log is None:
            await answer_in_full(exchange, dialect, services, watch=run.watch)
        else:
            await answer_into(exchange, dialect, services, run.log.add, watch=run.watch)

    async def _finish(self, run: _Run, body: dict[str, Any]) -> None:
        """Store an end other than an answer."""
        with contextlib.suppress(ApiError):  # it was deleted or evicted meanwhile
            await self._history.responses.finish(run.id, run.tenant, body)

    def _forget(self, run: _Run) -> None:
        self._live.pop((run.tenant, run.id), None)
        metrics.background_responses.set(len(self._live))
        if run.log is not None:
            run.log.end()
        run.ended.set()

    def _hold_log(self, key: tuple[str, str], log: EventLog) -> None:
        self._logs[key] = log
        ended = [key for key, each in self._logs.items() if each.has_ended]
        for key in ended[: max(0, len(ended) - self._held)]:
            del self._logs[key]


def _too_many(reason: str) -> ApiError:
    return ApiError(
        f"{reason} Wait for one to end, or cancel one.",
        kind="rate_limit_error",
        code="too_many_background_responses",
        retry_after=5.0,
    )
