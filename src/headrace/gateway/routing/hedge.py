"""Hedging: if a first token is later than nearly all others, a second request starts, and the first to answer wins.

Owns the latency estimate, the cap on how many requests are hedged, and the race. A hedge starts only if a replica is
idle, so it delays no other request. The loser is cancelled by the engine's next step, and only the winner's usage is
charged. Does not choose replicas: the engine's client sends the second request to the one that would finish it soonest,
which is the idle one.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from typing import Final

from headrace.config.routing_section import HedgeConfig
from headrace.errors import HeadraceError
from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import ChoiceDelta
from headrace.gateway.routing.composite_answerer import (
    Answerer,
    AnswererFactory,
    Clock,
    DecidingAnswerer,
    RoutingDecision,
    SettledCallback,
    VariantCharge,
    charges_for,
    has_output,
)
from headrace.gateway.serving.exchange import Exchange

MIN_SAMPLES: Final = 20  # for a meaningful quantile


class LatencyWindow:
    """The latest latencies and their quantiles."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._in_order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, seconds: float) -> None:
        if len(self._in_order) == self._size:
            del self._sorted[bisect_left(self._sorted, self._in_order.popleft())]
        self._in_order.append(seconds)
        insort(self._sorted, seconds)

    def quantile(self, share: float) -> float | None:
        """Return None with too few samples."""
        count = len(self._sorted)
        return self._sorted[min(count - 1, int(share * count))] if count >= MIN_SAMPLES else None


class HedgeAllowance:
    """Caps hedges at a share of requests: each request earns that share, and each hedge costs one."""

    def __init__(self, share: float, *, most: float = 10.0) -> None:
        """`most`: cap on what is saved, so that a quiet hour does not pay for a burst."""
        self._share = share
        self._most = most
        self._saved = 0.0

    def earn(self) -> None:
        self._saved = min(self._most, self._saved + self._share)

    def take(self) -> bool:
        if self._saved < 1.0 - 1e-9:
            return False
        self._saved -= 1.0
        return True


class HedgePolicy:
    """Decides for one variant when to hedge: its latencies, and the hedges that it may still start."""

    def __init__(self, config: HedgeConfig, idle: Callable[[], bool]) -> None:
        """`idle`: whether a replica is idle."""
        self.config = config
        self.latencies = LatencyWindow(config.samples)
        self._allowance = HedgeAllowance(config.share)
        self._idle = idle

    def record_request(self) -> None:
        self._allowance.earn()

    def record_first_token(self, seconds: float) -> None:
        """Record a latency. Hedging makes it shorter than it would have been; the bounds of `delay` allow for that."""
        self.latencies.add(seconds)

    def delay(self) -> float | None:
        """Return the seconds to wait for the first request; None while unknown."""
        quantile = self.latencies.quantile(self.config.quantile)
        return None if quantile is None else min(max(quantile, self.config.least_ms / 1e3), self.config.most_ms / 1e3)

    def try_hedge(self) -> bool:
        """Return whether to start a second request now, and count it if so."""
        return self._idle() and self._allowance.take()


class HedgedAnswerer(DecidingAnswerer):
    def __init__(
        self,
        exchange: Exchange,
        first: AnswererFactory,
        second: AnswererFactory,
        hedging: HedgePolicy,
        *,
        settled: SettledCallback | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(exchange, settled=settled, clock=clock)
        self.hedging = hedging
        self.hedged = False  # a second request was started
        self._factories = (first, second)
        self._pieces: dict[int, list[ChoiceDelta]] = {}  # by the part's index, before the race is decided
        self._began = 0.0

    @property
    def won(self) -> bool:
        """True if the second request won."""
        return self._serving is not None and self._serving is not self._parts[0]

    @property
    def charges(self) -> list[VariantCharge]:
        charges: list[VariantCharge] = []
        # Before any output, only the first has computed its prompt.
        paid = self._serving if self._serving is not None else next(iter(self._parts), None)
        for part in self._parts:
            charges += charges_for(part, "answer" if part is paid else "hedge", charged=part is paid)
        return charges

    async def begin(self) -> None:
        self.hedging.record_request()
        first = self._start(self._factories[0](self.exchange.text_request))
        self._began = self._clock()
        await first.begin()
        self.exchange.prompt_tokens = first.exchange.prompt_tokens
        self.exchange.shaped_at = first.exchange.shaped_at

    async def _decide(self) -> bool:
        await self._race()
        return self._serving is not None

    async def _race(self) -> None:
        running: dict[asyncio.Task[None], Answerer] = {}
        errors: list[Exception] = []

        def start(part: Answerer, *, begins: bool) -> None:
            index = self._parts.index(part)
            running[asyncio.ensure_future(self._run_until_output(part, index, begins=begins))] = part

        start(self._parts[0], begins=False)
        try:
            wait = self._wait()
            while running and self._serving is None and not self.gone:
                done, _ = await asyncio.wait(running, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                wait = None
                for task in done:
                    del running[task]
                    error = task.exception()
                    if isinstance(error, ApiError | HeadraceError):
                        errors.append(error)
                    elif error is not None:
                        raise error
                if not done and not self.gone and self.hedging.try_hedge():
                    self.hedged = True
                    start(self._start(self._factories[1](self.exchange.text_request)), begins=True)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        self._finish_race(errors)

    def _wait(self) -> float | None:
        delay = self.hedging.delay()
        return None if delay is None else max(0.0, self._began + delay - self._clock())

    async def _run_until_output(self, part: Answerer, index: int, *, begins: bool) -> None:
        """Run a part until it, or the other one, has output for the client."""
        pieces = self._pieces[index] = []

        def hold(piece: ChoiceDelta) -> bool:
            if self._serving is not None:
                return False
            pieces.append(piece)
            if has_output(piece):
                self._serve(part)
                return False
            return True

        if begins:
            await part.begin()
        await part.run(hold)

    def _finish_race(self, errors: list[Exception]) -> None:
        winner = self._serving
        if winner is None:
            if errors and not self.gone:
                raise errors[0]
            return
        self.hedging.record_first_token(max(0.0, self._clock() - self._began))
        self._held.extend(self._pieces.pop(self._parts.index(winner)))
        self._pieces.clear()
        for part in self._parts:
            if part is not winner:
                self._settle(part)
        if self.hedged:
            winner_name = "second" if self.won else "first"
            self.decisions.append(
                RoutingDecision("hedge", self.exchange.served.name, f"the {winner_name} of two requests answered first")
            )
