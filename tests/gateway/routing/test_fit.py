"""The fit of the complexity score and the benchmark's tables, on answers that are made up."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from benchmarks.cascade import report
from headrace.gateway.routing.complexity import FEATURES, Classifier
from headrace.lab.tuning.classifier_fit import fitted, ranked
from training import routing
from training.corpus.conversation import Question, Turn
from training.routing import (
    MODELS,
    Answered,
    Pair,
    Pairs,
    answers_from,
    digests,
    group_of,
    pair_of,
    train,
)


def answered(right: bool, logprob: float, tokens: int = 8) -> Answered:
    return Answered(right, 50, tokens, (logprob,) * tokens, ((logprob, -4.0),) * tokens)


def made_up(count: int = 400, models: dict[str, str] | None = None) -> Pairs:
    """Short questions are simple, and the small model is sure of those that it gets right."""
    random = Random(5)
    pairs: list[Pair] = []
    for number in range(count):
        simple = random.random() < 0.4
        words = random.randint(2, 12) if simple else random.randint(10, 60)
        messages = [{"role": "user", "content": "wheel " * words}]
        sure = random.uniform(-0.4, -0.01) if simple else random.uniform(-2.0, -0.3)
        draft, mini = answered(simple, sure), answered(random.random() < 0.9, -0.1)
        pairs.append(Pair("facts", f"facts/{number}", messages, (), draft, mini))
    return Pairs(models or {}, pairs, {"draft": 1000, "mini": 10_000}, "portable", "bf16")


def test_the_fit_finds_what_makes_questions_hard() -> None:
    classifier = train(made_up())
    assert classifier.made["other half, ranked right"] > 0.9
    assert classifier.weights["asked"] + classifier.weights["length"] > 0
    again = msgspec.json.decode(msgspec.json.encode(classifier), type=Classifier)
    assert again == classifier


def test_the_fit_is_that_of_a_logistic_regression() -> None:
    random = np.random.default_rng(3)
    values = random.normal(size=(4000, 2)) * [1.0, 5.0] + [0.0, 20.0]
    likely = 1.0 / (1.0 + np.exp(-(1.5 * values[:, 0] - 0.4 * values[:, 1] + 8.0)))
    labels = (random.random(4000) < likely).astype(np.float64)
    first, second, bias = fitted(values, labels, np.ones(4000), ridge=0.01)
    assert first == pytest.approx(1.5, abs=0.15)
    assert second == pytest.approx(-0.4, abs=0.04)
    assert bias == pytest.approx(8.0, abs=0.8)


def test_a_ranking_counts_pairs() -> None:
    labels = np.array([0.0, 0.0, 1.0, 1.0])
    assert ranked(np.array([1.0, 2.0, 3.0, 4.0]), labels) == 1.0
    assert ranked(np.array([1.0, 3.0, 2.0, 4.0]), labels) == 0.75
    assert ranked(np.ones(4), labels) == 0.5
    assert ranked(np.ones(4), np.ones(4)) == 0.5


def test_the_halves_share_no_group() -> None:
    pairs = made_up()
    first, second = pairs.half(), pairs.half(other=True)
    assert len(first) + len(second) == len(pairs.pairs)
    assert abs(len(first) - len(second)) < 80
    assert not {each.group for each in first} & {each.group for each in second}


def test_all_questions_after_one_fact_are_of_one_group() -> None:
    turns = (Turn("user", "What is TTFT?"),)
    first = Question("facts", turns, (), "The time to the first token.", "fact", "a")
    second = Question("facts", turns, (), "The time to the first token.", "fact", "b")
    other = Question("triage", turns, (), "{}", "json", "c")
    assert group_of(first) == group_of(second) != group_of(other)
    pair = pair_of(first, answered(True, -0.1), answered(True, -0.1))
    assert len(pair.features()) == len(FEATURES)
    assert pair.messages == [{"role": "user", "content": "What is TTFT?"}]


def test_a_confidence_is_that_of_the_first_tokens_where_only_they_are_asked_for() -> None:
    found = Answered(True, 10, 3, (-0.1, -0.3, -5.0), ((-0.1,), (-0.3,), (-5.0,)))
    assert found.confidence(2).value("least") == pytest.approx(math.exp(-0.3))
    assert found.confidence().value("least") == pytest.approx(math.exp(-5.0))


def test_answers_that_were_kept_are_made_again_for_other_models_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in MODELS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    path, pairs = tmp_path / "answers.json", made_up(10, digests(tmp_path))
    path.write_bytes(msgspec.json.encode(pairs))
    assert answers_from(path, tmp_path, None) == pairs
    (tmp_path / "mini" / "model.safetensors").write_bytes(b"trained further")
    again = made_up(20, digests(tmp_path))
    monkeypatch.setattr(routing, "answer_all", lambda *_, **__: again)
    assert answers_from(path, tmp_path, None) == again
    assert msgspec.json.decode(path.read_bytes(), type=Pairs) == again


def test_the_tables_say_what_a_cascade_saves() -> None:
    text = report(made_up(), "python benchmarks/cascade.py")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    curve = [[cell.strip() for cell in row] for row in rows if len(row) == 5][2:]
    assert curve[0][0] == "never"
    assert curve[0][1] == "0.0%"
    assert curve[-1][1] == "100.0%"
    targets = {row[2].strip(): float(row[6]) for row in rows if len(row) == 10 and "`mean`" in row[1]}
    assert targets["99%"] < 1.0  # the draft is sure of what it knows, so something is saved
    assert targets["80%"] <= targets["99%"]
