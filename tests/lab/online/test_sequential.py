"""Sequential tests: no more false alarms than stated with a look after every value, and detection of what matters."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from headrace.lab.online.canary_evidence import MEASURES
from headrace.lab.online.sequential import BettingTest, MeanComparison, RateComparison, TailComparison, is_decided

ALPHA = 0.05


def test_the_hypothesis_holds_in_1000_trials_with_a_look_after_each_value() -> None:
    alarms = 0
    for seed in range(1000):
        random_ = random.Random(seed)
        test = BettingTest(1.0)
        for _ in range(400):
            test.add(random_.uniform(-1.0, 1.0))
            if is_decided(test.evidence, ALPHA):
                alarms += 1
                break
    assert alarms <= 50  # 5 %


def test_equal_rates_raise_no_more_alarms_than_stated_in_1000_trials() -> None:
    """A/A: both arms fail one time in ten; no tolerance, so nothing but the level protects them."""
    alarms = 0
    for seed in range(1000):
        random_ = random.Random(seed)
        comparison = RateComparison.of(0.0)
        for _ in range(400):
            value = float(random_.random() < 0.1)
            (comparison.candidate if random_.random() < 0.3 else comparison.control)(value)
        alarms += is_decided(comparison.breach, ALPHA)  # the peak: as if looked at after every request
    assert alarms <= 50


def test_equal_durations_raise_no_more_alarms_than_stated_in_1000_trials() -> None:
    alarms = 0
    for seed in range(1000):
        random_ = random.Random(seed)
        comparison = TailComparison.of(0.0)
        for _ in range(200):
            seconds = random_.lognormvariate(0.0, 0.5)
            (comparison.candidate if random_.random() < 0.5 else comparison.control)(seconds)
        alarms += is_decided(comparison.breach, ALPHA)
    assert alarms <= 50


def test_equal_costs_raise_no_more_alarms_than_stated_in_400_trials() -> None:
    alarms = 0
    for seed in range(400):
        random_ = random.Random(seed)
        comparison = MeanComparison(0.0)
        for _ in range(200):
            cost = random_.lognormvariate(5.0, 0.7)
            (comparison.candidate if random_.random() < 0.5 else comparison.control)(cost)
        alarms += is_decided(comparison.breach, ALPHA)
    assert alarms <= 20


def test_a_candidate_that_is_30_percent_dearer_is_found_and_equal_costs_are_proven() -> None:
    found: list[int] = []
    for seed in range(9):
        random_ = random.Random(seed)
        dearer, equal = MeanComparison(0.1), MeanComparison(0.1)
        for number in range(4000):
            if number % 2:
                dearer.control(random_.lognormvariate(5.0, 0.5))
                equal.control(100.0)
            else:
                dearer.candidate(1.3 * random_.lognormvariate(5.0, 0.5))
                equal.candidate(100.0)
            if is_decided(dearer.breach, ALPHA / MEASURES):
                found.append(number // 2)
                break
        assert is_decided(equal.proof, ALPHA / MEASURES) or number < 1000
        assert not is_decided(equal.breach, ALPHA / MEASURES)
    assert len(found) == 9
    assert max(found) <= 1500


def test_a_change_of_load_that_hits_both_arms_is_no_breach() -> None:
    random_ = random.Random(1)
    comparison = TailComparison.of(0.0)
    for number in range(2000):
        seconds = random_.lognormvariate(0.0, 0.3) * (3.0 if number > 1000 else 1.0)
        (comparison.candidate if random_.random() < 0.5 else comparison.control)(seconds)
    assert not is_decided(comparison.breach, ALPHA)


def found_after(slower: float, share: float, spread: float, seed: int, *, most: int = 20_000) -> int:
    random_ = random.Random(seed)
    comparison = TailComparison.of(0.1)
    candidates = 0
    for _ in range(most):
        seconds = random_.lognormvariate(0.0, spread)
        if random_.random() < share:
            candidates += 1
            comparison.candidate(seconds * slower)
        else:
            comparison.control(seconds)
        if is_decided(comparison.breach, ALPHA / MEASURES):
            return candidates
    return most


@pytest.mark.parametrize(("spread", "most"), [(0.25, 800), (0.5, 2500)])
def test_a_candidate_that_is_20_percent_slower_is_found(spread: float, most: int) -> None:
    found = sorted(found_after(1.2, 0.1, spread, seed) for seed in range(9))
    assert found[-1] <= most  # requests of the candidate, at a tenth of the traffic


def test_5_points_of_quality_are_found_within_1000_pairs() -> None:
    found: list[int] = []
    for seed in range(20):
        random_ = random.Random(seed)
        comparison = RateComparison.of(0.02)
        for number in range(1000):
            control = min(1.0, max(0.0, random_.gauss(0.85, 0.1)))
            candidate = min(1.0, max(0.0, random_.gauss(0.80, 0.1)))
            comparison.pair(1.0 - control, 1.0 - candidate)
            if is_decided(comparison.breach, ALPHA / MEASURES):
                found.append(number + 1)
                break
    assert len(found) == 20
    assert sorted(found)[10] <= 500


def test_an_equal_candidate_is_proven_to_be_within_its_tolerance() -> None:
    random_ = random.Random(3)
    durations, rates = TailComparison.of(0.2), RateComparison.of(0.05)
    for _ in range(6000):
        seconds, value = random_.lognormvariate(0.0, 0.25), float(random_.random() < 0.05)
        is_candidate = random_.random() < 0.5
        (durations.candidate if is_candidate else durations.control)(seconds)
        (rates.candidate if is_candidate else rates.control)(value)
    assert is_decided(durations.proof, ALPHA)
    assert is_decided(rates.proof, ALPHA)
    assert not is_decided(durations.breach, ALPHA)


def test_evidence_is_the_mean_wealth_of_the_bets() -> None:
    test = BettingTest(2.0)
    assert test.evidence == pytest.approx(0.0)
    test.add(1.0)  # half of the bound: each bet b grows by 1 + b / 2
    bets = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
    assert math.exp(test.evidence) == pytest.approx(sum(1 + bet / 2 for bet in bets) / len(bets))
    peak = test.peak
    test.add(-2.0)
    assert test.evidence < peak == test.peak
    test.add(50.0)  # counts as the bound
    assert math.isfinite(test.evidence)


def test_saved_comparisons_go_on_where_they_were() -> None:
    random_ = random.Random(5)
    comparison, rates = TailComparison.of(0.1), RateComparison.of(0.1)
    for _ in range(400):
        comparison.control(random_.lognormvariate(0.0, 0.3))
        comparison.candidate(random_.lognormvariate(0.3, 0.3))
        rates.control(0.0)
        rates.candidate(float(random_.random() < 0.5))
    restored = TailComparison.of(0.1)
    restored.unpack(msgspec.json.decode(msgspec.json.encode(comparison.pack())))
    assert (restored.breach, restored.proof) == (comparison.breach, comparison.proof)
    assert restored.thresholds == comparison.seen.quantiles((0.5, 0.8, 0.95))
    kept = msgspec.json.decode(msgspec.json.encode(rates), type=RateComparison)
    assert (kept.breach, kept.proof) == (rates.breach, rates.proof)
