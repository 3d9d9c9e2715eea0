"""Exchange: one client request from its arrival to its last byte: the caller, the request, timestamps and usage.

The stages of the flow read and write it. It decides nothing itself.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from headrace.gateway.requests.text_request import TextRequest, TokenUsage, combine_usages

if TYPE_CHECKING:
    from headrace.gateway.serving.fleet import ServedVariant


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


class Exchange(msgspec.Struct, kw_only=True):
    """Timestamps are on the monotonic clock; 0.0 means "not yet"."""

    caller: Caller
    asked: TextRequest
    served: ServedVariant
    id: str = msgspec.field(default_factory=lambda: secrets.token_urlsafe(18))
    arrival: float = msgspec.field(default_factory=time.monotonic)
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    prompt_tokens: int = 0  # of all prompts together
    shaped_at: float = 0.0  # when the prompt was tokenised
    first_at: float = 0.0  # when the first output came
    last_at: float = 0.0  # when the latest output came
    usage: TokenUsage = msgspec.field(default_factory=TokenUsage)
    finish: str = ""
    endpoint: str = ""  # the route's path
    surface: str = ""  # set by `identify`
    prompts: dict[str, list[Prompt]] = {}  # by variant, once tokenised
    answered_by: str = ""  # exact, stale, shared, semantic or extract; empty for an engine or an upstream
    cut_by: str = ""  # what ended the answer early: limit or budget
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
        return self.asked.surface or self.caller.surface or self.served.surface

    @property
    def deadline(self) -> float | None:
        """When the answer must end, on the monotonic clock: the request's deadline, else its surface's."""
        seconds = self.asked.deadline_s
        if seconds is None:
            seconds = self.served.deadlines.get(self.effective_surface)
        return None if seconds is None else self.arrival + seconds

    @property
    def fingerprint(self) -> str:
        return self.served.fingerprint

    def report(self, usages: Sequence[TokenUsage]) -> dict[str, Any]:
        """Return the response's `headrace` field. Times are milliseconds."""
        usage = combine_usages(list(usages), max(self.asked.n, 1))
        return {
            "queue_ms": _ms(usage.queue_s),
            "prefill_ms": _ms(usage.prefill_s),
            "decode_ms": _ms(usage.decode_s),
            "total_ms": _ms(time.monotonic() - self.arrival),
            "cached_tokens": usage.cached_tokens,
            "draft_acceptance": round(usage.accepted / usage.drafted, 4) if usage.drafted else None,
            **self.notes,
        }

    def log_line(self) -> dict[str, Any]:
        """Return the fields of this exchange's line in the request log."""
        usage, asked = self.usage, self.asked
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
        }
        if self.answered_by:
            fields["by"] = self.answered_by
        if self.cut_by:
            fields["cut"] = self.cut_by
        if "degraded" in self.notes:
            fields["degraded"] = ",".join(self.notes["degraded"])
        fields |= self.log_fields
        if asked.user is not None:
            fields["user"] = asked.user
        return fields

    def server_timing(self) -> str:
        """Return the `Server-Timing` header of a complete answer."""
        usage, now = self.usage, time.monotonic()
        spent = {
            "shape": max(0.0, self.shaped_at - self.arrival),
            "queue": usage.queue_s,
            "prefill": usage.prefill_s,
            "decode": usage.decode_s,
            "post": max(0.0, now - self.last_at) if self.last_at else 0.0,
            "total": now - self.arrival,
        }
        return ", ".join(f"{name};dur={_ms(seconds)}" for name, seconds in spent.items())


def _ms(seconds: float) -> float:
    return round(seconds * 1000.0, 3)
