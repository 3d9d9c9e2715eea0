"""Objectives: what counts, how fast budgets burn, and when alerts begin and end."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import SloConfig
from headrace.observe.latency.latency_book import RequestSample, Slice
from headrace.observe.slo.objectives import Objectives, objectives_of
from tests.support.clock import Clock

CHAT = {"chat": SloConfig(ttft_p95_ms=300.0, itl_p95_ms=60.0, availability=0.99)}


def sample(ttft: float = 0.1, surface: str = "chat", **fields: Any) -> RequestSample:
    made = RequestSample(Slice("mini", surface, "-", "/v1/x", "<=128", "direct"), {"ttft": ttft})
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def of(objectives: Objectives, name: str) -> dict[str, Any]:
    return next(each for each in objectives.as_json() if each["objective"] == name)


def test_a_section_has_an_objective_for_each_of_its_keys() -> None:
    found = objectives_of({**CHAT, "fast lane": SloConfig(surface="voice", e2e_p99_ms=2000.0)})
    assert [(each.slo, each.surface, each.name, each.latency, each.threshold_s, each.target) for each in found] == [
        ("chat", "chat", "ttft_p95_ms", "ttft", 0.3, 0.95),
        ("chat", "chat", "itl_p95_ms", "itl", 0.06, 0.95),
        ("chat", "chat", "availability", "", 0.0, 0.99),
        ("fast lane", "voice", "e2e_p99_ms", "e2e", 2.0, 0.99),
    ]


def test_attainment_and_budget_follow_from_what_was_good() -> None:
    objectives = Objectives(objectives_of(CHAT), Clock())
    good = [objectives.judge(sample(0.1, gaps=[0.05] * 9 + [0.1])) for _ in range(98)]
    good += [objectives.judge(sample(0.5, gaps=[0.05] * 20)), objectives.judge(sample(0.1, failed=True))]
    objectives.judge(sample(9.0, surface="voice"))
    assert good.count(True) == 0  # one gap in ten is too long for 95 %
    ttft = of(objectives, "ttft_p95_ms")
    assert (ttft["events"], ttft["attainment"]) == (100, 0.99)
    assert ttft["budget_left"] == pytest.approx(0.8)
    itl = of(objectives, "itl_p95_ms")
    assert (itl["events"], itl["attainment"]) == (1000, pytest.approx(902 / 1000))
    assert of(objectives, "availability")["burn_rate"]["5m"] == pytest.approx(1.0)


def test_an_alert_needs_a_long_and_a_short_window_and_ends_with_the_short_one() -> None:
    clock = Clock()
    objectives = Objectives(objectives_of({"chat": SloConfig(availability=0.99)}), clock)
    for _ in range(3 * 3600 // 10):  # three good hours
        objectives.judge(sample())
        clock.now += 10.0
    for _ in range(30):  # five bad minutes: a short window alone does not page
        objectives.judge(sample(failed=True))
        clock.now += 10.0
    assert not any(alert.window == "1h" for alert in objectives.evaluate())
    for _ in range(120):
        objectives.judge(sample(failed=True))
        clock.now += 10.0
    objectives.evaluate()
    assert objectives.paging() == {"chat"}
    assert objectives.evaluate() == []  # it is told once
    for _ in range(7 * 360):
        objectives.judge(sample())
        clock.now += 10.0
    (ended,) = [alert for alert in objectives.evaluate() if not alert.fires or alert.severity == "ticket"]
    assert ended.objective.name == "availability"
    assert objectives.paging() == set()


def test_a_few_failures_at_night_are_no_alert() -> None:
    clock = Clock()
    objectives = Objectives(objectives_of({"chat": SloConfig(availability=0.999)}), clock)
    for _ in range(5):
        objectives.judge(sample(failed=True))
    assert objectives.evaluate() == []


def test_events_of_three_days_are_kept_and_no_more() -> None:
    clock = Clock()
    objectives = Objectives(objectives_of({"chat": SloConfig(availability=0.9)}), clock)
    for _ in range(6 * 24):
        objectives.judge(sample())
        clock.now += 3600.0
    assert 71 <= of(objectives, "availability")["events"] <= 73
    ((_, good, total),) = objectives.events()
    assert (good, total) == (144, 144)
