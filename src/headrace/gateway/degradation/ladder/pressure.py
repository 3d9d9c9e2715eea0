"""What is known of the pressure on each variant: how long a request would wait, and how much memory is free.

Owns the counts of who waits for a first token, the rate at which they get one, and the latest statistics of the
engines. A tenant waits for its own requests and for as many of each other tenant's, because the engine shares fairly;
so a flood of one is pressure for that one. Everything is bounded, and what is too old is not known. Decides nothing.

    wait = pressure.wait("mini", "acme")     when a request is handed to the engine
    wait.begun()                             its first output came
    wait.over()                              it ended, however; calling it again does nothing
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from headrace.gateway.degradation.ladder.levels import PressureSignals

_REMEMBERED: Final = 48  # first tokens, or answers, that a mean is taken over
_LEAST_WAIT: Final = 0.05  # seconds; shorter ones say nothing of a queue
_MOST_ERROR: Final = 2.0  # of a logarithm: one wait that was foreseen badly counts for no more
_MOST_WRONG: Final = math.log(8.0)


class StatisticsSource(Protocol):
    """Something that can be asked for its statistics, such as the client of an engine."""

    async def stats(self) -> list[dict[str, Any]]: ...


class _Line:
    """Who waits: how many of each tenant, and how many tenants have at least so many."""

    __slots__ = ("_at_least", "_of")

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._at_least: list[int] = []  # the tenants with at least k are at place k - 1

    def add(self, tenant: str) -> None:
        count = self._of[tenant] = self._of.get(tenant, 0) + 1
        if count > len(self._at_least):
            self._at_least.append(0)
        self._at_least[count - 1] += 1

    def drop(self, tenant: str) -> None:
        count = self._of.pop(tenant)
        self._at_least[count - 1] -= 1
        if not self._at_least[-1]:
            self._at_least.pop()
        if count > 1:
            self._of[tenant] = count - 1

    def before(self, tenant: str) -> int:
        """Who goes before one more of the tenant's: of each tenant's as many as it has itself, and one more."""
        return sum(self._at_least[: self._of.get(tenant, 0) + 1])


class _Variant(msgspec.Struct):
    waiting: dict[int, _Waiting] = {}  # in order of arrival
    line: _Line = msgspec.field(default_factory=_Line)
    wrong: float = 0.0  # logarithm of measured / foreseen waiting, of late
    busy: float = 0.0  # seconds in which somebody waited, and first tokens in them, both of late
    begun: float = 0.0
    since: float = 0.0  # such seconds since the last of those tokens
    looked: float = 0.0  # up to when they count
    token_s: float | None = None  # seconds for each token of an answer
    answers: dict[str, float] = {}  # tokens of an answer, by surface
    memory_free: float | None = None
    heard: float = 0.0  # when the memory was


class _Waiting(msgspec.Struct):
    tenant: str
    since: float
    foreseen: float  # seconds, before it was corrected


class WaitTicket:
    """One request that waits for its first token."""

    __slots__ = ("_number", "_pressure", "_variant")

    def __init__(self, pressure: PressureMonitor, variant: str, number: int) -> None:
        self._pressure = pressure
        self._variant = variant
        self._number = number

    def begun(self) -> None:
        self._end(served=True)

    def over(self) -> None:
        self._end(served=False)

    def _end(self, *, served: bool) -> None:
        number, self._number = self._number, 0
        if number:
            self._pressure.ended(self._variant, number, served=served)


class PressureMonitor:
    """All of it belongs to one event loop."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        stale_s: float = 2.0,  # after which statistics are not known any more
        most: int = 256,  # variants; there are no more than the configuration has
    ) -> None:
        self._clock = clock
        self._stale_s = stale_s
        self._most = most
        self._variants: dict[str, _Variant] = {}
        self._last = 0

    # What happens

    def wait(self, variant: str, tenant: str) -> WaitTicket:
        """A request was handed to the engine of a variant. To be called for those that somebody waits for: background
        work waits by design."""
        found = self._of(variant)
        now = self._look(found)
        self._last += 1
        found.waiting[self._last] = _Waiting(tenant, now, _foreseen(found, tenant))
        found.line.add(tenant)
        return WaitTicket(self, variant, self._last)

    def ended(self, variant: str, number: int, *, served: bool) -> None:
        """For Wait alone."""
        found = self._of(variant)
        now = self._look(found)
        waited = found.waiting.pop(number)
        found.line.drop(waited.tenant)
        if served:
            keep = 1.0 - 1.0 / _REMEMBERED
            found.busy = found.busy * keep + found.since
            found.begun = found.begun * keep + 1.0
            found.since = 0.0
        measured = max(now - waited.since, _LEAST_WAIT)
        # One that ended without a token would have waited longer still.
        if waited.foreseen > _LEAST_WAIT and (served or measured > waited.foreseen):
            error = math.log(measured / waited.foreseen) - found.wrong
            found.wrong += max(-_MOST_ERROR, min(_MOST_ERROR, error)) / _REMEMBERED
            found.wrong = max(-_MOST_WRONG, min(_MOST_WRONG, found.wrong))

    def answered(self, variant: str, surface: str, *, tokens: int, seconds: float) -> None:
        """An answer was so many tokens long, and took so long after its first one."""
        found = self._of(variant)
        if tokens > 0:
            mean = found.answers.get(surface, float(tokens))
            if surface in found.answers or len(found.answers) < self._most:
                found.answers[surface] = mean + (tokens - mean) / _REMEMBERED
        if tokens > 1 and seconds >= 0.0:
            each = seconds / (tokens - 1)
            found.token_s = each if found.token_s is None else found.token_s + (each - found.token_s) / _REMEMBERED

    def heard(self, variant: str, replicas: Sequence[Mapping[str, Any]]) -> None:
        """What the engines of a variant say of themselves. The one with most memory counts: a request can go there."""
        shares = [share for share in map(_free_share, replicas) if share is not None]
        if shares:
            found = self._of(variant)
            found.memory_free, found.heard = max(shares), self._clock()

    # What is known

    def signals(
        self,
        variant: str,
        tenant: str = "",
        *,
        surface: str = "",
        deadline_s: float | None = None,  # seconds that are left
        max_tokens: int | None = None,
        budget_left: float | None = None,
    ) -> PressureSignals:
        """What a request of a tenant would meet now."""
        found = self._of(variant)
        now = self._look(found)
        if found.waiting and not found.begun:
            # While nobody has had a token yet, only so much is known.
            queue = max(now - next(iter(found.waiting.values())).since, 0.0)
        else:
            queue = _foreseen(found, tenant) * math.exp(found.wrong)
        slack: float | None = None
        if deadline_s is not None:
            tokens = found.answers.get(surface, 0.0)
            if max_tokens is not None:
                tokens = min(tokens, max_tokens)
            slack = deadline_s - queue - tokens * (found.token_s or 0.0)
        fresh = found.memory_free is not None and now - found.heard <= self._stale_s
        return PressureSignals(
            queue_s=queue,
            memory_free=found.memory_free if fresh else None,
            slack_s=slack,
            budget_left=budget_left,
        )

    def _look(self, found: _Variant) -> float:
        """Counts the time since the last look, where somebody waited in it; the time."""
        now = self._clock()
        if found.waiting:
            found.since += max(now - found.looked, 0.0)
        found.looked = now
        return now

    def _of(self, variant: str) -> _Variant:
        found = self._variants.get(variant)
        if found is None:
            if len(self._variants) >= self._most:
                raise ValueError(f"more than {self._most} variants")
            found = self._variants[variant] = _Variant(looked=self._clock())
        return found


def _foreseen(found: _Variant, tenant: str) -> float:
    """Seconds until those have their first tokens who go before one more request of the tenant."""
    return found.line.before(tenant) * (found.busy + found.since) / found.begun if found.begun else 0.0


def _free_share(statistics: Mapping[str, Any]) -> float | None:
    blocks: dict[str, float] = statistics.get("blocks") or {}
    total = blocks.get("total", 0)
    return (blocks.get("free", 0) + blocks.get("cached", 0)) / total if total else None


async def poll_statistics(
    pressure: PressureMonitor,
    engines: Mapping[str, StatisticsSource],
    *,
    every: float = 0.2,  # seconds
    patience: float = 0.5,  # seconds that an engine may take to answer
) -> None:
    """Asks every engine again and again, until it is cancelled. One that does not answer is not known, and holds up no
    other."""

    async def ask(variant: str, engine: StatisticsSource) -> None:
        try:
            async with asyncio.timeout(patience):
                pressure.heard(variant, await engine.stats())
        except Exception:  # whatever is wrong with it, its statistics grow old
            return

    while True:
        await asyncio.gather(*(ask(variant, engine) for variant, engine in engines.items()))
        await asyncio.sleep(every)
