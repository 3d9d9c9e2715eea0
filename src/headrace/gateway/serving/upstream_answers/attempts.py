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
from headrace.gateway.upstreams import upstream_errors as faults
from headrace.gateway.upstreams.upstream import Upstream
from headrace.gateway.upstreams.upstream_errors import BrokenStreamError, UpstreamError
from headrace.sse import EventReader, EventTooLongError

if TYPE_CHECKING:
    from headrace.gateway.upstreams.upstream_client import UpstreamReply

Item = TypeVar("Item")
BuildRestart = Callable[[UpstreamError], Sequence[Item]]


class AttemptReader(Protocol[Item]):
    """Reads one attempt's answer. UpstreamError for what cannot be read."""

    @property
    def started(self) -> bool:
        """Some output came."""
        ...

    @property
    def complete(self) -> bool:
        """Every choice has its end, though the usage may be still to come."""
        ...

    @property
    def over(self) -> bool:
        """Nothing more is to come."""
        ...

    @property
    def counted(self) -> usage.AnswerUsage | None: ...

    @property
    def output_tokens(self) -> int:
        """That came so far, of all choices."""
        ...

    def event(self, data: bytes) -> list[Item]: ...

    def body(self, body: bytes) -> list[Item]: ...

    def broken_off(self) -> list[Item]: ...

    def cut(self) -> list[Item]: ...

    def together(self, found: list[Item]) -> list[Item]:
        """What came at once, in as few parts as it may be handed on."""
        ...

    def delivered(self) -> tuple[list[Choice], list[int]]: ...

    def spent(self) -> usage.AnswerUsage: ...


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
    ) -> None:
        """`reader`: makes one for each attempt. `deadline`: when the answer is cut. Times are by the upstream's
        clock."""
        timeouts = upstream.config.timeouts
        self.gone = False  # nobody waits any more
        self.made = 0  # attempts
        self.reader = reader()
        self.queued_s = 0.0
        self.sent: float | None = None  # when the last attempt was
        self._upstream = upstream
        self._clock = upstream.clock
        self._request = request
        self._make_reader = reader
        self._deadline = deadline
        self._last = arrival + timeouts.total_s  # nothing is waited for after it
        self._priority = priority
        self._placed = False
        self._permit: CallPermit | None = None
        self._reply: UpstreamReply | None = None
        self._events = EventReader(upstream.config.event_bytes)
        self._whole: bool | None = None  # whether the answer is one body; None until something of it came
        self._body = bytearray()  # and this is it
        self._heard = 0.0  # when something last came
        self._ready: deque[Item] = deque()
        self._handed = False  # something is with the caller
        self._error: UpstreamError | None = None  # once what is ready was handed on
        self._over = False
        self._waiting: asyncio.Task[Any] | None = None

    async def run(self, take: Callable[[Item], bool], *, again: BuildRestart[Item] | None = None) -> bool:
        """Hands on what comes. True at the end; False as soon as `take` wants no more for now. While nobody runs this,
        nothing is read.

        `again`: the caller can forget what it has, so that another attempt may be made all the same; what this tells it
        comes before the attempt's own.
        """
        self._heard = self._clock()  # the time that nobody asked is not the upstream's
        while not self.gone:
            if self._error is not None and await self._tries_again(self._error, again):
                continue
            while self._ready and not self.gone:
                item = self._ready.popleft()
                self._handed = True
                if not take(item):
                    return False
            if self.gone:
                break
            if self._error is not None:
                raise self._told(self._error)
            if self._over:
                return True
            try:
                await self._more()
            except UpstreamError as error:
                self._fail(error)
        return True

    def cancel(self) -> None:
        """Nobody waits any more: the connection is closed, by which the upstream knows."""
        self.gone = True
        if self._waiting is not None:
            self._waiting.cancel()
        self._leave()

    def close(self) -> None:
        """What is held is given back. To be called at the end, whatever it was."""
        self._leave()
        if self._placed:
            self._placed = False
            self._upstream.slots.release()

    def _leave(self) -> None:
        if self._reply is not None:
            self._reply.close()
            self._reply = None
        if self._permit is not None:
            self._permit.dropped()
            self._permit = None

    # One attempt

    async def _more(self) -> None:
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
            self._late(due)
            return
        except UpstreamError:
            if self.gone:
                return
            raise
        if not self.gone:
            self._take(data)

    async def _open(self) -> None:
        """A reply, unless nobody waits any more. TimeoutError at the deadline."""
        upstream = self._upstream
        if not self._placed:
            upstream.count("requests")
            upstream.retry_budget.record_request()
            try:
                upstream.refuse_where_shut()
                if not await self._unless_gone(self._place()):
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
        self.made += 1
        self.sent = self._clock()
        await self._unless_gone(self._post())

    async def _place(self) -> None:
        """A place, noted in the very turn in which it is given, so that it is given back whoever leaves then."""
        upstream = self._upstream
        began = self._clock()
        due = min(began + upstream.config.queue_s, self._end())
        refuses = upstream.slots.full
        try:
            await upstream.slots.acquire(self._priority, due - began)
        except UpstreamError:
            if not refuses and self._past_deadline(due):
                raise TimeoutError from None
            raise
        self._placed = True
        self.queued_s = self._clock() - began

    async def _post(self) -> None:
        upstream = self._upstream
        timeouts = upstream.config.timeouts
        streamed = bool(upstream.takes.stream)
        began = self._clock()
        due = min(self._end(), began + timeouts.first_s) if streamed else self._end()
        try:
            self._reply = await upstream.client.post(self._request.path, self._request.body, due)
        except UpstreamError as error:
            if error.reason == "timeout" and self._past_deadline(due):
                raise TimeoutError from None
            raise
        self._heard = self._clock()

    async def _unless_gone(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether the work was done, and somebody still waits for what follows."""
        self._waiting = asyncio.ensure_future(work)
        try:
            await self._waiting
        except asyncio.CancelledError:
            if not self.gone:
                raise
            return False
        finally:
            self._waiting = None
        return not self.gone

    def _take(self, data: bytes) -> None:
        reader = self.reader
        if self._whole is None and (start := data.lstrip()[:1]):
            self._whole = start == b"{"  # as it looks: not all servers give its right name
        if self._whole:
            self._take_body(data)
            return
        before = reader.started
        try:
            events = self._events.feed(data) if data else self._events.finish()
        except EventTooLongError:
            raise faults.invalid_answer(self._upstream.name, "sent an event that is too long", again=False) from None
        if events:
            self._heard = self._clock()
        found: list[Item] = []
        try:
            for event in events:
                if reader.over:
                    break  # what follows the end is nobody's
                found += reader.event(event)
            if not data:
                found += reader.broken_off()
        finally:
            self._ready.extend(reader.together(found))  # what came before an error is handed on before it
        if reader.started and not before:
            self._began()
        if reader.over:
            self._end_well()

    def _take_body(self, data: bytes) -> None:
        if data:
            self._heard = self._clock()
            self._body += data
            if len(self._body) > self._upstream.config.answer_bytes:
                raise faults.invalid_answer(self._upstream.name, "sent an answer that is too long", again=False)
            return
        self._ready.extend(self.reader.body(bytes(self._body)))
        self._began()
        self._end_well()

    def _began(self) -> None:
        if self._permit is not None and self.sent is not None:
            self._upstream.worked(self._permit, self._clock() - self.sent)

    def _end_well(self) -> None:
        self._over = True
        if not self.reader.started:
            self._began()  # an answer without a word is one, too
        self._permit = None
        if self._reply is not None:
            self._reply.let_go()
            self._reply = None

    # Time

    def _end(self) -> float:
        return self._last if self._deadline is None else min(self._last, self._deadline)

    def _past_deadline(self, waited: float = 0.0) -> bool:
        """`waited`: the instant until which was waited in vain. A loop may think it there some milliseconds early."""
        return self._deadline is not None and max(self._clock(), waited) >= self._end()

    def _due(self) -> float:
        """When the next of what comes has to be there."""
        timeouts = self._upstream.config.timeouts
        if self.reader.complete:
            due = self._heard + timeouts.usage_s
        elif self.reader.started or not self._upstream.takes.stream:
            due = self._heard + timeouts.chunk_s
        else:
            due = (self.sent or self._heard) + timeouts.first_s
        return min(due, self._end())

    def _late(self, due: float) -> None:
        """Nothing came until `due`."""
        if self._past_deadline(due):
            self._cut()
        elif self.reader.complete:
            self._ready.extend(self.reader.broken_off())  # it can do without the rest
            self._end_well()
        elif max(self._clock(), due) >= self._last:
            raise faults.too_slow(self._upstream.name, "to complete its answer", again=False)
        else:
            what = "between outputs" if self.reader.started else "to begin its output"
            raise faults.too_slow(self._upstream.name, what)

    def _cut(self) -> None:
        """The deadline: the answer ends with what there is."""
        self._ready.extend(self.reader.cut())
        self._over = True
        if self._permit is not None and self.sent is not None and not self.reader.started:
            waited = self._clock() - self.sent
            if self._upstream.breaker.is_slow(waited):
                self._upstream.worked(self._permit, waited)
        self._leave()

    # Failures

    def _fail(self, error: UpstreamError) -> None:
        self._error = error
        if self._permit is not None:
            self._upstream.failed(self._permit, error)
            self._permit = None
        self._leave()

    async def _tries_again(self, error: UpstreamError, again: BuildRestart[Item] | None) -> bool:
        """Whether another attempt is made; then its wait is over."""
        if not error.again or (self._handed and again is None):
            return False
        config = self._upstream.config.retries
        wait = min(config.base_s * 2.0 ** (self.made - 1), config.longest_s) * self._upstream.chance()
        wait += error.wait or 0.0
        late = wait > config.longest_s or self._clock() + wait >= self._end()
        if self.made > config.most or late or not self._upstream.ready or not self._upstream.retry_budget.try_spend():
            self._upstream.count("retries_denied")
            error.again = False  # it is decided
            return False
        self._upstream.count("retries")
        if not await self._unless_gone(asyncio.sleep(wait)):
            return True
        self._ready.clear()
        if again is not None and self._handed:
            self._ready.extend(again(error))
        self._error, self._handed = None, False
        self._whole = None
        self._body.clear()
        self._events = EventReader(self._upstream.config.event_bytes)
        self.reader = self._make_reader()
        return True

    def _told(self, error: UpstreamError) -> UpstreamError:
        """A stream that broke off says what was delivered of it."""
        if not self._handed:
            return error
        self._upstream.count("broken")
        choices, whole = self.reader.delivered()
        return BrokenStreamError(error, choices, whole)
