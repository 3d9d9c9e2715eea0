"""The tables of a report, and the frame around a chart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from headrace.bench.report.markup import Html, escape, join, tag
from headrace.bench.report.page import tile_list
from headrace.bench.report.plot import colour
from headrace.bench.results.benchmark_result import BenchmarkResult, Distribution, RequestStats, StageResult
from headrace.bench.results.formatting import clean, milliseconds, number, seconds, share
from headrace.bench.results.result_columns import ResultColumns

NAMES: Final[Mapping[str, str]] = {
    "ttft": "Time to first token",
    "ttfo": "Time to first output other than reasoning",
    "itl": "Gap between streamed outputs",
    "tpot": "Time per output token",
    "e2el": "End to end",
    "queue": "Queue, reported by the server",
    "prefill": "Prefill, reported by the server",
    "decode": "Decode, reported by the server",
    "lag": "Client's lag behind the schedule",
    "chunk_tokens": "Tokens in a streamed output",
}
SHORT: Final[Mapping[str, str]] = {"ttft": "TTFT", "ttfo": "TTFO", "itl": "ITL", "tpot": "TPOT", "e2el": "E2EL"}
TIMES: Final = "\N{MULTIPLICATION SIGN}"
MOST_GROUPS: Final = 64  # rows of a table of tenants
MOST_STAGES: Final = 200
MOST_ERRORS: Final = 32  # kinds


class ReportedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One result in a report."""

    result: BenchmarkResult
    columns: ResultColumns
    name: str
    series: int  # index of its colour, if there are several


def figure(ident: str, title: str, note: str, drawing: Html, data: Html, *, wide: bool = False) -> Html:
    """Frame a chart with its title, a note, and its data as a table."""
    return tag(
        "figure",
        tag("figcaption", title, id=ident),
        tag("p", note) if note else Html(),
        tag("div", drawing, class_="plot"),
        tag("details", tag("summary", "Data"), data),
        class_="wide" if wide else None,
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "") -> Html:
    """Build a table; the first cell of a row is its heading."""
    head = tag("tr", *(tag("th", heading, scope="col") for heading in headings))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    parts = [tag("caption", caption)] if caption else []
    grid = tag("table", *parts, tag("thead", head), tag("tbody", *body))
    return tag("div", grid, class_="table", tabindex="0", role="region", aria_label=caption or headings[0] or "Table")


def swatch(series: int) -> Html:
    return tag("span", class_=f"swatch {colour(series)}", aria_hidden="true")


def keys(runs: Sequence[ReportedRun]) -> Html:
    """Build the legend of a report of several results, with a switch for each."""
    return tag(
        "div",
        *(
            tag(
                "label",
                tag("input", type="checkbox", checked="checked", data_series=str(run.series)),
                swatch(run.series),
                run.name,
            )
            for run in runs
        ),
        class_="keys",
        role="group",
        aria_label="Results",
    )


def headline(run: ReportedRun) -> tuple[RequestStats, str]:
    """Return the statistics that represent a result, and their load: for a sweep, the knee."""
    knee = run.result.knee
    if knee is not None and knee < len(run.result.stages):
        stage = run.result.stages[knee]
        return stage.figures, f"at the knee, {clean(stage.name, 60)}"
    return run.result.figures, "all loads together" if len(run.result.stages) > 1 else ""


def tiles(run: ReportedRun) -> Html:
    """Build the tiles with the key figures."""
    total, load = headline(run)
    found: list[tuple[str, str, str, bool]] = []
    for name in ("ttft", "itl", "tpot", "e2el"):
        spread: Distribution | None = getattr(total, name)
        if spread is not None:
            found.append((f"{SHORT[name]} p50", milliseconds(spread.p50), f"p99 {milliseconds(spread.p99)}", False))
    best = f"best second {number(total.peak_output_per_s)}"
    found.append(("Output tokens/s", number(total.output_throughput), best, False))
    completed = f"{number(total.completed)} in {seconds(total.seconds)}"
    found.append(("Requests/s", number(total.request_throughput), completed, False))
    if total.goodput is not None:
        met = share((total.good or 0) / total.requests) if total.requests else "-"
        found.append(("Goodput", f"{number(total.goodput)}/s", f"{met} met every objective", False))
    failed = share(total.failed / total.requests) if total.requests else "-"
    found.append(("Failed", number(total.failed), f"{failed} of {number(total.requests)}", bool(total.failed)))
    shown = tile_list(found)
    return join(tag("p", f"{load[0].upper()}{load[1:]}:", class_="at"), shown) if load else shown


_SPREAD: Final = ("requests", "mean", "std", "p50", "p90", "p95", "p99", "least", "most")


def figures_table(run: ReportedRun) -> Html:
    total = run.result.figures
    rows: list[list[str]] = []
    for name, title in NAMES.items():
        spread: Distribution | None = getattr(total, name)
        if spread is None or (name == "ttfo" and spread == total.ttft):  # without reasoning it equals the TTFT
            continue
        show: Callable[[float], str] = number if name == "chunk_tokens" else milliseconds
        values = (spread.mean, spread.std, spread.p50, spread.p90, spread.p95, spread.p99, spread.least, spread.most)
        titled = f"{title} ({SHORT[name]})" if name in SHORT else title
        rows.append([titled, f"{spread.count:,}", *map(show, values)])
    return table(["", "values", *_SPREAD[1:]], rows, caption="Latency")


def totals(figures: RequestStats) -> list[tuple[str, str]]:
    """List the totals: everything except latencies."""
    found = [
        ("Requests", f"{figures.requests:,}"),
        ("Successful", f"{figures.completed:,}"),
        ("Failed", f"{figures.failed:,}"),
        ("Seconds", seconds(figures.seconds)),
        ("Requests/s", number(figures.request_throughput)),
        ("Output tokens/s", number(figures.output_throughput)),
        ("Tokens/s, prompts and answers", number(figures.total_throughput)),
        ("Output tokens in the best second", number(figures.peak_output_per_s)),
        ("Peak concurrent requests", f"{figures.peak_running:,}"),
        ("Prompt tokens", f"{figures.prompt_tokens:,}"),
        ("cached prompt tokens", f"{figures.cached_tokens:,}"),
        ("Output tokens", f"{figures.output_tokens:,}"),
        ("Outputs read together with another", share(figures.together)),
    ]
    if figures.goodput is not None:
        found.insert(5, ("Goodput, requests/s", number(figures.goodput)))
        found.insert(6, ("Met every objective", f"{figures.good or 0:,}"))
    return found


def totals_table(runs: Sequence[ReportedRun]) -> Html:
    """Build the totals: a row per total, a column per result."""
    each = [dict(totals(run.result.figures)) for run in runs]
    names = max((list(found) for found in each), key=len)
    rows = [[name, *(found.get(name, "-") for found in each)] for name in names]
    headings = ["", *(run.name for run in runs)] if len(runs) > 1 else ["", "value"]
    return table(headings, rows, caption="Totals")


def side_by_side(runs: Sequence[ReportedRun]) -> Html:
    """Compare latencies and rates of several results."""
    totals = [headline(run)[0] for run in runs]
    rows: list[list[str]] = []
    for name in ("ttft", "itl", "tpot", "e2el"):
        spreads: list[Distribution | None] = [getattr(total, name) for total in totals]
        if not any(spreads):
            continue
        for point in ("p50", "p90", "p99", "mean"):
            values: list[float | None] = [None if spread is None else getattr(spread, point) for spread in spreads]
            rows.append([f"{SHORT[name]} {point}", *_marked(values, milliseconds, least=True)])
    rates: tuple[tuple[str, list[float | None]], ...] = (
        ("Output tokens/s", [total.output_throughput for total in totals]),
        ("Requests/s", [total.request_throughput for total in totals]),
        ("Goodput, requests/s", [total.goodput for total in totals]),
    )
    for title, values in rates:
        if any(value is not None for value in values):
            rows.append([title, *_marked(values, number, least=False)])
    rows.append(["Failed", *(f"{total.failed:,} of {total.requests:,}" for total in totals)])
    loads = [headline(run)[1] for run in runs]
    if any(loads):
        rows.insert(0, ["", *loads])
    headings = ["", *(join(swatch(run.series), tag("span", run.name)) for run in runs)]
    return table(
        headings, rows, caption=f"Side by side: the best value of each row is bold; {TIMES}2 is twice the best"
    )


def _marked(values: Sequence[float | None], show: Callable[[float | None], str], *, least: bool) -> list[str]:
    """Format values: the best in bold, the others with their ratio to it."""
    known = [value for value in values if value is not None]
    best = (min if least else max)(known) if len(known) > 1 else None
    found: list[str] = []
    for value in values:
        if value is None or not best:
            found.append(show(value))
        elif value == best:
            found.append(tag("strong", show(value)))
        else:
            found.append(join(escape(show(value)), tag("span", f" {TIMES}{value / best:.2f}", class_="times")))
    return found


_GROUP: Final = (
    *("requests", "failed", "prompt tokens", "output tokens", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "TPOT p50"),
    *("E2EL p50", "E2EL p99", "output tokens/s", "requests/s", "goodput/s"),
)


def _group_row(name: str, figures: RequestStats) -> list[str]:
    def at(which: str, point: str) -> str:
        spread: Distribution | None = getattr(figures, which)
        return milliseconds(None if spread is None else getattr(spread, point))

    counts = (figures.requests, figures.failed, figures.prompt_tokens, figures.output_tokens)
    return [
        name,
        *(f"{count:,}" for count in counts),
        at("ttft", "p50"),
        at("ttft", "p99"),
        at("itl", "p50"),
        at("itl", "p99"),
        at("tpot", "p50"),
        at("e2el", "p50"),
        at("e2el", "p99"),
        number(figures.output_throughput),
        number(figures.request_throughput),
        number(figures.goodput),
    ]


def group_tables(runs: Sequence[ReportedRun]) -> list[Html]:
    """Build the tables by tenant, surface, workload and prompt length, if a run has several."""
    found: list[Html] = []
    for field, title in (
        ("tenants", "By tenant"),
        ("surfaces", "By surface"),
        ("workloads", "By workload"),
        ("lengths", "By prompt tokens"),
    ):
        rows: list[list[str]] = []
        left = 0
        for run in runs:
            groups: list[RequestStats] = getattr(run.result, field)
            if len(groups) < 2:
                continue
            left += max(0, len(groups) - MOST_GROUPS)
            for group in groups[:MOST_GROUPS]:
                rows.append(_group_row(f"{run.name}: {group.name}" if len(runs) > 1 else group.name, group))
        if rows:
            more = f"; {left:,} more are not shown" if left else ""
            found.append(table(["", *_GROUP], rows, caption=title + more))
    return found


def stages_table(runs: Sequence[ReportedRun]) -> Html | None:
    rows: list[list[str]] = []
    for run in runs:
        if len(run.result.stages) < 2:
            continue
        ordered = sorted(enumerate(run.result.stages[:MOST_STAGES]), key=lambda item: load_of(item[1]) or 0.0)
        for place, stage in ordered:
            name = f"{run.name}: {stage.name}" if len(runs) > 1 else stage.name
            state = "knee" if place == run.result.knee else "" if stage.kept_up else stage.why or "fell behind"
            rows.append([*_group_row(name, stage.figures), state])
    return table(["", *_GROUP, ""], rows, caption="By load") if rows else None


def load_of(stage: StageResult) -> float | None:
    return stage.rate if stage.rate is not None else stage.concurrency


def load_in_short(stage: StageResult) -> str:
    if stage.rate is not None:
        return f"{number(stage.rate)}/s"
    return clean(stage.name, 14)


def errors_table(runs: Sequence[ReportedRun]) -> Html | None:
    rows: list[list[str]] = []
    for run in runs:
        examples: dict[str, str] = {}
        for row in run.result.rows:
            if row.error and row.why:
                examples.setdefault(row.error, row.why)
        counted = sorted(run.result.figures.errors.items(), key=lambda item: (-item[1], item[0]))
        for kind, count in counted[:MOST_ERRORS]:
            name = f"{run.name}: {kind}" if len(runs) > 1 else kind
            rows.append([clean(name, 200), f"{count:,}", clean(examples.get(kind, ""), 300)])
    return table(["kind", "requests", "example"], rows, caption="Errors") if rows else None


def ran_table(run: ReportedRun, machine: str) -> Html:
    """Describe what was run."""
    result = run.result
    lines: list[tuple[str, str]] = [
        ("Server", result.url),
        ("Endpoint", result.endpoint),
        ("Model", result.model),
        ("Lengths counted by", result.tokenizer),
        ("Responses", "streamed" if result.streamed else "whole"),
        ("Workload", result.workload),
        ("Load", ", ".join(part for part in (result.load, result.arrivals) if part)),
        ("Objectives", ", ".join(f"{name} ≤ {most:g} ms" for name, most in result.objectives.items())),
        ("Seed", str(result.seed)),
        ("Prompts begin with", result.nonce),
        ("Started", result.started_at),
        ("Ended", result.ended_at),
        ("Warm-up requests", f"{result.warmup:,}"),
        ("Client machine", machine),
        ("headrace", result.headrace),
    ]
    if result.arrivals == "gamma":
        lines.append(("Burstiness", f"{result.burstiness:g}"))
    if result.ramp is not None:
        low, high = result.ramp
        lines.append(("Ramp", f"{low:g} to {high:g} requests/s"))
    if result.token_check is not None:
        check = result.token_check
        lines.append(
            (
                "Token counts",
                f"{check.answers:,} answers: {check.usage:,} by the server, {check.counted:,} counted by {check.by}, "
                f"{share(abs(check.difference))} apart",
            )
        )
    lines += [(f"--{clean(key, 60)}", _argument(value)) for key, value in list(result.arguments.items())[:100]]
    rows = [[name, clean(value, 500)] for name, value in lines if value]
    return tag("div", table(["", "value"], rows, caption=run.name), class_="ran")


def _argument(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def names(results: Sequence[BenchmarkResult]) -> list[str]:
    """Return unique names for the results: label, model or server."""
    found: list[str] = []
    for place, result in enumerate(results):
        name = clean(result.label or result.model or result.url or f"result {place + 1}", 60)
        while name in found:
            name = f"{name} ({place + 1})"
        found.append(name)
    return found
