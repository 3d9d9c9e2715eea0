"""Prompts are read from JSON lines, lm-eval tasks and promptfoo files; what is not supported is refused by name."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.lab.cases.case import COMPLETIONS
from headrace.lab.cases.prompt_file import read_cases
from headrace.lab.cases.red_team import red_team_cases
from headrace.lab.comparison.answer import AnsweredCall

pytest.importorskip("yaml")


def written(folder: Path, name: str, *lines: Any) -> Path:
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_line_becomes_a_request_with_what_a_good_answer_has(tmp_path: Path) -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    path = written(
        tmp_path,
        "p.jsonl",
        {"prompt": "Hi", "completion": "Hello", "max_tokens": 5, "id": "first"},
        {"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]},
        {"prompt": "J", "response_format": form, "sources": [{"id": "s", "text": "t"}], "temperature": 0.7},
        {"prompt": "T", "calls": [{"name": "f", "arguments": {"a": 1}}], "behaviour": "refuse", "category": "c"},
        {"prompt": "C", "assert": [{"type": "contains", "value": "x"}]},
    )
    first, second, third, fourth, fifth = read_cases(path, max_tokens=64)
    assert first.body == {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "temperature": 0.0}
    assert (first.id, first.expected, second.id) == ("first", "Hello", "line 2")
    assert (second.body["messages"], second.expected) == ([{"role": "user", "content": "A"}], "B")
    assert second.body["max_tokens"] == 64
    assert (third.context.schema, third.context.wants_json) == (schema, True)
    assert [source.id for source in third.context.sources] == ["s"]
    assert third.body["temperature"] == 0.7
    assert fourth.expected_calls == (AnsweredCall("f", '{"a":1}'),)
    assert (fourth.behaviour, fourth.category) == ("refuse", "c")
    assert [each.name for each in fifth.assertions] == ["contains: x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a", "messages": []}, "line 1: expected either"),
        ({"promt": "a"}, "promt"),
        ({"prompt": "a", "assert": [{"type": "javascript", "value": "1"}]}, "javascript"),
        ({"prompt": "a", "behaviour": "maybe"}, "behaviour|maybe"),
        ("", "no prompts"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_cases(written(tmp_path, "p.jsonl", line))


LM_EVAL = """
task: sums
dataset_path: json
dataset_kwargs:
  data_files:
    test: docs.jsonl
test_split: test
output_type: {kind}
doc_to_text: "Question: {{{{ question }}}}\\nAnswer:"
doc_to_target: {target}
{more}
"""


def task(folder: Path, kind: str, target: str, more: str = "") -> Path:
    return written(folder, "task.yaml", LM_EVAL.format(kind=kind, target=target, more=more))


def test_an_lm_eval_task_generates_until(tmp_path: Path) -> None:
    written(tmp_path, "docs.jsonl", {"question": "2+2?", "answer": "4"}, {"question": "3+3?", "answer": "6"})
    more = "generation_kwargs:\n  until: ['.']\n  max_gen_toks: 7\n"
    first, second = read_cases(task(tmp_path, "generate_until", "answer", more))
    assert first.endpoint == COMPLETIONS
    assert first.body == {"prompt": "Question: 2+2?\nAnswer:", "max_tokens": 7, "temperature": 0.0, "stop": ["."]}
    assert (first.expected, second.expected, second.id) == ("4", "6", "sums 2")


def test_an_lm_eval_task_of_multiple_choice(tmp_path: Path) -> None:
    written(tmp_path, "docs.jsonl", {"question": "2+2?", "choices": ["3", "4"], "gold": 1})
    [case] = read_cases(task(tmp_path, "multiple_choice", "gold", 'doc_to_choice: "{{choices}}"'))
    assert (case.choices, case.correct_choice) == ((" 3", " 4"), 1)
    written(tmp_path, "docs.jsonl", {"question": "Up?", "gold": "no"})
    [case] = read_cases(task(tmp_path, "multiple_choice", "gold", "doc_to_choice: ['yes', 'no']"))
    assert (case.choices, case.correct_choice) == ((" yes", " no"), 1)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("loglikelihood_rolling", "", "output_type"),
        ("generate_until", "process_results: x", "process_results"),
        ("generate_until", "num_fewshot: 5", "num_fewshot"),
        ("generate_until", "filter_list: []", "filter_list"),
    ],
)
def test_what_lm_eval_has_beyond_the_subset_is_refused(tmp_path: Path, kind: str, more: str, message: str) -> None:
    written(tmp_path, "docs.jsonl", {"question": "2+2?", "answer": "4"})
    with pytest.raises(RequestError, match=message):
        read_cases(task(tmp_path, kind, "answer", more))


def test_tags_that_load_code_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "docs.jsonl", {"question": "2+2?", "answer": "4"})
    with pytest.raises(RequestError, match="load code are not supported"):
        read_cases(task(tmp_path, "generate_until", "!function utils.target"))


def test_templates_cannot_reach_python(tmp_path: Path) -> None:
    written(tmp_path, "docs.jsonl", {"question": "x", "answer": "4"})
    with pytest.raises(RequestError, match="cannot be filled"):
        read_cases(task(tmp_path, "generate_until", '"{{ question.__class__.__mro__ }}"'))


def test_a_promptfoo_file_combines_prompts_and_tests(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "promptfooconfig.yaml",
        """
prompts: ["Translate {{ word }}", "Say {{ word }} as JSON"]
providers: [openai:gpt-4o]
defaultTest:
  assert: [{type: not-contains, value: sorry}]
tests:
  - vars: {word: river}
    assert: [{type: icontains, value: fluss}, {type: is-json}]
  - vars: {word: mill}
""",
    )
    cases = read_cases(path)
    assert [case.prompt_text for case in cases] == [
        "Translate river",
        "Translate mill",
        "Say river as JSON",
        "Say mill as JSON",
    ]
    assert [each.name for each in cases[0].assertions] == ["not-contains: sorry", "icontains: fluss", "is-json"]
    assert (cases[0].context.wants_json, cases[1].context.wants_json) == (True, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompts: [file://x.txt]\ntests: [{}]", "prompts from files"),
        ("prompts: [a]\ntests: [{assert: [{type: javascript, value: x}]}]", "javascript"),
        ("prompts: [a]\ntests: [{options: {}}]", "'options'"),
        ("prompts: ['{{ gone }}']\ntests: [{}]", "gone"),
        ("prompts: [a]\nscenarios: []", "'scenarios'"),
        ("hello: 1", "neither an lm-eval task"),
        ("a: [", "while parsing"),
    ],
)
def test_what_promptfoo_has_beyond_the_subset_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_cases(written(tmp_path, "x.yaml", text))


def test_the_red_team_set_has_both_behaviours_in_every_category() -> None:
    cases = red_team_cases()
    assert len(cases) >= 300
    by_category = Counter((case.category, case.behaviour) for case in cases)
    categories = {category for category, _ in by_category}
    assert len(categories) >= 10
    assert all(by_category[category, behaviour] >= 8 for category in categories for behaviour in ("refuse", "answer"))
    assert len({case.prompt_text for case in cases}) == len({case.id for case in cases}) == len(cases)


def test_a_sample_has_every_category_and_is_the_same_each_time() -> None:
    sample = red_team_cases(60)
    assert len({(case.category, case.behaviour) for case in sample}) == 30
    assert [case.id for case in sample] == [case.id for case in red_team_cases(60)]
    assert red_team_cases(0) == []
