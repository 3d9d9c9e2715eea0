"""A Grafana dashboard for a server's metrics and the objectives of its configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from headrace.observe.slo.objectives import Objective

_SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
_WIDTH, _HEIGHT = 12, 8  # of a panel; a row has 24


def _quantile(latency: str, share: float) -> str:
    selected = f'headrace_latency_seconds_bucket{{latency="{latency}",model=~"$model",surface=~"$surface"}}'
    return f"histogram_quantile({share}, sum by (le) (rate({selected}[$__rate_interval])))"


def _percentiles(latency: str) -> list[tuple[str, str]]:
    return [(_quantile(latency, share), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)]


_PANELS: Final[list[tuple[str, str, list[tuple[str, str]]]]] = [
    ("Time to first token", "s", _percentiles("ttft")),
    ("Time between outputs", "s", _percentiles("itl")),
    ("Duration of requests", "s", _percentiles("e2e")),
    (
        "Where the time goes (p95)",
        "s",
        [(_quantile(stage, 0.95), stage) for stage in ("queue", "prefill", "decode", "hop", "post", "tokenise")],
    ),
    (
        "Requests by ending",
        "reqps",
        [("sum by (ended) (rate(headrace_answers_total[$__rate_interval]))", "{{ended}}")],
    ),
    ("Tokens", "none", [("sum by (kind) (rate(headrace_tokens_total[$__rate_interval]))", "{{kind}}")]),
    (
        "Queue",
        "none",
        [("sum(headrace_engine_running)", "running"), ("sum(headrace_engine_waiting)", "waiting")],
    ),
    (
        "KV blocks",
        "none",
        [
            ("sum(headrace_engine_blocks_used)", "used"),
            ("sum(headrace_engine_blocks_cached)", "cached"),
            ("sum(headrace_engine_blocks_free)", "free"),
        ],
    ),
    (
        "Machine time saved by caches",
        "s",
        [("sum by (cache) (rate(headrace_cache_saved_seconds_total[$__rate_interval]))", "{{cache}}")],
    ),
    (
        "Cost per hour",
        "none",
        [("sum by (model) (rate(headrace_cost_micros_total[$__rate_interval])) * 3600 / 1e6", "{{model}}")],
    ),
    ("Degraded requests", "reqps", [("sum by (step) (rate(headrace_degraded_total[$__rate_interval]))", "{{step}}")]),
    (
        "Routes",
        "reqps",
        [("sum by (route) (rate(headrace_slice_requests_total[$__rate_interval]))", "{{route}}")],
    ),
]


def grafana_dashboard(objectives: Sequence[Objective]) -> dict[str, Any]:
    panels = [
        ("Burn rate of objectives, 1 h", "none", [(_burn(objective), _title(objective)) for objective in objectives]),
        ("Attainment, 3 d", "percentunit", [(_attained(objective), _title(objective)) for objective in objectives]),
    ]
    return {
        "title": "Headrace",
        "uid": "headrace",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["headrace"],
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus"},
                _variable("model"),
                _variable("surface"),
            ]
        },
        "panels": [_panel(number, *panel) for number, panel in enumerate([*(panels if objectives else ()), *_PANELS])],
    }


def _title(objective: Objective) -> str:
    return f"{objective.slo} {objective.name}"


def _selected(objective: Objective) -> str:
    return f"slo={json.dumps(objective.slo)},objective={json.dumps(objective.name)}"


def _burn(objective: Objective) -> str:
    return f'max(headrace_slo_burn_rate{{{_selected(objective)},window="1h"}})'


def _attained(objective: Objective) -> str:
    good = f'sum(increase(headrace_slo_events_total{{{_selected(objective)},outcome="good"}}[3d]))'
    return f"{good} / sum(increase(headrace_slo_events_total{{{_selected(objective)}}}[3d]))"


def _variable(label: str) -> dict[str, Any]:
    query = f"label_values(headrace_latency_seconds_count, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": label},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def _panel(number: int, title: str, unit: str, queries: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": {"x": number % 2 * _WIDTH, "y": number // 2 * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for place, (query, legend) in enumerate(queries)
        ],
    }
