"""Drift of traffic: what counts as a change, and what a running server sees."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import numpy as np
import pytest

from headrace.cli import main
from headrace.config import DriftConfig, ModelConfig
from headrace.config.cache_section import ExactConfig
from headrace.lab.online.drift import MOST_GROUPS, DailyTraffic, compare_traffic, mix_drift, total_of
from headrace.lab.online.drift_watch import DAY_S, DriftWatch, TopicClusters
from tests.support.caching_server import BOSS, RED, caching
from tests.support.clock import Clock
from tests.support.running_server import asynchronous, words


class MemoryStore:
    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    async def load(self, name: str) -> bytes | None:
        return self.kept.get(name)

    async def save(self, name: str, body: bytes) -> None:
        self.kept[name] = body


def test_drift_is_the_share_that_would_have_to_move() -> None:
    found = mix_drift("language", {"en": 900, "de": 100}, {"en": 600, "de": 100, "fr": 300})
    assert found.drift == pytest.approx(0.3)
    assert found.has_drifted
    assert found.groups[0] == ("en", 0.9, 0.6)
    assert mix_drift("language", {"en": 10}, {"en": 90}).drift == 0.0


def test_small_samples_of_the_same_traffic_have_not_drifted() -> None:
    random = Random(1)
    names = [str(number) for number in range(20)]
    alarms = 0
    for _ in range(200):
        mixes: list[dict[str, int]] = [{}, {}]
        for mix in mixes:
            for _ in range(40):
                name = random.choice(names)
                mix[name] = mix.get(name, 0) + 1
        found = mix_drift("topic", *mixes)
        assert found.drift == pytest.approx(found.by_chance, abs=0.25)
        alarms += found.has_drifted
    assert alarms == 0


def test_means_and_quality_change_beyond_their_error() -> None:
    random = Random(2)
    spans = [DailyTraffic(), DailyTraffic()]
    for place, span in enumerate(spans):
        for _ in range(400):
            span.note("prompt_tokens", random.gauss(100, 10))
            span.note_quality("mini@int4", random.gauss(0.9 - 0.1 * place, 0.1))
    report = compare_traffic(*spans)
    assert [each.has_drifted for each in report.quality] == [True]
    [tokens] = report.means
    assert abs(tokens.after - tokens.before) < 3
    assert report.as_json()["quality"][0]["name"] == "mini@int4"


def test_groups_are_bounded_and_days_add_up() -> None:
    day = DailyTraffic()
    for number in range(MOST_GROUPS + 10):
        day.count("language", str(number))
    assert len(day.mixes["language"]) == MOST_GROUPS + 1
    assert day.mixes["language"]["other"] == 10
    assert total_of([day, day]).mixes["language"]["0"] == 2


def test_topics_are_clusters_of_near_questions() -> None:
    topics, random = TopicClusters(3, near=0.8), np.random.default_rng(4)
    directions = np.eye(4, 8, dtype=np.float32)
    for _ in range(30):
        for place in range(3):
            noisy = directions[place] + random.normal(0, 0.05, 8).astype(np.float32)
            assert topics.assign(noisy) == place
    assert topics.assign(directions[3]) in (0, 1, 2)  # there are no more than three


@asynchronous
async def test_weeks_are_compared_and_outlive_a_restart() -> None:
    clock, store = Clock(1_700_000_000.0), MemoryStore()
    watch = DriftWatch(DriftConfig(share=1.0), store, clock=clock)
    watch._today().count("language", "en", 500)
    watch._today().requests = 500
    await watch.save()
    clock.now += 7 * DAY_S
    again = DriftWatch(DriftConfig(share=1.0), store, clock=clock)
    await again.load()
    again._today().count("language", "de", 400)
    again._today().count("language", "en", 100)
    again._today().requests = 500
    found = again.as_json(7)
    assert (found["requests_before"], found["requests_after"]) == (500, 500)
    [mix] = found["mixes"]
    assert (mix["drift"], mix["has_drifted"]) == (0.8, True)
    clock.now += 100 * DAY_S
    again._today()
    assert len(again.days) == 1  # old days are forgotten


@asynchronous
async def test_a_server_profiles_its_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {"models": {"mini": ModelConfig()}, "exact": ExactConfig(), "drift": DriftConfig(share=1.0)}
    async with caching(tmp_path, **sections) as running:
        running.engine.answer = words("Hello ", "there")
        await running.chat("What is the capital of France and how big is it?", key=RED)
        await running.chat("Wie ist das Wetter und was kann ich für den Garten tun?", key=RED)
        [watch] = [each for each in running.server.services.answer_observers if isinstance(each, DriftWatch)]
        [profile] = watch.days.values()
        assert profile.mixes["language"] == {"en": 1, "de": 1}
        assert profile.means["output_tokens"].count == 2
        found = await running.ask("GET", "/admin/v1/drift?days=7", **BOSS)
        assert (found.status, found.json["requests_after"]) == (200, 2)
        assert found.json["facts_by_day"] == []  # none had sources
        sources = [{"id": "a", "text": "The mill opened in 1874."}]
        for year in (1874, 1974):
            running.engine.answer = words(f"It opened in {year}.")
            await running.chat("When did the mill open?", key=RED, sources=sources, cache="off")
        [day] = (await running.ask("GET", "/admin/v1/drift", **BOSS)).json["facts_by_day"]
        assert (day["variant"], day["answers"], day["supported"]) == ("mini", 2, 0.5)
        week = tmp_path / "week.html"
        monkeypatch.setenv("HEADRACE_ADMIN_KEY", BOSS["authorization"].removeprefix("Bearer "))
        assert await asyncio.to_thread(main, ["report", "-o", str(week), "--url", running.server.url]) == 0
        assert "50.0 %" in week.read_text().partition("Drift of questions and answers")[2]
        assert (await running.ask("GET", "/admin/v1/drift?days=99", **BOSS)).status == 400
