"""AdaptData: the rows that `headrace adapt` trains and evaluates on, and the held-out prompts with good answers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from headrace.adapt.training_rows import TrainingRow, hold_out
from headrace.bench.evaluation.evaluation import EvaluationProgress
from headrace.cli.evaluate import EvaluationBar
from headrace.cli.making.adapt_examples import (
    answered_by,
    has_answer,
    read_answered_traffic,
    read_examples,
    rows_of,
    text_rows,
)
from headrace.cli.making.adapt_teacher import Teacher
from headrace.errors import RequestError
from headrace.lab.answering.model_server import AnswererSpec
from headrace.lab.cases.case import Case
from headrace.models.model_folder import ModelFolder

_HELD_OUT: Final = 0.1  # share of the examples
_TEXT: Final = (".txt", ".md")


class AdaptData:
    def __init__(self, rows: Sequence[TrainingRow], held_out: Sequence[TrainingRow], cases: Sequence[Case]) -> None:
        self.rows = rows
        self.held_out = held_out
        self.cases = cases  # empty: the data is a text

    def describe(self) -> str:
        return f"{len(self.rows):,} to train on, {len(self.held_out):,} held out"

    @classmethod
    def read(
        cls,
        folder: ModelFolder,
        data: Path | None,
        held_out: Path | None,
        teacher: Teacher | None,
        most: int,
        *,
        plain: bool,
        seed: int,
    ) -> AdaptData:
        if data is not None and not data.is_file():
            raise RequestError(f"There is no file {data}.", parameter="data")
        if data is not None and data.suffix in _TEXT:
            rows = text_rows(data, folder.tokenizer, most)
            own = None if held_out is None else text_rows(held_out, folder.tokenizer, most)
            return cls._split(rows, [], own, [], seed)
        cases = [] if data is None else read_examples(data, plain=plain)
        if teacher is not None and teacher.recording is not None:
            cases = [*cases, *read_answered_traffic(teacher.recording)]
        if not cases:
            raise RequestError("Pass your examples: --data FILE.", parameter="data")
        if teacher is not None and teacher.answers is not None:
            cases = _taught(cases, teacher.answers, teacher.key)
        unanswered = next((case for case in cases if not has_answer(case)), None)
        if unanswered is not None:
            raise RequestError(
                f"{data}, {unanswered.id}: the example has no answer. Add 'completion' or an assistant's message, or "
                "pass --distil-from MODEL --distil answers.",
                parameter="data",
            )
        rows, kept = rows_of(cases, folder.tokenizer, most)
        if len(rows) < len(cases):
            print(f"Left out {len(cases) - len(rows):,} examples of more than {most} tokens.", file=sys.stderr)
        if held_out is None:
            return cls._split(rows, kept, None, [], seed)
        own_rows, own_cases = rows_of(read_examples(held_out, plain=plain), folder.tokenizer, most)
        return cls._split(rows, kept, own_rows, own_cases, seed)

    @classmethod
    def _split(
        cls,
        rows: Sequence[TrainingRow],
        cases: Sequence[Case],
        own: Sequence[TrainingRow] | None,
        own_cases: Sequence[Case],
        seed: int,
    ) -> AdaptData:
        if own is not None:
            return cls(rows, own, own_cases)
        if len(rows) < 2:
            raise RequestError("Training needs at least two examples: one is held out.", parameter="data")
        train, held = hold_out(len(rows), _HELD_OUT, seed)
        return cls([rows[at] for at in train], [rows[at] for at in held], [cases[at] for at in held] if cases else [])


def _taught(cases: Sequence[Case], teacher: AnswererSpec, key: str) -> list[Case]:
    with EvaluationBar() as bar:

        def watch(done: int, total: int) -> None:
            bar.show(EvaluationProgress("teacher's answers", done, total))

        return answered_by(cases, teacher, key=key, watch=watch)
