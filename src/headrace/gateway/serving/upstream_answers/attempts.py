"""Runs the attempts at one answer from an upstream: waits for a slot, connects, reads, and retries failures.

Every wait has a deadline. Makes no further attempt once output was delivered, unless the caller can restart the answer.
Does not interpret what it reads.

    slot ─▶ attempt ─▶ first output ─▶ ... ─▶ end
               ▲   │ failed before any output was delivered
               └───┘ backoff
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from headrace.gateway.circuit_breaker import CallPermit
from headrace.gateway.requests.text_request import Choice
from headrace.gateway.serving.upstream_answers import upstream_usage as usage
from headrace.gateway.serving.upstream_answers.upstream_request import UpstreamRequest
from headrace.gateway.upstreams import upstream_errors
from headrace.gateway.upstreams.upstream import Upstream
from headrace.gateway.upstreams.upstream_errors import BrokenStreamError, UpstreamError
from headrace.observe.traces.timeline import Timeline
from headrace.observe.traces.trace_context import new_span_id
from headrace.sse import EventReader, EventTooLongError

if TYPE_CHECKING:
    from headrace.gateway.upstreams.upstream_client import UpstreamReply

Item = TypeVar("Item")
BuildRestart = Callable[[UpstreamError], Sequence[Item]]


class AttemptReader(Protocol[Item]):
    """Reads one attempt's answer. Raises UpstreamError if it cannot be read."""

    @property
    def started(self) -> bool:
        """True once any output has arrived."""
        ...

    @property
    def complete(self) -> bool:
        """True once every choice has ended; the usage may still be missing."""
        ...

    @property
    def over(self) -> bool:
        """True once the answer has ended, usage included."""
        ...

    @property
    def counted(self) -> usage.AnswerUsage | None: ...

    @property
    def output_tokens(self) -> int:
        """Tokens received so far, over all choices."""
        ...

    def event(self, data: bytes) -> list[Item]: ...

    def body(self, body: bytes) -> list[Item]: ...

    def broken_off(self) -> list[Item]: ...

    def cut(self) -> list[Item]: ...

    def merge(self, found: list[Item]) -> list[Item]:
        """Merge items that arrived together into as few as the caller may be handed."""
        ...

    def delivered(self) -> tuple[list[Choice], list[int]]: ...

    def usage_so_far(self) -> usage.AnswerUsage: ...


class Attempts(Generic[Item]):
    def __init__(
        self,
        upstream: Upstream,
        request: UpstreamRequest,
        reader: Callable[[], AttemptReader[Item]],
        *,
        arrival: float,
        deadline: float | None,
        priority: int,
        timeline: Timeline | None = None,
    ) -> None:
        """`reader` builds a reader for each attempt. `deadline`: when to cut off the answer. Times are on the
        upstream's clock."""
        timeouts = upstream.config.timeouts
        self.cancelled = False  # the client has left
        self.count = 0  # attempts made
        self.reader = reader()
        self.queued_s = 0.0
        self.sent: float | None = None  # when the last attempt was sent
        self._upstream = upstream
        self._clock = upstream.clock
        self._request = request
        self._make_reader = reader
        self._deadline = deadline
        self._last = arrival + timeouts.total_s  # no wait goes beyond it
        self._priority = priority
        self._timeline = timeline
        self._span_id = ""  # of the attempt under way
        self._has_slot = False
        self._permit: CallPermit | None = None
        self._reply: UpstreamReply | None = None
        self._events = EventReader(upstream.config.event_bytes)
        self._is_body: bool | None = None  # a single JSON body instead of events; None until the first byte
        self._body = bytearray()
        self._received_at = 0.0  # when data last arrived
        self._ready: deque[Item] = deque()
        self._delivered = False  # the caller has some output
        self._error: UpstreamError | None = None  # raised after the ready items are delivered
        self._over = False
        self._waiting: asyncio.Task[Any] | None = None

    async def run(self, take: Callable[[Item], bool], *, restart: BuildRestart[Item] | None = None) -> bool:
        """Pass items to `take` as they arrive. Return True at the end, False as soon as `take` returns False.

        Reads from the upstream only while it runs. With `restart` the caller can discard what it has, so that a stream
        that broke off may be retried; the items that `restart` returns come before those of the new attempt.
        """
        self._received_at = self._clock()  # a pause of the caller does not count as the upstream's
        while not self.cancelled:
            if self._error is not None and await self._retry(self._error, restart):
                continue
            while self._ready and not self.cancelled:
                item = self._ready.popleft()
                self._delivered = True
                if not take(item):
                    return False
            if self.cancelled:
                break
            if self._error is not None:
                raise self._with_delivered(self._error)
            if self._over:
                return True
            try:
                await self._advance()
            except UpstreamError as error:
                self._fail(error)
        return True

    def cancel(self) -> None:
        """Close the connection, so that the upstream stops generating."""
        self.cancelled = True
        if self._waiting is not None:
            self._waiting.cancel()
        self._disconnect()

    def close(self) -> None:
        """Release the slot and the connection. Call this once the answer has ended in any way."""
        self._end_span()
        self._disconnect()
        if self._has_slot:
            self._has_slot = False
            self._upstream.slots.release()

    def _disconnect(self) -> None:
        if self._reply is not None:
            self._reply.close()
            self._reply = None
        if self._permit is not None:
            self._permit.dropped()
            self._permit = None

    # One attempt

    async def _advance(self) -> None:
        if self._reply is None:
            try:
                await self._open()
            except TimeoutError:
                self._cut()
            return
        due = self._due()
        try:
            data = await self._reply.read(due)
        except TimeoutError:
            self._time_out(due)
            return
        except UpstreamError:
            if self.cancelled:
                return
            raise
        if not self.cancelled:
            self._take(data)

    async def _open(self) -> None:
        """Wait for a slot and send the request, unless the client leaves. Raises TimeoutError at the deadline."""
        upstream = self._upstream
        if not self._has_slot:
            upstream.count("requests")
            upstream.retry_budget.record_request()
            try:
                upstream.check_ready()
                if not await self._unless_cancelled(self._acquire_slot()):
                    return
            except (UpstreamError, TimeoutError):
                upstream.count("refused")
                if self._past_deadline():
                    raise TimeoutError from None
                raise
        try:
            self._permit = upstream.enter()
        except UpstreamError:
            upstream.count("refused")
            raise
        self.count += 1
        self.sent = self._clock()
        await self._unless_cancelled(self._post())

    async def _acquire_slot(self) -> None:
        """Wait for a slot. It is noted in the same turn of the loop, so that a cancellation right then releases it."""
        upstream = self._upstream
        began = self._clock()
        due = min(began + upstream.config.queue_s, self._end())
        was_full = upstream.slots.full
        try:
            await upstream.slots.acquire(self._priority, due - began)
        except UpstreamError:
            if not was_full and self._past_deadline(due):
                raise TimeoutError from None
            raise
        self._has_slot = True
        self.queued_s = self._clock() - began

    async def _post(self) -> None:
        upstream = self._upstream
        timeouts = upstream.config.timeouts
        streamed = bool(upstream.takes.stream)
        began = self._clock()
        due = min(self._end(), began + timeouts.first_s) if streamed else self._end()
        try:
            self._reply = await upstream.client.post(self._request.path, self._request.body, due, self._trace_headers())
        except UpstreamError as error:
            if error.reason == "timeout" and self._past_deadline(due):
                raise TimeoutError from None
            raise
        self._received_at = self._clock()

    def _trace_headers(self) -> dict[str, str]:
        """Begin the attempt's span, and return the header that lets the upstream go on with the trace."""
        if self._timeline is None:
            return {}
        self._span_id = new_span_id()
        context = self._timeline.context
        return {"traceparent": context.traceparent(self._span_id, sampled=self._timeline.is_sampled)}

    def _end_span(self, error: UpstreamError | None = None) -> None:
        if self._timeline is None or not self._span_id or self.sent is None:
            return
        known: dict[str, Any] = {"upstream": self._upstream.name, "attempt": self.count, "span_id": self._span_id}
        if error is not None:
            known["error"] = error.code or error.kind
        self._timeline.part("generate", "attempt", self.sent, self._clock(), **known)
        self._span_id = ""

    async def _unless_cancelled(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work`. False if the client left meanwhile."""
        self._waiting = asyncio.ensure_future(work)
        try:
            await self._waiting
        except asyncio.CancelledError:
            if not self.cancelled:
                raise
            return False
        finally:
            self._waiting = None
        return not self.cancelled

    def _take(self, data: bytes) -> None:
        reader = self.reader
        if self._is_body is None and (start := data.lstrip()[:1]):
            self._is_body = start == b"{"  # decided by content: some servers send the wrong content type
        if self._is_body:
            self._take_body(data)
            return
        before = reader.started
        try:
            events = self._events.feed(data) if data else self._events.finish()
        except EventTooLongError:
            raise upstream_errors.invalid_answer(
                self._upstream.name, "sent an event that is too long", again=False
            ) from None
        if events:
            self._received_at = self._clock()
        found: list[Item] = []
        try:
            for event in events:
                if reader.over:
                    break  # ignore anything after the end
                found += reader.event(event)
            if not data:
                found += reader.broken_off()
        finally:
            self._ready.extend(reader.merge(found))  # deliver what arrived before an error first
        if reader.started and not before:
            self._record_first_output()
        if reader.over:
            self._complete()

    def _take_body(self, data: bytes) -> None:
        if data:
            self._received_at = self._clock()
            self._body += data
            if len(self._body) > self._upstream.config.answer_bytes:
                raise upstream_errors.invalid_answer(
                    self._upstream.name, "sent an answer that is too long", again=False
                )
            return
        self._ready.extend(self.reader.body(bytes(self._body)))
        self._record_first_output()
        self._complete()

    def _record_first_output(self) -> None:
        if self._permit is not None and self.sent is not None:
            self._upstream.worked(self._permit, self._clock() - self.sent)

    def _complete(self) -> None:
        self._over = True
        self._end_span()
        if not self.reader.started:
            self._record_first_output()  # an empty answer is an answer
        self._permit = None
        if self._reply is not None:
            self._reply.release()
            self._reply = None

    # Time

    def _end(self) -> float:
        return self._last if self._deadline is None else min(self._last, self._deadline)

    def _past_deadline(self, waited: float = 0.0) -> bool:
        """`waited`: when the wait was due to end. Event loops may wake some milliseconds early."""
        return self._deadline is not None and max(self._clock(), waited) >= self._end()

    def _due(self) -> float:
        """Return the time by which the next data must arrive."""
        timeouts = self._upstream.config.timeouts
        if self.reader.complete:
            due = self._received_at + timeouts.usage_s
        elif self.reader.started or not self._upstream.takes.stream:
            due = self._received_at + timeouts.chunk_s
        else:
            due = (self.sent or self._received_at) + timeouts.first_s
        return min(due, self._end())

    def _time_out(self, due: float) -> None:
        """End or fail the attempt: nothing arrived until `due`."""
        if self._past_deadline(due):
            self._cut()
        elif self.reader.complete:
            self._ready.extend(self.reader.broken_off())  # only the usage is missing
            self._complete()
        elif max(self._clock(), due) >= self._last:
            raise upstream_errors.too_slow(self._upstream.name, "to complete its answer", again=False)
        else:
            what = "between outputs" if self.reader.started else "to begin its output"
            raise upstream_errors.too_slow(self._upstream.name, what)

    def _cut(self) -> None:
        """End the answer at its deadline with what has arrived."""
        self._ready.extend(self.reader.cut())
        self._over = True
        if self._permit is not None and self.sent is not None and not self.reader.started:
            waited = self._clock() - self.sent
            if self._upstream.breaker.is_slow(waited):
                self._upstream.worked(self._permit, waited)
        self._disconnect()

    # Failures

    def _fail(self, error: UpstreamError) -> None:
        self._error = error
        self._end_span(error)
        if self._permit is not None:
            self._upstream.failed(self._permit, error)
            self._permit = None
        self._disconnect()

    async def _retry(self, error: UpstreamError, restart: BuildRestart[Item] | None) -> bool:
        """Wait and prepare the next attempt. False if the error is final."""
        if not error.again or (self._delivered and restart is None):
            return False
        config = self._upstream.config.retries
        wait = min(config.base_s * 2.0 ** (self.count - 1), config.longest_s) * self._upstream.chance()
        wait += error.wait or 0.0
        late = wait > config.longest_s or self._clock() + wait >= self._end()
        if self.count > config.most or late or not self._upstream.ready or not self._upstream.retry_budget.try_spend():
            self._upstream.count("retries_denied")
            error.again = False
            return False
        self._upstream.count("retries")
        if not await self._unless_cancelled(asyncio.sleep(wait)):
            return True
        self._ready.clear()
        if restart is not None and self._delivered:
            self._ready.extend(restart(error))
        self._error, self._delivered = None, False
        self._is_body = None
        self._body.clear()
        self._events = EventReader(self._upstream.config.event_bytes)
        self.reader = self._make_reader()
        return True

    def _with_delivered(self, error: UpstreamError) -> UpstreamError:
        """Return the error; for a stream that broke off, with what was delivered of it."""
        if not self._delivered:
            return error
        self._upstream.count("broken")
        choices, whole = self.reader.delivered()
        return BrokenStreamError(error, choices, whole)
