"""Limits that a tenant, a key, a model or a surface can have, and what stands behind them.

Owns these sections with their defaults. What a limit means is gateway.limits's.
"""

from __future__ import annotations

from headrace.config.value_types import Count, Milliseconds, Seconds, Section, Text


class LimitSet(Section, frozen=True):
    """None: no such limit."""

    requests_per_s: Count | None = None
    requests_per_min: Count | None = None
    concurrent: Count | None = None  # requests that run at once
    input_tokens_per_s: Count | None = None
    input_tokens_per_min: Count | None = None
    output_tokens_per_s: Count | None = None
    output_tokens_per_min: Count | None = None
    context: Count | None = None  # tokens of one request, prompt and answer together


class LimitingConfig(Section, frozen=True):
    """How limits are counted."""

    redis_env: Text | None = None  # the environment variable that has the address of a Redis that gateways share
    namespace: Text = "headrace"  # of the keys there
    wait_ms: Milliseconds = 50.0  # that it has for an answer
    patience_s: Seconds = 2.0  # that a stream may wait for room before it is stopped
