"""Runs a Lua script in Redis or Valkey with bounded waits and a circuit breaker.

Calls made while others are in flight are sent together in one round trip, in order. Does not know what the script does.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from headrace.errors import HeadraceError
from headrace.gateway.circuit_breaker import StoreBreaker

Result = TypeVar("Result")
# Why a call failed: timeout; no connection or a broken one; Redis out of memory; another Redis error; circuit breaker
# open; queue full; closed.
UnavailableReason = Literal["timeout", "reset", "full", "error", "skipped", "crowded", "closed"]

_POLLS: Final = 32  # checks for the answer within the timeout


class RedisUnavailableError(Exception):
    """Redis is down or too slow. The call may still have taken effect."""

    def __init__(self, why: UnavailableReason) -> None:
        super().__init__(why)
        self.why: Final[UnavailableReason] = why


class _Call(msgspec.Struct, eq=False):
    keys: Sequence[str]
    payload: bytes
    answer: asyncio.Future[list[int]]


class RedisCallBatcher:
    def __init__(
        self,
        url: str,
        script: str,
        *,
        timeout_s: float = 0.05,  # of one round trip, including a new connection
        failures: int = 3,  # in a row, after which the breaker opens
        skip_s: float = 5.0,  # how long it stays open
        batch: int = 16,  # calls per round trip
        waiting: int = 10_000,  # calls queued, at most
        note: Callable[[str], None] = lambda why: None,  # called for each failed round trip
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.breaker: Final = StoreBreaker(failures=failures, rest_s=skip_s, clock=clock)
        self._url = url
        self._script = script
        self._sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        self._timeout_s = timeout_s
        self._batch = batch
        self._waiting = waiting
        self._note = note
        self._library: Any = _library()
        self._client: Any = self._connect()  # checks the URL; connects with the first call
        self._loaded = False
        self._closed = False
        self._queue: deque[_Call] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Future[Any]] = set()

    async def call(self, keys: Sequence[str], payload: bytes, *, probe: bool = False) -> list[int]:
        """Return the script's reply, or raise RedisUnavailableError. `probe`: call even while the breaker is open."""
        if self._closed:
            raise RedisUnavailableError("closed")
        if self.breaker.open and not probe:
            raise RedisUnavailableError("skipped")
        if len(self._queue) >= self._waiting:
            raise RedisUnavailableError("crowded")
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._queue.append(_Call(keys, payload, answer))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
        return await answer

    async def close(self) -> None:
        self._closed = True
        if self._sending is not None:
            await asyncio.wait({self._sending}, timeout=2 * self._timeout_s)
        self._disconnect()
        if self._ending:
            await asyncio.wait(self._ending, timeout=2 * self._timeout_s)

    async def _send_all(self) -> None:
        try:
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(self._batch, len(self._queue)))]
                try:
                    self._answered(batch, await self._bounded(self._send(batch)))
                except Exception as error:
                    self._failed(batch, _why(error))
        finally:
            self._sending = None

    def _answered(self, batch: Sequence[_Call], answers: Sequence[Any]) -> None:
        wrong = [answer for answer in answers if isinstance(answer, Exception)]
        if wrong:
            self._count(_why(wrong[0]))
        else:
            self.breaker.succeeded()
        for call, answer in zip(batch, answers, strict=True):
            if not call.answer.done():
                if isinstance(answer, Exception):
                    call.answer.set_exception(RedisUnavailableError(_why(answer)))
                else:
                    call.answer.set_result(answer)

    def _failed(self, batch: list[_Call], why: UnavailableReason) -> None:
        """Fail the batch and the whole queue, which would otherwise time out one batch after another."""
        self._count(why)
        self._disconnect()
        for call in (*batch, *self._queue):
            if not call.answer.done():
                call.answer.set_exception(RedisUnavailableError(why))
        self._queue.clear()

    def _count(self, why: UnavailableReason) -> None:
        self.breaker.failed()
        self._note(why)

    async def _bounded(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`; raise TimeoutError if Redis takes too long.

        Only the time of Redis counts: if this process is busy and checks late, the answer may already have arrived.
        """
        task = asyncio.ensure_future(work)
        clock = asyncio.get_running_loop().time
        interval = self._timeout_s / _POLLS
        left = self._timeout_s
        while left > 0 and not task.done():
            before = clock()
            await asyncio.wait({task}, timeout=min(interval, left))
            left -= min(clock() - before, 2 * interval)
        if not task.done():
            task.cancel()
            self._end(task)
            raise TimeoutError
        return task.result()

    def _end(self, task: asyncio.Future[Any]) -> None:
        """Let a task finish in the background and ignore its result."""
        self._ending.add(task)

        def ended(task: asyncio.Future[Any]) -> None:
            self._ending.discard(task)
            if not task.cancelled():
                task.exception()

        task.add_done_callback(ended)

    async def _send(self, batch: Sequence[_Call]) -> list[Any]:
        answers = await self._round(batch, load=not self._loaded)
        lost = [place for place, answer in enumerate(answers) if type(answer).__name__ == "NoScriptError"]
        if lost:  # Redis has dropped the script and ran none of these
            again = await self._round([batch[place] for place in lost], load=True)
            for place, answer in zip(lost, again, strict=True):
                answers[place] = answer
        self._loaded = True
        return answers

    async def _round(self, batch: Sequence[_Call], *, load: bool) -> list[Any]:
        if self._client is None:
            self._client = self._connect()
        pipeline: Any = self._client.pipeline(transaction=False)
        if load:
            pipeline.script_load(self._script)
        for call in batch:
            pipeline.evalsha(self._sha, len(call.keys), *call.keys, call.payload)
        answers = await pipeline.execute(raise_on_error=False)
        return answers[1:] if load else answers

    def _connect(self) -> Any:
        try:
            return self._library.asyncio.from_url(
                self._url,
                protocol=2,
                decode_responses=False,
                socket_connect_timeout=self._timeout_s,
                retry=self._library.asyncio.retry.Retry(
                    self._library.backoff.NoBackoff(), 0
                ),  # never send a call twice
            )
        except ValueError as error:
            raise HeadraceError(f"Invalid Redis URL for shared limits: {error}.") from None

    def _disconnect(self) -> None:
        client, self._client, self._loaded = self._client, None, False
        if client is not None:
            self._end(asyncio.ensure_future(client.aclose()))


def _library() -> Any:
    try:
        importlib.import_module("redis.asyncio.retry")
        importlib.import_module("redis.backoff")
        return importlib.import_module("redis")
    except ImportError:
        raise HeadraceError("Shared limits need the package redis. Run: pip install 'headrace[redis]'") from None


def _why(error: Exception) -> UnavailableReason:
    # Compared by name, because the package may be missing.
    name = type(error).__name__
    if name == "OutOfMemoryError" or str(error).startswith("OOM"):
        return "full"
    if isinstance(error, TimeoutError) or name == "TimeoutError":
        return "timeout"
    return "reset" if isinstance(error, OSError) or name == "ConnectionError" else "error"
