"""Reads the examples of `headrace adapt`: prompts with good answers, recordings, texts, and a teacher's answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.adapt.training_rows import TrainingRow, answer_row
from headrace.bench.evaluation.documents import Document, cut, read_text, tokenise
from headrace.errors import RequestError
from headrace.lab.answering.model_server import AnswererSpec
from headrace.lab.cases.case import COMPLETIONS, Case
from headrace.lab.cases.prompt_file import cases_of_records, read_cases
from headrace.lab.gate.task_scores import ask_all
from headrace.lab.recording.recorded_request import read_trace
from headrace.models.text.tokenizer import Tokenizer

ANSWER_TOKENS: Final = 512  # of an answer that a teacher or a gate generates, at most


def read_examples(path: Path, *, plain: bool) -> list[Case]:
    """Read prompts with or without good answers. With `plain`, a prompt is continued as text, without a template."""
    cases = read_cases(path, max_tokens=ANSWER_TOKENS)
    return [_as_text(case) for case in cases] if plain else cases


def read_answered_traffic(path: Path) -> list[Case]:
    """Read a recording: every request that was answered, with its answer as the good one."""
    found: list[Case] = []
    for case in cases_of_records(read_trace(path)):
        answer = case.original
        if answer is not None and not answer.error and answer.finish != "length" and (answer.text or answer.calls):
            body = {**case.body, "temperature": 0.0}
            found.append(msgspec.structs.replace(case, body=body, expected=answer.text, expected_calls=answer.calls))
    if not found:
        raise RequestError(f"{path} has no request with a complete answer.", parameter="distil-from")
    return found


def answered_by(
    cases: Sequence[Case], teacher: AnswererSpec, *, key: str = "", watch: Callable[[int, int], None]
) -> list[Case]:
    """Return the cases with the teacher's answers as the good ones. Cases without a complete answer are left out."""
    (answers,) = asyncio.run(ask_all(cases, [teacher], key=key, watch=watch))
    found = [
        msgspec.structs.replace(case, expected=answer.text, expected_calls=answer.calls)
        for case, answer in zip(cases, answers, strict=True)
        if not answer.error and answer.finish != "length" and (answer.text or answer.calls)
    ]
    if not found:
        reason = next((answer.error for answer in answers if answer.error), "every answer was cut at its limit")
        raise RequestError(f"{teacher.name} gave no complete answer: {reason}.", parameter="distil-from")
    return found


def has_answer(case: Case) -> bool:
    return case.expected is not None or bool(case.expected_calls)


def rows_of(cases: Sequence[Case], tokenizer: Tokenizer, most: int) -> tuple[list[TrainingRow], list[Case]]:
    """Return the rows of at most `most` tokens, with their cases. Longer examples are left out."""
    end = min(tokenizer.eos_ids, default=None)
    rows: list[TrainingRow] = []
    kept: list[Case] = []
    for case in cases:
        tokens = tokenise(_document(case, tokenizer), tokenizer)
        row = answer_row([*tokens.prefix, *tokens.body], len(tokens.prefix) + tokens.score_from, tokenizer.eos_ids, end)
        if len(row.tokens) <= most and row.learnt > 0:
            rows.append(row)
            kept.append(case)
    if not rows:
        raise RequestError(f"Every example has more than {most} tokens. Pass --max-length.", parameter="max-length")
    return rows, kept


def text_rows(path: Path, tokenizer: Tokenizer, most: int) -> list[TrainingRow]:
    """Return the rows of a text, every token of which is learnt."""
    tokens = [tokenise(document, tokenizer) for document in read_text(path)]
    windows = cut(tokens, window=most, stride=most - 1)
    return [TrainingRow(window.tokens, max(1, window.first)) for window in windows]


def _as_text(case: Case) -> Case:
    messages: list[dict[str, Any]] = case.body["messages"]
    if len(messages) != 1:
        raise RequestError(f"The prompt '{case.id}' is a chat. Remove --plain.", parameter="plain")
    body = {name: value for name, value in case.body.items() if name != "messages"}
    return msgspec.structs.replace(
        case, endpoint=COMPLETIONS, body={**body, "prompt": messages[0].get("content") or ""}
    )


def _document(case: Case, tokenizer: Tokenizer) -> Document:
    if case.endpoint == COMPLETIONS:
        return Document(prompt=str(case.body.get("prompt") or ""), completion=case.expected or "")
    if tokenizer.template is None:
        raise RequestError("The model has no chat template. Pass --plain to continue prompts as text.")
    answer: dict[str, Any] = {"role": "assistant", "content": case.expected or ""}
    if case.expected_calls:
        answer["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": msgspec.json.decode(call.arguments)}}
            for call in case.expected_calls
        ]
    return Document(messages=[*case.body["messages"], answer], tools=case.body.get("tools"))
