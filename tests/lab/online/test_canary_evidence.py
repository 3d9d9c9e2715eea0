"""What a canary's measurements amount to."""

from __future__ import annotations

import random

from headrace.lab.online.canary_evidence import CanaryBounds, CanaryEvidence

BOUNDS = CanaryBounds()


def test_a_candidate_that_fails_more_often_is_a_breach_of_that_measure_alone() -> None:
    evidence, random_ = CanaryEvidence("one", BOUNDS), random.Random(1)
    for _ in range(600):
        evidence.note_rate("control", "failures", 0.0)
        evidence.note_rate("candidate", "failures", float(random_.random() < 0.1))
        evidence.note_rate("control", "checks", 0.0)
        evidence.note_rate("candidate", "checks", 0.0)
    assert [each.measure for each in evidence.breaches()] == ["failures"]
    shown = {each["measure"]: each["verdict"] for each in evidence.as_json()["measures"]}
    assert shown == {"failures": "breached", "checks": "proven"}


def test_equal_arms_are_proven_and_shown_side_by_side() -> None:
    evidence, random_ = CanaryEvidence("one", CanaryBounds(slower=0.3, worse=0.05, failures=0.05)), random.Random(2)
    for _ in range(3000):
        evidence.note_rate("control", "failures", float(random_.random() < 0.01))
        evidence.note_rate("candidate", "failures", float(random_.random() < 0.01))
        evidence.note_quality(random_.uniform(0.8, 1.0), random_.uniform(0.8, 1.0))
        for name in ("ttft", "e2e"):
            evidence.note_seconds("control", name, random_.lognormvariate(-2, 0.2))
            evidence.note_seconds("candidate", name, random_.lognormvariate(-2, 0.2))
    assert evidence.breaches() == []
    assert evidence.is_proven
    found = evidence.as_json()
    for arm in ("control", "candidate"):
        assert 0.85 < found[arm]["quality"] < 0.95
        assert 100 < found[arm]["latency"]["ttft"]["p50_ms"] < 170
    assert found["needed_evidence"] == 160.0  # 8 measures share the level of 5 %


def test_a_dearer_candidate_is_a_breach_and_free_answers_are_not_compared() -> None:
    evidence, random_ = CanaryEvidence("one", BOUNDS), random.Random(4)
    for _ in range(600):
        evidence.note_answer("control", output_tokens=10, micros=random_.randint(80, 120))
        evidence.note_answer("candidate", output_tokens=10, micros=random_.randint(120, 180))
    assert [each.measure for each in evidence.breaches()] == ["cost"]
    assert CanaryEvidence.unpack("one", BOUNDS, evidence.pack()).as_json() == evidence.as_json()
    assert CanaryEvidence.unpack("one", CanaryBounds(dearer=0.9), evidence.pack()).breaches() == []
    free = CanaryEvidence("two", BOUNDS)
    for _ in range(100):
        free.note_answer("control", output_tokens=10, micros=0)
        free.note_answer("candidate", output_tokens=10, micros=0)
    assert free.as_json()["measures"] == []


def test_nothing_is_proven_without_measurements() -> None:
    assert not CanaryEvidence("one", BOUNDS).is_proven


def test_saved_evidence_goes_on_and_belongs_to_its_run() -> None:
    evidence, random_ = CanaryEvidence("one", BOUNDS), random.Random(3)
    for _ in range(200):
        evidence.arms["control"].requests += 1
        evidence.note_rate("control", "failures", 0.0)
        evidence.note_rate("candidate", "failures", float(random_.random() < 0.3))
        evidence.note_seconds("control", "ttft", random_.lognormvariate(-2, 0.2))
        evidence.note_seconds("candidate", "ttft", random_.lognormvariate(-2, 0.2))
    saved = evidence.pack()
    restored = CanaryEvidence.unpack("one", BOUNDS, saved)
    assert restored.as_json() == evidence.as_json()
    empty = CanaryEvidence("two", BOUNDS).as_json()
    assert CanaryEvidence.unpack("two", BOUNDS, saved).as_json() == empty
    assert CanaryEvidence.unpack("one", CanaryBounds(failures=0.2), saved).as_json() == empty
    for broken in (None, b"", b"{", b'{"run": "one"}', b"[]"):
        assert CanaryEvidence.unpack("one", BOUNDS, broken).as_json() == empty
