"""The charts of a report: percentile curves, histograms, time lines, requests as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from headrace.bench.report.markup import Html
from headrace.bench.report.plot import PLAIN, Axis, Plot, axis, tail_axis, thin
from headrace.bench.report.report_tables import NAMES, SHORT, ReportedRun, figure, load_in_short, table
from headrace.bench.results.formatting import clean, milliseconds, number, seconds, share
from headrace.bench.results.result_columns import (
    Floats,
    bins,
    lanes,
    percentiles,
    rate,
    running,
    slice_width,
    slices,
)

SHOWN: Final = ("ttft", "itl", "tpot", "e2el")  # in order of colours
MOST_BARS: Final = 1200  # requests as bars
MOST_LANES: Final = 96
MOST_DOTS: Final = 1500
MOST_STAGES: Final = 12  # marked in time lines
_KIND_COLOURS: Final = (7, 6, 5, PLAIN)  # of errors; the last is for all further kinds
_WIDE: Final = 1140.0  # pixels
_POINTS: Final = (0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
_TABLE_ROWS: Final = 24  # of a time line's data


def percentile_charts(runs: Sequence[ReportedRun]) -> list[Html]:
    """Draw a percentile curve for each latency."""
    found: list[Html] = []
    for paint, name in enumerate(SHOWN):
        curves = [(run, run.columns.latency(name)) for run in runs]
        curves = [(run, values) for run, values in curves if values.size > 1]
        if not curves:
            continue
        alone = len(runs) == 1
        drawn = [(run, values, *percentiles(values)) for run, values in curves]
        objectives = {run.result.objectives[name] for run, _ in curves if name in run.result.objectives}
        across = tail_axis(max(values.size for _, values in curves))
        down = axis([ys for *_, ys in drawn], title=SHORT[name], unit="ms", zero=True)
        plot = Plot(x=across, y=_holding(down, objectives), about=f"percentiles-{name}")
        if not alone:
            plot.room_for([run.name for run, _ in curves])
        for most in sorted(objectives):
            plot.rule(y=most, text=f"objective {milliseconds(most)}", look="objective")
        for run, _, shares, ys in drawn:
            series = paint if alone else run.series
            plot.line(
                shares, ys, series=series, name=SHORT[name] if alone else run.name, label="" if alone else run.name
            )
        if alone:
            values = drawn[0][1]
            for point in (0.5, 0.9, 0.99):
                if values.size >= 1.0 / (1.0 - point):
                    at = float(np.percentile(values, 100.0 * point))
                    plot.mark(point, at, milliseconds(at), series=paint)
        data = table(
            ["", "values", "p50", "p75", "p90", "p95", "p99", "p99.9", "most"],
            [
                [
                    run.name,
                    f"{values.size:,}",
                    *(
                        milliseconds(float(value))
                        for value in np.percentile(values, [100.0 * each for each in _POINTS])
                    ),
                    milliseconds(float(values.max())),
                ]
                for run, values in curves
            ],
        )
        what = "gaps" if name == "itl" else "requests"
        counted = f"{curves[0][1].size:,} {what}. " if alone else ""
        note = f"{counted}Each nine has the same width."
        found.append(figure(f"percentiles-{name}", f"{NAMES[name]} ({SHORT[name]})", note, plot.render(), data))
    return found


def histograms(runs: Sequence[ReportedRun]) -> list[Html]:
    found: list[Html] = []
    alone = len(runs) == 1
    for paint, name in enumerate(SHOWN):
        curves = [(run, run.columns.latency(name)) for run in runs]
        curves = [(run, values) for run, values in curves if values.size > 1]
        if not curves:
            continue
        pooled = np.concatenate([values for _, values in curves])
        # Outputs read together have nearly no gap, which would widen the axis by decades.
        floor = float(np.percentile(pooled[pooled > 0.0], 0.5)) if (pooled > 0.0).any() else 0.0
        fewest = f"The first bar has what is below {milliseconds(floor)}, too." if (pooled < floor).any() else ""
        curves = [(run, np.maximum(values, floor)) for run, values in curves]
        across = axis([values for _, values in curves], title=SHORT[name], unit="ms", zero=False)
        edges = bins(pooled, log=across.kind == "log", low=across.low, high=across.high)
        heights = [np.histogram(values, bins=edges)[0] / values.size for _, values in curves]
        down = axis(heights, title="share of values", unit="share", log=False)
        plot = Plot(x=across, y=down, about=f"histogram-{name}")
        if alone:
            plot.bars(edges, heights[0], series=paint, name="share")
            for row, point in enumerate((50, 99)):  # their texts, if the two are near
                at = float(np.percentile(curves[0][1], point))
                plot.rule(x=at, text=f"p{point} {milliseconds(at)}", row=row)
        else:
            middles = (edges[:-1] + edges[1:]) / 2.0
            for (run, _), shares in zip(curves, heights, strict=True):
                plot.line(middles, shares, series=run.series, name=run.name, area=True)
                peak = int(shares.argmax())
                plot.label(run.name, float(middles[peak]), float(shares[peak]), series=run.series)
        rows = [
            [f"{milliseconds(low)} to {milliseconds(high)}", *(share(float(column[place])) for column in heights)]
            for place, (low, high) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
            if any(column[place] for column in heights)
        ]
        data = table(["", *(run.name for run, _ in curves)], rows)
        found.append(figure(f"histogram-{name}", f"{NAMES[name]} ({SHORT[name]})", fewest, plot.render(), data))
    return found


def time_lines(runs: Sequence[ReportedRun]) -> list[Html]:
    """Draw charts over the time since the run's start, all with the same time axis."""
    known = [run for run in runs if run.columns.start.size]
    if not known:
        return []
    total = max(run.columns.seconds for run in known)
    width = slice_width(total)
    edges = [slices(run.columns.seconds, width) for run in known]
    time = Axis(low=0.0, high=max(total, 1e-3), title="since the run's start", unit="s")
    alone = len(runs) == 1

    def lines(ident: str, title: str, note: str, unit: str, series: int, columns: list[Floats]) -> Html:
        plot = Plot(x=time, y=axis(columns, title=unit, unit="number", log=False), about=ident, width=_WIDE, height=210)
        plot.room_for([run.name for run in known] if not alone else [])
        _stage_rules(plot, known)
        for run, cuts, values in zip(known, edges, columns, strict=True):
            label = "" if alone else run.name
            plot.line(
                (cuts[:-1] + cuts[1:]) / 2.0,
                values,
                series=series if alone else run.series,
                name=unit if alone else run.name,
                label=label,
                area=alone,
            )
        return figure(ident, title, note, plot.render(), _time_table(known, edges, columns), wide=True)

    sliced = f"Means of {milliseconds(1e3 * width)}." if width < 1.0 else f"Means of {width:g} s."
    peaks = ", ".join(f"{'' if alone else run.name + ' '}{run.result.figures.peak_running:,}" for run in known)
    said = f"{sliced} Most at any moment: {peaks}."
    cut = [(run.columns, each) for run, each in zip(known, edges, strict=True)]
    counts = [running(found.start, found.end, each) for found, each in cut]
    tokens = [rate(found.output_at, found.output_tokens, each) for found, each in cut]
    found = [
        lines("running", "Requests that ran at once", said, "requests", PLAIN, counts),
        lines("tokens", "Output tokens per second", sliced, "tokens/s", 4, tokens),
    ]
    first = _first_tokens(known, time, edges, alone)
    if first is not None:
        found.append(first)
    failed = [run for run in known if not run.columns.ok.all()]
    if failed and alone:
        found.append(_errors_by_kind(failed[0], time, edges[0]))
    elif failed:
        ends = [(each.end[~each.ok], cuts) for each, cuts in cut]
        columns = [rate(at, np.ones(at.size), cuts) for at, cuts in ends]
        found.append(lines("errors", "Requests that failed, per second", sliced, "requests/s", PLAIN, columns))
    return found


def _first_tokens(runs: Sequence[ReportedRun], time: Axis, edges: Sequence[Floats], alone: bool) -> Html | None:
    """Draw each request's TTFT over its send time, which shows whether waiting grew."""
    drawn: list[tuple[ReportedRun, Floats, Floats]] = []
    medians: list[tuple[Floats, Floats]] = []
    for run, cuts in zip(runs, edges, strict=True):
        there = np.flatnonzero(np.isfinite(run.columns.ttft))
        if there.size:
            medians.append(_medians(run.columns.start[there], run.columns.ttft[there], cuts))
            there = there[thin(there.size, max(100, MOST_DOTS // len(runs)))]
            drawn.append((run, run.columns.start[there], run.columns.ttft[there]))
    if not drawn:
        return None
    down = axis([ys for *_, ys in drawn], title="TTFT", unit="ms")
    plot = Plot(x=time, y=down, about="first-tokens", width=_WIDE, height=240)
    plot.room_for([run.name for run in runs] if not alone else [])
    _stage_rules(plot, runs)
    for run, xs, ys in drawn:
        plot.dots(xs, ys, series=0 if alone else run.series, radius=2.2)
    for (run, *_), (xs, ys) in zip(drawn, medians, strict=True):
        name = "median" if alone else run.name
        plot.line(xs, ys, series=0 if alone else run.series, name=name, label="" if alone else name, look="thin")
    shown = sum(xs.size for _, xs, _ in drawn)
    total = sum(int(np.isfinite(run.columns.ttft).sum()) for run, *_ in drawn)
    note = "Each dot is a request at the time it was sent; the line is the median per time slice."
    if shown < total:
        note += f" {shown:,} of {total:,} requests are drawn, evenly sampled."
    rows: list[list[str]] = []
    for (run, *_), (xs, ys) in zip(drawn, medians, strict=True):
        for place in thin(xs.size, _TABLE_ROWS).tolist():
            rows.append([f"{run.name} at {seconds(float(xs[place]))}", milliseconds(float(ys[place]))])
    data = table(["", "median TTFT"], rows)
    return figure("first-tokens", "First tokens over time", note, plot.render(), data, wide=True)


def _medians(at: Floats, values: Floats, edges: Floats) -> tuple[Floats, Floats]:
    """Compute the medians of the time slices that have values."""
    order = np.argsort(at, kind="stable")
    ordered = values[order]
    cuts = np.searchsorted(at[order], edges)
    full = np.flatnonzero(np.diff(cuts))
    middles = (edges[full] + edges[full + 1]) / 2.0
    return middles, np.array([float(np.median(ordered[cuts[place] : cuts[place + 1]])) for place in full])


def _errors_by_kind(run: ReportedRun, time: Axis, edges: Floats) -> Html:
    kinds: dict[str, list[float]] = {}
    for row in run.result.rows:
        if not row.ok:
            kinds.setdefault(clean(row.error, 40) or "unknown", []).append(row.end)
    ordered = sorted(kinds, key=lambda kind: (-len(kinds[kind]), kind))
    shown = {kind: kinds[kind] for kind in ordered[: len(_KIND_COLOURS) - 1]}
    rest = [at for kind in ordered[len(_KIND_COLOURS) - 1 :] for at in kinds[kind]]
    if rest:
        shown["others"] = rest
    counts = {kind: np.histogram(at, bins=edges)[0].astype(np.float64) for kind, at in shown.items()}
    total = np.sum(list(counts.values()), axis=0)
    down = axis([total], title="requests", unit="count", log=False)
    plot = Plot(x=time, y=down, about="errors", width=_WIDE, height=200)
    plot.room_for([kind for kind in shown])
    base = np.zeros(edges.size - 1)
    for place, (kind, heights) in enumerate(counts.items()):
        plot.bars(edges, heights, series=_KIND_COLOURS[place], name=kind, base=base)
        plot.label(kind, time.high, float(base[-1]), series=_KIND_COLOURS[place])
        base = base + heights
    note = "By kind and time slice, at the time they ended."
    busy = np.flatnonzero(total)
    rows = [
        [seconds(float(edges[place])), *(number(float(heights[place])) for heights in counts.values())]
        for place in busy[thin(busy.size, _TABLE_ROWS)].tolist()
    ]
    data = table(["from", *counts], rows)
    return figure("errors", "Failed requests", note, plot.render(), data, wide=True)


def request_bars(run: ReportedRun) -> Html | None:
    """Draw requests as bars in the lowest free lane: waiting for the first token, then streaming."""
    known = run.columns
    order = np.argsort(known.start, kind="stable")
    if not order.size:
        return None
    note = ""
    if order.size > MOST_BARS:
        # All of them would be unreadable: draw those around the longest wait.
        waits = np.nan_to_num(known.ttft[order], nan=-1.0)
        begin = int(np.clip(int(waits.argmax()) - MOST_BARS // 2, 0, order.size - MOST_BARS))
        order = order[begin : begin + MOST_BARS]
        note = f" {MOST_BARS:,} of {known.start.size:,} requests, around the longest wait."
    start, end = known.start[order], known.end[order]
    lane = lanes(start, end)
    if int(lane.max()) >= MOST_LANES:
        kept = lane < MOST_LANES
        note += f" {int((~kept).sum()):,} more ran beyond the {MOST_LANES} lanes drawn."
        order, start, end, lane = order[kept], start[kept], end[kept], lane[kept]
    first = np.where(np.isfinite(known.ttft[order]), start + known.ttft[order] / 1e3, end)
    count = int(lane.max()) + 1
    thick = float(np.clip(360.0 / count, 3.0, 16.0))
    time = Axis(low=float(start.min()), high=max(float(end.max()), float(start.min()) + 1e-3), unit="s")
    down = Axis(low=-0.5, high=count - 0.5, title="place", at=tuple(range(0, count, max(1, round(count / 8)))))
    plot = Plot(x=time, y=down, about="requests", width=_WIDE, height=66.0 + thick * count)
    ok = known.ok[order]
    plot.spans(start[ok], first[ok], lane[ok], thick=0.78 * thick, look="waiting")
    plot.spans(first[ok], end[ok], lane[ok], thick=0.78 * thick, look="streaming")
    plot.spans(start[~ok], end[~ok], lane[~ok], thick=0.78 * thick, look="failed")
    texts = [_in_words(run, place) for place in order.tolist()]
    plot.hints(start, end, lane, texts, tall=thick)
    longest = np.argsort(-(end - start), kind="stable")[:_TABLE_ROWS]
    rows: list[list[str]] = []
    for row in (run.result.rows[int(place)] for place in order[longest]):
        ttft, e2el = (None if value is None else 1e3 * value for value in (row.ttft, row.e2el))
        counts = (row.prompt_tokens, row.output_tokens)
        rows.append(
            [
                f"request {row.number}",
                seconds(row.start),
                milliseconds(ttft),
                milliseconds(e2el),
                *(f"{count:,}" for count in counts),
                clean(row.error, 60) or "ended well",
            ]
        )
    data = table(
        ["", "sent at", "TTFT", "E2EL", "prompt tokens", "output tokens", "end"], rows, caption="Those that ran longest"
    )
    said = "Blue: until the first token. Grey: the rest. Red: failed. Each request is in the lowest free lane." + note
    return figure("requests", "Requests", said, plot.render(), data, wide=True)


def _in_words(run: ReportedRun, place: int) -> str:
    row = run.result.rows[place]
    name = f"request {row.number}" + (f" of {clean(row.tenant, 40)}" if row.tenant else "")
    if not row.ok:
        return f"{name}: {clean(row.error, 60)} after {milliseconds(1e3 * (row.e2el or 0.0))}"
    first = f"first token {milliseconds(1e3 * row.ttft)}, " if row.ttft is not None else ""
    whole = milliseconds(1e3 * (row.e2el or 0.0))
    return f"{name}: {first}whole {whole}, {row.prompt_tokens:,} + {row.output_tokens:,} tokens"


def _stage_rules(plot: Plot, runs: Sequence[ReportedRun]) -> None:
    """Mark where each load began, for a single result and if there is room."""
    stages = runs[0].result.stages if len(runs) == 1 else []
    if not 1 < len(stages) <= MOST_STAGES:
        return
    span = plot.x.high - plot.x.low
    labelled = -1.0
    for stage in stages:
        room = (stage.began - labelled) / span > 0.09 or labelled < 0.0
        plot.rule(x=stage.began, text=load_in_short(stage) if room else "")
        if room:
            labelled = stage.began


def _time_table(runs: Sequence[ReportedRun], edges: Sequence[Floats], columns: Sequence[Floats]) -> Html:
    longest = max(edges, key=len)
    rows = [
        [
            seconds(float(longest[place])),
            *(number(float(column[place])) if place < column.size else "" for column in columns),
        ]
        for place in thin(longest.size - 1, _TABLE_ROWS).tolist()
    ]
    return table(["from", *(run.name for run in runs)], rows)


def _holding(found: Axis, objectives: set[float]) -> Axis:
    """Raise the axis to include an objective that is not far above it."""
    near = [most for most in objectives if found.high < most <= 2.0 * found.high]
    return replace(found, high=1.05 * max(near)) if near else found
