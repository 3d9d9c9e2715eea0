"""Measures a model that a command has made against the one that it was made from, and prints the table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from headrace.bench.evaluation.documents import Document
from headrace.bench.evaluation.evaluation import EvaluationOptions, evaluate_variants
from headrace.bench.evaluation.evaluation_table import markdown, show
from headrace.cli.evaluate import EvaluationBar
from headrace.variant import Variant

_COLUMNS: Final = 100  # width of a table that is not printed on a terminal


def table_console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS)


def measure_made(
    model: str,
    made: Path,
    documents: Sequence[Document],
    source: str,
    *,
    speed: bool,
    tokens: int,
    threads: int | None,
) -> str:
    """Measure the made model against the original, print the table and return it as Markdown."""
    with EvaluationBar() as bar:
        report = evaluate_variants(
            documents,
            [Variant.of(str(made), threads=threads, cache=False)],
            source=source,
            reference=Variant.of(model, threads=threads),
            options=EvaluationOptions(speed=speed, tokens=tokens),
            watch=bar.show,
        )
    show(report, table_console())
    return markdown(report)
