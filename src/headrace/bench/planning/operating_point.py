"""Finds where one replica settles under a load: sequences at once, TTFT, time between tokens, memory; or what breaks.

Every step computes a token for each stream and a chunk of waiting prompts. A prompt waits for those before it, as in a
queue with Poisson arrivals and constant service. `simulate` runs the real scheduler over the same step times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from headrace.bench.objectives import Objectives
from headrace.bench.planning.step_costs import StepCost
from headrace.bench.traffic_profile import TrafficProfile

GATEWAY_S: Final = 0.010  # network, tokenising and the way through the gateway
_STABLE: Final = 0.92  # most of the time that prompts may take
_ROUNDS: Final = 200
_LEAST_CHUNK: Final = 16
_TAILS: Final = {"p50": 0.5, "p90": 0.1, "p95": 0.05, "p99": 0.01}


class ReplicaLimits(msgspec.Struct, frozen=True, kw_only=True):
    kv_tokens: float
    max_sequences: int
    max_rows: int


class OperatingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Of one replica. Times in seconds."""

    rate: float  # requests per second
    batch: float  # sequences that decode at once
    latencies: dict[str, float]  # ttft_p95, itl_p50, ...
    prompts: float  # share of the time in steps with prompts
    kv_tokens: float
    kv_share: float  # of the KV memory
    breaks: str = ""  # what the load exceeds; empty: it is served

    @property
    def ok(self) -> bool:
        return not self.breaks


def operating_point(
    cost: StepCost, traffic: TrafficProfile, rate: float, limits: ReplicaLimits, objectives: Objectives
) -> OperatingPoint:
    fresh = max(1.0, traffic.prompt * (1.0 - traffic.reused))
    context = traffic.prompt + traffic.answer / 2.0
    held = traffic.prompt + traffic.answer
    most = min(limits.max_sequences, limits.kv_tokens / held)
    bound = min((value for name, value in objectives.items() if name.startswith(("itl", "tpot"))), default=math.inf)
    batch, itl, share, chunk = 1e-3, 0.0, 0.0, _LEAST_CHUNK
    alone = mixed = 0.0
    for _ in range(_ROUNDS):
        alone = cost.seconds(max(batch, 1.0), context)
        chunk = _chunk(cost, max(batch, 1.0), context, fresh, limits.max_rows, bound)
        mixed = cost.seconds(max(batch, 1.0), context, chunk, round(traffic.prompt - fresh))
        share = rate * mixed * fresh / chunk  # prompts that are shorter than a chunk share a step
        if share >= _STABLE or batch > most:
            break
        itl = share * mixed + (1.0 - share) * alone
        wanted = rate * traffic.answer * itl
        if abs(wanted - batch) <= 1e-3 * wanted:
            batch = wanted
            break
        batch = wanted
    breaks = ""
    if share >= _STABLE:
        breaks = "compute: prompts take all of the time"
    elif limits.kv_tokens < held:
        breaks = "KV memory: one request does not fit"
    elif batch > most:
        breaks = "KV memory" if limits.kv_tokens / held <= limits.max_sequences else "sequences at once"
    service = math.ceil(fresh / chunk) * mixed
    longest = math.ceil(max(1.0, traffic.prompt_p95 - traffic.prompt * traffic.reused) / chunk) * mixed
    latencies: dict[str, float] = {}
    for point, tail in _TAILS.items():
        wait = _wait(min(share, 0.999), service, tail)
        own = longest if point in {"p95", "p99"} else service
        latencies[f"ttft_{point}"] = GATEWAY_S + wait + own + alone / 2.0
        # A gap is a step with prompts as often as steps have prompts.
        steps = share / mixed / (share / mixed + (1.0 - share) / alone) if mixed and alone else 0.0
        latencies[f"itl_{point}"] = mixed if steps > tail else alone
        latencies[f"tpot_{point}"] = itl
        tokens = traffic.answer_p95 if point in {"p95", "p99"} else traffic.answer
        latencies[f"e2el_{point}"] = latencies[f"ttft_{point}"] + tokens * itl
    if not breaks:
        late = [name for name, value in objectives.items() if latencies[name] > value]
        breaks = f"{late[0]} of {latencies[late[0]]:.3g} s" if late else ""
    return OperatingPoint(
        rate=rate,
        batch=batch,
        latencies=latencies,
        prompts=min(share, 1.0),
        kv_tokens=batch * held,
        kv_share=batch * held / limits.kv_tokens if limits.kv_tokens else math.inf,
        breaks=breaks,
    )


def most_load(
    cost: StepCost, traffic: TrafficProfile, limits: ReplicaLimits, objectives: Mapping[str, float]
) -> OperatingPoint:
    """Return the highest load that one replica serves, by doubling and halving; its `ok` is False if there is none."""
    low = operating_point(cost, traffic, 1e-4, limits, objectives)
    if not low.ok:
        return low
    high = 1e-3
    while (found := operating_point(cost, traffic, high, limits, objectives)).ok and high < 1e6:
        low, high = found, 2.0 * high
    for _ in range(20):
        middle = (low.rate + high) / 2.0
        found = operating_point(cost, traffic, middle, limits, objectives)
        if found.ok:
            low = found
        else:
            high = middle
    return low


def _chunk(cost: StepCost, batch: float, context: float, fresh: float, most: int, bound: float) -> int:
    """Return the rows of a prompt that a step takes: as many as the objective between tokens leaves time for."""
    chunk = max(1, min(most, math.ceil(fresh)))
    while chunk > _LEAST_CHUNK and cost.seconds(batch, context, chunk) > bound:
        chunk //= 2
    return max(chunk, min(_LEAST_CHUNK, most))


def _wait(load: float, service: float, tail: float) -> float:
    """Return the wait that a share `tail` of arrivals exceeds (M/D/1, by the exponential tail of heavy traffic)."""
    if load <= tail:
        return 0.0
    return service * math.log(load / tail) / (2.0 * (1.0 - load))
