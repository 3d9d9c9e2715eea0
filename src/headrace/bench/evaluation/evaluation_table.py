"""Shows an evaluation as a table of at most 100 columns, or as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.bench.evaluation.evaluation_report import FEW_CHUNKS, Estimate, EvaluatedVariant, EvaluationReport
from headrace.bench.results.formatting import clean, number, three

_HEADINGS = ("weights", "MB", "perplexity", "change %", "KL per token", "top-1 %", "prompt", "decode")
_REFERENCE = "reference"


def show(report: EvaluationReport, console: Console) -> None:
    for line in summary(report):
        console.print(escape(clean(line)), highlight=False)
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    rows = list(_rows(report))
    width = max(len(name) for (name, _), *_ in rows)
    filled = _filled(rows)
    for place in filled:
        if place:
            table.add_column(_HEADINGS[place], justify="right", no_wrap=True)
        else:
            table.add_column(_HEADINGS[place], min_width=width, overflow="fold")
    for row in rows:
        table.add_row(*(escape(clean("\n".join(filter(None, row[place])))) for place in filled))
    console.print(table)
    for line in notes(report):
        console.print(escape(line), highlight=False)


def markdown(report: EvaluationReport) -> str:
    """Return the summary, the table and the notes as Markdown."""
    rows = list(_rows(report))
    filled = _filled(rows)
    headings = [_HEADINGS[place] for place in filled]
    lines = ["| " + " | ".join(headings) + " |", "|---" + "|---:" * (len(headings) - 1) + "|"]
    for row in rows:
        cells = [value + (f" ({under})" if under else "") for value, under in (row[place] for place in filled)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n\n".join([" ".join(summary(report)), "\n".join(lines), " ".join(notes(report))]) + "\n"


def _filled(rows: Sequence[Sequence[tuple[str, str]]]) -> list[int]:
    """Return the places of the columns that have a value in any row."""
    return [place for place in range(len(_HEADINGS)) if any(row[place] != ("", "") for row in rows)]


def summary(report: EvaluationReport) -> Iterator[str]:
    """Yield what was measured, on what."""
    models = list(dict.fromkeys(Path(variant.model).name for variant in report.variants))
    kinds = sorted({_kv(variant) for variant in report.variants})
    chunks = "1 chunk" if report.chunks == 1 else f"{report.chunks:,} chunks"
    yield (
        f"{' and '.join(models)} on {report.source}: {report.tokens:,} tokens scored in {chunks}, KV cache "
        f"{' and '.join(kinds)}."
    )
    windows = f"Windows of {report.window:,} tokens, of which each scores its last {report.stride:,}."
    if report.stride == report.window:
        windows = f"Disjoint windows of {report.window:,} tokens."
    yield (f"{windows} {report.cpu}, {report.isa}, {report.threads} threads.")


def _kv(variant: EvaluatedVariant) -> str:
    return variant.kv if variant.kv_offsets is None else f"{variant.kv} with offsets"


def notes(report: EvaluationReport) -> Iterator[str]:
    if report.chunks == 1:
        yield "One chunk has no interval: use a longer text."
    else:
        few = f", and only a hint with fewer than {FEW_CHUNKS} chunks" if report.chunks < FEW_CHUNKS else ""
        yield f"Ranges are {report.confidence:.0%} intervals, by resampling chunks (seed {report.seed}){few}."
    if any(variant.distance is not None for variant in report.variants):
        yield "Change of the perplexity, KL in nats and agreement on the likeliest token are against the first row."
    if report.speed_prompt is not None:
        yield f"Speeds in tokens/s, one sequence: a prompt of {report.speed_prompt:,} tokens, and decode after it."


def _rows(report: EvaluationReport) -> Iterator[list[tuple[str, str]]]:
    names = _names(report.variants)
    compared = any(variant.distance is not None for variant in report.variants)
    for name, variant in zip(names, report.variants, strict=True):
        found = variant.distance
        distances = [("", "")] * 3
        if found is not None:
            distances = [
                _cell(found.perplexity_change, lambda value: f"{100 * value:+.2f}"),
                _cell(found.kl, _divergence),
                _cell(found.top1, lambda value: f"{100 * value:.1f}"),
            ]
        elif compared:
            distances[0] = (_REFERENCE, "")
        speed = variant.speed
        yield [
            name,
            (f"{variant.weight_bytes / 1e6:,.1f}", ""),
            _cell(variant.perplexity, _perplexity),
            *distances,
            ("" if speed is None else number(speed.prompt), ""),
            ("" if speed is None else number(speed.decode), ""),
        ]


def _names(variants: Sequence[EvaluatedVariant]) -> list[tuple[str, str]]:
    """Return each variant's weights, and under them whatever else differs."""
    several_models = len({variant.model for variant in variants}) > 1
    several_kv = len({_kv(variant) for variant in variants}) > 1
    found: list[tuple[str, str]] = []
    for variant in variants:
        more = [Path(variant.model).name] if several_models else []
        more += [f"KV {_kv(variant)}"] if several_kv else []
        more += [f"keep {rule}" for rule in variant.keep]
        found.append((variant.weights, ", ".join(more)))
    return found


def _cell(estimate: Estimate, form: Callable[[float], str]) -> tuple[str, str]:
    if estimate.low is None or estimate.high is None:
        return form(estimate.value), ""
    return form(estimate.value), f"{form(estimate.low)}…{form(estimate.high)}"


def _divergence(value: float) -> str:
    return f"{value:.4f}" if value >= 1e-3 else f"{value:.1e}" if value else "0"


def _perplexity(value: float) -> str:
    return f"{value:,.3f}" if value < 100 else three(value)
