"""The outcome of a comparison, and its table on the terminal."""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.bench.results.formatting import milliseconds, number

RatioUnit = Literal["ms", "1/s"]
Verdict = Literal["better", "worse", "no difference", "too few", "unknown"]

_STYLES: Final = {"better": "green", "worse": "red"}


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    figure: str  # "ttft p50", "output tokens/s"
    unit: RatioUnit  # less is better for ms, more for 1/s
    a: float
    b: float
    ratio: float | None  # b / a; None where a is 0
    low: float | None  # the confidence interval
    high: float | None
    verdict: Verdict  # about b
    values_a: int  # behind the figure
    values_b: int


class LoadComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two whole runs, or of one load."""

    name: str  # of the load; empty: whole runs
    requests_a: int
    requests_b: int
    failed_a: int
    failed_b: int
    ratios: list[Ratio]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    a: str
    b: str
    rounds_a: int
    rounds_b: int
    paired: bool
    seed: int
    resamples: int
    confidence: float
    margin: float  # 0.02: ratios from 1 / 1.02 to 1.02 count as no difference
    warnings: list[str]  # why the results may not be comparable
    knees_a: list[str]  # of sweeps
    knees_b: list[str]
    groups: list[LoadComparison]


def show(console: Console, found: Comparison) -> None:
    console.print(Text(f"A: {found.a}\nB: {found.b}"), soft_wrap=True)
    if found.rounds_a + found.rounds_b > 2:
        pairs = ", paired: ratios are medians of the rounds' ratios" if found.paired else ": figures are medians"
        console.print(Text(f"{found.rounds_a} and {found.rounds_b} rounds{pairs}"), soft_wrap=True)
    if found.knees_a or found.knees_b:
        knees = [", ".join(each) or "none" for each in (found.knees_a, found.knees_b)]
        console.print(Text(f"knee: A {knees[0]}; B {knees[1]}"), soft_wrap=True)
    for group in found.groups:
        console.print(_table(group, found))
    if not found.groups:
        console.print("The results have no load in common, so there is nothing to compare.")
    judged = sum(ratio.low is not None for group in found.groups for ratio in group.ratios)
    if judged:
        by_chance = f"{judged * (1.0 - found.confidence):.1f}"
        console.print(
            f"'no difference': the {100 * found.confidence:g} % interval of B / A contains 1"
            + (f", or B / A is within {100 * found.margin:g} %" if found.margin else "")
            + f". Between two equal servers, about {by_chance} of {judged} figures would differ by chance. 'too few': "
            "not enough values to tell.",
            soft_wrap=True,
            highlight=False,
        )
    if found.rounds_a == found.rounds_b == 1:
        console.print(
            "Each side has one run, so the intervals do not cover differences between runs on this machine. "
            "Alternating rounds of A and B would.",
            soft_wrap=True,
            highlight=False,
        )
    for warning in found.warnings:
        console.print(Text("note: ", style="yellow").append(warning, style="default"), soft_wrap=True)


def _table(group: LoadComparison, found: Comparison) -> Table:
    counts = f"{group.requests_a:,} and {group.requests_b:,} requests"
    failed = f", {group.failed_a:,} and {group.failed_b:,} of them failed" if group.failed_a or group.failed_b else ""
    title = Text(f"{group.name}: {counts}{failed}" if group.name else f"{counts}{failed}")
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, pad_edge=False)
    table.add_column("")
    for heading in ("A", "B", "B / A", f"{100 * found.confidence:g} % interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("B is", no_wrap=True)
    kinds = [ratio.figure.partition(" ")[0] if ratio.unit == "ms" else "" for ratio in group.ratios]
    for place, ratio in enumerate(group.ratios):
        if place and kinds[place] != kinds[place - 1]:
            table.add_section()
        table.add_row(*_cells(ratio))
    return table


def _cells(ratio: Ratio) -> list[Text]:
    write = milliseconds if ratio.unit == "ms" else number
    name, _, point = ratio.figure.partition(" ")
    between = "-" if ratio.low is None else f"{_times(ratio.low)} to {_times(ratio.high)}"
    return [
        Text(f"{name.upper()} {point}" if ratio.unit == "ms" else ratio.figure),
        Text(write(ratio.a)),
        Text(write(ratio.b)),
        Text(_times(ratio.ratio)),
        Text(between),
        Text(ratio.verdict, style=_STYLES.get(ratio.verdict, "dim")),
    ]


def _times(value: float | None) -> str:
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "∞"
    return f"{value:.3f}" if value < 10.0 else number(value)
