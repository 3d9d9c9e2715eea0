"""The part of the report about answer lengths: how long answers are, what ends them, and default lengths that do not
fit."""

from __future__ import annotations

from typing import Final

from headrace.bench.report.markup import Html, tag
from headrace.bench.report.report_tables import table
from headrace.bench.results.formatting import clean, number
from headrace.cli.report.weeks import Span
from headrace.observe.latency.answer_lengths import DEFAULT, AnswerLengths

_MOST_ROWS: Final = 30
_HEADINGS: Final = ("answers", "p50 tokens", "before", "p95 tokens", "before", "cut", "readers left", "cut by default")


def length_section(before: Span, after: Span) -> list[Html]:
    parts: list[Html] = []
    for by in ("surface", "tenant"):
        earlier = {key: AnswerLengths(row) for key, row in before.rows((by,)).items() if row.lengths}
        found = [(key, AnswerLengths(row)) for key, row in after.rows((by,)).items() if row.lengths]
        found.sort(key=lambda each: -each[1].count())
        rows = [_row(key[0], each, earlier.get(key)) for key, each in found[:_MOST_ROWS]]
        if rows:
            parts.append(table((by, *_HEADINGS), rows))
        if by == "surface":
            advice = [(key[0], each.advice(key[0], None)) for key, each in found]
            parts += [tag("p", f"{clean(name, 60)}: {text}", class_="under") for name, text in advice if text]
    return parts


def _row(name: str, lengths: AnswerLengths, before: AnswerLengths | None) -> list[str]:
    now, earlier = lengths.as_json(), None if before is None else before.as_json()
    return [
        clean(name, 80),
        number(now["answers"]),
        number(now["p50_tokens"]),
        "-" if earlier is None else number(earlier["p50_tokens"]),
        number(now["p95_tokens"]),
        "-" if earlier is None else number(earlier["p95_tokens"]),
        _percent(now["cut_share"]),
        _percent(now["left_share"]),
        _percent(lengths.cut_share(DEFAULT)) if lengths.count(limit=DEFAULT) else "-",
    ]


def _percent(share: float) -> str:
    return f"{100.0 * share:.1f} %"
