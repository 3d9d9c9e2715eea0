"""Frames a report: one HTML file with its style sheet and scripts in it, which loads nothing from the network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from headrace.bench.report.markup import Html, join, page, tag
from headrace.bench.results.formatting import clean
from headrace.observe.web import web_text

_HERE: Final = Path(__file__).parent


def report_page(
    title: str, under: str, main: Sequence[Html], *, glossary: Sequence[tuple[str, str]] = (), style: str = ""
) -> str:
    """Return the file. `under`: the line below the title; `glossary`: words and their meanings, for the end; `style`:
    rules after the reports' own."""
    style = web_text("base.css", "charts.css") + (_HERE / "report.css").read_text(encoding="utf-8") + style
    script = web_text("theme.js", "tooltips.js") + (_HERE / "report.js").read_text(encoding="utf-8")
    words = (join(tag("dt", word), tag("dd", meaning)) for word, meaning in glossary)
    parts = (
        tag(
            "header",
            tag("div", tag("h1", clean(title, 240)), tag("p", under, class_="under")),
            tag("button", "Dark", id="theme", type="button", hidden="hidden"),
        ),
        tag("main", *main),
        tag("footer", tag("dl", *words)),
        tag("div", id="tip", role="status", hidden="hidden"),
    )
    return page(title, *parts, style=style, script=script)


def section(title: str, parts: Sequence[Html], *, charts: bool = False) -> Html:
    """Return a part of the page with its heading; nothing without parts."""
    if not parts:
        return Html()
    return tag("section", tag("h2", title), *([tag("div", *parts, class_="charts")] if charts else parts))


def tile_list(shown: Sequence[tuple[str, str, str, bool]]) -> Html:
    """Return tiles with key figures: title, value, a line below it, and whether that is bad."""
    return tag(
        "dl",
        *(
            tag(
                "div",
                tag("dt", title),
                tag("dd", value, class_="big"),
                tag("dd", under),
                class_="bad" if is_bad else None,
            )
            for title, value, under, is_bad in shown
        ),
        class_="tiles",
    )
