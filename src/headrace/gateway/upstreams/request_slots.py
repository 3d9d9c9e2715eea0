"""The bounded priority queue before an upstream, and the budget of retries.

Does not open connections.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools

from headrace.config.upstream_section import UpstreamRetries
from headrace.gateway.upstreams import upstream_errors


class RequestSlots:
    """Slots for concurrent requests, given by priority and then by arrival. Use it from one event loop."""

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
        """True if the next request would be rejected."""
        return self.taken >= self._most and self._waiting >= self._most_waiting

    async def acquire(self, priority: int, seconds: float) -> None:
        """Wait for a slot; call `release` afterwards. Raises UpstreamError if the queue is full or slow."""
        if self.taken < self._most:
            self.taken += 1
            return
        if self._waiting >= self._most_waiting:
            raise upstream_errors.busy(self._name, f"has a full queue of {self._waiting} requests", 1.0)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (-priority, next(self._numbers), turn))
        self._waiting += 1
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.release()  # the slot was granted in the same turn of the loop
            else:
                self._forget(turn)
            if isinstance(error, TimeoutError):
                raise upstream_errors.busy(self._name, "could not start the request in time", 1.0) from None
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
        """Remove a waiter that gave up, so that the queue keeps its bound."""
        self._queue = [each for each in self._queue if each[2] is not turn]
        heapq.heapify(self._queue)


class RetryBudget:
    """Limits retries to a share of the first attempts, plus a reserve at the start."""

    def __init__(self, config: UpstreamRetries) -> None:
        self._share = config.share
        self._most = float(config.reserve)
        self._left = float(config.reserve)

    @property
    def left(self) -> float:
        return self._left

    def record_request(self) -> None:
        """Credit the budget for a first attempt."""
        self._left = min(self._left + self._share, max(self._most, 1.0))

    def try_spend(self) -> bool:
        """Spend one retry if the budget allows it."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
