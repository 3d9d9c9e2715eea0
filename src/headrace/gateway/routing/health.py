"""Tracks whether variants are available: a circuit breaker that learns from calls, and active health checks.

Owns the breakers and checks of all variants by name. Time is a parameter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from headrace.config.breaker_section import BreakerConfig
from headrace.config.routing_section import VariantHealthConfig
from headrace.gateway.circuit_breaker import BreakerState, CircuitBreaker
from headrace.gateway.routing.composite_answerer import Clock


class HealthCheck:
    """The result of a variant's health checks. A variant starts as healthy."""

    def __init__(self, config: VariantHealthConfig) -> None:
        self._config = config
        self._contradicting = 0  # consecutive results against the current state
        self.healthy = True
        self.reason = ""

    def passed(self) -> None:
        self._record(healthy=True)

    def failed(self, reason: str) -> None:
        self.reason = reason
        self._record(healthy=False)

    def _record(self, *, healthy: bool) -> None:
        if healthy == self.healthy:
            self._contradicting = 0
            return
        self._contradicting += 1
        if self._contradicting >= (self._config.rise if healthy else self._config.fall):
            self.healthy, self._contradicting = healthy, 0


Probe = Callable[[], Awaitable[None]]  # raises if the variant does not answer


class VariantHealth:
    """The breakers and checks of all variants, which the configuration names and so bounds."""

    def __init__(
        self,
        breaker: BreakerConfig | None = None,
        check: VariantHealthConfig | None = None,
        *,
        clock: Clock = time.monotonic,
        changed: Callable[[str, BreakerState], None] | None = None,
    ) -> None:
        """`changed` is called with every new state of a variant's breaker."""
        self._breaker = breaker or BreakerConfig()
        self._check = check or VariantHealthConfig()
        self._clock = clock
        self._changed = changed
        self._breakers: dict[str, CircuitBreaker] = {}
        self._checks: dict[str, HealthCheck] = {}

    def breaker(self, variant: str) -> CircuitBreaker:
        breaker = self._breakers.get(variant)
        if breaker is None:
            changed = None if self._changed is None else partial(self._changed, variant)
            breaker = self._breakers[variant] = CircuitBreaker(self._breaker, clock=self._clock, changed=changed)
        return breaker

    def check(self, variant: str) -> HealthCheck:
        return self._checks.setdefault(variant, HealthCheck(self._check))

    def why_not(self, variant: str) -> str | None:
        """Return why a variant is unavailable, or None."""
        check = self._checks.get(variant)
        if check is not None and not check.healthy:
            return f"it does not answer: {check.reason}"
        breaker = self._breakers.get(variant)
        return None if breaker is None else breaker.why_not()

    async def watch(self, probes: Mapping[str, Probe]) -> None:
        """Probe every variant periodically until cancelled."""
        while True:
            await asyncio.gather(*(self.probe(variant, probe) for variant, probe in probes.items()))
            await asyncio.sleep(self._check.every_s)

    async def probe(self, variant: str, probe: Probe) -> None:
        """Probe a variant once."""
        check = self.check(variant)
        try:
            async with asyncio.timeout(self._check.within_s):
                await probe()
        except TimeoutError:
            check.failed(f"no answer within {self._check.within_s:g} s")
        except Exception as error:
            check.failed(str(error) or type(error).__name__)
        else:
            check.passed()
