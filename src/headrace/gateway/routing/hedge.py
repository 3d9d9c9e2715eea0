"""Hedging: where a first token is later than nearly all, a second request is made, and the one that speaks first wins.

Owns the estimate of when that is, the bound on how many requests are asked twice, and the race. A hedge is started only
where a replica idles, so it takes nobody's place. The loser is cancelled by the engine's next step, and only the
winner's usage is charged. Knows nothing of how a replica is found: the engine's client sends a second request to the
one that would have it done soonest, which is the idle one.
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
    CompositeAnswerer,
    RoutingDecision,
    SettledCallback,
    Take,
    VariantCharge,
    charges_for,
    has_output,
)
from headrace.gateway.serving.exchange import Exchange

LEAST_SAMPLES: Final = 20  # before a quantile means anything


class LatencyWindow:
    """The latest times, and their quantiles."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, seconds: float) -> None:
        if len(self._in_order) == self._most:
            del self._sorted[bisect_left(self._sorted, self._in_order.popleft())]
        self._in_order.append(seconds)
        insort(self._sorted, seconds)

    def quantile(self, share: float) -> float | None:
        """None where there are too few."""
        count = len(self._sorted)
        return self._sorted[min(count - 1, int(share * count))] if count >= LEAST_SAMPLES else None


class HedgeAllowance:
    """Of all requests at most a share: every one saves up that much, and a hedge takes a whole one."""

    def __init__(self, share: float, *, most: float = 10.0) -> None:
        """`most`: that can be saved up, so that no quiet hour pays for a storm."""
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
    """What is known of one variant: how long its first tokens take, and how many more hedges it may have."""

    def __init__(self, config: HedgeConfig, idle: Callable[[], bool]) -> None:
        """`idle`: whether a replica has nothing to do."""
        self.config = config
        self.latencies = LatencyWindow(config.samples)
        self._allowance = HedgeAllowance(config.share)
        self._idle = idle

    def asked(self) -> None:
        self._allowance.earn()

    def answered(self, seconds: float) -> None:
        """To the first token. Of a hedged request it is less than it would have been, which the bounds make up for."""
        self.latencies.add(seconds)

    def delay(self) -> float | None:
        """Seconds that the first request has; None where that is not known yet."""
        found = self.latencies.quantile(self.config.quantile)
        return None if found is None else min(max(found, self.config.least_ms / 1e3), self.config.most_ms / 1e3)

    def may(self) -> bool:
        """Whether a second request may be made now; it is counted."""
        return self._idle() and self._allowance.take()


class HedgedAnswerer(CompositeAnswerer):
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
        self.hedged = False  # a second request was made
        self._makes = (first, second)
        self._pieces: dict[int, list[ChoiceDelta]] = {}  # by the part's place; that came before it was decided
        self._began = 0.0

    @property
    def won(self) -> bool:
        """Whether the second request's answer is the one."""
        return self._serving is not None and self._serving is not self._parts[0]

    @property
    def charges(self) -> list[VariantCharge]:
        found: list[VariantCharge] = []
        # Until something has come, it is the first whose prompt was computed.
        paid = self._serving if self._serving is not None else next(iter(self._parts), None)
        for part in self._parts:
            found += charges_for(part, "answer" if part is paid else "hedge", charged=part is paid)
        return found

    async def begin(self) -> None:
        self.hedging.asked()
        first = self._start(self._makes[0](self.exchange.asked))
        self._began = self._clock()
        await first.begin()
        self.exchange.prompt_tokens = first.exchange.prompt_tokens
        self.exchange.shaped_at = first.exchange.shaped_at

    async def run(self, take: Take) -> bool:
        if self._serving is None:
            await self._race()
        winner = self._serving
        if winner is None:
            self._sum_up()
            return True  # the client has left
        counting = self._counting(take)
        if not self._hand_over(counting):
            return False
        ended = await winner.run(counting)
        if ended:
            self._sum_up()
        return ended

    async def _race(self) -> None:
        running: dict[asyncio.Task[None], Answerer] = {}
        errors: list[Exception] = []

        def enter(part: Answerer, *, begins: bool) -> None:
            place = self._parts.index(part)
            running[asyncio.ensure_future(self._speak(part, place, begins=begins))] = part

        enter(self._parts[0], begins=False)
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
                if not done and not self.gone and self.hedging.may():
                    self.hedged = True
                    enter(self._start(self._makes[1](self.exchange.asked)), begins=True)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        self._decided(errors)

    def _wait(self) -> float | None:
        delay = self.hedging.delay()
        return None if delay is None else max(0.0, self._began + delay - self._clock())

    async def _speak(self, part: Answerer, place: int, *, begins: bool) -> None:
        """Until it has said something that a client hears, or the other one has."""
        pieces = self._pieces[place] = []

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

    def _decided(self, errors: list[Exception]) -> None:
        winner = self._serving
        if winner is None:
            if errors and not self.gone:
                raise errors[0]
            return
        self.hedging.answered(max(0.0, self._clock() - self._began))
        self._held.extend(self._pieces.pop(self._parts.index(winner)))
        self._pieces.clear()
        for part in self._parts:
            if part is not winner:
                self._settle(part)
        if self.hedged:
            which = "the second" if self.won else "the first"
            self.decisions.append(RoutingDecision("hedge", self.exchange.served.name, f"{which} of two spoke first"))
