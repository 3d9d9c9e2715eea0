"""Defects that are planted into a real model are caught, and int8 passes. Answers come from a server of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.lab.answering.model_server import AnswererSpec, open_servers, parse_spec
from headrace.lab.cases.case import Case
from headrace.lab.cases.prompt_file import PromptLine, case_of
from headrace.lab.comparison.answer import Answer
from headrace.lab.comparison.answer_comparison import compare_all
from headrace.lab.gate.judgement import judge, passes
from headrace.lab.gate.likelihood import answer_likelihood
from headrace.lab.gate.metrics import Judged
from headrace.lab.gate.thresholds import GateThresholds, default_limits
from tests.support.models.planted_defects import copied_model, with_noise

# A shared machine's times say nothing of a variant.
LIMITS = GateThresholds(limits=default_limits() | {"ttft": None, "tpot": None})
QUESTIONS = (
    "What is 2 plus 3?",
    "What is 12 minus 5?",
    "What is the capital of Portugal?",
    "Hello, who are you?",
    "Where does Ada work?",
    "Who runs the mill?",
    "When did the mill open?",
    "Give me the name of a colour.",
    "What is time to first token?",
    "How many days does a week have?",
    "What can you do?",
    "Write one sentence about a river.",
)
SOURCES = [{"id": "a", "text": "Ada works at the mill in Porto."}, {"id": "b", "text": "The mill opened in 1874."}]


def cases() -> list[Case]:
    found: list[Case] = []
    for place, question in enumerate(QUESTIONS):
        fields: dict[str, Any] = {"prompt": question}
        if 4 <= place <= 6:
            fields["sources"] = SOURCES
        found.append(case_of(msgspec.convert(fields, PromptLine), f"line {place}", f"case {place}", 24))
    return found


def with_truncated_template(folder: Path) -> Path:
    path = copied_model(folder) / "chat_template.jinja"
    text = path.read_text()
    kept = [line for line in text.splitlines() if "'<|" not in line]  # without the marks of roles and ends
    path.write_text("\n".join([*kept, "{%- for message in messages %}{{- text_of(message.content) }}{%- endfor %}"]))
    return folder


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AnswererSpec]:
    folder = tmp_path_factory.mktemp("variants")
    noisy = with_noise(folder / "noisy", "model.layers.3.mlp.down_proj.weight", 3.0)
    every = {"keep": ("*=int3",)}
    return {
        "baseline": parse_spec("mini", parameter="x"),
        "int8": parse_spec("mini@int8", parameter="x"),
        "int3 everywhere": parse_spec("mini@int3", parameter="x", options=every),
        "noise": parse_spec(str(noisy), parameter="x"),
        "template": parse_spec(str(with_truncated_template(folder / "template")), parameter="x"),
        "swapped": parse_spec("draft", parameter="x"),
    }


@pytest.fixture(scope="module")
def answers(specs: dict[str, AnswererSpec]) -> dict[str, list[Answer]]:
    """One server for all variants, asked once."""

    async def ask() -> dict[str, list[Answer]]:
        async with open_servers(list(specs.values())) as servers:
            return {
                name: [await server.answer(case) for case in cases()]
                for name, server in zip(specs, servers, strict=True)
            }

    return asyncio.run(ask())


def failing(name: str, specs: dict[str, AnswererSpec], answers: dict[str, list[Answer]]) -> set[str]:
    pairs = [
        (new, old, case.context) for new, old, case in zip(answers[name], answers["baseline"], cases(), strict=True)
    ]
    judged = [
        Judged(case=case, candidate=new, baseline=old, comparison=comparison)
        for case, (new, old, _), comparison in zip(cases(), pairs, compare_all(pairs), strict=True)
    ]
    candidate, baseline = specs[name].variant, specs["baseline"].variant
    assert candidate is not None
    assert baseline is not None
    distance, tokens = answer_likelihood(judged, candidate, baseline, tokens=2000)
    results = judge(judged, LIMITS, distance, tokens)
    failed = {result.name for result in results if result.verdict == "fail"}
    assert passes(results, strict=False) == (not failed)
    return failed


def test_int8_passes(specs: dict[str, AnswererSpec], answers: dict[str, list[Answer]]) -> None:
    assert failing("int8", specs, answers) == set()


@pytest.mark.parametrize(
    ("defect", "caught_by"),
    [
        ("int3 everywhere", {"kl"}),
        ("noise", {"kl"}),
        ("template", {"similarity"}),
        ("swapped", {"kl"}),
    ],
)
def test_a_defect_is_caught(
    defect: str, caught_by: set[str], specs: dict[str, AnswererSpec], answers: dict[str, list[Answer]]
) -> None:
    assert caught_by <= failing(defect, specs, answers)
