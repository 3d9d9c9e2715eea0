"""Recording and alert rules for Prometheus, from the objectives of a configuration.

They compute the same burn rates as the server does, over all gateways together. YAML is a superset of JSON, so texts
are written as JSON strings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from headrace.observe.slo.objectives import BURN_RULES, WINDOWS, Objective


def prometheus_rules(objectives: Sequence[Objective]) -> str:
    lines = ["# Written by `headrace observe rules`.", "groups:"]
    if not objectives:
        return lines[0] + "\ngroups: []\n"
    lines += ["  - name: headrace-objectives", "    rules:"]
    for window in WINDOWS:
        bad = f'sum by (slo, objective) (rate(headrace_slo_events_total{{outcome="bad"}}[{window}]))'
        every = f"sum by (slo, objective) (rate(headrace_slo_events_total[{window}]))"
        lines += [
            f"      - record: headrace:slo_errors:ratio_rate{window}",
            f"        expr: {json.dumps(f'{bad} / ({every} > 0)')}",
        ]
    lines += ["  - name: headrace-alerts", "    rules:"]
    for objective in objectives:
        for rule in BURN_RULES:
            lines += _alert(objective, rule.severity, rule.long, rule.short, rule.rate)
    return "\n".join(lines) + "\n"


def _alert(objective: Objective, severity: str, long: str, short: str, rate: float) -> list[str]:
    labels = f"slo={json.dumps(objective.slo)},objective={json.dumps(objective.name)}"
    limit = f"{rate * (1.0 - objective.target):.6g}"
    sides = [f"headrace:slo_errors:ratio_rate{window}{{{labels}}} > {limit}" for window in (long, short)]
    about = f"The objective {objective.name} of '{objective.slo}' uses its error budget {rate:g} times too fast."
    return [
        "      - alert: HeadraceErrorBudgetBurn",
        f"        expr: {json.dumps(' and '.join(sides))}",
        "        labels:",
        f"          severity: {severity}",
        f"          slo: {json.dumps(objective.slo)}",
        f"          objective: {objective.name}",
        f"          window: {json.dumps(long)}",
        "        annotations:",
        f"          summary: {json.dumps(about)}",
    ]
