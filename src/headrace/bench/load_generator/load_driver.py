"""Drives load at a server: closed-loop users, open-loop arrivals and conversations; records a row for each request.

Runs stages one after another. Does not compute statistics or choose rates.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np

from headrace.bench.client.http_client import HttpClient
from headrace.bench.client.timed_response import OutputTally, TimedResponse
from headrace.bench.load_generator.request_builder import BuiltRequest, PrebuiltRequests, RequestBuilder
from headrace.bench.load_generator.workloads import ConversationTurn, Session
from headrace.bench.results.benchmark_result import RequestRow, RunSnapshot

SAMPLE: Final = 64  # answers whose tokens are recounted
FIRST_KEPT: Final = 8  # sessions that may be repeated to recount their tokens
MOST_UNCOUNTED: Final = 20_000  # answers without usage whose texts are kept for counting
MOST_GAPS: Final = 8_000_000  # between outputs, kept in all rows together
_RECENT: Final = 512  # requests in the percentiles of a snapshot
_FAILURE_PAUSE_S: Final = 0.05  # of a closed-loop user, so that a failing server is not flooded


class StageLimits(msgspec.Struct, frozen=True, kw_only=True):
    requests: int | None  # per stage
    seconds: float | None  # per stage, in which requests are sent
    drain: float  # seconds that running requests may take after that
    running: int  # maximum concurrent requests
    rows: int  # in all stages


class TenantLoad(msgspec.Struct, kw_only=True):
    """The requests of one tenant in a stage."""

    ahead: PrebuiltRequests
    users: int | None = None  # closed loop
    times: Iterator[float] | None = None  # open loop: seconds from the stage's start
    timed: bool = False  # open loop at the sessions' own times
    most: int | None = None  # open loop: maximum concurrent requests; the others wait


class AnswerSample(msgspec.Struct):
    """A uniform sample of the successful answers (reservoir sampling)."""

    rng: random.Random
    seen: int = 0
    kept: list[tuple[str, int, bool]] = []

    def offer(self, text: str, tokens: int, *, ended: bool) -> None:
        self.seen += 1
        if len(self.kept) < SAMPLE:
            self.kept.append((text, tokens, ended))
        elif (place := self.rng.randrange(self.seen)) < SAMPLE:
            self.kept[place] = (text, tokens, ended)


class _Stage(msgspec.Struct):
    number: int
    name: str
    bounds: StageLimits
    began: float
    first_row: int
    planned: int = 0
    started: int = 0
    done: int = 0
    failed: int = 0
    last_sent: float = 0.0
    worst_lag: float = 0.0  # since the last snapshot
    stopping: bool = False
    tasks: set[asyncio.Task[Any]] = set()
    idle: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    bug: BaseException | None = None


class LoadDriver:
    """Not thread-safe: belongs to one event loop."""

    def __init__(
        self,
        client: HttpClient,
        prompts: RequestBuilder,
        *,
        stream: bool,
        seed: int,
        keep_texts: bool = False,
        watch: Callable[[RunSnapshot], None] | None = None,
        every: float = 0.5,
    ) -> None:
        """`watch` is called on the event loop every `every` seconds, so it must be quick."""
        self.rows: list[RequestRow] = []
        self.sample = AnswerSample(random.Random(f"{seed} sample"))
        self.first: list[Session] = []  # sessions of the run
        self.uncounted: list[tuple[RequestRow, str]] = []  # rows without usage, and their texts
        self.gaps_left_out = 0
        self.running = 0  # requests that run or wait for a slot
        self.stages: int | None = None  # planned
        self._client = client
        self._prompts = prompts
        self._clock = client.clock
        self._stream = stream
        self._keep_texts = keep_texts
        self._watch = watch
        self._every = every
        self._zero: float | None = None  # clock time of the run's start
        self._waiting = 0
        self._number = 0  # of the next request
        self._done = 0
        self._failed = 0
        self._tally = OutputTally()
        self._gaps = 0
        self._ttfts: deque[float] = deque(maxlen=_RECENT)
        self._itls: deque[float] = deque(maxlen=8 * _RECENT)
        self._chunks = 0  # of the finished answers
        self._tokens = 0

    async def warm(self, ahead: PrebuiltRequests, count: int, users: int, bounds: StageLimits) -> list[RequestRow]:
        """Send warm-up requests and return their rows, which do not become part of the run."""
        kept, self._watch, watch = self.rows, None, self._watch
        self.rows = []
        if watch is not None:
            watch(RunSnapshot(seconds=0.0, doing="warming up", stages=self.stages))
        try:
            warming = StageLimits(requests=count, seconds=None, drain=bounds.drain, running=bounds.running, rows=count)
            await self.stage(0, "warm-up", [TenantLoad(ahead=ahead, users=min(users, count))], warming)
            return self.rows
        finally:
            self.rows, self._watch, self._zero = kept, watch, None
            self.sample.kept.clear()
            self.sample.seen = 0
            for warmup_data in (self.first, self.uncounted, self._ttfts, self._itls):
                warmup_data.clear()
            self._number = self._done = self._failed = self._gaps = self.gaps_left_out = 0

    async def stage(
        self, number: int, name: str, loads: list[TenantLoad], bounds: StageLimits
    ) -> tuple[float, float, float]:
        """Run a stage; return its start, its last request's start, and its end, in seconds from the run's start."""
        now = self._clock()
        if self._zero is None:
            self._zero = now
        stage = _Stage(number, name, bounds, now, len(self.rows))
        watching = asyncio.create_task(self._report_progress(stage)) if self._watch is not None else None
        try:
            for load in loads:
                if load.users is not None:
                    for _ in range(load.users):
                        self._spawn(stage, self._user(stage, load))
                else:
                    self._spawn(stage, self._arrivals(stage, load))
            await self._finish(stage)
        finally:
            stage.stopping = True
            await _cancel(stage.tasks)
            if watching is not None:
                await _cancel({watching})
                if self._watch is not None:
                    self._watch(self._snapshot(stage, 0.0, "finished"))
        if stage.bug is not None:
            raise stage.bug
        end = max((row.end for row in self.rows[stage.first_row :]), default=now - self._zero)
        return now - self._zero, max(stage.last_sent, now) - self._zero, end

    def _spawn(self, stage: _Stage, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        stage.tasks.add(task)

        def ended(task: asyncio.Task[Any]) -> None:
            stage.tasks.discard(task)
            if not task.cancelled() and (bug := task.exception()) is not None:
                stage.bug = stage.bug or bug
            if not stage.tasks or stage.bug is not None:
                stage.idle.set()

        task.add_done_callback(ended)

    async def _finish(self, stage: _Stage) -> None:
        """Wait until every request is done, or until the stage's time and its drain are over."""
        bounds = stage.bounds
        if not stage.tasks:
            return
        if bounds.seconds is None:
            await stage.idle.wait()
            return
        left = stage.began + bounds.seconds + bounds.drain - self._clock()
        try:
            await asyncio.wait_for(stage.idle.wait(), max(0.0, left))
        except TimeoutError:
            stage.stopping = True  # the caller cancels what still runs

    def _may_send(self, stage: _Stage) -> bool:
        bounds = stage.bounds
        if stage.stopping or len(self.rows) + self.running >= bounds.rows:
            return False
        if bounds.requests is not None and stage.started >= bounds.requests:
            return False
        return bounds.seconds is None or self._clock() < stage.began + bounds.seconds

    # Loads

    async def _user(self, stage: _Stage, load: TenantLoad) -> None:
        while self._may_send(stage) and (item := load.ahead.next()) is not None:
            if not await self._converse(stage, item, None, None):
                await asyncio.sleep(_FAILURE_PAUSE_S)

    async def _arrivals(self, stage: _Stage, load: TenantLoad) -> None:
        gate = asyncio.Semaphore(load.most) if load.most is not None else None
        bounds = stage.bounds
        while bounds.requests is None or stage.planned < bounds.requests:
            if (item := load.ahead.next()) is None:
                return
            at = item[0].at if load.timed else next(load.times) if load.times is not None else 0.0
            due = stage.began + (at or 0.0)
            if bounds.seconds is not None and due >= stage.began + bounds.seconds:
                return
            stage.planned += 1
            # Sleep even when late: requests that are due must get a chance to start.
            await asyncio.sleep(max(0.0, due - self._clock()))
            full = bounds.requests is not None and stage.started >= bounds.requests  # for example with later turns
            if full or stage.stopping or len(self.rows) + self.running >= bounds.rows:
                return
            self._spawn(stage, self._converse(stage, item, due, gate))

    async def _converse(
        self, stage: _Stage, item: tuple[Session, BuiltRequest], due: float | None, gate: asyncio.Semaphore | None
    ) -> bool:
        """Run one conversation; return False if it ended early because of a failure."""
        session, prompt = item
        if len(self.first) < FIRST_KEPT:
            self.first.append(session)
        history: list[tuple[str, str]] = []
        for place, turn in enumerate(session.turns):
            if place:
                due = self._clock() + turn.think
                if not await self._think(stage, turn):
                    return True
                prompt = self._prompts.build(session, place, history)
            more = place + 1 < len(session.turns)
            answer = await self._request(stage, session, place, prompt, due, gate)
            if answer.error:
                return False
            if more:
                history.append((prompt.text, "".join(answer.content_parts)))
        return True

    async def _think(self, stage: _Stage, turn: ConversationTurn) -> bool:
        """Wait for the user's think time; return whether the next turn may be sent."""
        seconds = stage.bounds.seconds
        if seconds is not None and self._clock() + turn.think >= stage.began + seconds:
            return False
        if turn.think > 0.0:
            await asyncio.sleep(turn.think)
        return self._may_send(stage)

    async def _request(
        self,
        stage: _Stage,
        session: Session,
        turn: int,
        prompt: BuiltRequest,
        due: float | None,
        gate: asyncio.Semaphore | None,
    ) -> TimedResponse:
        handed = self._clock()
        lag = 0.0 if due is None else max(0.0, handed - due)
        stage.worst_lag = max(stage.worst_lag, lag)
        stage.started += 1
        number, self._number = self._number, self._number + 1
        answer = TimedResponse(stream=self._stream, keep_text=True, tally=self._tally)
        sent = False
        try:
            if self.running >= stage.bounds.running:
                answer.fail("not sent", f"{self.running} requests are running, which is the limit (--most-running)")
                answer.start = handed
            else:
                self.running += 1
                try:
                    if gate is not None:
                        self._waiting += 1
                        try:
                            await gate.acquire()
                        finally:
                            self._waiting -= 1
                    sent = True
                    stage.last_sent = max(stage.last_sent, self._clock())
                    await self._client.send(prompt.request, answer)
                finally:
                    self.running -= 1
                    if gate is not None and sent:
                        gate.release()
        except asyncio.CancelledError:
            if not sent:
                answer.start = handed
            answer.end = self._clock()
            answer.fail("unfinished", "the run ended before the response")
            raise
        finally:
            row = self._row(stage, session, turn, prompt, answer)
            row.number, row.lag = number, lag
            row.planned = (handed if due is None else due) - (self._zero or 0.0)
            row.waited = max(0.0, answer.start - handed) if gate is not None else 0.0
            if not sent:
                row.e2el = None
            self.rows.append(row)
        return answer

    # Rows

    def _row(
        self, stage: _Stage, session: Session, turn: int, prompt: BuiltRequest, answer: TimedResponse
    ) -> RequestRow:
        if not self._stream:
            answer.read_whole()
        ok = not answer.error
        times = answer.output_times
        start = answer.start
        row = RequestRow(
            number=0,
            stage=stage.number,
            tenant=session.tenant,
            surface=session.surface,
            workload=session.workload,
            session=session.number,
            turn=turn,
            start=start - (self._zero or 0.0),
            connect=answer.connect,
            ok=ok,
            error=answer.error,
            why=answer.why,
            status=answer.status,
            finish=answer.finish,
            asked_input=prompt.asked_input,
            asked_output=prompt.asked_output,
            prompt_tokens=answer.prompt_tokens or 0,
            cached_tokens=answer.cached_tokens,
            ttft=times[0] - start if times else None,
            ttfo=answer.first_content - start if answer.first_content is not None else None,
            e2el=max(0.0, answer.end - start),
            chunks=len(times),
            together=answer.together,
            queue_ms=answer.queue_ms,
            prefill_ms=answer.prefill_ms,
            decode_ms=answer.decode_ms,
        )
        if self._gaps + len(times) <= MOST_GAPS:
            row.gaps = [round(after - before, 7) for before, after in pairwise(times)]
            self._gaps += len(row.gaps)
        elif len(times) > 1:
            self.gaps_left_out += 1
        self._count_tokens(row, answer)
        if ok:
            stage.done += 1
            self._done += 1
            if row.ttft is not None:
                self._ttfts.append(row.ttft)
            self._itls.extend(row.gaps)
        else:
            stage.failed += 1
            self._failed += 1
        return row

    def _count_tokens(self, row: RequestRow, answer: TimedResponse) -> None:
        """Take the output tokens from the usage, and keep what is needed to recount them."""
        text = "".join(answer.reasoning_parts) + "".join(answer.content_parts)
        if self._keep_texts:
            row.text = text
        if answer.output_tokens is not None:
            row.output_tokens, row.tokens_from = answer.output_tokens, "usage"
            if row.ok and text and not answer.tools:
                self.sample.offer(text, answer.output_tokens, ended=answer.finish == "stop")
        else:
            row.output_tokens, row.tokens_from = row.chunks, "chunks"
            if row.ok and text and len(self.uncounted) < MOST_UNCOUNTED:
                self.uncounted.append((row, text))
        if row.ok:
            self._chunks += row.chunks
            self._tokens += row.output_tokens

    # Watching

    async def _report_progress(self, stage: _Stage) -> None:
        then, outputs = self._clock(), self._tally.outputs
        while True:
            await asyncio.sleep(self._every)
            now = self._clock()
            rate = (self._tally.outputs - outputs) / max(now - then, 1e-9)
            if self._chunks:
                rate *= self._tokens / self._chunks
            then, outputs = now, self._tally.outputs
            over = stage.bounds.seconds is not None and now >= stage.began + stage.bounds.seconds
            if self._watch is not None:
                self._watch(self._snapshot(stage, rate, "finishing" if over else "running"))
            stage.worst_lag = 0.0

    def _snapshot(self, stage: _Stage, rate: float, doing: str) -> RunSnapshot:
        now = self._clock()
        ttfts = _percentiles(self._ttfts)
        itls = _percentiles(self._itls)
        before = stage.first_row  # requests of earlier stages
        return RunSnapshot(
            seconds=now - (self._zero if self._zero is not None else now),
            stage=stage.number,
            stages=self.stages,
            load=stage.name,
            doing=doing,
            planned=max(stage.planned, stage.started) + before,
            sent=stage.started + before,
            running=self.running - self._waiting,
            done=self._done,
            failed=self._failed,
            most_requests=stage.bounds.requests,
            most_seconds=stage.bounds.seconds,
            stage_seconds=now - stage.began,
            stage_done=stage.done + stage.failed,
            ttft_p50=ttfts[0],
            ttft_p99=ttfts[1],
            itl_p50=itls[0],
            itl_p99=itls[1],
            tokens_per_s=rate,
            lag_ms=stage.worst_lag * 1e3,
        )


def _percentiles(values: deque[float]) -> tuple[float | None, float | None]:
    """Return p50 and p99 in milliseconds."""
    if not values:
        return None, None
    p50, p99 = np.percentile(np.array(values), [50, 99]) * 1e3
    return float(p50), float(p99)


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for them."""
    pending = list(tasks)
    for task in pending:
        task.cancel()
    for result in await asyncio.gather(*pending, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
