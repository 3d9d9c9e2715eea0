"""CapacityMonitor: what each variant could take on now, for clients, routers on other hosts and readiness.

Asks the engines once a second; what is older than a few seconds counts as unknown. Decides only whether the server is
overloaded, so that its readiness turns requests away before its queue does.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from headrace.gateway.serving.fleet import Fleet
from headrace.gateway.serving.served_variant import ServedVariant
from headrace.gateway.upstreams.upstream import Upstream

_EVERY_S: Final = 1.0
_STALE_S: Final = 5.0
_TIMEOUT_S: Final = 0.5  # of one engine
_RECOVERED: Final = 0.7  # share of the threshold below which an overloaded server is ready again


class VariantCapacity(msgspec.Struct, frozen=True):
    """What is unknown is None or absent."""

    ttft_s: Mapping[str, float] = {}  # predicted for a new request, by surface
    prompt_tokens_per_s: float | None = None
    free_output_tokens_per_s: float | None = None
    free_kv_tokens: int | None = None
    running: int = 0
    waiting: int = 0
    at: float = 0.0  # when it was measured

    def as_json(self) -> dict[str, Any]:
        return {
            "ttft_ms": {surface: round(seconds * 1e3, 1) for surface, seconds in self.ttft_s.items()},
            "prompt_tokens_per_s": _rounded(self.prompt_tokens_per_s),
            "free_output_tokens_per_s": _rounded(self.free_output_tokens_per_s),
            "free_kv_tokens": self.free_kv_tokens,
            "running": self.running,
            "waiting": self.waiting,
        }


_UNKNOWN: Final = VariantCapacity()


class CapacityMonitor:
    """All of it belongs to one event loop."""

    def __init__(
        self, fleet: Fleet, *, shed_ttft_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`shed_ttft_s`: predicted seconds to the first token beyond which the server is overloaded; None: never.
        The engines that write text decide, or the upstreams if there is none."""
        self._fleet = fleet
        self._shed_s = shed_ttft_s
        self._clock = clock
        self._known: dict[str, VariantCapacity] = {}
        self.overloaded = False

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            await self.measure()
            await asyncio.sleep(_EVERY_S)

    async def measure(self) -> None:
        await asyncio.gather(*(self._ask(name, served) for name, served in self._fleet.served.items()))
        self._judge()

    async def _ask(self, name: str, served: ServedVariant) -> None:
        if served.upstream is not None:
            self._known[name] = _of_upstream(served.upstream, self._clock())
            return
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                statistics = await served.engine.stats()
        except Exception:  # whatever fails, the known capacity grows stale
            return
        self._known[name] = _of_replicas(statistics, self._clock())

    def _judge(self) -> None:
        if self._shed_s is None:
            return
        threshold = self._shed_s * (_RECOVERED if self.overloaded else 1.0)
        # A model that writes no text is soon done, and says nothing of those that do.
        served = self._fleet.served
        writers = [name for name, each in served.items() if each.kind == "decoder"] or list(served)
        if engines := [name for name in writers if served[name].upstream is None]:
            waits = [min(known.ttft_s.values()) for name in engines if (known := self.of(name)).ttft_s]
        else:
            waits = self._upstream_waits(writers)
        self.overloaded = bool(waits) and min(waits) > threshold

    def _upstream_waits(self, names: Iterable[str]) -> list[float]:
        """Return the predicted seconds at each upstream: 0 at one that takes requests and predicts nothing. Empty if
        all are down, which is no matter of load."""
        served = self._fleet.served
        upstreams = [(name, upstream) for name in names if (upstream := served[name].upstream) is not None]
        if not any(upstream.ready for _, upstream in upstreams):
            return []
        return [
            min(self.of(name).ttft_s.values(), default=0.0) if upstream.available else math.inf
            for name, upstream in upstreams
        ]

    def of(self, name: str) -> VariantCapacity:
        known = self._known.get(name, _UNKNOWN)
        return known if self._clock() - known.at <= _STALE_S else _UNKNOWN

    def headers(self, name: str, surface: str) -> dict[str, str]:
        """Return the headers of a response from a variant; none if nothing is known."""
        known = self.of(name)
        found: dict[str, str] = {}
        if (seconds := known.ttft_s.get(surface)) is not None:
            found["x-headrace-capacity-ttft-ms"] = f"{seconds * 1e3:.0f}"
        if known.free_output_tokens_per_s is not None:
            found["x-headrace-capacity-tokens-per-s"] = f"{known.free_output_tokens_per_s:.0f}"
        return found

    def as_json(self, served: Iterable[ServedVariant]) -> list[dict[str, Any]]:
        return [
            {
                "model": each.name,
                "served_by": "engine" if each.upstream is None else "upstream",
                "available": each.responsive if each.upstream is None else each.upstream.available,
                **self.of(each.variant).as_json(),  # an adapter has that of its variant
            }
            for each in served
        ]


def _of_replicas(statistics: Sequence[Mapping[str, Any]], now: float) -> VariantCapacity:
    """Add up replicas; a request goes to the one that would answer first."""
    ttft: dict[str, float] = {}
    prompt = output = 0.0
    free = running = waiting = 0
    for each in statistics:
        capacity, blocks, scheduler = each.get("capacity"), each.get("blocks", {}), each.get("scheduler", {})
        running += scheduler.get("running", 0)
        waiting += scheduler.get("waiting", 0)
        free += (blocks.get("free", 0) + blocks.get("cached", 0)) * blocks.get("block_tokens", 0)
        if capacity is not None:
            prompt += capacity["prompt_tokens_per_s"]
            output += capacity["free_output_tokens_per_s"]
            for surface, seconds in capacity["ttft"].items():
                ttft[surface] = min(ttft.get(surface, seconds), seconds)
    if not statistics:
        return VariantCapacity(at=now)
    if not ttft:
        return VariantCapacity(free_kv_tokens=free, running=running, waiting=waiting, at=now)
    return VariantCapacity(ttft, prompt, output, free, running, waiting, now)


def _of_upstream(upstream: Upstream, now: float) -> VariantCapacity:
    state, said = upstream.state(), upstream.capacity
    engine: Mapping[str, Any] = state.get("engine") or {}
    running = engine.get("running")
    own = VariantCapacity(
        running=state["running"] if running is None else running,
        waiting=state["waiting"] + (engine.get("waiting") or 0),
        at=now,
    )
    if said is None:
        return own
    return replace(
        own,
        ttft_s=said.ttft_s,
        prompt_tokens_per_s=said.prompt_tokens_per_s,
        free_output_tokens_per_s=said.free_output_tokens_per_s,
        free_kv_tokens=said.free_kv_tokens,
        at=said.at,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
