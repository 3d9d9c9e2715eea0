"""Writes the report of a span as one HTML file: what changed, objectives, traffic, costs, caches, budgets, outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import numpy as np

from headrace.bench.report.markup import Html, tag
from headrace.bench.report.page import report_page, section, tile_list
from headrace.bench.report.plot import Axis, Plot, axis
from headrace.bench.report.report_tables import figure, table
from headrace.bench.results.formatting import clean, milliseconds, number, three
from headrace.cli.report.budget_forecast import BudgetForecast
from headrace.cli.report.changes import CONFIDENCE, Change
from headrace.cli.report.lab_sections import drift_section, semantic_section
from headrace.cli.report.length_section import length_section
from headrace.cli.report.weeks import DAY, HOUR, Key, Span
from headrace.observe.latency.latency_book import Row

_MOST_ROWS: Final = 30  # of a table
_MICROS: Final = 1_000_000
_WIDE: Final = 1140.0
_DRIFT: Final = 0.1  # of a mix, from which on it is called a drift
_GLOSSARY: Final = (
    ("TTFT, ITL, TPOT, E2E", "time to the first token; gaps between outputs; time per output token; the whole request"),
    ("p50, p95", "50 and 95 % of the values are at or below; right within 1.1 %"),
    ("interval", f"{100 * CONFIDENCE:g} % interval of the change, by resampling blocks of six hours of both spans"),
    ("drift", "share of requests that would have to move to another group for both spans to have the same mix"),
)


class Report(msgspec.Struct):
    server: str
    currency: str
    before: Span
    after: Span
    changes: Sequence[Change]
    targets: Mapping[tuple[str, str], float]  # of the objectives that are declared now
    budgets: Sequence[BudgetForecast]
    outcomes: tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]  # rows of before and after
    drift: Mapping[str, Any] | None = None
    semantic: Mapping[str, Any] | None = None


def report_html(report: Report) -> str:
    first, last = (_date(each) for each in (report.after.first, report.after.last))
    before, after = report.before.total, report.after.total
    title = f"Headrace from {first} to {last}"
    compared = f"compared with {_date(report.before.first)} to {_date(report.before.last)}"
    main = [
        _tiles(report, before, after),
        section("What changed", _changes(report)),
        section("Objectives", _objectives(report)),
        section("Traffic and latency", _charts(report), charts=True),
        section("Where the time went", _stages(before, after)),
        section("Costs", _costs(report)),
        section("Answer lengths", length_section(report.before, report.after)),
        section("Caches", _caches(before, after, report.currency)),
        section("The semantic cache on trial", semantic_section(report.semantic)),
        section("Budgets", _budgets(report)),
        section("Outcomes", _outcomes(report)),
        section("The mix of requests", [tag("figure", each) for each in _mix(report)], charts=True),
        section("Drift of questions and answers", drift_section(report.drift)),
    ]
    return report_page(title, f"{clean(report.server, 200)} · {compared} · times in UTC", main, glossary=_GLOSSARY)


# The parts


def _tiles(report: Report, before: Row, after: Row) -> Html:
    worse = [change for change in report.changes if change.verdict == "worse"]
    short = [each for each in report.budgets if each.runs_out_at is not None]
    tokens = _relative(before.output_tokens, after.output_tokens)
    good, failed = (f"before {_ratio(getattr(before, name), before.requests)}" for name in ("good", "failed"))
    shown = [
        ("Requests", number(after.requests), _relative(before.requests, after.requests), False),
        ("Output tokens", _short_number(after.output_tokens), tokens, False),
        ("Met objectives", _ratio(after.good, after.requests), good, False),
        ("Failed", _ratio(after.failed, after.requests), failed, bool(after.failed)),
    ]
    for name in ("ttft", "itl"):
        if name in after.sketches:
            earlier = milliseconds(_percentile(before, name, 0.95))
            now = milliseconds(_percentile(after, name, 0.95))
            shown.append((f"{name.upper()} p95", now, f"before {earlier}", False))
    if after.micros or before.micros:
        cost = _with("Cost", report.currency)
        shown.append((cost, _money(after.micros), _relative(before.micros, after.micros), False))
    shown.append(("Became worse", number(len(worse)), "measures, see below", bool(worse)))
    if report.budgets:
        shown.append(("Budgets running out", number(len(short)), f"of {len(report.budgets)}", bool(short)))
    return tile_list(shown)


def _changes(report: Report) -> list[Html]:
    if not report.changes:
        return [tag("p", "There is no traffic in both spans to compare.", class_="under")]
    known = [each for each in report.changes if each.verdict != "unknown"]
    telling = [each for each in known if each.verdict != "same"]
    order = {"worse": 0, "better": 1}
    telling.sort(key=lambda each: order[each.verdict])
    parts: list[Html] = []
    headings = ("surface and model", "measure", "before", "after", "change", "interval", "")
    if telling:
        parts.append(table(headings, [_change_row(each, report.currency) for each in telling[:_MOST_ROWS]]))
    same = len(known) - len(telling)
    said = f"{same} further measures did not change, as far as this traffic can show." if telling else ""
    if not telling:
        said = f"None of {same} measures changed, as far as this traffic can show." if same else ""
    unknown = len(report.changes) - len(known)
    if unknown:
        said += (
            f" {unknown} have too little traffic for an interval: it needs 100 requests in four blocks of six hours."
        )
    if said:
        parts.append(tag("p", said.strip(), class_="under"))
    rest = [each for each in report.changes if each not in telling]
    if rest:
        rows = [_change_row(each, report.currency) for each in rest[:_MOST_ROWS]]
        parts.append(tag("details", tag("summary", "All other measures"), table(headings, rows)))
    return parts


_VERDICTS: Final = {
    "worse": "worse",
    "better": "better",
    "same": "no change shown",
    "unknown": "too little traffic",
}


def _change_row(change: Change, currency: str) -> list[str]:
    def show(value: float) -> str:
        match change.unit:
            case "ms":
                return milliseconds(value)
            case "s":
                return f"{three(value)} s"
            case "share":
                return _percent(value)
            case _:
                return _with(_money(value), currency)

    before, after, low, high = change.before, change.after, change.low, change.high
    if change.is_difference:
        relative = f"{100 * (after - before):+.2f} points"
        ends = None if low is None or high is None else f"{100 * low:+.2f} to {100 * high:+.2f}"
    else:
        relative = f"{100 * (after / before - 1.0):+.1f} %"
        ends = None if low is None or high is None else f"{100 * (low - 1.0):+.1f} to {100 * (high - 1.0):+.1f} %"
    verdict = _VERDICTS[change.verdict]
    return [_name(change.key), change.what, show(before), show(after), relative, ends or "-", verdict]


def _objectives(report: Report) -> list[Html]:
    rows: list[list[str]] = []
    for key, (good, total) in sorted(report.after.objectives.items()):
        target = report.targets.get(key)
        earlier_good, earlier = report.before.objectives.get(key, (0, 0))
        used = "-"
        if target is not None and total:
            used = _percent((1.0 - good / total) / (1.0 - target))
        met = "-" if target is None or not total else "met" if good / total >= target else "missed"
        rows.append(
            [
                f"{key[0]} {key[1]}",
                "-" if target is None else _percent(target),
                _ratio(good, total),
                _ratio(earlier_good, earlier),
                number(total),
                used,
                met,
            ]
        )
    headings = ("objective", "target", "attained", "before", "events", "error budget used", "")
    return [table(headings, rows)] if rows else []


def _charts(report: Report) -> list[Html]:
    """Draw requests and time to the first token of each hour, over both spans."""
    begin, end = report.before.first, report.after.last
    hours = {**report.before.by_hour(), **report.after.by_hour()}
    if not hours:
        return []
    times = np.arange(begin, end + 1, HOUR)
    counts = np.array([hours[hour].requests if hour in hours else 0 for hour in times[:-1].tolist()], dtype=np.float64)
    across = Axis(low=(begin - end) / DAY, high=0.0, title="days before the end", unit="number")
    edges = (times - end) / DAY
    down = axis([counts], title="requests per hour", unit="count", log=False)
    plot = Plot(x=across, y=down, about="traffic", width=_WIDE, height=210)
    plot.rule(x=(report.after.first - end) / DAY, text="this span begins")
    plot.bars(edges, counts, series=0, name="requests")
    day_rows = [[_hour(hour), number(row.requests), number(row.failed)] for hour, row in _busiest(hours)]
    data = table(("hour", "requests", "failed"), day_rows, caption="The busiest hours")
    found = [figure("traffic", "Requests", "", plot.render(), data, wide=True)]
    known = sorted(hour for hour, row in hours.items() if "ttft" in row.sketches)
    if len(known) > 1:
        both = [hours[hour].sketches["ttft"].quantiles((0.5, 0.95)) for hour in known]
        p50, p95 = ([1e3 * each[place] for each in both] for place in (0, 1))
        down = axis([p50, p95], title="ms", unit="ms")
        plot = Plot(x=across, y=down, about="ttft", width=_WIDE, height=230)
        plot.room_for(["p95", "p50"])
        plot.rule(x=(report.after.first - end) / DAY, text="this span begins")
        places = [(hour + HOUR / 2 - end) / DAY for hour in known]
        plot.line(places, p95, series=1, name="p95", label="p95")
        plot.line(places, p50, series=0, name="p50", label="p50")
        slowest = sorted(zip(known, p50, p95, strict=True), key=lambda each: -each[2])[:24]
        rows = [[_hour(hour), milliseconds(low), milliseconds(high)] for hour, low, high in slowest]
        data = table(("hour", "p50", "p95"), rows, caption="The slowest hours")
        found.append(
            figure(
                "ttft", "Time to first token", "Hours without requests are left out.", plot.render(), data, wide=True
            )
        )
    return found


def _stages(before: Row, after: Row) -> list[Html]:
    if not after.requests or not after.stages:
        return []
    total = sum(after.stages.values())
    rows = [
        [
            name,
            milliseconds(1e3 * seconds / after.requests),
            milliseconds(1e3 * before.stages.get(name, 0.0) / before.requests) if before.requests else "-",
            _percent(seconds / total) if total else "-",
        ]
        for name, seconds in sorted(after.stages.items(), key=lambda each: -each[1])
    ]
    return [table(("stage", "mean", "before", "share of the time"), rows)]


def _costs(report: Report) -> list[Html]:
    parts: list[Html] = []
    for by, what in ((("surface", "model"), "surface and model"), (("tenant",), "tenant"), (("route",), "route")):
        after, before = report.after.rows(by), report.before.rows(by)
        rows = [_cost_row(key, row, before.get(key, Row())) for key, row in _most(after) if row.requests]
        headings = (what, "requests", "tokens in", "tokens out", "E2E p50", "E2E p95", "machine s / 1,000")
        money = (_with("cost", report.currency), "before", "cost / 1,000")
        parts.append(table((*headings, *money), rows))
    return parts


def _cost_row(key: Key, row: Row, before: Row) -> list[str]:
    return [
        _name(key),
        number(row.requests),
        _short_number(row.prompt_tokens),
        _short_number(row.output_tokens),
        milliseconds(_percentile(row, "e2e", 0.5)),
        milliseconds(_percentile(row, "e2e", 0.95)),
        three(1e3 * row.machine_s / row.requests),
        _money(row.micros),
        _money(before.micros),
        _money(1e3 * row.micros / row.requests),
    ]


def _caches(before: Row, after: Row, currency: str) -> list[Html]:
    rows: list[list[str]] = []
    for name in sorted({*before.saved, *after.saved}):
        hits, seconds, micros = after.saved.get(name, (0, 0.0, 0))
        earlier = before.saved.get(name, (0, 0.0, 0))[0]
        rows.append(
            [
                name,
                number(hits),
                _ratio(hits, after.requests),
                _ratio(earlier, before.requests),
                f"{three(seconds)} s",
                _money(micros),
            ]
        )
    if after.prompt_tokens:
        cached = _ratio(after.cached_tokens, after.prompt_tokens)
        rows.append(["prefix", "-", cached, _ratio(before.cached_tokens, before.prompt_tokens), "-", "-"])
    if not rows:
        return []
    headings = ("cache", "answers", "of all requests", "before", "machine time saved", _with("saved", currency))
    note = "The prefix cache's share is of prompt tokens; its savings are in the usage export."
    return [table(headings, rows), tag("p", note, class_="under")]


def _budgets(report: Report) -> list[Html]:
    if not report.budgets:
        return []
    rows = [
        [
            f"{each.tenant} {each.endpoint or ''}".strip(),
            each.period,
            _money(each.limit_micros),
            _money(each.spent_micros),
            _percent(each.spent_micros / max(1, each.limit_micros)),
            "-" if each.runs_out_at is None else _hour(each.runs_out_at),
            _hour(each.renews_at),
        ]
        for each in sorted(report.budgets, key=lambda each: -each.spent_micros / max(1, each.limit_micros))[:_MOST_ROWS]
    ]
    headings = ("tenant", "period", _with("limit", report.currency), "spent", "used", "runs out at this pace", "renews")
    return [table(headings, rows)]


def _outcomes(report: Report) -> list[Html]:
    before, after = report.outcomes
    earlier = {(each["outcome"], each["model"]): each for each in before}
    rows: list[list[str]] = []
    for each in after[:_MOST_ROWS]:
        known = earlier.get((each["outcome"], each["model"]))
        interval = "-" if each["mean_low"] is None else f"{each['mean_low']:.3g} to {each['mean_high']:.3g}"
        unit = each["micros_per_unit"]
        rows.append(
            [
                f"{each['outcome']} of {each['model']}",
                number(each["count"]),
                f"{each['mean']:.3g}",
                interval,
                "-" if known is None else f"{known['mean']:.3g}",
                milliseconds(each["mean_e2e_ms"]),
                "-" if unit is None else _money(unit),
            ]
        )
    headings = (
        "outcome",
        "values",
        "mean",
        "95 % interval",
        "before",
        "mean E2E",
        _with("cost per unit", report.currency),
    )
    return [table(headings, rows)] if rows else []


def _mix(report: Report) -> list[Html]:
    parts: list[Html] = []
    for name in ("length", "endpoint", "route", "tenant"):
        after, before = report.after.rows((name,)), report.before.rows((name,))
        now, then = (sum(row.requests for row in rows.values()) for rows in (after, before))
        if not now:
            continue
        rows = [
            [
                _name(key),
                number(row.requests),
                _percent(row.requests / now),
                _ratio(before.get(key, Row()).requests, then),
            ]
            for key, row in _most(after)
        ]
        caption = f"By {name}"
        if then:
            drift = 0.5 * sum(
                abs(after.get(key, Row()).requests / now - before.get(key, Row()).requests / then)
                for key in {*after, *before}
            )
            caption += f": drift {_percent(drift)}" + (", the mix has changed" if drift >= _DRIFT else "")
        title = "prompt tokens" if name == "length" else name
        parts.append(table((title, "requests", "share", "before"), rows, caption=caption))
    return parts


# Words and numbers


def _most(rows: Mapping[Key, Row]) -> list[tuple[Key, Row]]:
    return sorted(rows.items(), key=lambda each: -each[1].requests)[:_MOST_ROWS]


def _busiest(hours: Mapping[int, Row]) -> Iterable[tuple[int, Row]]:
    return sorted(hours.items(), key=lambda each: -each[1].requests)[:24]


def _percentile(row: Row, name: str, at: float) -> float | None:
    """Return a percentile in milliseconds."""
    sketch = row.sketches.get(name)
    return None if sketch is None or not sketch.count else 1e3 * sketch.quantiles((at,))[0]


def _name(key: Key) -> str:
    return clean(" ".join(key), 120)


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _hour(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%a %d %b %H:%M")


def _ratio(part: float, whole: float) -> str:
    return _percent(part / whole) if whole else "-"


def _percent(share: float) -> str:
    percent = 100.0 * share
    if percent in (0.0, 100.0):
        return f"{percent:.0f} %"
    if 0.0 < percent < 0.1:
        return "below 0.1 %"
    return f"{percent:,.2f} %" if percent > 99.0 else f"{percent:,.1f} %"


def _relative(before: float, after: float) -> str:
    return f"{100 * (after / before - 1.0):+.1f} % against before" if before else "nothing before"


def _short_number(value: float) -> str:
    return f"{value / 1e6:,.1f} M" if value >= 1e6 else number(value)


def _money(micros: float) -> str:
    amount = micros / _MICROS
    return f"{amount:,.2f}" if abs(amount) >= 100.0 or amount == 0.0 else f"{amount:,.4f}"


def _with(text: str, currency: str) -> str:
    return f"{text} {clean(currency, 12)}".rstrip()
