"""Shows a gate's result in the terminal: the verdict, a row for each metric, and the worst differences."""

from __future__ import annotations

from typing import Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.bench.results.formatting import clean, number
from headrace.bench.results.formatting import seconds as elapsed
from headrace.lab.gate.gate import GateResult
from headrace.lab.gate.judgement import MetricResult

_STYLES: Final = {"pass": "green", "fail": "bold red", "inconclusive": "yellow", "too few": "dim", "not tested": "dim"}
_SHOWN: Final = 3  # differences
HEADINGS: Final = ("metric", "n", "baseline", "candidate", "value", "limit", "verdict")


def show(result: GateResult, console: Console) -> None:
    style = "bold green" if result.passed else "bold red"
    console.print(f"[{style}]{'PASS' if result.passed else 'FAIL'}[/]  {escape(clean(heading(result)))}")
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for place, title in enumerate(HEADINGS):
        table.add_column(title, justify="left" if place in (0, 6) else "right", no_wrap=place in (1, 2, 3, 5, 6))
    for metric in result.metrics:
        *cells, verdict = row(metric)
        table.add_row(*(escape(clean(cell)) for cell in cells), f"[{_STYLES[metric.verdict]}]{verdict}[/]")
    console.print(table)
    for note in notes(result):
        console.print(escape(clean(note)), highlight=False)
    for difference in result.differences[:_SHOWN]:
        console.print(f"[bold]{escape(clean(difference.case))}[/]: {escape(clean(', '.join(difference.reasons), 300))}")


def heading(result: GateResult) -> str:
    red_team = f", {result.red_team:,} of the red-team set" if result.red_team else ""
    return (
        f"{result.candidate} against {result.baseline}: {result.cases:,} prompts{red_team}, "
        f"in {elapsed(result.seconds)}"
    )


def row(metric: MetricResult) -> list[str]:
    low, high = (metric.low, metric.high) if "drop" not in metric.kind else (metric.high, metric.low)
    return [
        metric.title,
        f"{metric.count:,}",
        _share(metric.baseline),
        _share(metric.candidate),
        f"{value_text(metric, metric.value)} ({value_text(metric, low)}…{value_text(metric, high)})",
        limit_text(metric),
        metric.verdict,
    ]


def value_text(metric: MetricResult, value: float | None) -> str:
    if value is None:
        return "?"
    match metric.kind:
        case "ratio" | "drift":
            return f"{value:.2f}x"
        case "drop" | "mean_drop":
            return f"{-100 * value:+.1f} pt".replace("-", "\u2212") if value else "0.0 pt"
        case _ if metric.name == "kl":
            return number(value)
        case _ if metric.name == "perplexity":
            return f"{100 * value:+.2f} %"
        case _:
            return f"{100 * value:.1f} %"


def limit_text(metric: MetricResult) -> str:
    if metric.limit is None:
        return "-"
    match metric.kind:
        case "ratio":
            return f"\u2264 {metric.limit:g}x"
        case "drift":
            return f"{1.0 / metric.limit:.2g} to {metric.limit:g}x"
        case "drop" | "mean_drop":
            return f"\u2265 \u2212{100 * metric.limit:g} pt"
        case "at most":
            return f"\u2264 {metric.limit:g}" if metric.name == "kl" else f"\u2264 {100 * metric.limit:g} %"
        case _:
            return f"\u2265 {100 * metric.limit:g} %"


def notes(result: GateResult) -> list[str]:
    found = [
        f"Ranges are {1 - result.level:.0%} intervals over prompts. All tests together raise a false alarm in at most "
        f"{result.level:.0%} of gates. Similarity: {result.similarity_by}."
    ]
    open_ones = [metric.title for metric in result.metrics if metric.verdict in ("inconclusive", "too few")]
    if open_ones:
        found.append(f"Too few prompts to exclude a breach: {', '.join(open_ones)}.")
    return found + result.notes


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
