"""The options of a benchmark, checked before anything is sent. An invalid one is a RequestError that names it."""

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
MOST_REQUESTS: Final = 200_000  # per run
MOST_STAGES: Final = 64
MOST_INPUT: Final = 1_000_000  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTenant:
    name: str = ""
    key: str | None = field(default=None, repr=False)
    surface: str = ""
    mix: WorkloadMix = ()
    rate: float | None = None  # open loop
    concurrency: int | None = None  # closed loop
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
    stages: int = 12  # maximum


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkOptions:
    url: str = "http://localhost:8000"
    model: str | None = None  # None: the first that the server lists
    endpoint: Endpoint = "chat"
    stream: bool = True
    temperature: float | None = 0.0
    ignore_eos: bool = True
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])  # added to each request
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    insecure: bool = False  # accept any TLS certificate
    timeout: float = 600.0  # seconds for a whole response
    connect_timeout: float = 10.0
    tenants: tuple[LoadTenant, ...] = (LoadTenant(),)
    concurrency: tuple[int, ...] = ()  # closed loops, one stage each; with a rate: maximum concurrent requests
    rates: tuple[float, ...] = ()  # open loops, one stage each
    ramp: tuple[float, float] | None = None
    sweep: SweepOptions | None = None
    trace: Path | None = None
    trace_format: TraceFormat = "auto"
    speed: float = 1.0  # of the trace replay
    requests: int | None = None  # per stage
    seconds: float | None = None
    drain: float = 60.0  # seconds for running requests when a stage's time is up
    warmup: int = 4
    running: int = 4096  # maximum concurrent requests
    most_lag: float = 10.0  # milliseconds of p99 lag without a warning
    seed: int = 0
    nonce: str | None = None  # None: a random one
    tokenizer: str | None = None
    mismatch: Literal["fail", "warn", "off"] = "fail"  # if our count of output tokens differs from the server's
    objectives: Mapping[str, float] = field(default_factory=dict[str, float])  # milliseconds
    buckets: tuple[int, ...] = (128, 512, 2048, 8192)
    texts: bool = False  # keep the answers' texts
    label: str = ""

    @property
    def is_trace_timed(self) -> bool:
        """True if requests are sent at the trace's own times."""
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
            check_minimum(name, value, least)
        if self.requests is not None and self.requests > MOST_REQUESTS:
            raise RequestError(f"--requests must be at most {MOST_REQUESTS:,}.", parameter="requests")
        if list(self.buckets) != sorted(set(self.buckets)) or (self.buckets and self.buckets[0] < 1):
            raise RequestError("--buckets must be increasing numbers of tokens.", parameter="buckets")
        for name, value in self.objectives.items():
            if name not in OBJECTIVES:
                raise RequestError(
                    f"Unknown objective '{name}'. Expected one of {', '.join(OBJECTIVES)}.", parameter="goodput"
                )
            check_minimum(f"objective {name}", value, 1e-6)
            if name != "e2el" and not self.stream:
                raise RequestError(f"An objective for {name} needs streaming.", parameter="goodput")

    def _check_load(self) -> None:
        kinds = [
            bool(self.concurrency) and not self.rates,
            bool(self.rates),
            self.ramp is not None,
            self.sweep is not None,
        ]
        if sum(kinds) > 1:
            raise RequestError("Pass only one of --concurrency, --rate, --ramp and --sweep.", parameter="rate")
        if len(self.rates) > 1 and len(self.concurrency) > 1:
            raise RequestError(
                "Several rates allow only one concurrency, which limits concurrent requests.", parameter="concurrency"
            )
        if len(self.rates) + len(self.concurrency) > MOST_STAGES:
            raise RequestError(f"A run has at most {MOST_STAGES} stages.", parameter="rate")
        for users in self.concurrency:
            check_minimum("concurrency", users, 1)
        for rate in self.rates:
            if not rate > 0.0:
                raise RequestError(f"--rate must be above 0, not {rate}.", parameter="rate")
            if rate == math.inf and self.requests is None and self.trace is None:
                raise RequestError("An infinite rate needs --requests.", parameter="rate")
        if self.ramp is not None:
            check_minimum("ramp", self.ramp[0], 0.0)
            check_minimum("ramp", self.ramp[1], 1e-6)
            if self.seconds is None:
                raise RequestError("A ramp needs --seconds.", parameter="seconds")
        if self.sweep is not None:
            check_minimum("sweep", self.sweep.low, 1e-6)
            if self.sweep.high < self.sweep.low or self.sweep.factor <= 1.0:
                raise RequestError("A sweep must go up: FROM below TO, and a factor above 1.", parameter="sweep")
            if not 0.0 < self.sweep.good_share <= 1.0 or not self.sweep.latency > 1.0:
                raise RequestError("--sweep-good must be 0 to 1, and --sweep-latency above 1.", parameter="sweep")
        if self.trace is not None and (self.sweep or len(self.rates) > 1 or len(self.concurrency) > 1):
            raise RequestError("A trace runs as one stage: a second would find its prompts cached.", parameter="trace")
        own = [tenant for tenant in self.tenants if tenant.rate is not None or tenant.concurrency is not None]
        if own and len(own) < len(self.tenants):
            raise RequestError("Give a rate or a concurrency to every tenant or to none.", parameter="tenants")
        if own and (self.rates or self.concurrency or self.ramp or self.sweep or self.trace):
            raise RequestError("The tenants file sets the load; do not pass another one.", parameter="tenants")


def check_minimum(name: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        raise RequestError(f"{name} must be at least {least:g}, not {value}.", parameter=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """The options of a workload; None keeps the named workload's value."""

    workload: str = "fixed"  # NAME, or NAME=SHARE,NAME=SHARE
    input_tokens: int | None = None
    output_tokens: int | None = None
    spread: float = 0.0  # of fixed lengths: 0.2 is up to a fifth more or less
    scale: float = 1.0  # of a named workload's lengths
    prefixes: int | None = None
    prefix_tokens: int | None = None
    prefix_kind: PrefixKind | None = None
    prefix_share: float | None = None
    turns: str | None = None  # 4, or 2-6
    think: float | None = None


def build_mix(options: WorkloadOptions) -> WorkloadMix:
    """Build the workloads and their shares. Raises RequestError for invalid or contradictory values."""
    for name, value, least, most in (
        ("input-tokens", options.input_tokens, 1, MOST_INPUT),
        ("output-tokens", options.output_tokens, 1, MOST_INPUT),
        ("spread", options.spread, 0.0, 1.0),
        ("scale", options.scale, 1e-3, 1e3),
        ("prefixes", options.prefixes, 0, MOST_INPUT),
        ("prefix-tokens", options.prefix_tokens, 1, MOST_INPUT),
        ("prefix-share", options.prefix_share, 0.0, 1.0),
        ("think", options.think, 0.0, 3600.0),
    ):
        if value is not None and not least <= value <= most:
            raise RequestError(f"{name} must be {least:g} to {most:g}, not {value}.", parameter=name)
    shares: list[tuple[str, float]] = []
    for part in options.workload.split(","):
        name, equals, share = part.partition("=")
        try:
            weight = float(share) if equals else 1.0
        except ValueError:
            weight = -1.0
        if name not in ("fixed", *WORKLOADS) or not 0.0 < weight < math.inf:
            known = ", ".join(("fixed", *WORKLOADS))
            raise RequestError(
                f"Unknown workload '{part}'. Expected one of {known}, or NAME=SHARE,…", parameter="workload"
            )
        shares.append((name, weight))
    named = [name for name, _ in shares if name != "fixed"]
    if named and len(shares) == len(named) and (options.input_tokens or options.output_tokens or options.spread):
        raise RequestError(
            f"Workload {named[0]} has its own lengths. Use --scale, or --workload fixed.", parameter="input-tokens"
        )
    return tuple((_workload(name, options), share) for name, share in shares)


def _workload(name: str, options: WorkloadOptions) -> Workload:
    if name == "fixed":
        found = Workload(
            name="fixed",
            own=UniformLengths(options.input_tokens or 256, options.spread),
            answer=UniformLengths(options.output_tokens or 128, options.spread),
        )
    else:
        found = scaled(WORKLOADS[name], options.scale)
    return replace(
        found,
        shared=_shared(found.shared, options),
        turns=found.turns if options.turns is None else _turns(options.turns),
        think=found.think if options.think is None else options.think,
    )


def _shared(own: SharedPrefixes | None, options: WorkloadOptions) -> SharedPrefixes | None:
    """Apply the options to the workload's shared prefixes, if it has any or they ask for some."""
    if own is None and not options.prefixes and options.prefix_tokens is None:
        return None
    shared = own or SharedPrefixes(count=1, tokens=256)
    shared = SharedPrefixes(
        count=shared.count if options.prefixes is None else options.prefixes,
        tokens=options.prefix_tokens or shared.tokens,
        kind=options.prefix_kind or shared.kind,
        share=shared.share if options.prefix_share is None else options.prefix_share,
    )
    return shared if shared.count else None


def _turns(text: str) -> tuple[int, int]:
    least, dash, most = text.partition("-")
    try:
        found = int(least), int(most) if dash else int(least)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= found[1] <= 1000:
        raise RequestError(f"turns must be a number or a range such as 2-6, not '{text}'.", parameter="turns")
    return found
