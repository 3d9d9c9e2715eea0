"""Measures the pressure on each variant: how long a request would wait, and how much memory is free.

Owns the counts of requests that wait for a first token, the rate at which they get one, and the engines' latest
statistics. The engine shares fairly, so a tenant waits for its own requests and for as many of each other tenant's: one
tenant's flood is pressure for that tenant. Everything is bounded, and old values count as unknown. Decides nothing.

    ticket = monitor.wait("mini", "acme")    when a request is handed to the engine
    ticket.start()                           on its first output
    ticket.end()                             when it ends, however; further calls do nothing
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from headrace.gateway.degradation.ladder.levels import PressureSignals

_SAMPLES: Final = 48  # first tokens, or answers, that a moving mean covers
_MIN_WAIT_S: Final = 0.05  # shorter waits say nothing about a queue
_MAX_LOG_ERROR: Final = 2.0  # a badly predicted wait counts for no more than this
_MAX_LOG_BIAS: Final = math.log(8.0)


class StatisticsSource(Protocol):
    """Reports statistics, such as the client of an engine."""

    async def stats(self) -> list[dict[str, Any]]: ...


class _WaitingCounts:
    """Counts waiting requests by tenant, and the tenants with at least k of them."""

    __slots__ = ("_at_least", "_by_tenant")

    def __init__(self) -> None:
        self._by_tenant: dict[str, int] = {}
        self._at_least: list[int] = []  # index k - 1: tenants with at least k waiting requests

    def add(self, tenant: str) -> None:
        count = self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + 1
        if count > len(self._at_least):
            self._at_least.append(0)
        self._at_least[count - 1] += 1

    def remove(self, tenant: str) -> None:
        count = self._by_tenant.pop(tenant)
        self._at_least[count - 1] -= 1
        if not self._at_least[-1]:
            self._at_least.pop()
        if count > 1:
            self._by_tenant[tenant] = count - 1

    def ahead_of(self, tenant: str) -> int:
        """Count what runs up to a new request of the tenant: of each tenant up to as many as this one then has."""
        return sum(self._at_least[: self._by_tenant.get(tenant, 0) + 1])


class _Waiting(msgspec.Struct):
    tenant: str
    since: float
    predicted_s: float  # before correction by the bias


class _VariantPressure(msgspec.Struct):
    waiting: dict[int, _Waiting] = {}  # in order of arrival
    counts: _WaitingCounts = msgspec.field(default_factory=_WaitingCounts)
    log_bias: float = 0.0  # moving mean of log(measured wait / predicted wait)
    busy_s: float = 0.0  # recent seconds in which a request waited
    first_tokens: float = 0.0  # recent first tokens in those seconds
    busy_since_token_s: float = 0.0  # such seconds since the latest first token
    updated_at: float = 0.0  # up to when the busy seconds are counted
    token_s: float | None = None  # seconds per output token
    answer_tokens: dict[str, float] = {}  # mean length of an answer, by surface
    memory_free: float | None = None
    memory_at: float = 0.0  # when the memory was reported


class WaitTicket:
    """One request that waits for its first token."""

    __slots__ = ("_monitor", "_number", "_variant")

    def __init__(self, monitor: PressureMonitor, variant: str, number: int) -> None:
        self._monitor = monitor
        self._variant = variant
        self._number = number

    def start(self) -> None:
        """The first output came."""
        self._finish(served=True)

    def end(self) -> None:
        """The request ended without output."""
        self._finish(served=False)

    def _finish(self, *, served: bool) -> None:
        number, self._number = self._number, 0
        if number:
            self._monitor.finish_wait(self._variant, number, served=served)


class PressureMonitor:
    """The pressure on all variants. Used from one event loop only."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        stale_s: float = 2.0,  # statistics older than this count as unknown
        max_variants: int = 256,
    ) -> None:
        self._clock = clock
        self._stale_s = stale_s
        self._max_variants = max_variants
        self._variants: dict[str, _VariantPressure] = {}
        self._last_number = 0

    # Events

    def wait(self, variant: str, tenant: str) -> WaitTicket:
        """Note that a request was handed to an engine. Leave out background work, which waits by design."""
        pressure = self._pressure(variant)
        now = self._advance(pressure)
        self._last_number += 1
        pressure.waiting[self._last_number] = _Waiting(tenant, now, _predicted_wait_s(pressure, tenant))
        pressure.counts.add(tenant)
        return WaitTicket(self, variant, self._last_number)

    def finish_wait(self, variant: str, number: int, *, served: bool) -> None:
        """End a wait; called by WaitTicket only."""
        pressure = self._pressure(variant)
        now = self._advance(pressure)
        wait = pressure.waiting.pop(number)
        pressure.counts.remove(wait.tenant)
        if served:
            keep = 1.0 - 1.0 / _SAMPLES
            pressure.busy_s = pressure.busy_s * keep + pressure.busy_since_token_s
            pressure.first_tokens = pressure.first_tokens * keep + 1.0
            pressure.busy_since_token_s = 0.0
        measured_s = max(now - wait.since, _MIN_WAIT_S)
        # A request that ended without a token would have waited even longer.
        if wait.predicted_s > _MIN_WAIT_S and (served or measured_s > wait.predicted_s):
            error = math.log(measured_s / wait.predicted_s) - pressure.log_bias
            pressure.log_bias += max(-_MAX_LOG_ERROR, min(_MAX_LOG_ERROR, error)) / _SAMPLES
            pressure.log_bias = max(-_MAX_LOG_BIAS, min(_MAX_LOG_BIAS, pressure.log_bias))

    def record_answer(self, variant: str, surface: str, *, tokens: int, seconds: float) -> None:
        """Note an answer's length, and the seconds from its first token to its last."""
        pressure = self._pressure(variant)
        lengths = pressure.answer_tokens
        if tokens > 0:
            mean = lengths.get(surface, float(tokens))
            if surface in lengths or len(lengths) < self._max_variants:
                lengths[surface] = mean + (tokens - mean) / _SAMPLES
        if tokens > 1 and seconds >= 0.0:
            token_s = seconds / (tokens - 1)
            mean = token_s if pressure.token_s is None else pressure.token_s
            pressure.token_s = mean + (token_s - mean) / _SAMPLES

    def record_statistics(self, variant: str, replicas: Sequence[Mapping[str, Any]]) -> None:
        """Note what the replicas report. The one with the most free memory counts, because a request can go there."""
        shares = [share for share in map(_free_share, replicas) if share is not None]
        if shares:
            pressure = self._pressure(variant)
            pressure.memory_free, pressure.memory_at = max(shares), self._clock()

    # Signals

    def signals(
        self,
        variant: str,
        tenant: str = "",
        *,
        surface: str = "",
        deadline_s: float | None = None,  # time left
        max_tokens: int | None = None,
        budget_left: float | None = None,
    ) -> PressureSignals:
        """Return what a new request of a tenant would meet now."""
        pressure = self._pressure(variant)
        now = self._advance(pressure)
        if pressure.waiting and not pressure.first_tokens:
            # Before the first token of all, the longest wait so far is all that is known.
            queue_s = max(now - next(iter(pressure.waiting.values())).since, 0.0)
        else:
            queue_s = _predicted_wait_s(pressure, tenant) * math.exp(pressure.log_bias)
        slack_ms: float | None = None
        if deadline_s is not None:
            tokens = pressure.answer_tokens.get(surface, 0.0)
            if max_tokens is not None:
                tokens = min(tokens, max_tokens)
            slack_ms = (deadline_s - queue_s - tokens * (pressure.token_s or 0.0)) * 1e3
        return PressureSignals(
            queue_ms=queue_s * 1e3,
            memory_free=pressure.memory_free if now - pressure.memory_at <= self._stale_s else None,
            slack_ms=slack_ms,
            budget_left=budget_left,
        )

    def _advance(self, pressure: _VariantPressure) -> float:
        """Count the time since the last call if a request was waiting; return the current time."""
        now = self._clock()
        if pressure.waiting:
            pressure.busy_since_token_s += max(now - pressure.updated_at, 0.0)
        pressure.updated_at = now
        return now

    def _pressure(self, variant: str) -> _VariantPressure:
        pressure = self._variants.get(variant)
        if pressure is None:
            if len(self._variants) >= self._max_variants:
                raise ValueError(f"More than {self._max_variants} variants.")
            pressure = self._variants[variant] = _VariantPressure(updated_at=self._clock())
        return pressure


def _predicted_wait_s(pressure: _VariantPressure, tenant: str) -> float:
    """Predict the seconds until a new request of the tenant gets its first token."""
    if not pressure.first_tokens:
        return 0.0
    busy_s = pressure.busy_s + pressure.busy_since_token_s
    return pressure.counts.ahead_of(tenant) * busy_s / pressure.first_tokens


def _free_share(statistics: Mapping[str, Any]) -> float | None:
    blocks: dict[str, float] = statistics.get("blocks") or {}
    total = blocks.get("total", 0)
    return (blocks.get("free", 0) + blocks.get("cached", 0)) / total if total else None


async def poll_statistics(
    monitor: PressureMonitor,
    engines: Mapping[str, StatisticsSource],
    *,
    interval_s: float = 0.2,
    timeout_s: float = 0.5,  # per engine
) -> None:
    """Poll every engine until cancelled. An engine that does not answer counts as unknown and delays no other."""

    async def poll(variant: str, engine: StatisticsSource) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                monitor.record_statistics(variant, await engine.stats())
        except Exception:  # whatever fails, the engine's statistics grow stale
            return

    while True:
        await asyncio.gather(*(poll(variant, engine) for variant, engine in engines.items()))
        await asyncio.sleep(interval_s)
