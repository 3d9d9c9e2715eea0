"""The search for the knee, against servers that are a number."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.bench.load_generator.sweep import RateSearch, shortfall
from headrace.bench.results.benchmark_result import RequestStats
from headrace.bench.results.request_stats import distribution


def climbed(most: float, **options: Any) -> tuple[list[float], RateSearch]:
    """Rates that are tried on a server that can do `most`."""
    usual: dict[str, Any] = {"low": 1.0}
    climb = RateSearch(**(usual | options))
    tried: list[float] = []
    while len(tried) < 40 and (rate := climb.next()) is not None:
        tried.append(rate)
        climb.note(rate, kept_up=rate <= most)
    return tried, climb


def test_rates_double_until_one_is_too_high_and_then_close_in() -> None:
    tried, climb = climbed(11.0)
    assert tried == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0, 11.3137, 9.5137], rel=1e-4)
    assert max(climb.good) == pytest.approx(9.5137, rel=1e-4)


def test_no_rate_is_above_the_highest() -> None:
    tried, climb = climbed(1e9, high=5.0)
    assert tried == [1.0, 2.0, 4.0, 5.0]
    assert climb.bad == []


def test_a_server_that_is_too_slow_for_the_first_rate_is_asked_less() -> None:
    tried, climb = climbed(0.3, refine=0)
    assert tried == [1.0, 0.5, 0.25]
    assert climb.good == [0.25]
    tried, climb = climbed(0.0)
    assert tried == [1.0, 0.5, 0.25, 0.125]
    assert climb.good == []


def found(**fields: Any) -> RequestStats:
    usual: dict[str, Any] = {"requests": 100, "completed": 100, "seconds": 10.0}
    usual |= {"ttft": distribution([100.0]), "e2el": distribution([1000.0])}
    return RequestStats(name="x", **(usual | fields))


def judged(
    figures: RequestStats, *, objectives: dict[str, float] | None = None, first: RequestStats | None = None
) -> str:
    return shortfall(figures, sending=10.0, first=first, objectives=objectives or {}, good_share=0.9, latency=5.0)


@pytest.mark.parametrize(
    ("figures", "objectives", "said"),
    [
        (found(), {}, ""),
        (found(failed=2), {}, "failed"),
        (found(ttft=distribution([501.0])), {}, "5.0 times"),
        (found(seconds=12.4), {}, ""),
        (found(seconds=12.6), {}, "2.6 s to finish"),
        (found(good=90), {"ttft": 300.0}, ""),
        (found(good=89, ttft=distribution([900.0])), {"ttft": 300.0}, "89%"),
        (found(good=95, ttft=distribution([900.0])), {"ttft": 300.0}, ""),
        (found(requests=0, completed=0), {}, "no request"),
    ],
)
def test_a_server_keeps_up_or_it_is_said_why_not(
    figures: RequestStats, objectives: dict[str, float], said: str
) -> None:
    why = judged(figures, objectives=objectives, first=found())
    assert said in why
    assert bool(why) == bool(said)


def test_the_first_stage_is_what_the_others_are_measured_by() -> None:
    assert judged(found(ttft=distribution([5000.0]), seconds=60.0)) == ""
