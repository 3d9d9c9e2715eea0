"""The bounded priority queue before an upstream, and the budget of retries.

Does not open connections.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools

from headrace.config.upstream_section import UpstreamRetries
from headrace.gateway.upstreams import upstream_errors as faults


class RequestSlots:
    """All of it belongs to one event loop. Higher priorities first, and among these who came first."""

    def __init__(self, name: str, most: int, waiting: int) -> None:
        self.taken = 0
        self._name = name
        self._most = most
        self._most_waiting = waiting
        self._numbers = itertools.count()
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._waiting = 0

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def full(self) -> bool:
        """Whether the next one would be refused."""
        return self.taken >= self._most and self._waiting >= self._most_waiting

    async def acquire(self, priority: int, seconds: float) -> None:
        """A place, which is to be given back. UpstreamError where the queue is full, or it takes too long."""
        if self.taken < self._most:
            self.taken += 1
            return
        if self._waiting >= self._most_waiting:
            raise faults.busy(self._name, f"has a full queue of {self._waiting} requests", 1.0)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (-priority, next(self._numbers), turn))
        self._waiting += 1
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.release()  # it had become ours in the same turn of the loop
            else:
                self._forget(turn)
            if isinstance(error, TimeoutError):
                raise faults.busy(self._name, "could not start the request in time", 1.0) from None
            raise
        finally:
            self._waiting -= 1

    def release(self) -> None:
        while self._queue:
            _, _, turn = heapq.heappop(self._queue)
            if not turn.done():
                turn.set_result(None)
                return
        self.taken -= 1

    def _forget(self, turn: asyncio.Future[None]) -> None:
        """Who gave up stays in no queue: it would grow beyond its bound."""
        self._queue = [each for each in self._queue if each[2] is not turn]
        heapq.heapify(self._queue)


class RetryBudget:
    """Further attempts: a share of the first ones, and a reserve for the beginning."""

    def __init__(self, config: UpstreamRetries) -> None:
        self._share = config.share
        self._most = float(config.reserve)
        self._left = float(config.reserve)

    @property
    def left(self) -> float:
        return self._left

    def record_request(self) -> None:
        """A first attempt was made."""
        self._left = min(self._left + self._share, max(self._most, 1.0))

    def try_spend(self) -> bool:
        """Whether one more may be made; then it is counted."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
