"""Exchange: one request of a client from its arrival to its last byte, with whose it is and how long what took.

Owns the identity of a request, its clock, and what a client is told of its stages. Each stage of the flow reads and
writes it; it knows none of them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from headrace.gateway.requests.text_request import Asked, Usage, total

if TYPE_CHECKING:
    from headrace.gateway.serving.fleet import Served


class Caller(msgspec.Struct, frozen=True):
    """Who calls, by the key."""

    key: str = ""  # its name in the configuration; never the secret
    tenant: str = ""
    weight: float = 1.0
    surface: str | None = None


class Prompt(NamedTuple):
    """One prompt of a request, cut for a variant."""

    tokens: tuple[int, ...]
    tail: str  # the end of its text


class Exchange(msgspec.Struct, kw_only=True):
    caller: Caller
    asked: Asked
    served: Served
    id: str = msgspec.field(default_factory=lambda: secrets.token_urlsafe(18))
    arrival: float = msgspec.field(default_factory=time.monotonic)
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    prompt_tokens: int = 0  # of all prompts, once they are tokens
    shaped: float = 0.0  # when the prompt was tokens; on the monotonic clock, as the others
    first: float = 0.0  # when the engine's first output came
    last: float = 0.0  # when its last came
    usage: Usage = msgspec.field(default_factory=Usage)
    finish: str = ""  # of the choices, for the log
    endpoint: str = ""  # the route's path
    surface: str = ""  # that it runs on, once it is known whose it is
    prompts: dict[str, list[Prompt]] = {}  # by variant, once cut
    by: str = ""  # what answered in the place of an engine: exact, stale, shared, semantic, extract
    cut: str = ""  # what ended the answer early: limit, budget
    headers: dict[str, str] = {}  # of the answer, from the stages
    logged: dict[str, Any] = {}  # for the log alone; parts share it
    notes: dict[str, Any] = {}  # what the answer's own field says beside the times

    @property
    def model(self) -> str:
        """As the client is told."""
        return self.served.name

    @property
    def fingerprint(self) -> str:
        return self.served.fingerprint

    def told(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """What an answer says of its own making; milliseconds."""
        usage = total(list(usages), max(self.asked.n, 1))
        return {
            "queue_ms": _ms(usage.queue_s),
            "prefill_ms": _ms(usage.prefill_s),
            "decode_ms": _ms(usage.decode_s),
            "total_ms": _ms(time.monotonic() - self.arrival),
            "cached_tokens": usage.cached_tokens,
            "draft_acceptance": round(usage.accepted / usage.drafted, 4) if usage.drafted else None,
            **self.notes,
        }

    def noted(self) -> dict[str, Any]:
        """For the log."""
        usage, asked = self.usage, self.asked
        found: dict[str, Any] = {
            "model": self.model,
            "finish": self.finish,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
            "shape_ms": _ms(max(0.0, self.shaped - self.arrival)) if self.shaped else None,
            "queue_ms": _ms(usage.queue_s),
            "prefill_ms": _ms(usage.prefill_s),
            "decode_ms": _ms(usage.decode_s),
            "ttft_ms": _ms(self.first - self.arrival) if self.first else None,
        }
        if self.by:
            found["by"] = self.by
        if self.cut:
            found["cut"] = self.cut
        if "degraded" in self.notes:
            found["degraded"] = ",".join(self.notes["degraded"])
        found |= self.logged
        if asked.user is not None:
            found["user"] = asked.user
        return found

    def server_timing(self) -> str:
        """The header of that name, for an answer that is whole."""
        usage, now = self.usage, time.monotonic()
        spent = {
            "shape": max(0.0, self.shaped - self.arrival),
            "queue": usage.queue_s,
            "prefill": usage.prefill_s,
            "decode": usage.decode_s,
            "post": max(0.0, now - self.last) if self.last else 0.0,
            "total": now - self.arrival,
        }
        return ", ".join(f"{name};dur={_ms(seconds)}" for name, seconds in spent.items())


def _ms(seconds: float) -> float:
    return round(seconds * 1000.0, 3)
