"""Configuration of circuit breakers, for variants and for upstreams. gateway/circuit_breaker.py applies it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from headrace.config.value_types import Count, Finding, Seconds, Section

PositiveShare = Annotated[float, Meta(gt=0, le=1)]


class BreakerConfig(Section, frozen=True):
    """When the breaker opens and when it probes again."""

    window_s: Seconds = 30.0  # seconds over which calls are counted
    least_calls: Count = 10  # calls in the window before the breaker may open
    failures: PositiveShare = 0.5  # share of failed calls that opens the breaker
    slow_s: Seconds | None = None  # seconds to the first token after which a call counts as slow; default: never
    slow: PositiveShare = 0.8  # share of failed or slow calls that opens the breaker
    open_s: Seconds = 5.0  # seconds until a probe is allowed; doubles after each failed probe
    open_most_s: Seconds = 60.0
    probes: Count = 3  # probes that must all succeed to close the breaker

    def check(self, where: str) -> Iterator[Finding]:
        if self.open_most_s < self.open_s:
            yield f"{where}.open_most_s", f"expected at least open_s ({self.open_s:g}), found {self.open_most_s:g}"


class UpstreamBreakerConfig(BreakerConfig, frozen=True):
    """The breaker of an upstream, with other defaults."""

    slow_s: Seconds | None = 30.0
    slow: PositiveShare = 0.5
    probes: Count = 1
