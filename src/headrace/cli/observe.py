"""`headrace observe`: writes what other programs need to watch a server, from its configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from headrace.observe.slo.grafana import grafana_dashboard
from headrace.observe.slo.objectives import Objective, objectives_of
from headrace.observe.slo.prometheus_rules import prometheus_rules
from headrace.server.config_checks import load_config

observe = App(
    name="observe",
    help="Write Prometheus rules and a Grafana dashboard for a configuration's objectives.",
    version_flags=[],
)

ConfigFile = Annotated[Path | None, Parameter(name=["--config", "-c"])]


@observe.command
def rules(*, config: ConfigFile = None) -> None:
    """Print recording and alert rules for Prometheus.

    Usage: headrace observe rules > headrace-rules.yml

    Parameters
    ----------
    config
        Configuration file. Default: $HEADRACE_CONFIG, else ./headrace.toml, if it exists.
    """
    print(prometheus_rules(_objectives(config)), end="")


@observe.command
def grafana(*, config: ConfigFile = None) -> None:
    """Print a Grafana dashboard as JSON, to import.

    Usage: headrace observe grafana > headrace-dashboard.json

    Parameters
    ----------
    config
        Configuration file. Default: $HEADRACE_CONFIG, else ./headrace.toml, if it exists.
    """
    print(json.dumps(grafana_dashboard(_objectives(config)), indent=2))


def _objectives(path: Path | None) -> list[Objective]:
    return objectives_of(load_config(path, environ=os.environ).slo)
