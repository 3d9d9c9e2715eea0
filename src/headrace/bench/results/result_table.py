"""Prints a result on the terminal: counts, percentiles, stages, groups, errors and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.bench.results.benchmark_result import BenchmarkResult, Distribution, RequestStats
from headrace.bench.results.formatting import clean, milliseconds, number, seconds, share

_TIMES: Final = (
    ("TTFT", "ttft"),
    ("TTFO", "ttfo"),
    ("ITL", "itl"),
    ("TPOT", "tpot"),
    ("E2EL", "e2el"),
    ("queue (server)", "queue"),
    ("prefill (server)", "prefill"),
    ("decode (server)", "decode"),
    ("lag behind the schedule", "lag"),
)
MOST_GROUPS: Final = 20  # rows per table; the file has all


def show(result: BenchmarkResult, console: Console) -> None:
    total = result.figures
    where = f"{clean(result.model, 200)} at {result.url}{result.endpoint}"
    console.print(f"[bold]{escape(where)}[/bold], {escape(result.workload)}, seed {result.seed}", highlight=False)
    console.print(_counts(result), highlight=False, markup=False)
    console.print(_times(total))
    if len(result.stages) > 1:
        stages = [stage.figures for stage in result.stages]
        notes = [_note(result, place) for place in range(len(stages))]
        console.print(_groups("load", stages, notes))
    for title, groups in (
        ("tenant", result.tenants),
        ("surface", result.surfaces),
        ("workload", result.workloads),
        ("prompt", result.lengths if len(result.lengths) > 1 else []),
    ):
        if groups:
            console.print(_groups(title, groups))
    for kind, count in total.errors.items():
        why = next((row.why for row in result.rows if row.error == kind), "")
        console.print(f"[red]{count} of {escape(clean(kind, 80))}[/red]: {escape(clean(why, 300))}", highlight=False)
    for warning in result.warnings:
        console.print(f"[yellow]note:[/yellow] {escape(clean(warning))}", highlight=False)


def _counts(result: BenchmarkResult) -> str:
    total = result.figures
    parts = [
        f"{total.completed:,} of {total.requests:,} requests ended well in {seconds(result.duration)}",
        f"{number(total.request_throughput)} requests/s",
        f"{number(total.output_throughput)} output tokens/s (best second {number(total.peak_output_per_s)})",
        f"{number(total.total_throughput)} tokens/s in all",
        f"{total.peak_running} at once at most",
    ]
    if total.goodput is not None:
        wanted = ", ".join(f"{name} {milliseconds(most)}" for name, most in result.objectives.items())
        met = share((total.good or 0) / total.requests) if total.requests else "none"
        parts.append(f"goodput {number(total.goodput)} requests/s ({met} within {wanted})")
    if total.completed:
        parts.append(
            f"{number(total.prompt_tokens / total.completed)} prompt tokens and "
            f"{number(total.output_tokens / total.completed)} output tokens a request"
        )
    if total.cached_tokens and total.prompt_tokens:
        parts.append(f"{share(total.cached_tokens / total.prompt_tokens)} of the prompts cached")
    if total.chunk_tokens is not None:
        parts.append(f"{total.chunk_tokens.mean:.2f} tokens a chunk")
    return "; ".join(parts) + "."


def _times(total: RequestStats) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("")
    for heading in ("mean", "p50", "p90", "p95", "p99", "longest", "values"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, attribute in _TIMES:
        spread: Distribution | None = getattr(total, attribute)
        if spread is None or (attribute == "ttfo" and spread == total.ttft):
            continue
        values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.most)
        table.add_row(name, *map(milliseconds, values), f"{spread.count:,}")
    return table


def _groups(title: str, groups: Sequence[RequestStats], notes: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column(title)
    with_goodput = any(group.goodput is not None for group in groups)
    for heading in (
        "requests",
        "failed",
        "requests/s",
        *(("goodput",) if with_goodput else ()),
        "tokens/s",
        "TTFT p50",
        "p99",
        "ITL p50",
        "p99",
        "E2EL p50",
        "p99",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    if notes:
        table.add_column("")
    for place, group in enumerate(groups[:MOST_GROUPS]):
        spreads = (group.ttft, group.itl, group.e2el)
        table.add_row(
            escape(clean(group.name, 60)),
            f"{group.requests:,}",
            f"{group.failed:,}",
            number(group.request_throughput),
            *((number(group.goodput),) if with_goodput else ()),
            number(group.output_throughput),
            *(
                milliseconds(value)
                for spread in spreads
                for value in ((spread.p50, spread.p99) if spread is not None else (None, None))
            ),
            *((escape(notes[place]),) if notes else ()),
        )
    if len(groups) > MOST_GROUPS:
        table.caption = f"and {len(groups) - MOST_GROUPS} more, see the file"
    return table


def _note(result: BenchmarkResult, place: int) -> str:
    stage = result.stages[place]
    if result.knee == place:
        return "the knee"
    return "" if stage.kept_up else stage.why
