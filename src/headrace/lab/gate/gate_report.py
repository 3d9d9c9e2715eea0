"""Writes a gate's result as one HTML file, the worst differences first, in the style of the benchmark's reports."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from headrace.bench.report.markup import Html, join, tag
from headrace.bench.report.page import report_page
from headrace.bench.report.report_tables import table
from headrace.bench.results.formatting import clean
from headrace.lab.gate.gate import Difference, GateResult
from headrace.lab.gate.gate_table import HEADINGS, heading, notes, row

MOST_TEXT: Final = 4000  # characters of a prompt or an answer
_STYLE: Final = """
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
.difference {
  background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px 14px; margin-top: 16px;
}
.difference pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0 8px; font-size: 13px; }
.difference h4 { margin: 8px 0 0; font-size: 13px; color: var(--muted); }
@media (max-width: 700px) { .pair { grid-template-columns: 1fr; } }
"""
_GLOSSARY: Final = (
    ("fail", "the answers prove that the candidate is beyond the limit"),
    ("pass", "the answers prove that it keeps the limit"),
    ("inconclusive", "neither is proven: more prompts would tell"),
    ("value", "what the limit is about, with its interval over prompts"),
    ("pt", "percentage points against the baseline"),
)


def write_gate_report(result: GateResult, path: Path) -> None:
    path.write_text(gate_html(result), encoding="utf-8")


def gate_html(result: GateResult) -> str:
    title = f"Gate: {result.candidate}"
    main = [
        _verdict(result),
        tag("section", tag("h2", "Metrics"), table(list(HEADINGS), [row(metric) for metric in result.metrics])),
        tag("section", tag("h2", "Notes"), tag("ul", *(tag("li", note) for note in notes(result)))),
        _differences(result),
    ]
    return report_page(title, f"{heading(result)} · {result.started_at}", main, glossary=_GLOSSARY, style=_STYLE)


def _verdict(result: GateResult) -> Html:
    counts = {
        name: sum(metric.verdict == name for metric in result.metrics) for name in ("fail", "inconclusive", "pass")
    }
    failed = [metric.title for metric in result.metrics if metric.verdict == "fail"]
    tiles = [
        _tile(
            "Verdict", "pass" if result.passed else "fail", ", ".join(failed) or "no metric fails", not result.passed
        ),
        _tile("Failed", str(counts["fail"]), f"of {len(result.metrics)} metrics", counts["fail"] > 0),
        _tile("Inconclusive", str(counts["inconclusive"]), "too few prompts to tell", False),
        _tile("Prompts", f"{result.cases:,}", f"{result.red_team:,} of the red-team set", False),
        _tile("Different answers", f"{len(result.differences):,}", "shown below", False),
    ]
    return tag("dl", *tiles, class_="tiles")


def _tile(title: str, value: str, under: str, bad: bool) -> Html:
    parts = (tag("dt", title), tag("dd", value, class_="big"), tag("dd", under))
    return tag("div", *parts, class_="bad" if bad else None)


def _differences(result: GateResult) -> Html:
    if not result.differences:
        return tag("section", tag("h2", "Differences"), tag("p", "All answers are equal.", class_="under"))
    return tag(
        "section",
        tag("h2", "Differences, the worst first"),
        *(_difference(number, each) for number, each in enumerate(result.differences, start=1)),
    )


def _difference(number: int, found: Difference) -> Html:
    category = f" · {found.category}" if found.category else ""
    return tag(
        "div",
        tag("h3", f"{number}. {clean(found.case, 120)}{category}"),
        tag("p", ", ".join(found.reasons), class_="under"),
        join(tag("h4", "Prompt"), _text(found.prompt)),
        tag(
            "div",
            tag("div", tag("h4", "Baseline"), _text(found.baseline)),
            tag("div", tag("h4", "Candidate"), _text(found.candidate)),
            class_="pair",
        ),
        class_="difference",
    )


def _text(text: str) -> Html:
    """Keep line ends, which `clean` would drop."""
    lines = [clean(line, MOST_TEXT) for line in text[:MOST_TEXT].splitlines()]
    if len(text) > MOST_TEXT:
        lines.append(f"... ({len(text) - MOST_TEXT:,} more characters)")
    parts: list[Html] = []
    for line in lines:
        parts += [tag("span", line), Html("\n")]
    return tag("pre", *parts)
