"""The semantic cache's trial: what would have been wrong at each threshold, and which threshold keeps the bound."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.gateway.caches.semantic.semantic_cache import SemanticComparison
from headrace.lab.online.semantic_trial import SemanticTrial, TrialDay, TrialReport, shown_thresholds
from headrace.server.server import Server
from tests.gateway.caches.semantic.test_semantic_served import ON, SAME, ready, remembering
from tests.lab.online.test_drift import MemoryStore
from tests.support.caching_server import BOSS, RED
from tests.support.clock import Clock
from tests.support.running_server import asynchronous, until, words

DAY_S = 86_400.0


def compared(score: float, same: bool | None, *, serve: bool = False, served: bool = False) -> SemanticComparison:
    return SemanticComparison(score, same, serve, served, is_trial=not served)


def trial_of(*comparisons: SemanticComparison) -> TrialReport:
    day = TrialDay()
    for each in comparisons:
        day.take(each)
    return TrialReport.of(day, 0.02)


def test_a_threshold_counts_all_answers_above_it() -> None:
    report = trial_of(
        *[compared(0.95, True, serve=True) for _ in range(400)],
        *[compared(0.81, True) for _ in range(60)],
        *[compared(0.81, False, serve=True) for _ in range(40)],
        compared(0.81, None),
    )
    (low, all_served), (high, few_served) = report.thresholds
    assert (low, high) == (0.8, 0.94)
    assert (all_served.served, all_served.wrong, few_served.served, few_served.wrong) == (500, 40, 400, 0)
    assert report.best is not None
    assert report.best[0] == 0.94
    assert (report.learned.served, report.learned.wrong, report.unsure) == (440, 40, 1)
    shown = report.as_json()
    assert (shown["best"], shown["compared"]) == (0.94, 500)
    assert shown["thresholds"][1]["share"] == 0.8
    assert "threshold = 0.94 serves 80 %" in report.advice


def test_without_enough_right_answers_no_threshold_is_advised() -> None:
    report = trial_of(*[compared(0.95, True) for _ in range(180)])
    assert report.best is None
    assert report.needed == 189
    assert "Keep the mode record" in report.advice
    assert trial_of(*[compared(0.95, True) for _ in range(189)]).best is not None
    assert "mode to record" in trial_of().advice


def test_an_advised_threshold_keeps_the_bound_on_new_questions() -> None:
    """Questions are wrong more often the less alike they are; the bound holds on a sample that it was not found on."""
    kept = 0
    for seed in range(20):
        random_ = random.Random(seed)

        def drawn(count: int, random_: random.Random = random_) -> list[SemanticComparison]:
            scores = [random_.uniform(0.5, 1.0) for _ in range(count)]
            return [compared(score, random_.random() > (1.0 - score) / 10.0) for score in scores]

        best = trial_of(*drawn(3000)).best
        assert best is not None
        fresh = [each.same for each in drawn(3000) if each.score >= best[0]]
        kept += fresh.count(False) / len(fresh) <= 0.03
    assert kept >= 18


def test_checked_hits_are_counted_apart_and_doubtful_ones_beside_hits_are_not() -> None:
    report = trial_of(
        compared(0.9, True, served=True),
        compared(0.9, False, served=True),
        SemanticComparison(0.6, False, would_serve=False, was_served=False, is_trial=False),
    )
    assert (report.checked.served, report.checked.wrong, report.compared) == (2, 1, 0)


def test_a_long_table_is_thinned_and_keeps_the_best() -> None:
    report = trial_of(*[compared(place / 50 + 0.01, True) for place in range(50) for _ in range(10)])
    rows = shown_thresholds(report.as_json())
    assert len(rows) <= 12
    assert report.as_json()["best"] in [row["threshold"] for row in rows]


@asynchronous
async def test_days_are_saved_and_old_ones_do_not_count() -> None:
    clock, store = Clock(1_700_000_000.0), MemoryStore()
    trial = SemanticTrial(store, delta=0.02, clock=clock)
    trial.take(compared(0.9, True))
    await trial.save()
    clock.now += 3 * DAY_S
    again = SemanticTrial(store, delta=0.02, clock=clock)
    await again.load()
    again.take(compared(0.9, False))
    assert (again.report(7).compared, again.report(2).compared) == (2, 1)
    clock.now += 100 * DAY_S
    again.take(compared(0.9, True))
    assert len(again.days) == 1


@asynchronous
async def test_a_server_on_trial_reports_what_it_would_have_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with remembering(tmp_path, mode="record") as (running, _):
        cache = running.server.services.semantic
        assert cache is not None
        await ready(running, "red")

        def count() -> int:
            return sum(each["served"] for each in trial(running.server).as_json(7)["thresholds"][:1])

        for number, (text, answer) in enumerate([(ON, "Open it."), (SAME, "Open it."), (SAME, "It cannot be done.")]):
            running.engine.answer = words(answer)
            found = await running.chat(text, key=RED)
            assert found.json["choices"][0]["message"]["content"] == answer  # nothing is served from the cache
            await until(lambda number=number: count() == number and cache.about("red")["entries"] >= 1)
        shown = (await running.ask("GET", "/admin/v1/cache/trial?days=3", **BOSS)).json
        assert (shown["compared"], shown["learned"]["wrong"], shown["best"]) == (2, 1, None)
        assert (await running.ask("GET", "/admin/v1/lab", **BOSS)).json["semantic"]["compared"] == 2
        assert (await running.ask("GET", "/admin/v1/cache/trial?days=99", **BOSS)).status == 400
        monkeypatch.setenv("HEADRACE_ADMIN_KEY", BOSS["authorization"].removeprefix("Bearer "))
        assert await asyncio.to_thread(main, ["admin", "cache-trial", "--url", running.server.url]) == 0
        printed = capsys.readouterr().out
        assert "No threshold is shown to keep 2 % wrong answers" in printed
        week = tmp_path / "week.html"
        assert await asyncio.to_thread(main, ["report", "-o", str(week), "--url", running.server.url]) == 0
        assert "No threshold is shown to keep 2 % wrong answers" in week.read_text()


def trial(server: Server) -> SemanticTrial:
    cache = server.services.semantic
    assert cache is not None
    found = getattr(cache.compared, "__self__", None)
    assert isinstance(found, SemanticTrial)
    return found
