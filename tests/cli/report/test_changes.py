"""Two spans of the same traffic have no change, and a real one is found with an interval that has it."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.cli.report.budget_forecast import forecast
from headrace.cli.report.changes import Change, changes
from headrace.cli.report.weeks import DAY, GROUPINGS, HOUR, Span
from headrace.observe.latency.latency_book import Row
from headrace.observe.latency.sketch import Sketch

KEY = ("chat", "mini")


def span(
    rng: np.random.Generator, first: int, *, slower: float = 1.0, failing: float = 0.01, requests: int = 30
) -> Span:
    """A week whose afternoons are busier and slower, and whose days differ."""
    hours: dict[int, Row] = {}
    for hour in range(first, first + 7 * DAY, HOUR):
        rush = 1.0 + 0.5 * np.sin(2 * np.pi * hour / DAY)
        load = rng.lognormal(0.0, 0.1)
        count = int(rng.poisson(requests * rush))
        row = Row(requests=count, failed=int(rng.binomial(count, failing)), micros=10 * count, machine_s=0.1 * count)
        row.sketches["ttft"] = Sketch()
        row.sketches["ttft"].extend((0.1 * slower * load * rush * rng.lognormal(0.0, 0.3, count)).tolist())
        hours[hour] = row
    return Span(first, first + 7 * DAY, {GROUPINGS[0]: {KEY: hours}})


def of(found: list[Change], what: str) -> Change:
    return next(each for each in found if each.what == what)


def test_the_same_traffic_twice_is_rarely_called_a_change() -> None:
    verdicts: list[str] = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        found = changes(span(rng, 0), span(rng, 7 * DAY))
        verdicts += [each.verdict for each in found if each.what.startswith("TTFT")]
    assert len(verdicts) == 40
    assert verdicts.count("same") >= 39


def test_a_slower_week_is_worse_and_the_interval_has_the_truth() -> None:
    rng = np.random.default_rng(7)
    found = changes(span(rng, 0), span(rng, 7 * DAY, slower=1.3, failing=0.05))
    for what in ("TTFT p50", "TTFT p95"):
        change = of(found, what)
        assert change.verdict == "worse"
        assert change.low is not None
        assert change.high is not None
        assert 1.0 < change.low < 1.3 < change.high < 1.8
    failed = of(found, "failed")
    assert failed.verdict == "worse"
    assert failed.after - failed.before == pytest.approx(0.04, abs=0.01)
    assert of(found, "price of 1,000 requests").verdict == "same"
    better = changes(span(rng, 0, slower=1.3), span(rng, 7 * DAY))
    assert of(better, "TTFT p95").verdict == "better"


def test_too_little_traffic_has_no_interval() -> None:
    rng = np.random.default_rng(1)
    found = changes(span(rng, 0, requests=30), span(rng, 7 * DAY, requests=0.0005))
    assert {each.verdict for each in found} <= {"unknown"}
    assert changes(Span(0, DAY), span(rng, 7 * DAY)) == []


def line(**fields: int | str) -> dict[str, int | str]:
    known = {"tenant": "red", "endpoint": "", "period": "2026-01", "limit_micros": 1000, "spent_micros": 500}
    return {**known, "renews_at": 1_769_904_000, **fields}  # 2026-02-01


def test_a_budget_runs_out_where_its_pace_ends_it_before_the_period() -> None:
    tenth, began = 1_768_003_200.0, 1_767_225_600.0  # 2026-01-10 and 2026-01-01
    found = forecast(line(), tenth)
    assert found.runs_out_at == pytest.approx(tenth + (tenth - began))
    assert forecast(line(spent_micros=100), tenth).runs_out_at is None
    assert forecast(line(spent_micros=1000), tenth).runs_out_at == tenth
    assert forecast(line(spent_micros=0), tenth).runs_out_at is None
    assert forecast(line(), began + 60.0).runs_out_at is None  # a minute says nothing of a month
    day = forecast(line(period="2026-01-31"), 1_769_904_000 - 43_200.0 - 3600.0)
    assert day.runs_out_at == pytest.approx(1_769_904_000 - 7200.0)
