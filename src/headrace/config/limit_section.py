"""Configuration of rate limits for tenants, keys, models and surfaces. headrace.gateway.limits applies it."""

from __future__ import annotations

from headrace.config.value_types import Count, Milliseconds, Seconds, Section, Text


class LimitSet(Section, frozen=True):
    """Limits of one tenant, key, model or surface. None: no limit."""

    requests_per_s: Count | None = None
    requests_per_min: Count | None = None
    concurrent: Count | None = None  # requests running at once
    input_tokens_per_s: Count | None = None
    input_tokens_per_min: Count | None = None
    output_tokens_per_s: Count | None = None
    output_tokens_per_min: Count | None = None
    context: Count | None = None  # tokens of one request, prompt and output together


class LimitingConfig(Section, frozen=True):
    """Where and how limits are counted."""

    redis_env: Text | None = None  # environment variable with the URL of a Redis that gateways share; default: none
    namespace: Text = "headrace"  # prefix of the keys in Redis
    wait_ms: Milliseconds = 50.0  # milliseconds, Redis timeout
    patience_s: Seconds = 2.0  # seconds a stream may wait for token quota before it is stopped
