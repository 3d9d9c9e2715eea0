"""Imports task files of lm-evaluation-harness: a subset of its YAML, with documents from local JSON lines.

Read: task, dataset_kwargs.data_files, test_split and validation_split, doc_to_text, doc_to_target, doc_to_choice,
output_type (generate_until, multiple_choice), generation_kwargs (until, max_gen_toks, temperature), target_delimiter,
description. Every other key that could change the result is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from headrace.bench.simulation.synthetic_traffic import trace_lines
from headrace.errors import RequestError
from headrace.lab.cases.assertions import Assertion
from headrace.lab.cases.case import COMPLETIONS, Case
from headrace.lab.cases.task_template import fill
from headrace.lab.comparison.answer import AnswerContext

MOST_LINE: Final = 8 * 1024 * 1024
_READ: Final = frozenset(
    """
    task dataset_path dataset_kwargs test_split validation_split doc_to_text doc_to_target doc_to_choice output_type
    generation_kwargs target_delimiter description num_fewshot metric_list metadata tag task_alias group
    """.split()
)


def read_lm_eval_task(content: Any, path: Path, max_tokens: int) -> list[Case]:
    """Return a case for each document. RequestError for what is not in the subset."""
    task = _task(content, path)
    kind = str(task.get("output_type", "generate_until"))
    if kind not in ("generate_until", "multiple_choice"):
        raise _refused(path, "output_type", f"'{kind}'; expected generate_until or multiple_choice")
    name = str(task.get("task", path.stem))
    cases: list[Case] = []
    for file in _data_files(task, path):
        for number, raw in trace_lines(file, MOST_LINE):
            where = f"{file}, line {number}"
            try:
                document = msgspec.json.decode(raw, type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise RequestError(f"{where}: {error}", parameter="prompts") from None
            cases.append(_case(task, document, f"{name} {number}", where, kind, max_tokens))
    if not cases:
        raise RequestError(f"{path}: its data files have no documents.", parameter="prompts")
    return cases


def _task(content: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(content, dict) or "doc_to_text" not in content:
        raise RequestError(
            f"{path} is neither an lm-eval task (with doc_to_text) nor a promptfoo file (with prompts).",
            parameter="prompts",
        )
    task = cast(dict[str, Any], content)
    for key in task:
        if key not in _READ:
            raise _refused(path, key, "remove it, or run the task in lm-eval itself")
    if task.get("num_fewshot"):
        raise _refused(path, "num_fewshot", "write the examples into doc_to_text or description")
    if task.get("dataset_path", "json") != "json":
        raise _refused(path, "dataset_path", "only 'json' with local data_files")
    return task


def _data_files(task: Mapping[str, Any], path: Path) -> list[Path]:
    kwargs: Any = task.get("dataset_kwargs") or {}
    files: Any = kwargs.get("data_files")
    if isinstance(files, dict):
        split = str(task.get("test_split") or task.get("validation_split") or "test")
        files = cast(dict[str, Any], files).get(split)
    names = cast(list[Any], files) if isinstance(files, list) else [] if files is None else [files]
    found = [path.parent / str(name) for name in names]
    for file in found:
        if not file.is_file():
            raise RequestError(f"{path}: there is no file {file}. Only local JSON lines are read.", parameter="prompts")
    if not found:
        raise RequestError(f"{path}: dataset_kwargs.data_files names no local file.", parameter="prompts")
    return found


def _case(task: Mapping[str, Any], document: dict[str, Any], id: str, where: str, kind: str, max_tokens: int) -> Case:
    prompt = str(task.get("description") or "") + _text(task["doc_to_text"], document, where)
    generation: Mapping[str, Any] = task.get("generation_kwargs") or {}
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": int(generation.get("max_gen_toks", max_tokens)),
        "temperature": float(generation.get("temperature", 0.0)),
    }
    target = _value(task.get("doc_to_target", ""), document, where)
    if kind == "multiple_choice":
        choices = [str(each) for each in _choices(task, document, where)]
        correct = _choice_index(target, choices, where)
        delimiter = str(task.get("target_delimiter", " "))
        return Case(
            id=id,
            endpoint=COMPLETIONS,
            body=body,
            context=AnswerContext(prompt=prompt),
            choices=tuple(delimiter + each for each in choices),
            correct_choice=correct,
            category=str(task.get("task", "")),
        )
    stop = generation.get("until", ["\n\n"])
    body["stop"] = [stop] if isinstance(stop, str) else [str(each) for each in stop]
    return Case(
        id=id,
        endpoint=COMPLETIONS,
        body=body,
        context=AnswerContext(prompt=prompt),
        expected=str(target),
        assertions=(Assertion("equals", str(target)),),
        category=str(task.get("task", "")),
    )


def _text(template: Any, document: dict[str, Any], where: str) -> str:
    return str(_value(template, document, where))


def _value(template: Any, document: dict[str, Any], where: str) -> Any:
    """Return a field of that name, or the filled template."""
    if isinstance(template, int):
        return template
    if not isinstance(template, str):
        raise RequestError(f"{where}: expected a template as text, found {str(template)[:60]!r}.")
    if template in document:
        return document[template]
    return fill(template, document, where)


def _choices(task: Mapping[str, Any], document: dict[str, Any], where: str) -> Sequence[Any]:
    given = task.get("doc_to_choice")
    if isinstance(given, list):
        return [_text(each, document, where) for each in cast(list[Any], given)]
    found = document.get(given) if isinstance(given, str) else None
    if isinstance(given, str) and found is None:
        expression = given.strip().removeprefix("{{").removesuffix("}}").strip()
        found = document.get(expression)
    if not isinstance(found, list) or not found:
        raise RequestError(f"{where}: doc_to_choice must be a list, or name a field that is one.")
    return cast(list[Any], found)


def _choice_index(target: Any, choices: Sequence[str], where: str) -> int:
    text = str(target).strip()
    if text in choices:
        return choices.index(text)
    if text.isdigit() and int(text) < len(choices):
        return int(text)
    raise RequestError(f"{where}: the target '{text[:60]}' is none of the choices and no place among them.")


def _refused(path: Path, key: str, what: str) -> RequestError:
    return RequestError(f"{path}: the key '{key}' is not supported here: {what}.", parameter="prompts")
