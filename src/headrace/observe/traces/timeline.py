"""Timeline: when each stage of one request began, on the monotonic clock.

A stage ends where the next one begins, so the stages of a request have no gaps and their sum is its duration. The time
of a generation is split afterwards by what the engine has measured: hop (to the engine and back), queue, prefill,
decode, and post (between the last output and the end of the generation).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final, NamedTuple

from headrace.observe.traces.trace_context import TraceContext, is_sampled, trace_context

# In the order of a request. `read`: its body. `wait`: a generation without output, or shared with another request.
# `replay`: an answer that needed no generation.
STAGES: Final = (
    "identify",
    "read",
    "route",
    "shape",
    "admit",
    "recall",
    "compute",
    "embed",  # the stages of a pipeline, up to `followups`
    "search",
    "rerank",
    "assemble",
    "tools",
    "check",
    "followups",
    "wait",
    "replay",
    "hop",
    "queue",
    "prefill",
    "decode",
    "post",
    "settle",
    "deliver",
)
GENERATE: Final = "generate"  # is split into stages
_MOST_PARTS: Final = 64  # of one request; an upstream may be retried often


class Stage(NamedTuple):
    name: str
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Part(NamedTuple):
    """A piece of work within a stage: a cache's lookup, the template, one attempt of an upstream."""

    stage: str
    name: str
    began: float
    ended: float
    attributes: Mapping[str, Any]


class GenerationTimes(NamedTuple):
    """What splits the time of a generation. Timestamps of 0 mean "never"."""

    first_at: float
    last_at: float
    queue_s: float
    prefill_s: float
    source: str = ""  # the cache that answered, or `shared`
    decode_s: float = 0.0  # more than passed between first and last output: the answer was held before its first


class Timeline:
    sample: ClassVar[float] = 0.0  # share of traces that are recorded by their id; set by the configuration

    __slots__ = ("_context", "_summed", "_sums", "_times", "began", "ended", "entered", "parts", "traceparent")

    def __init__(self, began: float | None = None, traceparent: str | None = None) -> None:
        self.began = time.monotonic() if began is None else began
        self.ended = 0.0
        self.entered: list[tuple[str, float]] = [("identify", self.began)]
        self.parts: list[Part] = []
        self.traceparent = traceparent  # the client's header
        self._context: TraceContext | None = None
        self._times: GenerationTimes | None = None
        self._sums: dict[str, float] = {}  # of the first `_summed` stages, split by `_times`
        self._summed = 0

    @property
    def context(self) -> TraceContext:
        if self._context is None:
            self._context = trace_context(self.traceparent)
        return self._context

    @property
    def milliseconds(self) -> float:
        """The duration of a request that has ended."""
        return round((self.ended - self.began) * 1e3, 3)

    @property
    def is_sampled(self) -> bool:
        """True if the trace is recorded whatever becomes of the request."""
        return is_sampled(self.context, Timeline.sample)

    def enter(self, stage: str) -> None:
        """Begin a stage, which ends the one before."""
        self.entered.append((stage, time.monotonic()))

    def part(self, stage: str, name: str, began: float, ended: float | None = None, **attributes: Any) -> None:
        if len(self.parts) < _MOST_PARTS:
            self.parts.append(Part(stage, name, began, time.monotonic() if ended is None else ended, attributes))

    def stages(self, times: GenerationTimes | None = None, *, now: float | None = None) -> list[Stage]:
        """Return the stages up to the end, or up to `now`. Their sum is the time since `began`."""
        end = now or self.ended or time.monotonic()
        found: list[Stage] = []
        entered = self.entered
        for place, (name, began) in enumerate(entered):
            ended = entered[place + 1][1] if place + 1 < len(entered) else max(end, began)
            if name == GENERATE:
                found += _split(began, ended, times)
            else:
                found.append(Stage(name, began, ended))
        return found

    def seconds_by_stage(self, times: GenerationTimes | None = None, *, now: float | None = None) -> dict[str, float]:
        """Return the sums of `stages(times, now=now)` by name, for every response: without an object for each.

        A stage that has ended is added once, however often the sums are asked for."""
        end = now or self.ended or time.monotonic()
        entered, last = self.entered, len(self.entered) - 1
        if times != self._times:
            self._times, self._sums, self._summed = times, {}, 0
        sums = self._sums
        for place in range(self._summed, last):
            name, began = entered[place]
            _add_stage(sums, name, began, entered[place + 1][1], times)
        self._summed = last
        sums = sums.copy()
        name, began = entered[last]
        _add_stage(sums, name, began, max(end, began), times)
        return sums


def _add_stage(sums: dict[str, float], name: str, began: float, ended: float, times: GenerationTimes | None) -> None:
    if name != GENERATE:
        sums[name] = sums.get(name, 0.0) + ended - began
        return
    edges = _edges(began, ended, times)
    for (inner, edge), (_, end) in zip(edges, (*edges[1:], ("", ended)), strict=True):
        sums[inner] = sums.get(inner, 0.0) + end - edge


def _split(began: float, ended: float, times: GenerationTimes | None) -> list[Stage]:
    edges = _edges(began, ended, times)
    ends = [edge for _, edge in edges[1:]] + [ended]
    return [Stage(name, edge, end) for (name, edge), end in zip(edges, ends, strict=True)]


def _edges(began: float, ended: float, times: GenerationTimes | None) -> tuple[tuple[str, float], ...]:
    """Return the stages of a generation and when each began."""
    if times is None or (not times.source and not times.first_at):
        return (("wait", began),)
    if times.source and times.source != "shared":
        return (("replay", began),)
    first = min(max(times.first_at, began), ended) if times.first_at else ended
    last = min(max(times.last_at, first), ended)
    if times.source:
        return ("wait", began), ("decode", first), ("post", last)
    first -= max(0.0, min(times.decode_s - (last - first), first - began))
    prefill = min(times.prefill_s, first - began)  # measured by another process, which may have taken over
    queue = min(times.queue_s, first - began - prefill)
    return (
        ("hop", began),
        ("queue", first - prefill - queue),
        ("prefill", first - prefill),
        ("decode", first),
        ("post", last),
    )


def parts_in(parts: Iterable[Part], began: float, ended: float) -> list[Part]:
    """Return the parts that began within a stage."""
    return [part for part in parts if began <= part.began < ended or (part.began == began == ended)]
