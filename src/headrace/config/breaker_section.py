"""What the configuration can say of breakers: of a variant's, and of an upstream's.

Owns the shape and its defaults. What they mean is gateway/breaker.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from headrace.config.value_types import Count, Finding, Seconds, Section

_PositiveShare = Annotated[float, Meta(gt=0, le=1)]


class BreakerConfig(Section, frozen=True):
    """When a variant is left alone, and when it is tried again."""

    window_s: Seconds = 30.0  # that is looked at
    least_calls: Count = 10  # in it, before anything follows from them
    failures: _PositiveShare = 0.5  # share of failed calls that opens it
    slow_s: Seconds | None = None  # a first token that takes longer is slow
    slow: _PositiveShare = 0.8  # share of failed and slow calls that opens it
    open_s: Seconds = 5.0  # until it is tried again; doubled after each try that fails
    open_most_s: Seconds = 60.0
    probes: Count = 3  # calls that are let through then, and must all do well

    def findings(self, where: str) -> Iterator[Finding]:
        if self.open_most_s < self.open_s:
            yield f"{where}.open_most_s", f"expected at least open_s, {self.open_s:g}, found {self.open_most_s:g}"


class UpstreamBreakerConfig(BreakerConfig, frozen=True):
    """When nothing more is sent to an upstream for a while."""

    slow_s: Seconds | None = 30.0
    slow: _PositiveShare = 0.5
    probes: Count = 1
