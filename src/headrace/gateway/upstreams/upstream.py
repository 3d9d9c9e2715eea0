"""One upstream: its client, request slots, circuit breaker, retry budget, health check and counters.

upstream_request.py builds its requests; attempts.py and upstream_generation.py run them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from headrace.config.upstream_section import UpstreamConfig, features_of, health_path
from headrace.errors import HeadraceError
from headrace.gateway.circuit_breaker import CallPermit, CircuitBreaker
from headrace.gateway.upstreams import upstream_errors as faults
from headrace.gateway.upstreams.request_slots import RequestSlots, RetryBudget
from headrace.models.config_json import MAX_VOCAB
from headrace.models.formats.json_file import read_json
from headrace.models.model_folder import find_model
from headrace.models.text.tokenizer import Tokenizer

log: Final = logging.getLogger(__name__)

# What is counted of each upstream, since the start.
UpstreamCounter = Literal[
    "requests",
    "attempts",
    "retries",
    "retries_denied",  # that the budget or the time did not allow
    "failed",  # attempts
    "broken",  # answers that broke off after some of them was with the client
    "refused",  # requests that the breaker, the health check or the queue let not through
    "usage_counted",  # answers without a usage, which our tokenizer counted
    "usage_estimated",  # and without a tokenizer
    "usage_wrong",  # answers whose usage cannot be, and was not used
]
UPSTREAM_COUNTERS: Final[tuple[UpstreamCounter, ...]] = (
    "requests",
    "attempts",
    "retries",
    "retries_denied",
    "failed",
    "broken",
    "refused",
    "usage_counted",
    "usage_estimated",
    "usage_wrong",
)
_SMOOTHING: Final = 0.2  # weight of the newest time to the first output in the average


class Upstream:
    """All of it belongs to one event loop, from `start` on."""

    def __init__(
        self,
        name: str,
        config: UpstreamConfig,
        *,
        key: str | None = None,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`name`: of the variant, as clients know it. `chance`: from 0 to 1, for the waits between attempts."""
        from headrace.gateway.upstreams.upstream_client import (
            UpstreamClient,
        )  # what it needs takes long to import

        self.name = name
        self.config = config
        self.takes = features_of(config)
        self.tokenizer = tokenizer
        self.clock = clock
        self.chance = chance
        self.slots = RequestSlots(name, config.connections, config.queue)
        self.breaker = CircuitBreaker(config.breaker, clock=clock)
        self.retry_budget = RetryBudget(config.retries)
        self.client = UpstreamClient(name, config, key, clock)
        self.secret = key or name  # that tenants' salts are made with
        self.healthy: bool | None = None  # by the health check; None where nothing was asked yet
        self._counts: dict[UpstreamCounter, int] = dict.fromkeys(UPSTREAM_COUNTERS, 0)
        self._reasons: dict[str, int] = {}  # failed attempts
        self._ttft: float | None = None  # seconds, a moving average
        self._unwell = 0  # health checks that failed in a row
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, name: str, config: UpstreamConfig, environ: Mapping[str, str]) -> Upstream:
        """As configured, with its key and its tokenizer. HeadraceError where one of them is not there."""
        key = config.key
        if config.key_env is not None:
            key = environ.get(config.key_env)
            if not key:
                raise HeadraceError(
                    f"The environment variable {config.key_env} is not set. It must hold the key of '{name}'."
                )
        return cls(name, config, key=key, tokenizer=_tokenizer(config.tokenizer) if config.tokenizer else None)

    # Life

    async def start(self) -> None:
        """Begins the health checks; requests wait for none of them."""
        if health_path(self.config):
            self._watching = asyncio.create_task(self._watch())

    def abandon(self) -> None:
        """In the place of `close`, where it was never started."""

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.client.close()

    async def _watch(self) -> None:
        while True:
            await self.check()
            await asyncio.sleep(self.config.health.interval_s)

    async def check(self) -> None:
        """Asks once how it is."""
        config = self.config.health
        try:
            status = await self.client.get(health_path(self.config), self.clock() + config.timeout_s)
        except faults.UpstreamError:
            status = 0
        if 200 <= status < 300:
            if self.healthy is False:
                log.info("the upstream of %s is healthy again", self.name)
            self.healthy, self._unwell = True, 0
            return
        self._unwell += 1
        if self._unwell >= config.failures and self.healthy is not False:
            self.healthy = False
            log.warning("the upstream of %s is unhealthy", self.name)

    # Requests

    @property
    def available(self) -> bool:
        """Whether a request would be let through now; for routing."""
        return self.ready and not self.slots.full

    @property
    def ready(self) -> bool:
        """Whether anything is sent at the moment."""
        return self.healthy is not False and self.breaker.ready

    @property
    def idle(self) -> bool:
        """Whether there is room to spare, as far as it can be known here: half of the places at least are free."""
        return self.ready and self.slots.taken * 2 <= self.config.connections

    def refuse_where_shut(self) -> None:
        """UpstreamError where nothing is sent at the moment."""
        if self.healthy is False:
            raise faults.unavailable(self.name, "unhealthy", self.config.health.interval_s)
        if not self.breaker.ready:
            raise faults.unavailable(self.name, "open", max(1.0, self.breaker.retry_after()))

    def enter(self) -> CallPermit:
        """For one attempt. UpstreamError where nothing is sent at the moment."""
        self.refuse_where_shut()
        permit = self.breaker.enter()
        assert permit is not None
        self.count("attempts")
        return permit

    def worked(self, permit: CallPermit, seconds: float) -> None:
        """An attempt's first output came, after so long."""
        self._ttft = seconds if self._ttft is None else self._ttft + _SMOOTHING * (seconds - self._ttft)
        permit.succeeded(seconds)

    def failed(self, permit: CallPermit, error: faults.UpstreamError) -> None:
        """An attempt came to nothing, or its answer broke off."""
        self.count("failed")
        self._reasons[error.reason] = self._reasons.get(error.reason, 0) + 1
        if not error.fault:
            permit.succeeded()
            return
        opened = self.breaker.times_opened
        permit.failed()
        if self.breaker.times_opened > opened:
            log.warning("the circuit breaker of the upstream of %s opened: %s", self.name, error.reason)

    def count(self, what: UpstreamCounter) -> None:
        self._counts[what] += 1

    def state(self) -> dict[str, Any]:
        """For metrics, and for routing. Numbers but for `breaker`; the reasons are those of faults.Reason."""
        bad, attempts = self.breaker.counts()
        return {
            "available": self.available,
            "breaker": self.breaker.state,
            "healthy": self.healthy,
            "opened": self.breaker.times_opened,
            "window_bad": bad,
            "window_attempts": attempts,
            "running": self.slots.taken,
            "waiting": self.slots.waiting,
            "retry_budget": round(self.retry_budget.left, 3),
            "ttft_s": self._ttft,
            **self._counts,
            "reasons": dict(self._reasons),
        }


def _tokenizer(name: str) -> Tokenizer:
    """Of a folder that need have no weights: the model runs elsewhere, and may be of a family that ours cannot run."""
    folder = find_model(name)
    path = folder / "config.json"
    size = read_json(path).get("vocab_size") if path.exists() else None
    return Tokenizer.load(folder, size if isinstance(size, int) and 0 < size < MAX_VOCAB else MAX_VOCAB)
