"""Exchange: one client request from its arrival to its last byte: the caller, the request, timestamps and usage.

The stages of the flow read and write it. It decides nothing itself.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from headrace.gateway.images.image_reader import PromptImage
from headrace.gateway.requests.text_request import SourceText, TextRequest, TokenUsage, combine_usages
from headrace.observe.traces.timeline import GenerationTimes, Timeline

if TYPE_CHECKING:
    from headrace.gateway.serving.served_variant import ServedVariant


class Caller(msgspec.Struct, frozen=True):
    """The owner of the API key that a request came with."""

    key: str = ""  # the key's name in the configuration; never the secret
    tenant: str = ""
    weight: float = 1.0
    surface: str | None = None


class Prompt(NamedTuple):
    """One prompt of a request, tokenised for a variant."""

    tokens: tuple[int, ...]
    tail: str  # the end of its text
    images: tuple[PromptImage, ...] = ()

    @property
    def image_tokens(self) -> int:
        """Tokens whose embeddings are features of images."""
        return sum(image.tokens for image in self.images)


class Exchange(msgspec.Struct, kw_only=True):
    """Timestamps are on the monotonic clock; 0.0 means "not yet"."""

    caller: Caller
    text_request: TextRequest
    served: ServedVariant
    id: str = msgspec.field(default_factory=lambda: secrets.token_urlsafe(18))
    arrival: float = msgspec.field(default_factory=time.monotonic)
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    prompt_tokens: int = 0  # of all prompts together
    shaped_at: float = 0.0  # when the prompt was tokenised
    first_at: float = 0.0  # when the first output came
    last_at: float = 0.0  # when the latest output came
    is_held_back: bool = False  # the first output waited for a check of the answer, after the model had written it
    gaps: list[float] = []  # seconds between outputs
    reading_s: float = 0.0  # spent on turning outputs into deltas: text, tool calls, reasoning
    timeline: Timeline = msgspec.field(default_factory=Timeline)  # shared with the parts of a composed generation
    usage: TokenUsage = msgspec.field(default_factory=TokenUsage)
    saved: TokenUsage | None = None  # what an answer from a cache would have used; set by `settle`
    cost_micros: int | None = None  # what the request costs, in millionths of the currency; set by `settle`
    finish: str = ""
    endpoint: str = ""  # the route's path
    surface: str = ""  # set by `identify`
    prompts: dict[str, list[Prompt]] = {}  # by variant, once tokenised
    sources: tuple[SourceText, ...] = ()  # numbered in the prompt, from 1; set by `shape`
    route: str = "direct"  # how it was routed, set by `settle`: a stage of routing, or the cache that answered
    answered_by: str = ""  # catalogue, exact, stale, shared, semantic, extract; empty for an engine or an upstream
    cut_by: str = ""  # what ended the answer early: limit or budget
    ended: str = ""  # finished, limited, deadline, gone, or the kind of error; set by `settle`
    set_max_tokens: bool = False  # the client did, so that no default applies; set by `identify`
    headers: dict[str, str] = {}  # response headers set by the stages
    log_fields: dict[str, Any] = {}  # for the log line only; shared with the parts of a composed generation
    notes: dict[str, Any] = {}  # further entries of the response's `headrace` field

    @property
    def model(self) -> str:
        """The variant that answers, as reported to the client."""
        return self.served.name

    @property
    def effective_surface(self) -> str:
        """The surface that the request names, else the key's, else the variant's."""
        return self.text_request.surface or self.caller.surface or self.served.surface

    @property
    def deadline(self) -> float | None:
        """When the answer must end, on the monotonic clock: the request's deadline, else its surface's."""
        seconds = self.text_request.deadline_s
        if seconds is None:
            seconds = self.served.deadlines.get(self.effective_surface)
        return None if seconds is None else self.arrival + seconds

    def add_cost(self, micros: int | None) -> None:
        """Add what work for this exchange costs; None: there are no prices."""
        if micros is not None:
            self.cost_micros = (self.cost_micros or 0) + micros

    @property
    def fingerprint(self) -> str:
        return self.served.fingerprint

    @property
    def generation_times(self) -> GenerationTimes:
        usage = self.usage
        return GenerationTimes(
            self.first_at, self.last_at, usage.queue_s, usage.prefill_s, self.answered_by, usage.decode_s
        )

    def stages(self) -> dict[str, float]:
        """Return the seconds of each stage so far. Their sum is the time since the request arrived."""
        return self.timeline.seconds_by_stage(self.generation_times)

    def report(self, usages: Sequence[TokenUsage]) -> dict[str, Any]:
        """Return the response's `headrace` field. Times are milliseconds."""
        usage = combine_usages(list(usages), max(self.text_request.n, 1))
        return {
            "queue_ms": _ms(usage.queue_s),
            "prefill_ms": _ms(usage.prefill_s),
            "decode_ms": _ms(usage.decode_s),
            "total_ms": _ms(time.monotonic() - self.arrival),
            "cached_tokens": usage.cached_tokens,
            "draft_acceptance": round(usage.accepted / usage.drafted, 4) if usage.drafted else None,
            "stages_ms": _by_ms(self.stages()),
            **({} if self.cost_micros is None else {"cost_micros": self.cost_micros}),
            **self.notes,
        }

    def log_line(self, stages: Mapping[str, float]) -> dict[str, Any]:
        """Return the fields of this exchange's line in the request log. `stages`: seconds of each."""
        usage, text_request = self.usage, self.text_request
        fields: dict[str, Any] = {
            "model": self.model,
            "finish": self.finish,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
            "shape_ms": _ms(max(0.0, self.shaped_at - self.arrival)) if self.shaped_at else None,
            "queue_ms": _ms(usage.queue_s),
            "prefill_ms": _ms(usage.prefill_s),
            "decode_ms": _ms(usage.decode_s),
            "ttft_ms": _ms(self.first_at - self.arrival) if self.first_at else None,
            "stages_ms": _by_ms(stages),
        }
        if self.answered_by:
            fields["by"] = self.answered_by
        if self.cut_by:
            fields["cut"] = self.cut_by
        if self.cost_micros is not None:
            fields["cost_micros"] = self.cost_micros
        if "degraded" in self.notes:
            fields["degraded"] = ",".join(self.notes["degraded"])
        fields |= self.log_fields
        if text_request.user is not None:
            fields["user"] = text_request.user
        return fields

    def facts(self) -> dict[str, Any]:
        """Return what a trace tells beside the fields of the log line."""
        usage, text_request = self.usage, self.text_request
        return {
            "surface": self.surface,
            "route": self.route,
            "requested": text_request.model or None,
            "stream": text_request.stream,
            "n": text_request.n,
            "max_tokens": text_request.max_tokens,
            "temperature": text_request.sampling.temperature,
            "reading_ms": _ms(self.reading_s),
            "prefill_steps": usage.prefill_steps or None,
            "decode_steps": usage.decode_steps or None,
            "drafted": usage.drafted or None,
            "accepted": usage.accepted if usage.drafted else None,
        }

    def server_timing(self) -> str:
        """Return the `Server-Timing` header of a complete answer: its stages, and `total`, their sum."""
        timeline = self.timeline
        now = time.monotonic()
        stages = timeline.seconds_by_stage(self.generation_times, now=now)
        stages["total"] = now - timeline.began
        return ", ".join([f"{name};dur={ms}" for name, ms in _by_ms(stages).items()])


# To the microsecond by way of an integer: `round` takes four times as long, and a response has fifty durations.


def _ms(seconds: float) -> float:
    return int(seconds * 1e6 + 0.5) / 1e3


def _by_ms(seconds_by_name: Mapping[str, float]) -> dict[str, float]:
    return {name: int(seconds * 1e6 + 0.5) / 1e3 for name, seconds in seconds_by_name.items()}
