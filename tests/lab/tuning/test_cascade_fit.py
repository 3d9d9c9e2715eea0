"""Fits of cascade, classifier and rule on made-up traffic whose best answer is known."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest

from headrace.cli.lab.tune_cascade import cascade_toml
from headrace.errors import RequestError
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.routing.calibration import ALWAYS_LARGE
from headrace.lab.tuning.cascade_fit import fit_cascade
from headrace.lab.tuning.judged_pair import JudgedPair, features_of, question_of, read_pairs, write_pairs


def pair(number: int, random: Random, *, knows: bool = True, small_cost: float = 1.0) -> JudgedPair:
    """Short questions are easy for the small variant. `knows`: it is sure of what it gets right."""
    easy = random.random() < 0.5
    question = f"{number} " + "why compare explain " * (1 if easy else 20)
    request = TextRequest(model="", messages=[{"role": "user", "content": question}])
    sure = random.uniform(0.8, 1.0) if easy == knows else random.uniform(0.1, 0.6)
    return JudgedPair(
        id=str(number),
        question=question_of(request),
        features=features_of(request),
        confidence={"mean": sure, "least": sure / 2, "entropy": random.random()},
        small=1.0 if easy else 0.2,
        large=1.0,
        small_cost=small_cost,
        large_cost=10.0,
    )


def traffic(count: int = 400, **options: object) -> list[JudgedPair]:
    random = Random(11)
    return [pair(number, random, **options) for number in range(count)]  # type: ignore[arg-type]


def test_a_small_variant_that_knows_what_it_knows_pays() -> None:
    fit = fit_cascade(traffic())
    assert fit.pays
    assert fit.measure in ("mean", "least")
    assert fit.held_out.quality >= 0.97
    assert fit.held_out.cost == pytest.approx(0.6, abs=0.08)  # all pay 1, half of them 10 more
    assert 0.4 < fit.held_out.share < 0.6
    assert fit.small_quality < 0.75 < fit.large_quality == 1.0


def test_a_small_variant_that_is_sure_of_its_mistakes_does_not_pay() -> None:
    fit = fit_cascade(traffic(knows=False))
    assert fit.threshold == ALWAYS_LARGE or fit.held_out.share < 0.1
    assert not fit.pays or fit.held_out.cost > 0.95
    text = cascade_toml(fit, None, Path("out"), ("draft", "mini"))
    if not fit.pays:
        assert "#[routing.cascades.tuned]" in text


def test_the_classifier_and_its_rule_are_measured_on_unseen_pairs() -> None:
    fit = fit_cascade(traffic())
    assert fit.ranked > 0.95
    assert fit.most_complexity is not None
    assert 0.0 < fit.most_complexity < 1.0
    assert fit.by_rule.quality >= 0.97
    assert fit.by_rule.cost == pytest.approx(0.55, abs=0.08)  # half of them pay 1, the others 10
    assert fit.classifier.made["by"] == "headrace tune cascade"


def test_few_pairs_are_rejected() -> None:
    with pytest.raises(RequestError, match="too few"):
        fit_cascade(traffic(10))


def test_pairs_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    made = traffic(30)
    write_pairs(tmp_path / "pairs.jsonl", made)
    assert read_pairs(tmp_path / "pairs.jsonl") == made
    (tmp_path / "bad.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(RequestError, match="line 1"):
        read_pairs(tmp_path / "bad.jsonl")
    assert math.isfinite(made[0].features[0])
