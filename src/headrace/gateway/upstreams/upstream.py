"""One upstream: its client, request slots, circuit breaker, retry budget, health check and counters.

upstream_request.py builds its requests; attempts.py and upstream_generation.py run them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from msgspec.structs import replace

from headrace.config.managed_section import ManagedConfig
from headrace.config.upstream_section import UpstreamConfig, features_of, health_path
from headrace.errors import HeadraceError
from headrace.gateway.circuit_breaker import CallPermit, CircuitBreaker
from headrace.gateway.upstreams import upstream_errors
from headrace.gateway.upstreams.engine_commands import EngineLoad, command_of, environment_of, load_of
from headrace.gateway.upstreams.managed_engine import ManagedEngine
from headrace.gateway.upstreams.remote_capacity import MOST_BYTES, PATH, RemoteCapacity, parse_capacity
from headrace.gateway.upstreams.request_slots import RequestSlots, RetryBudget
from headrace.models.config_json import MAX_VOCAB
from headrace.models.formats.json_file import read_json
from headrace.models.model_folder import find_model, open_tokenizer
from headrace.models.text.tokenizer import Tokenizer
from headrace.surfaces import SURFACES
from headrace.tasks import end_tasks

log: Final = logging.getLogger(__name__)

# Counters of each upstream, since the start.
UpstreamCounter = Literal[
    "requests",
    "attempts",
    "retries",
    "retries_denied",  # by the retry budget or the time left
    "failed",  # attempts
    "broken",  # answers that broke off after the client had part of them
    "refused",  # requests rejected by the breaker, the health check or the queue
    "usage_counted",  # answers without usage, counted with our tokenizer
    "usage_estimated",  # the same without a tokenizer
    "usage_wrong",  # answers with an impossible usage, which was ignored
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
_MOST_METRICS: Final = 1024 * 1024  # bytes of a managed engine's metrics
_CAPACITY_S: Final = 5.0  # after which a reading of a server's capacity says nothing
_SMOOTHING: Final = 0.2  # weight of the newest time to the first output in the average


class Upstream:
    """The state of one upstream. Use it from one event loop after `start`."""

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
        """`name`: the variant's name for clients. `chance`: random number from 0 to 1, for jitter between attempts."""
        from headrace.gateway.upstreams.upstream_client import UpstreamClient  # slow to import

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
        self.secret = key or name  # derives the tenants' salts
        self.healthy: bool | None = None  # by the health check; None before the first one
        self._counts: dict[UpstreamCounter, int] = dict.fromkeys(UPSTREAM_COUNTERS, 0)
        self._reasons: dict[str, int] = {}  # failed attempts
        self._ttft: float | None = None  # seconds, a moving average
        self._failed_checks = 0  # in a row
        self._watching: list[asyncio.Task[None]] = []
        self._capacity: RemoteCapacity | None = None
        self.engine: ManagedEngine | None = None  # the server, if Headrace runs it

    @classmethod
    def of(cls, name: str, config: UpstreamConfig, environ: Mapping[str, str]) -> Upstream:
        """Build an upstream from its configuration. Raises HeadraceError if its key or tokenizer is missing."""
        key = config.key
        if config.key_env is not None:
            key = environ.get(config.key_env)
            if not key:
                raise HeadraceError(
                    f"The environment variable {config.key_env} is not set. It must hold the key of '{name}'."
                )
        tokenizer = _tokenizer(config.tokenizer) if config.tokenizer else None
        if config.managed is None:
            return cls(name, config, key=key, tokenizer=tokenizer)
        return cls._managed(name, config, config.managed, environ, tokenizer)

    @classmethod
    def _managed(
        cls,
        name: str,
        config: UpstreamConfig,
        managed: ManagedConfig,
        environ: Mapping[str, str],
        tokenizer: Tokenizer | None,
    ) -> Upstream:
        port, key = managed.port or free_port(), secrets.token_urlsafe(32)
        served_name = config.model or name
        config = replace(config, url=f"http://127.0.0.1:{port}/v1", model=served_name)
        upstream = cls(name, config, key=key, tokenizer=tokenizer)
        command = command_of(
            config.kind,
            managed,
            served_name=served_name,
            port=port,
            key=key,
            context=config.context,
            priority=bool(features_of(config).priority),
        )
        upstream.engine = ManagedEngine(
            name,
            managed,
            command,
            environment_of(config.kind, managed, environ, key=key),
            check_s=config.health.interval_s,
            failures=config.health.failures,
            changed=upstream.set_healthy,
        )
        upstream.healthy = False
        return upstream

    # Lifecycle

    async def start(self) -> None:
        """Start the health checks. Requests do not wait for them, but for a managed engine."""
        if self.engine is not None:
            await self.engine.start(self)
        elif health_path(self.config):
            self._watching.append(asyncio.create_task(self._watch()))
        if self.config.kind == "headrace" and self.config.capacity_s:
            self._watching.append(asyncio.create_task(self._watch_capacity()))

    def abandon(self) -> None:
        """Do what `close` does for an upstream that was never started."""

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.close()
        await end_tasks(self._watching)
        await self.client.close()

    async def _watch(self) -> None:
        while True:
            await self.check()
            await asyncio.sleep(self.config.health.interval_s)

    async def check(self) -> None:
        """Run one health check."""
        config = self.config.health
        try:
            status = await self.client.get(health_path(self.config), self.clock() + config.timeout_s)
        except upstream_errors.UpstreamError:
            status = 0
        if 200 <= status < 300:
            if self.healthy is False:
                log.info("the upstream of %s is healthy again", self.name)
            self.healthy, self._failed_checks = True, 0
            return
        self._failed_checks += 1
        if self._failed_checks >= config.failures and self.healthy is not False:
            self.healthy = False
            log.warning("the upstream of %s is unhealthy", self.name)

    async def _watch_capacity(self) -> None:
        while True:
            await self.read_capacity()
            await asyncio.sleep(self.config.capacity_s)

    async def read_capacity(self) -> None:
        """Ask a Headrace server what it could take on. Without an answer, the last reading grows stale."""
        began = self.clock()
        try:
            status, body = await self.client.fetch(PATH, began + self.config.health.timeout_s, MOST_BYTES)
        except upstream_errors.UpstreamError:
            return
        if self._capacity is not None and self._capacity.at > began:
            return  # a later reading came sooner
        found = None
        if status == 200:
            found = parse_capacity(body, self.config.model or self.name, frozenset(SURFACES), began)
        if (was := self.capacity is not None and self.capacity.sheds) != (found is not None and found.sheds):
            log.info("the upstream of %s %s new requests", self.name, "takes" if was else "turns away")
        self._capacity = found

    @property
    def capacity(self) -> RemoteCapacity | None:
        """What the server could take on, if it is a Headrace server that answered lately."""
        known = self._capacity
        return known if known is not None and self.clock() - known.at <= _CAPACITY_S else None

    def set_healthy(self, healthy: bool) -> None:
        self.healthy = healthy

    async def probe(self) -> bool:
        """Return whether a managed engine answers its health check in time."""
        try:
            status = await self.client.get(health_path(self.config), self.clock() + self.config.health.timeout_s)
        except upstream_errors.UpstreamError:
            return False
        return 200 <= status < 300

    async def read_load(self) -> EngineLoad:
        """Read a managed engine's metrics; what cannot be read is unknown."""
        try:
            due = self.clock() + self.config.health.timeout_s
            status, body = await self.client.fetch("/metrics", due, _MOST_METRICS)
        except upstream_errors.UpstreamError:
            return EngineLoad()
        return load_of(self.config.kind, body.decode("utf-8", "replace")) if status == 200 else EngineLoad()

    # Requests

    @property
    def available(self) -> bool:
        """True if a request would be admitted now; for routing."""
        return self.why_not() is None and not self.slots.full and not (self.engine is not None and self.engine.crowded)

    def why_not(self) -> str | None:
        """Return why new requests should go elsewhere; None if they may come."""
        if not self.ready:
            return "it does not answer"
        capacity = self.capacity
        return f"it is {capacity.status}" if capacity is not None and capacity.sheds else None

    @property
    def ready(self) -> bool:
        """True if the health check and the breaker allow requests."""
        return self.healthy is not False and self.breaker.ready

    @property
    def idle(self) -> bool:
        """True if at least half of the slots are free."""
        return self.ready and self.slots.taken * 2 <= self.config.connections

    def check_ready(self) -> None:
        """Raise UpstreamError if the health check or the breaker allows no requests."""
        if self.healthy is False:
            raise upstream_errors.unavailable(self.name, "unhealthy", self.config.health.interval_s)
        if not self.breaker.ready:
            raise upstream_errors.unavailable(self.name, "open", max(1.0, self.breaker.retry_after()))

    def enter(self) -> CallPermit:
        """Return a permit for one attempt. Raises UpstreamError like `check_ready`."""
        self.check_ready()
        permit = self.breaker.enter()
        assert permit is not None
        self.count("attempts")
        return permit

    def worked(self, permit: CallPermit, seconds: float) -> None:
        """Record the time to an attempt's first output."""
        self._ttft = seconds if self._ttft is None else self._ttft + _SMOOTHING * (seconds - self._ttft)
        permit.succeeded(seconds)

    def failed(self, permit: CallPermit, error: upstream_errors.UpstreamError) -> None:
        """Record a failed attempt or a broken answer."""
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
        """Return the state for metrics and routing. `reasons` counts failures by FailureReason."""
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
            **({} if self.engine is None else {"engine": self.engine.state()}),
            **({} if self._capacity is None else {"capacity": self._capacity_gauges()}),
        }

    def _capacity_gauges(self) -> dict[str, Any]:
        capacity = self.capacity
        return {"known": capacity is not None, **({} if capacity is None else capacity.gauges())}


def free_port() -> int:
    """Return a port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer from a folder or a GGUF file. It needs no weights, and its family need not be supported."""
    model = find_model(name)
    path = model / "config.json"
    size = read_json(path).get("vocab_size") if path.exists() else None
    return open_tokenizer(model, size if isinstance(size, int) and 0 < size < MAX_VOCAB else MAX_VOCAB)
