"""What is learned of entries: the bound holds on streams of many kinds, and hits become more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from headrace.gateway.caches.semantic.thresholds import CELLS, Evidence, Thresholds, wilson_interval


@dataclass(slots=True)
class Run:
    requests: int = 0
    hits: int = 0
    wrong: int = 0  # of hits


def stream(thresholds: Thresholds, *, seed: int, hostile: bool = False, requests: int = 2500) -> tuple[Run, Run]:
    """The two halves of a stream in which each entry has its own threshold, slope and share of errors."""
    draw = np.random.default_rng(seed)
    entries = 150
    places = draw.uniform(0.4, 1.2, entries) if hostile else draw.normal(0.65, 0.1, entries)
    slopes = draw.uniform(15, 50, entries)
    lapses = np.where(draw.random(entries) < (0.2 if hostile else 0.05), 0.3, 0.003)
    popular = 1 / np.arange(1, entries + 1) ** 0.8
    ids: list[int] = draw.choice(entries, requests, p=popular / popular.sum()).tolist()
    scores: list[float] = draw.beta(6, 1.5, requests).tolist()
    evidence: list[Evidence] = [Evidence() for _ in range(entries)]
    halves = Run(), Run()
    for place, (id, score) in enumerate(zip(ids, scores, strict=True)):
        chance = (1 - lapses[id]) / (1 + np.exp(-slopes[id] * (score - places[id])))
        right = bool(draw.random() < chance)
        decision = thresholds.decide(id, evidence[id], score)
        run = halves[place >= requests // 2]
        run.requests += 1
        run.hits += decision.serve
        run.wrong += decision.serve and not right
        if not decision.serve or decision.sampled:
            thresholds.learn(evidence[id], score, right, good=decision.good)
    return halves


@pytest.mark.parametrize("hostile", [False, True])
def test_no_more_than_delta_of_the_hits_are_wrong_and_hits_become_more(hostile: bool) -> None:
    runs = [stream(Thresholds(delta=0.05, seed=seed), seed=seed, hostile=hostile) for seed in (1, 2)]
    hits = sum(half.hits for run in runs for half in run)
    wrong = sum(half.wrong for run in runs for half in run)
    assert hits > 100
    assert wilson_interval(wrong, hits)[1] <= 0.05
    assert all(second.hits > first.hits for first, second in runs)


def test_no_more_than_delta_of_the_requests_are_answered_wrong_when_that_is_the_bound() -> None:
    first, second = stream(Thresholds(delta=0.05, per="request", seed=1), seed=1, hostile=True, requests=1500)
    requests, wrong = first.requests + second.requests, first.wrong + second.wrong
    assert wilson_interval(wrong, requests)[0] <= 0.05
    strict = stream(Thresholds(delta=0.05, seed=1), seed=1, hostile=True, requests=1500)
    assert first.hits + second.hits > strict[0].hits + strict[1].hits


def test_a_smaller_delta_serves_less() -> None:
    hits = [
        sum(half.hits for half in stream(Thresholds(delta=delta, seed=1), seed=1, requests=1500))
        for delta in (0.01, 0.02, 0.1)
    ]
    assert hits[0] < hits[1] < hits[2]


def test_nothing_is_served_before_anything_is_known() -> None:
    thresholds = Thresholds()
    assert not thresholds.decide(1, Evidence(), 1.0).serve


def test_caution_raises_the_bound() -> None:
    evidence = Evidence()
    careless, careful = Thresholds(), Thresholds(caution=1.0)
    assert careful.wrong(evidence, 0.9) >= careless.wrong(evidence, 0.9)


def test_an_entry_that_was_wrong_is_asked_for_a_higher_score() -> None:
    thresholds = Thresholds()
    for _ in range(300):
        known = Evidence()
        for _ in range(4):
            thresholds.learn(known, 0.9, True)
    fresh, spoilt = Evidence(), Evidence()
    thresholds.learn(spoilt, 0.9, False)
    assert thresholds.wrong(spoilt, 0.9) > 2 * thresholds.wrong(fresh, 0.9)
    assert thresholds.decide(1, fresh, 0.9).serve
    assert not thresholds.decide(2, spoilt, 0.9).serve


def test_a_score_that_is_higher_is_never_believed_to_be_worse() -> None:
    thresholds = Thresholds()
    evidence = Evidence()
    for score, right in ((0.9, True), (0.6, False), (0.8, True), (0.5, False)):
        thresholds.learn(evidence, score, right)
    bounds = [thresholds.wrong(evidence, score) for score in np.linspace(0, 1, 21)]
    assert bounds == sorted(bounds, reverse=True)


def test_the_same_seed_decides_the_same() -> None:
    one, other = (stream(Thresholds(per="request", seed=5), seed=9, requests=400) for _ in range(2))
    assert one == other


def test_checks_that_find_too_many_wrong_hits_stop_serving_until_they_are_right_again() -> None:
    thresholds = Thresholds(delta=0.05, brake_window=60)
    known = Evidence()
    for _ in range(300):
        thresholds.learn(known, 0.95, True)
    assert thresholds.decide(1, known, 0.95).serve
    for _ in range(8):
        thresholds.learn(Evidence(), 0.99, False, good=True)
    assert thresholds.braked
    decision = thresholds.decide(1, known, 0.95)
    assert (decision.serve, decision.good) == (False, True)
    for _ in range(60):
        thresholds.learn(known, 0.95, True, good=True)
    assert not thresholds.braked
    assert thresholds.decide(1, known, 0.95).serve


def test_evidence_survives_being_packed() -> None:
    thresholds = Thresholds()
    evidence = Evidence()
    assert Evidence.unpacked(evidence.packed()) == evidence
    for right in (True, True, False):
        thresholds.learn(evidence, 0.8, right)
    kept = Evidence.unpacked(evidence.packed())
    assert (kept.right, kept.wrong) == (2, 1)
    assert kept.likelihood is not None
    assert evidence.likelihood is not None
    assert kept.likelihood == pytest.approx(evidence.likelihood, rel=1e-5)
    assert Evidence.unpacked(b"something else") == Evidence()
    assert len(evidence.packed()) == 24 + 4 * CELLS


def test_what_was_kept_teaches_a_new_namespace() -> None:
    old, new = Thresholds(), Thresholds()
    for _ in range(50):
        evidence = Evidence()
        for _ in range(3):
            old.learn(evidence, 0.9, True)
        new.remember(Evidence.unpacked(evidence.packed()))
    assert new.wrong(Evidence(), 0.9) < Thresholds().wrong(Evidence(), 0.9) / 3


def test_the_interval_of_a_share() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(5, 100) == pytest.approx((0.0215, 0.1118), abs=1e-4)
    assert wilson_interval(0, 50)[0] == 0.0
