"""Autoscaler: looks at the variants that may scale once a second, and starts or stops replicas on this machine.

`scale_policy` decides how many; the fleet starts and stops them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog

from headrace.config import Config
from headrace.config.worker_section import AutoscaleConfig
from headrace.errors import HeadraceError
from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.serving.scale_policy import ScaleLoad, ScalePolicy, ScaleRules

log = structlog.stdlib.get_logger("headrace.autoscaler")

_EVERY_S: Final = 1.0
_TIMEOUT_S: Final = 0.5  # of one engine
_AFTER_FAILURE_S: Final = 30.0


class Autoscaler:
    """All of it belongs to one event loop."""

    def __init__(
        self, fleet: Fleet, rules: Mapping[str, ScaleRules], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`rules` are by the variant's full name."""
        self._fleet = fleet
        self._policies = {name: ScalePolicy(each) for name, each in rules.items()}
        self._clock = clock

    @classmethod
    def from_config(cls, config: Config, fleet: Fleet) -> Autoscaler:
        rules = {
            full: rules_of(model.autoscale)
            for name, model in config.models.items()
            if model.autoscale is not None
            for full in fleet.scalable(name)
        }
        return cls(fleet, rules)

    async def run(self) -> None:
        """Scale until cancelled."""
        await asyncio.gather(*map(self._keep, self._policies))

    async def _keep(self, name: str) -> None:
        while True:
            try:
                await self.turn(name)
                pause = _EVERY_S
            except Exception as error:  # whatever fails, the variant goes on with the replicas that it has
                trace = None if isinstance(error, HeadraceError) else error
                log.error("scaling failed", model=name, reason=str(error), exc_info=trace)
                pause = _AFTER_FAILURE_S
            await self._fleet.until_starved(name, pause)

    async def turn(self, name: str) -> None:
        """Look at one variant, and start or stop what its policy says. HeadraceError if a replica does not start."""
        load = await self._load(name)
        wanted = self._policies[name].decide(self._clock(), load)
        if wanted != load.replicas:
            log.info("scaling", model=name, replicas=load.replicas, wanted=wanted, wait_s=round(load.wait_s, 3))
            await self._fleet.scale(name, wanted)

    async def _load(self, name: str) -> ScaleLoad:
        statistics: list[dict[str, Any]] = []
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                statistics = await self._fleet.served[name].stats()
        except (TimeoutError, HeadraceError):
            pass  # without figures nothing is late and nothing is calm for long
        known: list[Mapping[str, float]] = [each["capacity"]["ttft"] for each in statistics if each.get("capacity")]
        waits = [min(ttft.values()) for ttft in known if ttft]
        scale = self._fleet.scale_of(name)
        return ScaleLoad(
            replicas=scale.replicas, ready=scale.ready, requests=scale.requests, wait_s=min(waits, default=0.0)
        )


def rules_of(config: AutoscaleConfig) -> ScaleRules:
    return ScaleRules.within(
        price=config.replica_price,
        budget=config.most_price,
        least=config.least,
        most=config.most,
        wait_s=config.ttft_ms / 1e3,
        calm=config.calm,
        up_s=config.up_s,
        down_s=config.down_s,
        idle_stop_s=config.idle_stop_s if config.least == 0 else None,
    )
