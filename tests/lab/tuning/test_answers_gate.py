"""The gate of answers in a tuning: equal variants pass, other answers fail, and likelihood is asked first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench.evaluation.documents import read_prompts
from headrace.bench.tuning.engine_machine import EngineMachine
from headrace.bench.tuning.quality_gate import GateRules
from headrace.bench.tuning.search import Gate
from headrace.bench.tuning.tuning_traffic import tuning_traffic
from headrace.errors import RequestError
from headrace.lab.tuning.answers_gate import answers_gate
from headrace.variant import Variant


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"What is {number} plus 3?", "max_tokens": 6} for number in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_variant_passes_against_itself_and_another_model_fails(prompts: Path) -> None:
    gate = answers_gate(prompts)
    mini = Variant.of("mini", weights="bf16", threads=2)
    same = gate(mini, mini)
    assert same.passed, same.reason
    assert same.reason == "answers to 12 prompts pass"
    other = gate(Variant.of("draft", weights="bf16", threads=2), mini)
    assert not other.passed
    assert "answers fail: " in other.reason


def test_answers_are_compared_only_where_the_likelihood_passes(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"prompt": "The old mill stands by the river and its wheel turns."}\n' * 3)
    asked: list[str] = []

    def gate(candidate: Variant, reference: Variant) -> Gate:
        asked.append(candidate.weights)
        return Gate(passed=False, reason="answers fail: json", figures={"cases": 3.0})

    setting = {
        "batching": "continuous",
        "max_sequences": 1,
        "weights": "f32",
        "kv": "f32",
        "context": 256,
        "threads": 2,
    }
    machine = EngineMachine(
        "mini",
        tuning_traffic(None, "chat", requests=1, users=1, scale=0.05),
        objectives={},
        reference=setting,
        prompts=read_prompts(path),
        rules=GateRules(most_kl=1e-9, least_agreement=0.0, most_perplexity=1.0),
        answers_gate=gate,
    )
    assert "KL" in machine.gate({**setting, "weights": "int8"}).reason
    assert asked == []
    found = machine.gate({**setting, "threads": 1})
    assert (found.passed, found.reason, asked) == (False, "answers fail: json", ["f32"])
    assert machine.gate({**setting, "threads": 1}) is found  # asked once


def test_prompts_that_are_missing_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no\.jsonl"):
        answers_gate(tmp_path / "no.jsonl")
