"""The charts of several loads: latency and throughput against load, and the cost of more throughput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from headrace.bench.report.markup import Html
from headrace.bench.report.plot import PLAIN, Axis, Plot, axis, colour
from headrace.bench.report.report_tables import NAMES, SHORT, ReportedRun, figure, load_of, table
from headrace.bench.results.benchmark_result import Distribution, RequestStats, StageResult
from headrace.bench.results.formatting import milliseconds, number

MOST_TICKS: Final = 12  # loads with their own tick


class _Curve(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # in the tooltip and the table
    label: str  # beside its end
    series: int
    xs: list[float]
    ys: list[float | None]
    look: str = ""

    def at(self, load: float) -> float | None:
        return next((y for x, y in zip(self.xs, self.ys, strict=True) if x == load), None)


class _Loads(msgspec.Struct, frozen=True, kw_only=True):
    runs: list[ReportedRun]
    stages: dict[int, list[tuple[float, StageResult]]]  # by the run's series, in order of load
    across: Axis
    alone: bool

    def curves(
        self,
        value: Callable[[RequestStats], float | None],
        what: str,
        *,
        series: int,
        look: str = "",
        label: str | None = None,
    ) -> list[_Curve]:
        """Make one curve per run. `series` and `label` apply to a report of one result."""
        return [
            _Curve(
                name=what if self.alone else f"{run.name} {what}",
                label=(label if label is not None else what) if self.alone else "" if look else run.name,
                series=series if self.alone else run.series,
                xs=[load for load, _ in self.stages[run.series]],
                ys=[value(stage.figures) for _, stage in self.stages[run.series]],
                look=look,
            )
            for run in self.runs
        ]


def load_charts(runs: Sequence[ReportedRun]) -> list[Html]:
    """Return the charts; none if no result has several loads."""
    loads = _loads(runs)
    if loads is None:
        return []
    found: list[Html] = []
    knees = any(run.result.knee is not None for run in loads.runs) and not loads.alone
    knee = " Dotted: the knee." if knees else ""
    note = f"Solid: p50. Dashed: p99.{knee}"
    for paint, name in enumerate(("ttft", "itl", "tpot", "e2el")):
        if not any(getattr(stage.figures, name) for run in loads.runs for stage in run.result.stages):
            continue
        curves = [
            *loads.curves(_point(name, "p50"), "p50", series=paint),
            *loads.curves(_point(name, "p99"), "p99", series=paint, look="high"),
        ]
        objectives = {run.result.objectives[name] for run in loads.runs if name in run.result.objectives}
        heading = f"{NAMES[name]} ({SHORT[name]})"
        found.append(_chart(loads, f"load-{name}", heading, note, curves, SHORT[name], "ms", objectives))
    tokens = loads.curves(lambda figures: figures.output_throughput, "tokens/s", series=4, label="")
    found.append(
        _chart(
            loads,
            "load-tokens",
            "Output tokens per second",
            f"Of successful responses.{knee}",
            tokens,
            "tokens/s",
            "number",
            set(),
        )
    )
    served = loads.curves(lambda figures: figures.request_throughput, "served", series=PLAIN)
    good: list[_Curve] = []
    if any(stage.figures.goodput is not None for run in loads.runs for stage in run.result.stages):
        good = loads.curves(lambda figures: figures.goodput, "good", series=PLAIN, look="high")
    said = "Solid: all successful. Dashed: those that met every objective." if good else "Successful requests."
    said += knee
    found.append(
        _chart(loads, "load-requests", "Requests per second", said, [*served, *good], "requests/s", "number", set())
    )
    cost = _cost(loads)
    return [*found, cost] if cost is not None else found


def _loads(runs: Sequence[ReportedRun]) -> _Loads | None:
    several = [run for run in runs if len({load_of(stage) for stage in run.result.stages} - {None}) > 1]
    if not several:
        return None
    rated = all(stage.rate is not None for run in several for stage in run.result.stages)
    stages: dict[int, list[tuple[float, StageResult]]] = {}
    for run in several:
        found = [(stage.rate if rated else load_of(stage), stage) for stage in run.result.stages]
        stages[run.series] = sorted(((load, stage) for load, stage in found if load), key=lambda item: item[0])
    every = sorted({load for each in stages.values() for load, _ in each})
    across = axis([every], title="requests/s, as planned" if rated else "requests at once", unit="number")
    if len(every) <= MOST_TICKS:
        across = replace(across, at=tuple(every))
    return _Loads(runs=several, stages=stages, across=across, alone=len(runs) == 1)


def _point(name: str, point: str) -> Callable[[RequestStats], float | None]:
    def value(figures: RequestStats) -> float | None:
        spread: Distribution | None = getattr(figures, name)
        return None if spread is None else getattr(spread, point)

    return value


def _chart(
    loads: _Loads,
    ident: str,
    heading: str,
    note: str,
    curves: Sequence[_Curve],
    title: str,
    unit: str,
    objectives: set[float],
) -> Html:
    values = [[y for y in curve.ys if y is not None] for curve in curves]
    latency = unit == "ms"
    down = axis(values, title=title, unit="ms" if latency else "number", log=None if latency else False)
    plot = Plot(x=loads.across, y=down, about=ident)
    plot.room_for([curve.label for curve in curves])
    for most in sorted(objectives):
        plot.rule(y=most, text=f"objective {milliseconds(most)}", look="objective")
    for run in loads.runs:
        knee = run.result.knee
        at = load_of(run.result.stages[knee]) if knee is not None and knee < len(run.result.stages) else None
        if at is not None:
            look = "knee" if loads.alone else f"knee {colour(run.series)}"
            plot.rule(x=at, text=f"knee: {number(at)}" if loads.alone else "", look=look)
    for curve in curves:
        _draw(plot, curve)
    every = sorted({load for curve in curves for load in curve.xs})
    show = milliseconds if latency else number
    rows = [[number(load), *(show(curve.at(load)) for curve in curves)] for load in every]
    data = table([loads.across.title, *(curve.name for curve in curves)], rows)
    return figure(ident, heading, note, plot.render(), data)


def _draw(plot: Plot, curve: _Curve) -> None:
    known = [(x, y) for x, y in zip(curve.xs, curve.ys, strict=True) if y is not None]
    xs, ys = [x for x, _ in known], [y for _, y in known]
    plot.line(xs, ys, series=curve.series, name=curve.name, label=curve.label, look=curve.look)
    plot.dots(xs, ys, series=curve.series, radius=3.0)


def _cost(loads: _Loads) -> Html | None:
    """Draw tokens per second against the time per token: right and down is better."""
    ident = "load-cost"
    curves: list[_Curve] = []
    for run in loads.runs:
        points = [(stage.figures.output_throughput, stage.figures.tpot) for _, stage in loads.stages[run.series]]
        known = [(x, spread.p50) for x, spread in points if spread is not None]
        curves.append(
            _Curve(
                name="TPOT p50" if loads.alone else f"{run.name} TPOT p50",
                label="" if loads.alone else run.name,
                series=2 if loads.alone else run.series,
                xs=[x for x, _ in known],
                ys=[y for _, y in known],
            )
        )
    if not any(curve.xs for curve in curves):
        return None
    across = axis([curve.xs for curve in curves], title="output tokens/s of all requests together", unit="number")
    down = axis([[y for y in curve.ys if y] for curve in curves], title="TPOT p50", unit="ms")
    plot = Plot(x=across, y=down, about=ident)
    plot.room_for([curve.label for curve in curves])
    for curve in curves:
        _draw(plot, curve)
    rows = [
        [curve.name, f"{number(x)} tokens/s", milliseconds(y)]
        for curve in curves
        for x, y in zip(curve.xs, curve.ys, strict=True)
    ]
    data = table(["", "throughput", "TPOT p50"], rows)
    note = "A point for each load. Further right and further down is better."
    return figure(ident, "What more throughput costs", note, plot.render(), data)
