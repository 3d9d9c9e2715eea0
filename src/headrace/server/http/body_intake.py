"""BodyIntake: bounds what request bodies cost a server: the memory they take, and the time to read and parse them.

A payer is an API key, or the client's address on a server without keys. Each payer's bytes in memory and bytes per
second are bounded, and those of all payers together, so that one payer cannot keep others from sending theirs. Small
bodies are not counted: the number of connections bounds them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from headrace.config import ServerConfig
from headrace.gateway.api_errors import ApiError
from headrace.observe import metrics
from headrace.server.http.api_call import ApiCall
from headrace.server.http.client_address import client_address

UNCOUNTED_BYTES: Final = 64 * 1024  # of each body; the connection holds as much before the application reads it
_PARSED_AT_ONCE: Final = 2  # large bodies that are parsed at the same time, each of another payer
_BURST_S: Final = 0.25  # seconds' worth of bytes that a payer may send at once
_PAYERS: Final = 10_000  # whose pace is remembered


def payer_of(call: ApiCall) -> str:
    if call.caller.key:
        return f"key {call.caller.key}"
    return f"address {client_address(call.scope.get('client'))}"


class BodyIntake:
    """Not thread-safe: belongs to one event loop."""

    def __init__(
        self,
        server: ServerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.held = 0  # bytes of all payers
        self._server = server
        self._clock = clock
        self._sleep = sleep
        self._held: Counter[str] = Counter()
        self._paid: OrderedDict[str, float] = OrderedDict()  # until when each payer's bytes have used up its pace
        self._turns: dict[str, _Turn] = {}
        self._parsing = asyncio.Semaphore(_PARSED_AT_ONCE)

    @contextmanager
    def hold(self, payer: str) -> Generator[BodyHold]:
        """Count one body's bytes until the end of the block."""
        hold = BodyHold(self, payer)
        try:
            yield hold
        finally:
            self._change(payer, -hold.counted)

    def _change(self, payer: str, count: int) -> None:
        self.held += count
        self._held[payer] += count
        if not self._held[payer]:
            del self._held[payer]
        metrics.body_bytes.set(self.held)

    def count(self, payer: str, count: int) -> None:
        """Check that so many more bytes fit. Raise ApiError if not."""
        server = self._server
        most_each = max(server.key_bodies_bytes, server.body_bytes)  # one body always fits
        most = max(server.bodies_bytes, most_each)
        if self._held[payer] + count > most_each:
            metrics.of(metrics.bodies_refused, "key_bytes").inc()
            raise ApiError(
                f"The request bodies of this {payer.partition(' ')[0]} that are being read exceed {most_each} bytes. "
                "Send fewer large requests at once.",
                kind="rate_limit_error",
                code="key_bodies_too_large",
                retry_after=1.0,
            )
        if self.held + count > most:
            metrics.of(metrics.bodies_refused, "bytes").inc()
            raise ApiError(
                "The server reads too many large request bodies. Retry later.",
                kind="overloaded_error",
                code="bodies_too_large",
                retry_after=1.0,
            )
        self._change(payer, count)

    async def pace(self, payer: str, count: int) -> None:
        """Wait until a payer's bytes are within its pace. Meanwhile its connection is not read."""
        now = self._clock()
        paid = max(self._paid.pop(payer, now), now) + count / self._server.key_body_bytes_per_s
        self._paid[payer] = paid
        while len(self._paid) > _PAYERS:
            self._paid.popitem(last=False)
        ahead = paid - now - _BURST_S
        if ahead > 0:
            metrics.bodies_paced.inc()
            await self._sleep(ahead)

    @asynccontextmanager
    async def turn(self, payer: str) -> AsyncGenerator[None]:
        """Wait for a payer's turn to have a large body parsed: one at a time for each payer, and few in all.

        ApiError if that takes longer than `server.body_s`.
        """
        turn = self._turns.setdefault(payer, _Turn())
        turn.users += 1
        try:
            try:
                async with asyncio.timeout(self._server.body_s):
                    await turn.lock.acquire()
                    try:
                        await self._parsing.acquire()
                    except BaseException:
                        turn.lock.release()
                        raise
            except TimeoutError:
                metrics.of(metrics.bodies_refused, "wait").inc()
                raise ApiError(
                    "The server has too many large request bodies to parse. Retry later.",
                    kind="overloaded_error",
                    code="bodies_waiting",
                    retry_after=1.0,
                ) from None
            try:
                yield
            finally:
                self._parsing.release()
                turn.lock.release()
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[payer]


class _Turn:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


class BodyHold:
    """The bytes of one body that are in memory."""

    __slots__ = ("_intake", "_payer", "_received", "counted")

    def __init__(self, intake: BodyIntake, payer: str) -> None:
        self._intake = intake
        self._payer = payer
        self._received = 0
        self.counted = 0  # bytes beyond the first ones, which are free

    async def take(self, count: int) -> None:
        """Count more bytes of the body, and wait while its payer is ahead of its pace. ApiError if they do not fit."""
        self._received += count
        more = max(0, self._received - UNCOUNTED_BYTES) - self.counted
        if more:
            self._intake.count(self._payer, more)
            self.counted += more
            await self._intake.pace(self._payer, more)
