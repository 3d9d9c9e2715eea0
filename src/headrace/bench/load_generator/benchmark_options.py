"""What a benchmark is to do: where, with what load, for how long, by which measures. Checked before anything is sent.

Owns Options, and the making of a workload from its options. Whatever is wrong is a RequestError that names the option.
Knows nothing of how any of it is done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from msgspec.structs import replace

from headrace.bench.load_generator.arrivals import ArrivalProcess
from headrace.bench.load_generator.trace_reader import TraceFormat
from headrace.bench.load_generator.workloads import (
    WORKLOADS,
    PrefixKind,
    SharedPrefixes,
    UniformLengths,
    Workload,
    scaled,
)
from headrace.bench.results.request_stats import OBJECTIVES
from headrace.errors import RequestError

WorkloadMix = tuple[tuple[Workload, float], ...]  # workloads and their shares
Endpoint = Literal["chat", "completions"]
MOST_REQUESTS: Final = 200_000  # of a run
MOST_STAGES: Final = 64
MOST_INPUT: Final = 1_000_000  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTenant:
    name: str = ""
    key: str | None = field(default=None, repr=False)
    surface: str = ""
    mix: WorkloadMix = ()
    rate: float | None = None  # of an open loop
    concurrency: int | None = None  # of a closed one
    arrivals: ArrivalProcess = "poisson"
    burstiness: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    low: float  # requests per second
    high: float = math.inf
    factor: float = 2.0
    refine: int = 2
    good_share: float = 0.9
    latency: float = 5.0
    stages: int = 12  # at most


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkOptions:
    url: str = "http://localhost:8000"
    model: str | None = None  # None: the first that the server names
    endpoint: Endpoint = "chat"
    stream: bool = True
    temperature: float | None = 0.0
    ignore_eos: bool = True
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])  # further fields of each request
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    insecure: bool = False  # believe any certificate
    timeout: float = 600.0  # seconds for a whole answer
    connect_timeout: float = 10.0
    tenants: tuple[LoadTenant, ...] = (LoadTenant(),)
    concurrency: tuple[int, ...] = ()  # of closed loops, one stage each; with a rate the most at once
    rates: tuple[float, ...] = ()  # of open loops, one stage each
    ramp: tuple[float, float] | None = None
    sweep: SweepOptions | None = None
    trace: Path | None = None
    trace_format: TraceFormat = "auto"
    speed: float = 1.0  # of a trace
    requests: int | None = None  # of a stage
    seconds: float | None = None
    drain: float = 60.0  # seconds for what is under way when a stage's time is up
    warmup: int = 4
    running: int = 4096  # requests at once, at most
    most_lag: float = 10.0  # milliseconds of p99 lag that nobody is warned of
    seed: int = 0
    nonce: str | None = None  # None: one of this run's own
    tokenizer: str | None = None
    mismatch: Literal["fail", "warn", "off"] = "fail"  # where our count of output tokens is another than the server's
    objectives: Mapping[str, float] = field(default_factory=dict[str, float])  # milliseconds
    buckets: tuple[int, ...] = (128, 512, 2048, 8192)
    texts: bool = False  # keep the answers' texts
    label: str = ""

    @property
    def timed(self) -> bool:
        """Requests go by the trace's own times."""
        return self.trace is not None and not self.rates and not self.concurrency and self.ramp is None

    def check(self) -> None:
        self._check_load()
        for name, value, least in (
            ("timeout", self.timeout, 1e-3),
            ("connect-timeout", self.connect_timeout, 1e-3),
            ("speed", self.speed, 1e-6),
            ("requests", 1 if self.requests is None else self.requests, 1),
            ("seconds", 1.0 if self.seconds is None else self.seconds, 1e-3),
            ("drain", self.drain, 0.0),
            ("warmup", self.warmup, 0),
            ("most-running", self.running, 1),
            ("most-lag", self.most_lag, 0.0),
        ):
            bounded(name, value, least)
        if self.requests is not None and self.requests > MOST_REQUESTS:
            raise RequestError(f"requests must be at most {MOST_REQUESTS:,}", parameter="requests")
        if list(self.buckets) != sorted(set(self.buckets)) or (self.buckets and self.buckets[0] < 1):
            raise RequestError("buckets must be numbers of tokens that rise", parameter="buckets")
        for name, value in self.objectives.items():
            if name not in OBJECTIVES:
                raise RequestError(f"an objective is of {', '.join(OBJECTIVES)}, not '{name}'", parameter="goodput")
            bounded(f"the objective of {name}", value, 1e-6)
            if name != "e2el" and not self.stream:
                raise RequestError(f"without a stream there is no {name} to have an objective of", parameter="goodput")

    def _check_load(self) -> None:
        kinds = [
            bool(self.concurrency) and not self.rates,
            bool(self.rates),
            self.ramp is not None,
            self.sweep is not None,
        ]
        if sum(kinds) > 1:
            raise RequestError("give one of --concurrency, --rate, --ramp and --sweep", parameter="rate")
        if len(self.rates) > 1 and len(self.concurrency) > 1:
            raise RequestError("with several rates there is one concurrency, the most at once", parameter="concurrency")
        if len(self.rates) + len(self.concurrency) > MOST_STAGES:
            raise RequestError(f"there are at most {MOST_STAGES} stages", parameter="rate")
        for users in self.concurrency:
            bounded("concurrency", users, 1)
        for rate in self.rates:
            if not rate > 0.0:
                raise RequestError(f"rate must be above 0, not {rate}", parameter="rate")
            if rate == math.inf and self.requests is None and self.trace is None:
                raise RequestError("an infinite rate needs --requests", parameter="rate")
        if self.ramp is not None:
            bounded("ramp", self.ramp[0], 0.0)
            bounded("ramp", self.ramp[1], 1e-6)
            if self.seconds is None:
                raise RequestError("a ramp needs --seconds", parameter="seconds")
        if self.sweep is not None:
            bounded("sweep", self.sweep.low, 1e-6)
            if self.sweep.high < self.sweep.low or self.sweep.factor <= 1.0:
                raise RequestError("a sweep goes up", parameter="sweep")
            if not 0.0 < self.sweep.good_share <= 1.0 or not self.sweep.latency > 1.0:
                raise RequestError("a sweep's share is 0 to 1, and its latency above 1", parameter="sweep")
        if self.trace is not None and (self.sweep or len(self.rates) > 1 or len(self.concurrency) > 1):
            raise RequestError("a trace is one stage: what was sent once would be known in the next", parameter="trace")
        own = [tenant for tenant in self.tenants if tenant.rate is not None or tenant.concurrency is not None]
        if own and len(own) < len(self.tenants):
            raise RequestError("either every tenant has a rate or a concurrency, or none has", parameter="tenants")
        if own and (self.rates or self.concurrency or self.ramp or self.sweep or self.trace):
            raise RequestError("the tenants have loads of their own, or all have one together", parameter="tenants")


def bounded(name: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        raise RequestError(f"{name} must be at least {least:g}, not {value}", parameter=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """The options that a workload is made of; None is the workload's own."""

    workload: str = "fixed"  # NAME, or NAME=SHARE,NAME=SHARE
    input_tokens: int | None = None
    output_tokens: int | None = None
    spread: float = 0.0  # of fixed lengths: 0.2 is a fifth up or down
    scale: float = 1.0  # of the lengths of a workload with a name
    prefixes: int | None = None
    prefix_tokens: int | None = None
    prefix_kind: PrefixKind | None = None
    prefix_share: float | None = None
    turns: str | None = None  # 4, or 2-6
    think: float | None = None


def mix_of(asked: WorkloadOptions) -> WorkloadMix:
    """RequestError for what does not go together."""
    for name, value, least, most in (
        ("input-tokens", asked.input_tokens, 1, MOST_INPUT),
        ("output-tokens", asked.output_tokens, 1, MOST_INPUT),
        ("spread", asked.spread, 0.0, 1.0),
        ("scale", asked.scale, 1e-3, 1e3),
        ("prefixes", asked.prefixes, 0, MOST_INPUT),
        ("prefix-tokens", asked.prefix_tokens, 1, MOST_INPUT),
        ("prefix-share", asked.prefix_share, 0.0, 1.0),
        ("think", asked.think, 0.0, 3600.0),
    ):
        if value is not None and not least <= value <= most:
            raise RequestError(f"{name} must be {least:g} to {most:g}, not {value}", parameter=name)
    shares: list[tuple[str, float]] = []
    for part in asked.workload.split(","):
        name, equals, share = part.partition("=")
        try:
            weight = float(share) if equals else 1.0
        except ValueError:
            weight = -1.0
        if name not in ("fixed", *WORKLOADS) or not 0.0 < weight < math.inf:
            known = ", ".join(("fixed", *WORKLOADS))
            raise RequestError(f"a workload is one of {known}, or NAME=SHARE,…, not '{part}'", parameter="workload")
        shares.append((name, weight))
    named = [name for name, _ in shares if name != "fixed"]
    if named and len(shares) == len(named) and (asked.input_tokens or asked.output_tokens or asked.spread):
        raise RequestError(
            f"{named[0]} has lengths of its own: use --scale, or --workload fixed", parameter="input-tokens"
        )
    return tuple((_workload(name, asked), share) for name, share in shares)


def _workload(name: str, asked: WorkloadOptions) -> Workload:
    if name == "fixed":
        found = Workload(
            name="fixed",
            own=UniformLengths(asked.input_tokens or 256, asked.spread),
            answer=UniformLengths(asked.output_tokens or 128, asked.spread),
        )
    else:
        found = scaled(WORKLOADS[name], asked.scale)
    return replace(
        found,
        shared=_shared(found.shared, asked),
        turns=found.turns if asked.turns is None else _turns(asked.turns),
        think=found.think if asked.think is None else asked.think,
    )


def _shared(own: SharedPrefixes | None, asked: WorkloadOptions) -> SharedPrefixes | None:
    """The workload's own prefixes, changed as asked; where it has none, those that are asked for."""
    if own is None and not asked.prefixes and asked.prefix_tokens is None:
        return None
    shared = own or SharedPrefixes(count=1, tokens=256)
    shared = SharedPrefixes(
        count=shared.count if asked.prefixes is None else asked.prefixes,
        tokens=asked.prefix_tokens or shared.tokens,
        kind=asked.prefix_kind or shared.kind,
        share=shared.share if asked.prefix_share is None else asked.prefix_share,
    )
    return shared if shared.count else None


def _turns(text: str) -> tuple[int, int]:
    least, dash, most = text.partition("-")
    try:
        found = int(least), int(most) if dash else int(least)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= found[1] <= 1000:
        raise RequestError(f"turns must be a number or a range such as 2-6, not '{text}'", parameter="turns")
    return found
