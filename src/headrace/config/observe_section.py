"""The section [observe]: what the server remembers of finished requests, and the traces that it exports."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.config.value_types import Count, Section, Share, Text


class TracesConfig(Section, frozen=True):
    """Export of traces to an OpenTelemetry collector."""

    url: Text | None = None  # of the collector, such as http://localhost:4318; default: nothing is exported
    header_env: Text | None = None  # environment variable with the value of the `Authorization` header
    service: Text = "headrace"  # `service.name` of the spans
    sample: Share = 0.01  # share of all requests to export, beside those whose client asks for it by `traceparent`
    errors: bool = True  # export every request that fails
    slowest_per_minute: Annotated[int, Meta(ge=0, le=1000)] = 10  # export so many of the slowest requests each minute
    buffer: Count = 2048  # traces that wait for the collector; beyond that the oldest are dropped
    prompts_of: tuple[Text, ...] = ()  # tenants whose prompts are exported with their traces; "-": requests without one


class AlertsConfig(Section, frozen=True):
    """Where alerts of objectives go, beside the log."""

    webhook_url_env: Text | None = None  # environment variable with the URL that alerts are posted to
    webhook_header_env: Text | None = None  # environment variable with the webhook's `Authorization` header


class ObserveConfig(Section, frozen=True):
    recent_requests: Count = 1000  # finished requests kept in memory for GET /v1/requests/{id}
    slices: Count = 512  # combinations of model, tenant, endpoint... that latencies are kept for; the rest is `other`
    history_days: Count = 35  # days that latencies, costs and objectives of each hour are kept in storage
    history_bytes: Count = 256 * 1024**2  # 256 MiB; beyond that the oldest hours are removed
    # Finished requests that POST /v1/feedback may be about; 0: no feedback is taken.
    feedback_requests: Annotated[int, Meta(ge=0)] = 100_000
    feedback_outcomes: Count = 1_000_000  # outcomes kept; beyond that the oldest of the tenant with the most is removed
    alerts: AlertsConfig = AlertsConfig()
    traces: TracesConfig = msgspec.field(default_factory=TracesConfig)
