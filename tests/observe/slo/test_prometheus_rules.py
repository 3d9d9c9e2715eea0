"""The generated rules and the dashboard are valid, and name metrics that the server has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.config import SloConfig
from headrace.observe import computed_metrics, metrics
from headrace.observe.slo.grafana import grafana_dashboard
from headrace.observe.slo.objectives import objectives_of
from headrace.observe.slo.prometheus_rules import prometheus_rules

OBJECTIVES = objectives_of(
    {"chat": SloConfig(ttft_p95_ms=300.0, availability=0.999), 'od"d': SloConfig(surface="voice", itl_p99_ms=50.0)}
)


def names() -> set[str]:
    """The names of all time series."""
    found: set[str] = set()
    assert computed_metrics.collector in metrics.registry._collector_to_names  # pyright: ignore[reportPrivateUsage]
    for metric in metrics.registry.collect():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(metric.type, ("",))
        found |= {metric.name + suffix for suffix in suffixes}
    return found


def metrics_in(query: str) -> set[str]:
    return set(re.findall(r"\b(headrace_\w+)", query))


def test_the_rules_are_a_list_of_recordings_and_alerts() -> None:
    text = prometheus_rules(OBJECTIVES)
    recorded = set(re.findall(r"- record: (\S+)", text))
    assert recorded == {f"headrace:slo_errors:ratio_rate{window}" for window in ("5m", "30m", "1h", "6h", "3d")}
    expressions = [json.loads(found) for found in re.findall(r"expr: (\".*\")$", text, re.MULTILINE)]
    assert len(expressions) == 5 + 3 * len(OBJECTIVES)
    for expression in expressions:
        assert metrics_in(expression) <= names()
        assert set(re.findall(r"headrace:\S+?(?=\{)", expression)) <= recorded
    assert "> 0.0144 and" in text  # 14.4 times 0.1 %
    assert "> 0.72 and" in text  # 14.4 times 5 %


def test_every_query_of_the_dashboard_is_about_metrics_of_the_server() -> None:
    dashboard = grafana_dashboard(OBJECTIVES)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert queries
    for query in queries:
        assert query.count("(") == query.count(")")
        assert metrics_in(query)
        assert metrics_in(query) <= names()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian's prometheus)")
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    path = tmp_path / "rules.yml"
    path.write_text(prometheus_rules(OBJECTIVES), encoding="utf-8")
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{5 + 3 * len(OBJECTIVES)} rules found" in done.stdout


def test_the_command_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text("[slo.chat]\nttft_p95_ms = 300\n", encoding="utf-8")
    assert main(["observe", "rules", "-c", str(path)]) == 0
    assert 'objective=\\"ttft_p95_ms\\"' in capsys.readouterr().out
    assert main(["observe", "grafana", "-c", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Headrace"


def test_mistakes_in_objectives_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text("[slo.maxi]\nttft_p95_ms = 300\n\n[slo.chat]\nfast_mode = true\n", encoding="utf-8")
    assert main(["observe", "rules", "-c", str(path)]) == 2
    said = capsys.readouterr().err
    assert "slo.maxi" in said
    assert "slo.chat.fast_mode: the section [fast] is empty" in said
