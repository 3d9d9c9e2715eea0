"""Imports promptfoo-like YAML: prompts, tests with vars, and deterministic assertions.

Every prompt is combined with every test. Providers are ignored, because the gate has a candidate and a baseline.
Prompts from files, and assertions that run code, are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from headrace.errors import RequestError
from headrace.lab.cases.assertions import Assertion, read_assertion
from headrace.lab.cases.case import Case
from headrace.lab.cases.task_template import fill
from headrace.lab.comparison.answer import AnswerContext

_READ: Final = frozenset({"description", "prompts", "providers", "tests", "defaultTest", "outputPath", "tags"})
_TEST: Final = frozenset({"description", "vars", "assert", "metadata"})


def read_promptfoo(content: Mapping[str, Any], path: Path, max_tokens: int) -> list[Case]:
    for key in content:
        if key not in _READ:
            raise RequestError(f"{path}: the key '{key}' is not supported here.", parameter="prompts")
    prompts = _list(content.get("prompts"), f"{path}: prompts")
    tests = _list(content.get("tests") or [{}], f"{path}: tests")
    default = _test(content.get("defaultTest") or {}, f"{path}: defaultTest")
    cases: list[Case] = []
    for prompt_number, prompt in enumerate(prompts, start=1):
        template = _template(prompt, f"{path}: prompts[{prompt_number - 1}]")
        for number, given in enumerate(tests, start=1):
            where = f"{path}: tests[{number - 1}]"
            test = _test(given, where)
            values = {**cast(dict[str, Any], default.get("vars") or {}), **cast(dict[str, Any], test.get("vars") or {})}
            text = fill(template, values, where)
            assertions = _assertions(default, f"{path}: defaultTest") + _assertions(test, where)
            cases.append(
                Case(
                    id=f"prompt {prompt_number}, test {number}",
                    body={
                        "messages": [{"role": "user", "content": text}],
                        "max_tokens": max_tokens,
                        "temperature": 0.0,
                    },
                    context=AnswerContext(
                        prompt=text, wants_json=any(each.type == "is-json" and not each.negated for each in assertions)
                    ),
                    assertions=assertions,
                    category=str(test.get("description") or ""),
                )
            )
    return cases


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise RequestError(f"{where}: expected a list.", parameter="prompts")
    return cast(list[Any], value)


def _template(prompt: Any, where: str) -> str:
    text: Any = cast(dict[str, Any], prompt).get("raw") if isinstance(prompt, dict) else prompt
    if not isinstance(text, str):
        raise RequestError(f"{where}: expected the prompt's text.", parameter="prompts")
    if text.startswith("file://") or text.endswith((".txt", ".json", ".js", ".py", ".yaml")):
        raise RequestError(
            f"{where}: prompts from files are not supported. Write the text itself.", parameter="prompts"
        )
    return text


def _test(given: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise RequestError(f"{where}: expected a table with vars and assert.", parameter="prompts")
    test = cast(dict[str, Any], given)
    for key in test:
        if key not in _TEST:
            raise RequestError(f"{where}: the key '{key}' is not supported here.", parameter="prompts")
    return test


def _assertions(test: Mapping[str, Any], where: str) -> tuple[Assertion, ...]:
    given: Any = test.get("assert") or []
    return tuple(
        read_assertion(cast(dict[str, Any], each), f"{where}.assert[{place}]") for place, each in enumerate(given)
    )
