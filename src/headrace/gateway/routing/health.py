"""Whether a variant is well: its breaker, which learns from its calls, and checks that ask it.

Owns Check and Health (breakers and checks of every variant, by name). Time is a parameter.
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
    """Whether a variant answers when it is asked if it is there. At first it counts as there."""

    def __init__(self, config: VariantHealthConfig) -> None:
        self._config = config
        self._in_a_row = 0  # answers that speak against what it counts as
        self.well = True
        self.why = ""

    def passed(self) -> None:
        self._hear(well=True)

    def failed(self, why: str) -> None:
        self.why = why
        self._hear(well=False)

    def _hear(self, *, well: bool) -> None:
        if well == self.well:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row >= (self._config.rise if well else self._config.fall):
            self.well, self._in_a_row = well, 0


Probe = Callable[[], Awaitable[None]]  # raises where the variant is not there


class VariantHealth:
    """The breakers and checks of all variants. Their names are the configuration's, so there are no more than those."""

    def __init__(
        self,
        breaker: BreakerConfig | None = None,
        check: VariantHealthConfig | None = None,
        *,
        clock: Clock = time.monotonic,
        changed: Callable[[str, BreakerState], None] | None = None,
    ) -> None:
        """`changed` hears of every new state of a variant's breaker."""
        self._breaker = breaker or BreakerConfig()
        self._check = check or VariantHealthConfig()
        self._clock = clock
        self._changed = changed
        self._breakers: dict[str, CircuitBreaker] = {}
        self._checks: dict[str, HealthCheck] = {}

    def breaker(self, variant: str) -> CircuitBreaker:
        found = self._breakers.get(variant)
        if found is None:
            changed = None if self._changed is None else partial(self._changed, variant)
            found = self._breakers[variant] = CircuitBreaker(self._breaker, clock=self._clock, changed=changed)
        return found

    def check(self, variant: str) -> HealthCheck:
        return self._checks.setdefault(variant, HealthCheck(self._check))

    def why_not(self, variant: str) -> str | None:
        """Why a variant is to be left alone now; None where it is well."""
        check = self._checks.get(variant)
        if check is not None and not check.well:
            return f"it does not answer: {check.why}"
        breaker = self._breakers.get(variant)
        return None if breaker is None else breaker.why_not()

    async def watch(self, probes: Mapping[str, Probe]) -> None:
        """Asks every variant again and again, until it is cancelled."""
        while True:
            await asyncio.gather(*(self.ask(variant, probe) for variant, probe in probes.items()))
            await asyncio.sleep(self._check.every_s)

    async def ask(self, variant: str, probe: Probe) -> None:
        """Once."""
        check = self.check(variant)
        try:
            async with asyncio.timeout(self._check.within_s):
                await probe()
        except TimeoutError:
            check.failed(f"nothing came within {self._check.within_s:g} s")
        except Exception as error:
            check.failed(str(error) or type(error).__name__)
        else:
            check.passed()
