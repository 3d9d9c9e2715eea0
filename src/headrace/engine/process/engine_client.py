"""The asyncio client of a variant's worker processes: takes requests, returns streams of outputs, survives lost
workers.

When a worker is lost, its unfinished requests continue on another replica, or on the worker that replaces it, after the
tokens received so far. A connection delivers frames in order and whole, so no output is lost or duplicated; tokens
depend only on the tokens before them, so the continuation is byte-identical. Does not start processes: the supervisor
does.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import Any, Final

import msgspec

from headrace.engine.interface.outputs import SequenceEnd, SequenceOutput, SequenceUsage
from headrace.engine.interface.request import AdapterRef, FinishReason, GenerationRequest, prompt_ids
from headrace.engine.interface.sequence_result import SequenceResult
from headrace.engine.process import wire
from headrace.engine.process.client_errors import OverloadedError, WorkerLostError
from headrace.engine.process.kept_prefixes import KeptPrefixes
from headrace.engine.process.output_stream import OutputStream
from headrace.engine.process.replica_choice import SEQUENCE_COST, ReplicaRouter, eligible, prefix_keys
from headrace.engine.process.replica_links import ReplicaLinks
from headrace.engine.process.submission import (
    ClientTimeouts,
    Replica,
    ReplicaState,
    Submission,
    served_by,
    submit_message,
    why_wrong,
)
from headrace.engine.process.worker_address import WorkerTls, parse_address
from headrace.engine.process.worker_connection import WorkerConnection
from headrace.engine.process.worker_questions import WorkerQuestions
from headrace.errors import HeadraceError, RequestError
from headrace.tasks import end_tasks

log = logging.getLogger(__name__)

# workers that a request may lose without a new token; after that, the request itself is suspect
MOST_ATTEMPTS: Final = 5
_FINISH_S: Final = 0.05  # between looks at the streams of a client that is being replaced


class EngineClient:
    """Sends requests to one variant's replicas, given by their addresses. Belongs to one event loop."""

    def __init__(
        self,
        addresses: Sequence[str | PathLike[str]],
        *,
        standby: int = 0,
        tls: WorkerTls | None = None,
        fingerprint: str = "",
        waits: ClientTimeouts | None = None,
        most_requests: int = 16_384,
    ) -> None:
        """Addresses are paths of sockets, or `tls://HOST:PORT`. The last `standby` of them take requests only while
        others are missing. `fingerprint`: of the model's files, which the workers must have; empty: they must have the
        same."""
        self._waits = waits or ClientTimeouts()
        self._most = most_requests
        self._links = ReplicaLinks(self, self._waits, tls)
        self._fingerprint = fingerprint
        self._routes = ReplicaRouter()
        self._replica_numbers = itertools.count()
        self._replicas: list[Replica] = []
        self._running = False
        self.parked = False  # replicas are started when a request comes; until then there may be none
        self.starved = asyncio.Event()  # a request waits because there is no replica
        for place, address in enumerate(addresses):
            self.add_replica(address, standby=place >= len(addresses) - standby)
        self._name = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._waiting: list[Submission] = []
        self._retries: set[asyncio.TimerHandle] = set()
        self._questions = WorkerQuestions(patience=self._waits.patience)
        self._prefixes = KeptPrefixes(self._questions, self._connected)
        self._changed = asyncio.Event()  # a replica became usable or was rejected
        self._streams: dict[OutputStream, set[Submission]] = {}  # open ones, with their submissions
        self._variant: tuple[str, ...] | None = None
        self._closing = False

    # Lifecycle

    async def __aenter__(self) -> EngineClient:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Connect to every replica, and reconnect whenever a worker is lost."""
        self._running = True
        for replica in self._replicas:
            replica.task = asyncio.create_task(self._links.keep(replica))

    def add_replica(self, address: str | PathLike[str], *, standby: bool = False, discovered: bool = False) -> None:
        """Send requests to another replica too, once it is connected. `discovered`: a registry named it."""
        replica = Replica(next(self._replica_numbers), parse_address(address), standby, discovered)
        self._routes.add(replica.number, str(replica.address) if replica.address.is_remote else "")
        self._replicas.append(replica)
        if self._running:
            replica.task = asyncio.create_task(self._links.keep(replica))

    def retire_replica(self, address: str | PathLike[str]) -> None:
        """Send a replica nothing more. Its requests go on there."""
        for replica in self._replicas:
            if replica.address == parse_address(address):
                replica.retired = True

    async def remove_replica(self, address: str | PathLike[str]) -> None:
        """Disconnect from a replica. What still runs there continues on another."""
        for replica in [each for each in self._replicas if each.address == parse_address(address)]:
            replica.retired = True
            await end_tasks([replica.task])
            self._replicas.remove(replica)
            self._routes.remove(replica.number)
            self._changed.set()

    def note_sequences(self, address: str, sequences: int) -> None:
        """Learn how many sequences a replica has of all its clients together, so that others' count as load too."""
        for replica in self._replicas:
            if str(replica.address) == address:
                own = sum(len(each.indices) for each in replica.submissions.values())
                self._routes.set_other_load(replica.number, SEQUENCE_COST * max(0, sequences - own))

    @property
    def addresses(self) -> list[str]:
        """Addresses of the replicas that no registry named."""
        return [str(replica.address) for replica in self._replicas if not replica.discovered]

    @property
    def discovered(self) -> list[str]:
        """Addresses of the replicas that a registry named."""
        return [str(replica.address) for replica in self._replicas if replica.discovered]

    def replicas(self) -> list[ReplicaState]:
        """Return the replicas as operators see them."""
        return [replica.state(is_responsive=self._is_responsive(replica)) for replica in self._replicas]

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def drain_replica(self, address: str) -> bool:
        """Ask one worker to finish its requests, take no new ones, and exit. Return False if it is not connected."""
        found = False
        for replica in self._replicas:
            if str(replica.address) == address and replica.connection is not None:
                replica.draining = found = True
                replica.connection.send(wire.Drain())
        return found

    async def ready(self, timeout: float | None = None) -> wire.Welcome:
        """Wait until a replica can take requests. Return what it serves."""

        async def wait() -> wire.Welcome:
            while True:
                for replica in self._replicas:
                    if replica.usable and replica.welcome is not None:
                        return replica.welcome
                if (wrong := self._wrong()) is not None:
                    raise wrong
                self._changed.clear()
                await self._changed.wait()

        try:
            return await asyncio.wait_for(wait(), self._waits.patience if timeout is None else timeout)
        except TimeoutError:
            raise WorkerLostError("No worker is connected.") from None

    async def close(self) -> None:
        """Cancel what runs and disconnect. The workers live on."""
        self._closing = True
        for stream in list(self._streams):
            stream.cancel()
        await end_tasks(replica.task for replica in self._replicas)
        for timer in self._retries:
            timer.cancel()

    @property
    def idle(self) -> bool:
        """True if a replica has nothing to do for this client."""
        return any(replica.usable and not replica.submissions for replica in self._replicas)

    @property
    def responsive(self) -> bool:
        """True if a replica can take requests now: it is connected and answers pings."""
        return self.parked or any(self._is_responsive(replica) for replica in self._replicas)

    def _is_responsive(self, replica: Replica) -> bool:
        # Counted in pings: if this process was held up itself, it suspects no worker.
        return replica.usable and replica.unanswered * self._waits.ping < self._waits.suspicion

    def _wrong(self) -> HeadraceError | None:
        """Return why no replica can be used, if that is known of each of them."""
        reasons = [replica.wrong for replica in self._replicas]
        return reasons[0] if reasons and None not in reasons else None

    # Requests

    def stream(self, request: GenerationRequest) -> OutputStream:
        """Submit a request. Its `deadline` and `arrival` are on this process's monotonic clock."""
        stream = OutputStream(self, request)
        if len(self._streams) >= self._most:
            stream.end(OverloadedError(f"{self._most} requests run already", retry_after=1.0))
            return stream
        self._streams[stream] = set()
        self._dispatch(self._new_submission(stream, tuple(range(request.n))))
        return stream

    async def complete(self, request: GenerationRequest) -> list[SequenceResult]:
        """Return the complete results of a request's sequences."""
        answers = [SequenceResult(index) for index in range(request.n)]
        async with self.stream(request) as stream:
            async for output in stream:
                answers[output.index].add(output)
        return answers

    async def complete_all(
        self, requests: Iterable[GenerationRequest], *, at_once: int = 1024
    ) -> list[list[SequenceResult]]:
        """Return the results of many requests in their order, with at most `at_once` of them in flight."""
        room = asyncio.Semaphore(at_once)

        async def one(request: GenerationRequest) -> list[SequenceResult]:
            async with room:
                return await self.complete(request)

        return await asyncio.gather(*map(one, requests))

    async def stats(self) -> list[dict[str, Any]]:
        """Return the statistics of every connected replica."""
        asked = [self._questions.ask(replica, wire.AskStats) for replica in self._connected()]
        return [reply.values for reply in await asyncio.gather(*asked) if isinstance(reply, wire.Stats)]

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Have every connected replica read an adapter. Others read it when a request has it. RequestError, with the
        replica's address if it is on another host, if one cannot load it."""
        connected = self._connected()
        replies = await asyncio.gather(
            *(self._questions.ask(each, lambda number: wire.LoadAdapter(number, adapter)) for each in connected),
            return_exceptions=True,
        )
        for replica, reply in zip(connected, replies, strict=True):
            if isinstance(reply, WorkerLostError):
                continue  # the worker that replaces it reads the adapter when a request has it
            if isinstance(reply, BaseException):
                raise reply
            if reply.reason is not None:
                where = f"The worker at {replica.address}: " if replica.address.is_remote else ""
                raise RequestError(f"{where}{reply.reason}", parameter="path")

    def drop_adapter(self, digest: str) -> None:
        """Ask every replica to free an adapter. One that requests use stays until another needs its memory."""
        self._send_to_all(wire.DropAdapter(digest))

    async def pin(
        self, tokens: Sequence[int], salt: str = "", *, public: bool = False, keep: bool = True, owner: str = ""
    ) -> None:
        """Keep a prefix in every replica's memory for an owner, or stop keeping it (`keep=False`). See
        `KeptPrefixes`."""
        if keep:
            await self._prefixes.keep(tokens, salt, public=public, owner=owner)
        else:
            await self._prefixes.drop(tokens, salt, owner=owner)

    async def take_pins(self, other: EngineClient) -> None:
        """Keep what another client keeps, before it is replaced by this one."""
        await self._prefixes.keep_all_of(other._prefixes)

    async def finish(self, timeout: float) -> None:
        """Return when every stream has ended, or after `timeout` seconds. Further streams may begin meanwhile."""
        until = time.monotonic() + timeout
        while self._streams and time.monotonic() < until:
            await asyncio.sleep(_FINISH_S)

    def drain(self) -> None:
        """Ask every worker to finish its requests, take no new ones, and exit."""
        self._send_to_all(wire.Drain())

    def _connected(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.connection is not None]

    def _send_to_all(self, message: wire.ClientMessage) -> None:
        for replica in self._replicas:
            if replica.connection is not None:
                replica.connection.send(message)

    def drop(self, stream: OutputStream) -> None:
        """Forget a stream and cancel its sequences. Called by the stream."""
        for submission in list(self._streams.get(stream, ())):
            if submission.replica is not None and submission.replica.connection is not None:
                submission.replica.connection.send(wire.Cancel(submission.id))
            self._forget(submission)
        self._streams.pop(stream, None)

    # Submissions

    def _new_submission(self, stream: OutputStream, indices: tuple[int, ...], *, continues: bool = False) -> Submission:
        submission = Submission(f"{self._name}.{next(self._numbers)}", stream, indices, continues)
        submission.give_up = time.monotonic() + self._waits.patience
        if stream.request.deadline is not None:
            submission.give_up = min(submission.give_up, stream.request.deadline)
        self._streams[stream].add(submission)
        return submission

    def _forget(self, submission: Submission) -> None:
        self._streams.get(submission.stream, set()).discard(submission)
        if submission.replica is not None:
            submission.replica.submissions.pop(submission.id, None)
            self._routes.add_load(submission.replica.number, -submission.load)
            submission.replica, submission.load = None, 0.0
        elif submission in self._waiting:
            self._waiting.remove(submission)

    def _dispatch(self, submission: Submission) -> None:
        usable = self._eligible(submission)
        fresh = self._eligible(submission, fresh=True)
        if not usable:
            wrong = self._wrong()
            if wrong is not None:
                self._fail(submission, wrong)
                return
            self._waiting.append(submission)
            self.starved.set()
            self._later(max(0.0, submission.give_up - time.monotonic()), self._fail_overdue)
            return
        request = submission.stream.request
        output = submission.stream.tokens[submission.indices[0]] if len(submission.indices) == 1 else []
        number, load = self._routes.choose(submission.stream.keys, len(request.prompt) + len(output), fresh or usable)
        replica = next(replica for replica in self._replicas if replica.number == number)
        assert replica.connection is not None
        try:
            replica.connection.send(submit_message(request, submission.id, submission.indices, output))
        except RequestError as error:
            self._fail(submission, error)
            return
        except (wire.WireError, msgspec.MsgspecError, TypeError, OverflowError) as error:
            self._fail(submission, RequestError(f"The request cannot be sent to a worker: {error}"))
            return
        submission.replica, submission.load = replica, load
        replica.submissions[submission.id] = submission
        self._routes.add_load(number, load)
        self._routes.learn(number, submission.stream.keys)

    def _eligible(self, submission: Submission, *, fresh: bool = False) -> list[int]:
        """Return the replicas that the submission may go to; `fresh`: only those that have not refused it."""
        usable = [replica for replica in self._replicas if self._is_responsive(replica)]
        usable = usable or [replica for replica in self._replicas if replica.usable]
        wanted = sum(not replica.is_standby and not replica.retired for replica in self._replicas)
        if fresh:
            refused = [replica for replica in usable if replica.number in submission.refused_by]
            wanted -= sum(not replica.is_standby for replica in refused)
            usable = [replica for replica in usable if replica.number not in submission.refused_by]
        roles = [replica.role for replica in usable]
        return eligible(roles, wanted=wanted, batch=submission.stream.request.surface == "batch")

    def _fail(self, submission: Submission, error: Exception) -> None:
        stream = submission.stream
        self.drop(stream)
        stream.end(error)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        def run() -> None:
            self._retries.discard(timer)
            call()

        timer = asyncio.get_running_loop().call_later(seconds, run)
        self._retries.add(timer)

    def _fail_overdue(self) -> None:
        now = time.monotonic() + 0.001  # timers may fire a little early
        for submission in [submission for submission in self._waiting if submission.give_up <= now]:
            if not self._cut(submission, now):
                self._fail(submission, WorkerLostError(f"no worker was available for {self._waits.patience:g} s"))

    def _cut(self, submission: Submission, now: float) -> bool:
        """End a submission that is past its deadline with its output so far. Return False if it is not."""
        stream = submission.stream
        deadline = stream.request.deadline
        if deadline is None or now < deadline:
            return False
        self._forget(submission)
        for index in submission.indices:
            if stream.endings[index] is None:
                usage = SequenceUsage(len(stream.request.prompt), len(stream.tokens[index]), 0, 0, 0, 0.0, 0.0, 0.0)
                ending = SequenceEnd(FinishReason.DEADLINE, usage)
                stream.push(SequenceOutput(submission.id, index, [], "", ending=ending))
        if stream.closed:
            self._streams.pop(stream, None)
        return True

    def _recover(self, replica: Replica) -> None:
        """Continue the requests of a lost worker elsewhere."""
        lost, replica.submissions = list(replica.submissions.values()), {}
        for submission in lost:
            self._routes.add_load(replica.number, -submission.load)
            submission.replica, submission.load = None, 0.0
            self._streams.get(submission.stream, set()).discard(submission)
        for stream in {submission.stream for submission in lost}:
            stream.attempts += 1
        for submission in lost:
            stream = submission.stream
            if stream.closed:
                continue
            if stream.attempts >= MOST_ATTEMPTS:
                self._fail(
                    submission, WorkerLostError(f"{stream.attempts} workers were lost while running this request.")
                )
            elif submission.indices == tuple(range(stream.request.n)) and not any(stream.tokens):
                self._dispatch(self._new_submission(stream, submission.indices, continues=True))
            else:
                # Sequences that have diverged continue one by one.
                for index in submission.indices:
                    if stream.endings[index] is None:
                        self._dispatch(self._new_submission(stream, (index,), continues=True))

    # Messages

    def take(self, replica: Replica, message: wire.WorkerMessage) -> None:
        """Part of LinkOwner."""
        replica.unanswered = 0
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
                if message.busy > self._waits.longest_step and replica.connection is not None:
                    replica.connection.abort()
            case wire.Draining():
                replica.draining = True
            case wire.Stats() | wire.Pinned() | wire.AdapterLoaded():
                taken = self._questions.take(message)
                if not taken and isinstance(message, wire.Pinned) and message.reason is not None:
                    log.warning("the worker at %s did not pin a prefix: %s", replica.address, message.reason)
            case wire.Bye(reason):
                replica.wrong = wire.WireError(f"The worker at {replica.address} closed the connection: {reason}")

    def _on_output(self, replica: Replica, output: SequenceOutput) -> None:
        submission = replica.submissions.get(output.request)
        if submission is None:
            return  # cancelled in the meantime
        stream = submission.stream
        output.index = submission.indices[output.index]
        decoding = SEQUENCE_COST * len(submission.indices)
        if submission.load > decoding:  # its prompt is computed
            self._routes.add_load(replica.number, decoding - submission.load)
            submission.load = decoding
        ended = output.ending is not None
        stream.push(output)
        if ended and len(stream.request.prompt) + len(stream.tokens[output.index]) >= 64:
            text = (*prompt_ids(stream.request), *stream.tokens[output.index])
            self._routes.learn(replica.number, prefix_keys(text, stream.request.salt))
        if all(stream.endings[index] is not None for index in submission.indices):
            self._forget(submission)
        if stream.closed:
            self._streams.pop(stream, None)

    def _on_refused(self, replica: Replica, refused: wire.Rejected) -> None:
        submission = replica.submissions.get(refused.id)
        if submission is None:
            return
        stream = submission.stream
        self._forget(submission)
        self._streams[stream].add(submission)
        if refused.draining:
            replica.draining = True
            self._dispatch(submission)
            return
        submission.refused_by.add(replica.number)
        now = time.monotonic()
        if submission.continues and refused.parameter == "deadline":
            # It was admitted once, but can no longer finish in time.
            self._cut(submission, max(now, stream.request.deadline or now))
        elif refused.parameter is not None:
            self._fail(submission, RequestError(refused.reason, parameter=refused.parameter))
        elif self._eligible(submission, fresh=True):
            self._dispatch(submission)
        elif submission.continues and self._cut(submission, now):
            pass
        elif submission.continues and now < submission.give_up:
            # The request is not to blame if the worker that takes over is full: retry.
            self._streams.get(stream, set()).discard(submission)
            self._later(min(refused.retry_after or 0.1, 1.0), lambda: self._try_again(submission))
        else:
            error = OverloadedError(refused.reason, retry_after=refused.retry_after, predicted=refused.predicted)
            self._fail(submission, error)

    def _try_again(self, submission: Submission) -> None:
        if not submission.stream.closed:
            submission.refused_by.clear()
            self._streams[submission.stream].add(submission)
            self._dispatch(submission)

    # Connections

    def accept(self, replica: Replica, connection: WorkerConnection, welcome: wire.Welcome) -> bool:
        """Part of LinkOwner: whether the worker speaks our protocol version and gives the same bytes as the others."""
        if all(each.connection is None for each in self._replicas):
            self._variant = None  # no stream has to continue where another began
        self._variant = self._variant or served_by(welcome)
        replica.wrong = why_wrong(welcome, replica.address, self._variant, self._fingerprint)
        if replica.wrong is None:
            replica.connection, replica.welcome, replica.draining = connection, welcome, welcome.draining
            self._prefixes.send_all(replica)
            waiting, self._waiting = self._waiting, []
            for submission in waiting:
                self._dispatch(submission)
        self._changed.set()
        return replica.connection is not None

    def lose(self, replica: Replica) -> None:
        """Part of LinkOwner."""
        self._routes.forget(replica.number)
        if not self._closing:
            self._recover(replica)
