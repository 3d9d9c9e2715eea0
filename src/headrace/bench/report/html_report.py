"""Writes a benchmark report: one HTML file with inline charts that loads nothing from the network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from headrace.bench.report.charts import histograms, percentile_charts, request_bars, time_lines
from headrace.bench.report.load_charts import load_charts
from headrace.bench.report.markup import Html, tag
from headrace.bench.report.page import report_page, section
from headrace.bench.report.report_tables import (
    ReportedRun,
    errors_table,
    figures_table,
    group_tables,
    keys,
    names,
    ran_table,
    side_by_side,
    stages_table,
    tiles,
    totals_table,
)
from headrace.bench.results.benchmark_result import BenchmarkResult
from headrace.bench.results.formatting import clean
from headrace.bench.results.result_columns import columns
from headrace.errors import RequestError

MOST_RESULTS: Final = 16  # per report; the style sheet can hide as many
MOST_WARNINGS: Final = 50
_GLOSSARY: Final = (
    ("TTFT", "time from sending a request to its first content, reasoning or tool delta"),
    ("ITL", "gaps between streamed outputs, of all requests"),
    ("TPOT", "(E2EL - TTFT) / (output tokens - 1), per request"),
    ("E2EL", "time from sending a request to the last byte of its response"),
    ("Goodput", "successful requests per second that met every objective"),
    ("p50, p90, p95, p99", "50, 90, 95 and 99 % of the values are at or below"),
    ("Knee", "highest load of a sweep at which the server kept up"),
)


def write_html(results: BenchmarkResult | Sequence[BenchmarkResult], path: Path, *, machine: str = "") -> None:
    """Write the report. `machine`: description of the client's machine."""
    path.write_text(html(results, machine=machine), encoding="utf-8")


def html(results: BenchmarkResult | Sequence[BenchmarkResult], *, machine: str = "") -> str:
    every = [results] if isinstance(results, BenchmarkResult) else list(results)
    if not 1 <= len(every) <= MOST_RESULTS:
        raise RequestError(f"A report shows 1 to {MOST_RESULTS} results, not {len(every)}.")
    runs = [
        ReportedRun(result=result, columns=columns(result), name=name, series=place)
        for place, (result, name) in enumerate(zip(every, names(every), strict=True))
    ]
    title = "Benchmark of " + (every[0].model or every[0].url or "a server")
    if len(runs) > 1:
        title = "Benchmark of " + ", ".join(run.name for run in runs)
    return report_page(clean(title, 240), _under(runs), _main(runs, machine), glossary=_GLOSSARY)


def _under(runs: Sequence[ReportedRun]) -> str:
    first = runs[0].result
    parts = (
        [first.url, first.workload, first.load, first.started_at] if len(runs) == 1 else [first.workload, first.load]
    )
    if len(runs) == 1 and first.label:
        parts.insert(0, first.label)
    return " · ".join(clean(part, 200) for part in parts if part)


def _main(runs: Sequence[ReportedRun], machine: str) -> list[Html]:
    alone = len(runs) == 1
    found = [tiles(runs[0])] if alone else [keys(runs), side_by_side(runs)]
    warnings = [(run, warning) for run in runs for warning in run.result.warnings][:MOST_WARNINGS]
    if warnings:
        lines = (tag("li", warning if alone else f"{run.name}: {warning}") for run, warning in warnings)
        found.insert(0, tag("ul", *lines, class_="warnings", aria_label="Warnings"))
    bars = request_bars(runs[0]) if alone else None
    found += [
        section("Latency and throughput against load", load_charts(runs), charts=True),
        section("Latency by percentile", percentile_charts(runs), charts=True),
        section("Over time", [*time_lines(runs), *([bars] if bars is not None else [])], charts=True),
        section("Distributions", histograms(runs), charts=True),
    ]
    tables = [figures_table(run) for run in runs] if alone else []
    tables += [totals_table(runs), *(each for each in (stages_table(runs),) if each is not None), *group_tables(runs)]
    errors = errors_table(runs)
    if errors is not None:
        tables.append(tag("div", errors, class_="words"))
    found.append(tag("section", tag("h2", "Figures"), *tables))
    if not any(run.result.rows for run in runs):
        found.append(tag("p", "The result has no rows of requests, so there are no curves.", class_="under"))
    found.append(tag("section", tag("h2", "What was run"), *(ran_table(run, machine) for run in runs)))
    return found
