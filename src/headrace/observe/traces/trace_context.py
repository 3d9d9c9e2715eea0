"""W3C trace context: reads a client's `traceparent`, and makes the one that goes to upstreams and exporters."""

from __future__ import annotations

import random
import re
from typing import Final, NamedTuple

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_random: Final = random.Random()  # seeded by the system; ids need to be unique, not secret


class TraceContext(NamedTuple):
    trace_id: str  # 32 hexadecimal digits
    span_id: str  # of the request's own span: 16 digits
    parent_id: str  # the client's span; empty if this request begins the trace
    sampled: bool  # the client asks for this trace to be recorded

    def traceparent(self, span_id: str = "", *, sampled: bool | None = None) -> str:
        """Return the header for a call that belongs to the span, by default the request's own."""
        is_sampled = self.sampled if sampled is None else sampled
        return f"00-{self.trace_id}-{span_id or self.span_id}-{'01' if is_sampled else '00'}"


def new_span_id() -> str:
    return f"{_random.getrandbits(64) or 1:016x}"


def trace_context(traceparent: str | None) -> TraceContext:
    """Continue the client's trace, or begin one where the header is missing or invalid."""
    found = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent.strip())
    if found is not None:
        version, trace_id, parent_id, flags, rest = found.groups()
        is_known = version != "ff" and (version != "00" or rest is None)
        if is_known and trace_id.strip("0") and parent_id.strip("0"):
            return TraceContext(trace_id, new_span_id(), parent_id, bool(int(flags, 16) & 1))
    return TraceContext(f"{_random.getrandbits(128) or 1:032x}", new_span_id(), "", False)


def is_sampled(context: TraceContext, share: float) -> bool:
    """Return whether a trace is recorded: the client asks for it, or its id falls into the share. Every service that
    decides by the id decides alike."""
    return context.sampled or int(context.trace_id[-14:], 16) < share * 2.0**56
