"""Traffic for simulations and load tests: generated from a few numbers and a seed, or read from a trace file.

The same numbers and seed give the same traffic everywhere. Prompts are token ids; each tenant's requests share a few
prefixes (system prompts, documents), and some start with a unique one. A trace has one TraceLine as JSON per line.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from headrace.errors import RequestError

MOST_LINE: Final = 1024 * 1024  # bytes per trace line
MOST_TOKENS: Final = 1_000_000  # per prompt or answer of a trace
_IDS: Final = 100_000  # exclusive upper bound of synthetic token ids


class SimulatedRequest(msgspec.Struct, frozen=True):
    at: float  # seconds from the start
    tenant: str
    surface: str
    prompt: tuple[int, ...]
    answer: int  # tokens, if nothing cuts it
    cold: bool = False  # its prefix is unique
    weight: float = 1.0
    priority: int = 0
    deadline: float | None = None  # seconds from its arrival


class LogNormalLengths(msgspec.Struct, frozen=True, kw_only=True):
    """Log-normal lengths: most near the median, a few long."""

    median: float
    spread: float = 0.6  # of the logarithm
    most: int = 4096

    def draw(self, rng: random.Random) -> int:
        return max(1, min(self.most, round(self.median * math.exp(rng.gauss(0.0, self.spread)))))


class SurfaceProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one surface's requests."""

    share: float  # of the requests
    prefix: LogNormalLengths  # tokens that a tenant's requests share
    own: LogNormalLengths  # tokens of the prompt after that
    answer: LogNormalLengths


SURFACE_PROFILES: Final[Mapping[str, SurfaceProfile]] = {
    "chat": SurfaceProfile(
        share=0.70,
        prefix=LogNormalLengths(median=400, most=2000),
        own=LogNormalLengths(median=120, spread=0.9, most=2000),
        answer=LogNormalLengths(median=80, most=400),
    ),
    "voice": SurfaceProfile(
        share=0.10,
        prefix=LogNormalLengths(median=150, most=600),
        own=LogNormalLengths(median=40, most=200),
        answer=LogNormalLengths(median=30, most=120),
    ),
    "agent": SurfaceProfile(
        share=0.15,
        prefix=LogNormalLengths(median=1200, most=4000),
        own=LogNormalLengths(median=250, spread=0.9, most=4000),
        answer=LogNormalLengths(median=50, most=400),
    ),
    "batch": SurfaceProfile(
        share=0.05,
        prefix=LogNormalLengths(median=200, most=1000),
        own=LogNormalLengths(median=600, spread=0.9, most=4000),
        answer=LogNormalLengths(median=100, most=400),
    ),
}


class TrafficMix(msgspec.Struct, frozen=True, kw_only=True):
    tenants: int = 50
    rate: float = 2.0  # requests per second of all tenants, without the abuser's excess
    seconds: float = 120.0
    seed: int = 0
    kinds: Mapping[str, SurfaceProfile] = msgspec.field(default_factory=lambda: SURFACE_PROFILES)
    prefixes: int = 1  # shared prefixes per tenant and surface
    cold: float = 0.05  # share of requests with a unique prefix
    skew: float = 0.5  # tenant k has k**-skew of the first tenant's load
    bursts: float = 0.1  # share of requests in bursts, from one tenant with one prefix
    burst: int = 8  # requests per burst
    abuse: float = 1.0  # the abuser's load, as a multiple of its usual load
    deadlines: bool = False  # requests have a deadline for the whole answer

    def check(self) -> None:
        for name, least in (("tenants", 1), ("rate", 0.0), ("seconds", 0.0), ("burst", 1), ("abuse", 0.0)):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise RequestError(f"{name} must be at least {least}, not {value}.", parameter=name)
        for name in ("cold", "bursts"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise RequestError(f"{name} must be 0 to 1, not {value}.", parameter=name)


def tenant_name(number: int) -> str:
    return f"tenant-{number:04d}"


def abuser(mix: TrafficMix) -> str:
    """Return the abuser: the tenant in the middle, neither the busiest nor the quietest."""
    return tenant_name(mix.tenants // 2)


def generate(mix: TrafficMix) -> Iterator[SimulatedRequest]:
    """Yield requests in order of arrival."""
    mix.check()
    quiet = replace(mix, abuse=1.0)
    streams = [_arrivals(quiet, random.Random(f"{mix.seed} all"), mix.rate, None)]
    if mix.abuse > 1.0:
        # The other tenants' traffic is identical with and without abuse.
        place = mix.tenants // 2
        rate = mix.rate * _loads(mix)[place] * (mix.abuse - 1.0)
        streams.append(_arrivals(quiet, random.Random(f"{mix.seed} abuse"), rate, place))
    merged: list[SimulatedRequest] = sorted(itertools.chain(*streams), key=lambda call: call.at)
    return iter(merged)


def _loads(mix: TrafficMix) -> list[float]:
    raw = [(place + 1.0) ** -mix.skew for place in range(mix.tenants)]
    total = sum(raw)
    return [load / total for load in raw]


def _arrivals(mix: TrafficMix, rng: random.Random, rate: float, only: int | None) -> Iterator[SimulatedRequest]:
    loads = list(itertools.accumulate(_loads(mix)))
    names = list(mix.kinds)
    shares = list(itertools.accumulate(kind.share for kind in mix.kinds.values()))
    at = 0.0
    # An arrival is a single request or a burst; together they make `rate` requests per second.
    single = mix.burst / (mix.burst + mix.bursts / (1.0 - mix.bursts)) if mix.bursts < 1.0 else 0.0
    per_arrival = single + (1.0 - single) * mix.burst
    while rate > 0.0:
        at += rng.expovariate(rate / per_arrival)
        if at >= mix.seconds:
            return
        place = rng.choices(range(mix.tenants), cum_weights=loads)[0] if only is None else only
        surface = rng.choices(names, cum_weights=shares)[0]
        if rng.random() < single:
            yield _call(mix, rng, at, place, surface, rng.randrange(mix.prefixes), cold=rng.random() < mix.cold)
            continue
        # Half of the bursts share a prefix that is new.
        prefix = rng.randrange(1 << 30) if rng.random() < 0.5 else rng.randrange(mix.prefixes)
        for _ in range(mix.burst):
            yield _call(mix, rng, at, place, surface, prefix, cold=False)


def _call(
    mix: TrafficMix, rng: random.Random, at: float, place: int, surface: str, prefix: int, *, cold: bool
) -> SimulatedRequest:
    kind = mix.kinds[surface]
    name = rng.randrange(1 << 40) if cold else prefix
    shared = made_tokens(f"{mix.seed} {place} {surface} {name}", kind.prefix)
    own = _run(rng, kind.own.draw(rng))
    answer = kind.answer.draw(rng)
    deadline = 3.0 + 0.15 * answer if mix.deadlines and surface != "batch" else None
    return SimulatedRequest(at, tenant_name(place), surface, shared + own, answer, cold, deadline=deadline)


def made_tokens(name: str, lengths: LogNormalLengths) -> tuple[int, ...]:
    """Return the prefix with this name: always the same tokens."""
    rng = random.Random(name)
    return _run(rng, lengths.draw(rng))


def _run(rng: random.Random, count: int) -> tuple[int, ...]:
    start = rng.randrange(_IDS)
    step = rng.randrange(1, 97)
    return tuple((start + step * place) % _IDS for place in range(count))


class TraceLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a trace."""

    at: float  # seconds from the start, not before the line above
    prompt: int  # tokens
    answer: int  # tokens
    tenant: str = ""
    surface: str = "chat"
    prefix: str = ""  # a tenant's requests with the same name start with the same tokens
    prefix_tokens: int = 0  # length of the prefix
    weight: float = 1.0
    priority: int = 0
    deadline: float | None = None  # seconds from its arrival
    recorded: Any = None  # of a recording: the request and its answers; see headrace.lab.recording


def trace_lines(path: Path, most: int) -> Iterator[tuple[int, bytes]]:
    """Yield the non-blank lines of a trace with their numbers. Raises RequestError if one exceeds `most` bytes."""
    with path.open("rb") as file:
        for number in itertools.count(1):
            raw = file.readline(most + 1)
            if not raw:
                return
            if len(raw) > most:
                raise RequestError(f"{path}, line {number}: longer than {most} bytes", parameter="trace")
            if raw.strip():
                yield number, raw


def read_simulation_trace(path: Path, *, seed: int = 0) -> Iterator[SimulatedRequest]:
    """Yield the requests of a trace file. Raises RequestError with the line that is invalid."""
    decoder = msgspec.json.Decoder(TraceLine)
    rng = random.Random(f"{seed} trace")
    last = 0.0
    for number, raw in trace_lines(path, MOST_LINE):
        try:
            line = decoder.decode(raw)
            _check_line(line, last)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"{path}, line {number}: {error}", parameter="trace") from None
        last = line.at
        shared = min(line.prefix_tokens, line.prompt)
        prefix = _run(random.Random(f"{seed} {line.tenant} {line.prefix}"), shared) if line.prefix else ()
        prompt = prefix + _run(rng, line.prompt - len(prefix))
        yield SimulatedRequest(
            line.at,
            line.tenant,
            line.surface,
            prompt,
            line.answer,
            not line.prefix,
            line.weight,
            line.priority,
            line.deadline,
        )


def _check_line(line: TraceLine, last: float) -> None:
    if not last <= line.at < math.inf:
        raise msgspec.ValidationError(f"`at` must be at least {last}, as in the line before, not {line.at}")
    for name, value, least in (
        ("prompt", line.prompt, 1),
        ("answer", line.answer, 1),
        ("prefix_tokens", line.prefix_tokens, 0),
    ):
        if not least <= value <= MOST_TOKENS:
            raise msgspec.ValidationError(f"`{name}` must be {least} to {MOST_TOKENS}, not {value}")
