"""The async client of an engine's worker processes: requests in, streams of outputs out, whatever happens to a worker.

Owns the connections to a variant's replicas, the requests that run on them, and their continuation: what a lost worker
had not finished goes on, from the tokens that have come so far, on another replica or on the worker that takes its
place. Outputs come over one connection in order and a frame counts as a whole or not at all, so nothing is lost and
nothing comes twice; and because tokens follow from the tokens before them alone, the continuation is byte for byte what
would have come. Knows no processes: starting and restarting them is the supervisor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from os import PathLike, fspath
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from headrace.engine.interface.grammar_spec import GRAMMAR_KINDS
from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import FinishReason, GenerationRequest
from headrace.engine.interface.sampling import sequence_seed
from headrace.engine.interface.sequence_result import SequenceResult
from headrace.engine.process import wire
from headrace.engine.process.output_stream import OutputStream
from headrace.engine.process.replica_choice import SEQUENCE_COST, ReplicaRouter, prefix_keys
from headrace.engine.process.worker_connection import WorkerConnection
from headrace.errors import HeadraceError, RequestError

MOST_ATTEMPTS: Final = 5  # workers that a request may lose without a new token: after that it may be what kills them


class OverloadedError(HeadraceError):
    """No replica admits the request now."""

    def __init__(self, reason: str, *, retry_after: float | None = None, predicted: float | None = None) -> None:
        self.retry_after = retry_after
        self.predicted = predicted
        super().__init__(reason)


class WorkerLostError(HeadraceError):
    """No worker could finish the request in the time that a client waits for one."""


class ClientTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long a client waits for what, in seconds."""

    patience: float = 60.0  # for a worker that can take a request
    silence: float = 15.0  # of a worker that was asked whether it is there
    ping: float = 1.0  # between such questions, while something runs
    longest_step: float = 60.0  # a step that takes longer is stuck
    reconnect: float = 0.02  # at first; it grows to the next
    reconnect_most: float = 0.5


class Submission(msgspec.Struct, eq=False):
    """A stream, or some of its sequences, as submitted to a worker once."""

    id: str
    stream: OutputStream
    indices: tuple[int, ...]  # of the request's n, by the index that the worker knows
    continues: bool = False
    replica: _Replica | None = None
    load: float = 0.0
    refused_by: set[int] = set()
    give_up: float = 0.0  # when patience ends, while it waits for a worker


class _Replica(msgspec.Struct, eq=False):
    number: int
    path: str
    connection: WorkerConnection | None = None  # greeted, and to be used
    welcome: wire.Welcome | None = None
    draining: bool = False
    jobs: dict[str, Submission] = {}
    greeting: asyncio.Future[wire.Welcome] | None = None
    task: asyncio.Task[None] | None = None
    asked: int = 0  # pings that were not answered yet

    @property
    def usable(self) -> bool:
        return self.connection is not None and not self.draining


class EngineClient:
    """Requests to one variant's replicas, given by the paths of their sockets. All of it belongs to one event loop."""

    def __init__(
        self, paths: Sequence[str | PathLike[str]], *, waits: ClientTimeouts | None = None, most_requests: int = 16_384
    ) -> None:
        self._replicas = [_Replica(number, fspath(path)) for number, path in enumerate(paths)]
        self._waits = waits or ClientTimeouts()
        self._most = most_requests
        self._routes = ReplicaRouter(len(paths))
        self._name = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._waiting: list[Submission] = []
        self._retries: set[asyncio.TimerHandle] = set()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._changed = asyncio.Event()  # a replica became usable, or was found to be wrong
        self._wrong: HeadraceError | None = None
        self._streams: set[OutputStream] = set()
        self._variant: tuple[str, str] | None = None
        self._closing = False

    # Life

    async def __aenter__(self) -> EngineClient:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Begins to connect, and to connect again whenever a worker is lost."""
        for replica in self._replicas:
            replica.task = asyncio.create_task(self._keep(replica))

    async def ready(self, timeout: float | None = None) -> wire.Welcome:
        """ClientTimeouts until a replica can take requests; what it serves."""

        async def wait() -> wire.Welcome:
            while True:
                for replica in self._replicas:
                    if replica.usable and replica.welcome is not None:
                        return replica.welcome
                if self._wrong is not None:
                    raise self._wrong
                self._changed.clear()
                await self._changed.wait()

        try:
            return await asyncio.wait_for(wait(), self._waits.patience if timeout is None else timeout)
        except TimeoutError:
            raise WorkerLostError("no worker is there") from None

    async def close(self) -> None:
        """Cancels what runs and lets the workers go; they live on."""
        self._closing = True
        for stream in list(self._streams):
            stream.cancel()
        tasks = [replica.task for replica in self._replicas if replica.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for timer in self._retries:
            timer.cancel()

    @property
    def idle(self) -> bool:
        """Whether a replica has nothing to do for this client."""
        return any(replica.usable and not replica.jobs for replica in self._replicas)

    # Requests

    def stream(self, request: GenerationRequest) -> OutputStream:
        """Submits a request. Its `deadline` and `arrival` are on this process's monotonic clock."""
        stream = OutputStream(self, request)
        if len(self._streams) >= self._most:
            stream.end(OverloadedError(f"{self._most} requests run already", retry_after=1.0))
            return stream
        self._streams.add(stream)
        self._dispatch(self._job(stream, tuple(range(request.n))))
        return stream

    async def complete(self, request: GenerationRequest) -> list[SequenceResult]:
        """A request's answers, whole."""
        answers = [SequenceResult(index) for index in range(request.n)]
        async with self.stream(request) as stream:
            async for output in stream:
                answers[output.index].add(output)
        return answers

    async def complete_all(
        self, requests: Iterable[GenerationRequest], *, at_once: int = 1024
    ) -> list[list[SequenceResult]]:
        """The answers of many requests, in their order, with at most `at_once` of them under way."""
        room = asyncio.Semaphore(at_once)

        async def one(request: GenerationRequest) -> list[SequenceResult]:
            async with room:
                return await self.complete(request)

        return await asyncio.gather(*map(one, requests))

    async def stats(self) -> list[dict[str, Any]]:
        """What each replica that is there says of itself."""
        asked = [self._ask(replica, wire.AskStats) for replica in self._replicas if replica.connection is not None]
        return [reply.values for reply in await asyncio.gather(*asked) if isinstance(reply, wire.Stats)]

    async def pin(self, tokens: Sequence[int], salt: str = "", *, public: bool = False, keep: bool = True) -> None:
        """Keeps a prefix in every replica's memory (`keep=False`: no longer)."""

        def message(number: int) -> wire.Pin:
            return wire.Pin(number=number, tokens=tuple(tokens), salt=salt, public=public, keep=keep)

        for reply in await asyncio.gather(*(self._ask(replica, message) for replica in self._replicas)):
            if reply.reason is not None:
                raise RequestError(reply.reason, parameter="pin")

    def drain(self) -> None:
        """Asks every worker to finish what it has, take nothing new, and end."""
        for replica in self._replicas:
            if replica.connection is not None:
                replica.connection.send(wire.Drain())

    def drop(self, stream: OutputStream) -> None:
        """Forgets a stream and cancels what runs of it; the stream itself calls this."""
        for job in list(stream.jobs):
            if job.replica is not None and job.replica.connection is not None:
                job.replica.connection.send(wire.Cancel(job.id))
            self._forget(job)
        self._streams.discard(stream)

    async def _ask(self, replica: _Replica, message: Callable[[int], wire.ClientMessage]) -> Any:
        if replica.connection is None:
            raise WorkerLostError(f"the worker at {replica.path} is not there")
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        replica.connection.send(message(number))
        lost = replica.connection.closed
        try:
            await asyncio.wait({reply, lost}, timeout=self._waits.patience, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                raise WorkerLostError(f"the worker at {replica.path} did not answer")
            return reply.result()
        finally:
            del self._replies[number]

    # Jobs

    def _job(self, stream: OutputStream, indices: tuple[int, ...], *, continues: bool = False) -> Submission:
        job = Submission(f"{self._name}.{next(self._numbers)}", stream, indices, continues)
        job.give_up = time.monotonic() + self._waits.patience
        if stream.request.deadline is not None:
            job.give_up = min(job.give_up, stream.request.deadline)
        stream.jobs.add(job)
        return job

    def _forget(self, job: Submission) -> None:
        job.stream.jobs.discard(job)
        if job.replica is not None:
            job.replica.jobs.pop(job.id, None)
            self._routes.add_load(job.replica.number, -job.load)
            job.replica, job.load = None, 0.0
        elif job in self._waiting:
            self._waiting.remove(job)

    def _dispatch(self, job: Submission) -> None:
        usable = [replica.number for replica in self._replicas if replica.usable]
        fresh = [number for number in usable if number not in job.refused_by]
        if not usable:
            if self._wrong is not None and all(replica.connection is None for replica in self._replicas):
                self._fail(job, self._wrong)
                return
            self._waiting.append(job)
            self._later(max(0.0, job.give_up - time.monotonic()), self._lose_patience)
            return
        request = job.stream.request
        output = job.stream.tokens[job.indices[0]] if len(job.indices) == 1 else []
        number, load = self._routes.choose(job.stream.keys, len(request.prompt) + len(output), fresh or usable)
        replica = self._replicas[number]
        assert replica.connection is not None
        try:
            replica.connection.send(submission(request, job.id, job.indices, output))
        except RequestError as error:
            self._fail(job, error)
            return
        except (wire.WireError, msgspec.MsgspecError, TypeError, OverflowError) as error:
            self._fail(job, RequestError(f"The request cannot be sent to a worker: {error}"))
            return
        job.replica, job.load = replica, load
        replica.jobs[job.id] = job
        self._routes.add_load(number, load)
        self._routes.learn(number, job.stream.keys)

    def _fail(self, job: Submission, error: Exception) -> None:
        stream = job.stream
        self.drop(stream)
        stream.end(error)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        def run() -> None:
            self._retries.discard(timer)
            call()

        timer = asyncio.get_running_loop().call_later(seconds, run)
        self._retries.add(timer)

    def _lose_patience(self) -> None:
        now = time.monotonic() + 0.001  # a timer may come a little early
        for job in [job for job in self._waiting if job.give_up <= now]:
            if not self._cut(job, now):
                self._fail(job, WorkerLostError(f"no worker was there for {self._waits.patience:g} s"))

    def _cut(self, job: Submission, now: float) -> bool:
        """Ends a job that is past its deadline with what there is; False where it is not."""
        stream = job.stream
        deadline = stream.request.deadline
        if deadline is None or now < deadline:
            return False
        self._forget(job)
        for index in job.indices:
            if stream.endings[index] is None:
                usage = SequenceUsage(len(stream.request.prompt), len(stream.tokens[index]), 0, 0, 0, 0.0, 0.0, 0.0)
                ending = SequenceEnd(FinishReason.DEADLINE, usage)
                stream.push(SequenceOutput(job.id, index, [], "", ending=ending))
        if stream.closed:
            self._streams.discard(stream)
        return True

    def _recover(self, replica: _Replica) -> None:
        """What a lost worker had not finished goes on elsewhere."""
        lost, replica.jobs = list(replica.jobs.values()), {}
        for job in lost:
            self._routes.add_load(replica.number, -job.load)
            job.replica, job.load = None, 0.0
            job.stream.jobs.discard(job)
        for stream in {job.stream for job in lost}:
            stream.attempts += 1
        for job in lost:
            stream = job.stream
            if stream.closed:
                continue
            if stream.attempts >= MOST_ATTEMPTS:
                self._fail(job, WorkerLostError(f"{stream.attempts} workers were lost while they ran this request"))
            elif job.indices == tuple(range(stream.request.n)) and not any(stream.tokens):
                self._dispatch(self._job(stream, job.indices, continues=True))
            else:
                # Sequences that have parted from one another go on one by one.
                for index in job.indices:
                    if stream.endings[index] is None:
                        self._dispatch(self._job(stream, (index,), continues=True))

    # Messages

    def _on_message(self, replica: _Replica, message: wire.WorkerMessage) -> None:
        match message:
            case wire.Outputs(items):
                for output in items:
                    self._on_output(replica, output)
            case wire.Rejected():
                self._on_refused(replica, message)
            case wire.Welcome():
                if replica.greeting is not None and not replica.greeting.done():
                    replica.greeting.set_result(message)
            case wire.Pong():
                replica.asked = 0
                if message.busy > self._waits.longest_step and replica.connection is not None:
                    replica.connection.abort()
            case wire.Draining():
                replica.draining = True
            case wire.Stats() | wire.Pinned():
                reply = self._replies.get(message.number)
                if reply is not None and not reply.done():
                    reply.set_result(message)
            case wire.Bye(reason):
                self._wrong = wire.WireError(f"the worker at {replica.path} ended the connection: {reason}")

    def _on_output(self, replica: _Replica, output: SequenceOutput) -> None:
        job = replica.jobs.get(output.request)
        if job is None:
            return  # cancelled meanwhile
        stream = job.stream
        output.index = job.indices[output.index]
        decoding = SEQUENCE_COST * len(job.indices)
        if job.load > decoding:  # its prompt is computed
            self._routes.add_load(replica.number, decoding - job.load)
            job.load = decoding
        ended = output.ending is not None
        stream.push(output)
        if ended and len(stream.request.prompt) + len(stream.tokens[output.index]) >= 64:
            text = (*stream.request.prompt, *stream.tokens[output.index])
            self._routes.learn(replica.number, prefix_keys(text, stream.request.salt))
        if all(stream.endings[index] is not None for index in job.indices):
            self._forget(job)
        if stream.closed:
            self._streams.discard(stream)

    def _on_refused(self, replica: _Replica, refused: wire.Rejected) -> None:
        job = replica.jobs.get(refused.id)
        if job is None:
            return
        stream = job.stream
        self._forget(job)
        stream.jobs.add(job)
        if refused.draining:
            replica.draining = True
            self._dispatch(job)
            return
        job.refused_by.add(replica.number)
        now = time.monotonic()
        if job.continues and refused.parameter == "deadline":
            # It was admitted once, and will not be done in time any more.
            self._cut(job, max(now, stream.request.deadline or now))
        elif refused.parameter is not None:
            self._fail(job, RequestError(refused.reason, parameter=refused.parameter))
        elif any(other.usable and other.number not in job.refused_by for other in self._replicas):
            self._dispatch(job)
        elif job.continues and self._cut(job, now):
            pass
        elif job.continues and now < job.give_up:
            # That the worker that takes over is full for the moment is not its fault.
            stream.jobs.discard(job)
            self._later(min(refused.retry_after or 0.1, 1.0), lambda: self._try_again(job))
        else:
            error = OverloadedError(refused.reason, retry_after=refused.retry_after, predicted=refused.predicted)
            self._fail(job, error)

    def _try_again(self, job: Submission) -> None:
        if not job.stream.closed:
            job.refused_by.clear()
            job.stream.jobs.add(job)
            self._dispatch(job)

    # Connections

    async def _keep(self, replica: _Replica) -> None:
        """Connects, watches, and connects again, for ever."""
        wait = self._waits.reconnect
        while not self._closing:
            try:
                connection = await WorkerConnection.open(
                    replica.path, lambda message: self._on_message(replica, message)
                )
            except OSError:
                await asyncio.sleep(wait)
                wait = min(wait * 1.5, self._waits.reconnect_most)
                continue
            try:
                replica.greeting = asyncio.get_running_loop().create_future()
                connection.send(wire.Hello(wire.VERSION))
                welcome = await _unless(connection.closed, replica.greeting, self._waits.silence)
                if welcome is not None and self._accept(replica, connection, welcome):
                    wait = self._waits.reconnect
                    await self._watch(replica, connection)
                else:
                    await asyncio.sleep(wait)
                    wait = min(wait * 1.5, self._waits.reconnect_most)
            finally:
                connection.abort()
                replica.connection = None
                self._routes.forget(replica.number)
                if not self._closing:
                    self._recover(replica)

    def _accept(self, replica: _Replica, connection: WorkerConnection, welcome: wire.Welcome) -> bool:
        """Whether the worker speaks our version and serves what the others do."""
        serves = (welcome.model, welcome.variant)
        self._variant = self._variant or serves
        if welcome.version != wire.VERSION:
            self._wrong = wire.WireError(
                f"the worker at {replica.path} speaks version {welcome.version}, this is {wire.VERSION}"
            )
        elif serves != self._variant:
            self._wrong = HeadraceError(f"the worker at {replica.path} serves {serves}, the others {self._variant}")
        else:
            self._wrong = None
            replica.connection, replica.welcome, replica.draining = connection, welcome, welcome.draining
            waiting, self._waiting = self._waiting, []
            for job in waiting:
                self._dispatch(job)
        self._changed.set()
        return replica.connection is not None

    async def _watch(self, replica: _Replica, connection: WorkerConnection) -> None:
        """Until the worker is gone, or says nothing though it was asked."""
        asked_at = time.monotonic()
        replica.asked = 0
        while not connection.closed.done():
            await asyncio.wait({connection.closed}, timeout=self._waits.ping)
            if connection.closed.done() or not replica.jobs:
                continue
            if not replica.asked:
                asked_at = time.monotonic()
            elif time.monotonic() - max(asked_at, connection.heard) > self._waits.silence:
                return
            replica.asked += 1
            connection.send(wire.Ping(replica.asked))


T = TypeVar("T")


async def _unless(ended: asyncio.Future[None], wanted: Awaitable[T], seconds: float) -> T | None:
    """What is wanted, or None where the connection ends or the time is over before."""
    task = asyncio.ensure_future(wanted)
    await asyncio.wait({ended, task}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return None


def submission(request: GenerationRequest, id: str, indices: Sequence[int], output: Sequence[int]) -> wire.Submit:
    """Return the wire message for a request: all of its sequences from the start, or one of them after `output`."""
    now = time.monotonic()
    if request.grammar is not None and request.grammar.kind not in GRAMMAR_KINDS:
        raise RequestError(f"Unknown grammar kind '{request.grammar.kind}'.", parameter="grammar")
    sampling = request.sampling
    if len(indices) == 1 and indices[0]:
        sampling = replace(sampling, seed=sequence_seed(sampling.seed, indices[0]))
    return wire.Submit(
        request=replace(
            request,
            id=id,
            n=len(indices),
            sampling=sampling,
            prompt_logprobs=None if output else request.prompt_logprobs,
            deadline=None,
            arrival=0.0,
        ),
        output=tuple(output),
        deadline_in_s=None if request.deadline is None else request.deadline - now,
        waited_s=max(0.0, now - request.arrival) if request.arrival else 0.0,
    )
