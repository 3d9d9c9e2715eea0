"""The result of a tuning, its state for a later run, the commented configuration and the HTML waterfall."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.bench.report.markup import Html, page, tag
from headrace.bench.report.report_tables import table
from headrace.bench.results.formatting import milliseconds, number, share
from headrace.bench.traffic_profile import TrafficProfile
from headrace.bench.tuning.bottleneck import Bottleneck
from headrace.bench.tuning.search import LevelResult, Setting, SettingComparison
from headrace.observe.web import web_text

_NOT_CONFIGURED: Final = frozenset({"batching", "model"})
_WIDTH, _ROW = 1100.0, 34.0  # pixels


class TuneReport(msgspec.Struct, frozen=True, kw_only=True):
    """The output of --json."""

    model: str
    cpu: str
    isa: str
    traffic: str
    profile: TrafficProfile
    requests: int  # in each measurement
    users: int | None
    objectives: dict[str, float]
    start: Setting
    final: Setting
    results: list[LevelResult]
    overall: SettingComparison | None  # the final setting against the first; None: they are the same
    before: Bottleneck | None
    after: Bottleneck | None
    measurements: int
    seconds: float

    @property
    def kept(self) -> list[LevelResult]:
        return [result for result in self.results if result.outcome == "kept"]


def state_digest(**inputs: Any) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()[:32]


# Configuration


def tuned_toml(report: TuneReport, model: str) -> str:
    """Return a headrace.toml: the settings that were kept, and for each level why."""
    lines = [
        f"# Tuned for {report.traffic} on {report.cpu} ({report.isa}).",
        f"# {report.measurements} measurements of {report.requests} requests in {report.seconds:.0f} s.",
    ]
    if report.overall is not None:
        lines.append(
            f"# Against the first setting: {report.overall.gain:.2f} times "
            f"({report.overall.low:.2f} to {report.overall.high:.2f})."
        )
    lines.append("#")
    for result in report.results:
        chosen = f" {result.choice}" if result.choice else ""
        lines.append(f"# {result.outcome}: {result.level}{chosen}: {' '.join(result.reason.split())}")
    name = model if model.replace("-", "").replace("_", "").isalnum() and model.isascii() else Path(model).stem
    key = name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else json.dumps(name)
    path = str(report.final.get("model", model))
    lines += ["", f"[models.{key}]"]
    if path != name:
        lines.append(f"path = {json.dumps(path)}")
    lines += ["", f"[models.{key}.options]"]
    for option, value in report.final.items():
        if option not in _NOT_CONFIGURED and value is not None and value != []:
            lines.append(f"{option} = {_toml(value)}")
    surface = _surface(report.objectives)
    if surface:
        lines += ["", "[surfaces.chat]", *surface]
    if report.final["batching"] != "continuous":
        lines.insert(
            4, f"# The measurements batched as '{report.final['batching']}'; a server always batches continuously."
        )
    return "\n".join(lines) + "\n"


def _surface(objectives: dict[str, float]) -> list[str]:
    found: dict[str, float] = {}
    for name, value in objectives.items():
        key = {"ttft": "ttft_ms", "itl": "itl_ms"}.get(name.partition("_")[0])
        if key is not None:
            found[key] = min(1e3 * value, found.get(key, math.inf))
    return [f"{key} = {value:g}" for key, value in found.items()]


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)  # pyright: ignore[reportUnknownArgumentType]


# HTML


def tune_html(report: TuneReport) -> str:
    title = f"Tuning of {report.model}"
    under = (
        f"{report.traffic} · {report.cpu}, {report.isa} · {report.measurements} measurements, {report.seconds:.0f} s"
    )
    style = web_text("base.css", "charts.css") + _STYLE
    return page(
        title,
        tag(
            "header",
            tag("div", tag("h1", title), tag("p", under, class_="under")),
            tag("button", "Dark", id="theme", type="button", hidden="hidden"),
        ),
        tag(
            "main",
            _tiles(report),
            tag("section", tag("h2", "From the first setting to the last"), _waterfall(report)),
            tag("section", tag("h2", "What each kept level did"), _kept_table(report)),
            tag("section", tag("h2", "Every level"), _level_table(report.results)),
            *(tag("section", tag("h2", f"What bounds it {when}"), _bound(found)) for when, found in _bounds(report)),
        ),
        style=style,
        script=web_text("theme.js"),
    )


def _bounds(report: TuneReport) -> list[tuple[str, Bottleneck]]:
    return [(when, found) for when, found in (("before", report.before), ("after", report.after)) if found is not None]


def _tiles(report: TuneReport) -> Html:
    cells: list[tuple[str, str, str]] = []
    overall = report.overall
    if overall is not None:
        cells.append(("against the first setting", f"{overall.gain:.2f} x", f"{overall.low:.2f} to {overall.high:.2f}"))
        for name, key, show in _FIGURES:
            before, after = overall.before.get(key), overall.after.get(key)
            if before is not None and after is not None and math.isfinite(before) and math.isfinite(after):
                cells.append((name, show(after), f"before {show(before)}"))
    return tag(
        "dl", *(tag("div", tag("dt", a), tag("dd", b, class_="big"), tag("dd", c)) for a, b, c in cells), class_="tiles"
    )


def _waterfall(report: TuneReport) -> Html:
    """Draw a bar for the first setting, one for each kept level by its measured ratio, and one for the last."""
    total = 1.0
    rows = [("first setting", 0.0, 1.0, "1.00 x", 7)]
    for result in report.kept:
        before, total = total, total * (result.gain or 1.0)
        label = f"{result.gain or 1.0:.2f} x"
        rows.append((f"{result.level}: {result.choice}", before, total, label, 1 if result.lossy else 0))
    if report.overall is not None:
        rows.append(("measured together", 0.0, report.overall.gain, f"{report.overall.gain:.2f} x", 2))
    most = max(high for _, low, high, *_ in rows for high in (low, high))
    left, room = 300.0, _WIDTH - 420.0
    parts: list[Html] = []
    for place, (name, low, high, label, series) in enumerate(rows):
        y = place * _ROW
        start, end = (left + room * min(low, high) / most, left + room * max(low, high) / most)
        parts += [
            tag("text", name, x=left - 10.0, y=y + 21.0, text_anchor="end", class_="name"),
            tag("rect", x=start, y=y + 6.0, width=max(2.0, end - start), height=_ROW - 12.0, class_=f"bar s{series}"),
            tag("text", label, x=end + 8.0, y=y + 21.0, class_="value"),
        ]
    height = len(rows) * _ROW
    svg = tag(
        "svg",
        tag("title", "Cumulative gain by level"),
        *parts,
        viewBox=f"0 0 {_WIDTH:.0f} {height:.0f}",
        role="img",
        class_="waterfall",
    )
    note = "Each bar is the product of the measured ratios up to that level; lossy levels passed the gate."
    return tag("figure", svg, tag("figcaption", note))


def _seconds(value: float) -> str:
    return milliseconds(value * 1e3)


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB"


def _usd(value: float) -> str:
    return f"{value:,.3f} USD"


_FIGURES: Final = (
    ("tokens/s", "tokens_per_s", number),
    ("TTFT p50", "ttft_p50", _seconds),
    ("TTFT p95", "ttft_p95", _seconds),
    ("ITL p50", "itl_p50", _seconds),
    ("ITL p95", "itl_p95", _seconds),
    ("memory", "memory", _megabytes),
    ("cost per million tokens", "usd_per_million", _usd),
)


def _kept_table(report: TuneReport) -> Html:
    shown = [figure for figure in _FIGURES if any(figure[1] in result.figures for result in report.kept)]
    rows: list[list[str]] = []
    for result in report.kept:
        gate = result.gate
        quality = "same tokens" if not result.lossy else gate.reason if gate is not None else ""
        cells = [show(result.figures.get(key, math.nan)) if key in result.figures else "" for _, key, show in shown]
        rows.append([f"{result.level}: {result.choice}", *cells, quality])
    return table(["level", *(name for name, *_ in shown), "quality"], rows)


def _level_table(results: Sequence[LevelResult]) -> Html:
    rows = [
        [
            result.level,
            str(result.walk),
            result.choice,
            result.outcome,
            "" if result.predicted is None else f"{result.predicted:.2f} x",
            interval_text(result),
            result.reason,
        ]
        for result in results
    ]
    return tag(
        "div", table(["level", "walk", "choice", "outcome", "predicted", "measured", "reason"], rows), class_="words"
    )


def interval_text(result: LevelResult) -> str:
    if result.gain is None or result.low is None or result.high is None:
        return ""
    return f"{result.gain:.2f} x ({result.low:.2f} to {result.high:.2f})"


def _bound(found: Bottleneck) -> Html:
    total = sum(found.seconds.values()) or 1.0
    rows = [[name, _seconds(each), share(each / total)] for name, each in found.seconds.items()]
    return tag(
        "div",
        tag("p", f"{found.bound}: {found.advice}."),
        tag(
            "p",
            f"Prefill {number(found.prefill_tokens_per_s)} tokens/s, {share(found.prefill_share)} of the floor's; "
            f"decode {number(found.decode_tokens_per_s)} tokens/s, {share(found.decode_share)}.",
        ),
        table(["time of a request", "seconds", "share"], rows),
    )


_STYLE: Final = """
.waterfall { width: 100%; max-width: 1100px; height: auto; }
.waterfall text { fill: var(--ink); font-size: 13px; }
.waterfall .bar { fill: var(--c); }
figcaption { color: var(--muted); font-size: 13px; }
.words td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
"""
