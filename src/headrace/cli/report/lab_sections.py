"""The parts of the report that come from the lab: drift of traffic and answers, and the semantic cache's trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace.bench.report.markup import Html, tag
from headrace.bench.report.report_tables import table
from headrace.bench.results.formatting import clean, number, three
from headrace.lab.online.semantic_trial import shown_thresholds

_MOST_ROWS: Final = 31


def drift_section(drift: Mapping[str, Any] | None) -> list[Html]:
    """`drift`: the answer of `GET /admin/v1/drift`; None if the server does not watch its traffic."""
    if drift is None:
        return []
    parts: list[Html] = []
    before, after = drift["requests_before"], drift["requests_after"]
    if before and after:
        rows = [
            [
                clean(mix["dimension"], 60),
                _percent(mix["drift"]),
                _percent(mix["by_chance"]),
                "; ".join(
                    f"{clean(each['group'], 40)} {_percent(each['before'])} to {_percent(each['after'])}"
                    for each in mix["groups"][:2]
                ),
                "changed" if mix["has_drifted"] else "no change shown",
            ]
            for mix in drift["mixes"]
        ]
        parts.append(table(("mix", "drift", "by chance", "largest changes", ""), rows))
        means = [
            *((each["name"].replace("_", " "), each) for each in drift["means"]),
            *((f"quality of {each['name']}", each) for each in drift["quality"]),
            *((f"supported facts, {each['name']}", each) for each in drift["facts"]),
        ]
        rows = [
            [
                clean(name, 80),
                three(each["before"]),
                three(each["after"]),
                "-" if each["error"] is None else f"± {three(each['error'])}",
                "changed" if each["has_drifted"] else "no change shown",
            ]
            for name, each in means
        ]
        if rows:
            parts.append(table(("mean", "before", "after", "error of the change", ""), rows))
    else:
        said = f"There is nothing to compare: {number(before)} requests were profiled before, {number(after)} since."
        parts.append(tag("p", said, class_="under"))
    days = [
        [each["day"], clean(each["variant"], 60), number(each["answers"]), _percent(each["supported"])]
        for each in drift["facts_by_day"][-_MOST_ROWS:]
    ]
    if days:
        caption = "Numbers and names in answers that the request's sources or prompt have"
        parts.append(table(("day", "variant", "answers with facts", "supported"), days, caption=caption))
    return parts


def semantic_section(trial: Mapping[str, Any] | None) -> list[Html]:
    """`trial`: the answer of `GET /admin/v1/cache/trial`; None without a semantic cache."""
    if trial is None:
        return []
    parts = [tag("p", clean(trial["advice"], 600), class_="under")]
    rows = [
        [
            f"{row['threshold']:.2f}" + (" (best)" if row["threshold"] == trial["best"] else ""),
            _percent(row["share"]),
            number(row["served"]),
            number(row["wrong"]),
            _percent(row["wrong_share"]),
            _percent(row["wrong_most"]),
        ]
        for row in shown_thresholds(trial)
    ]
    rows += [
        [name, _percent(row["share"]), number(row["served"]), number(row["wrong"]), _percent(row["wrong_share"]), most]
        for name, row in (("learned", trial["learned"]), ("served, and checked", trial["checked_hits"]))
        if row["served"] and (most := _percent(row["wrong_most"]))
    ]
    if rows:
        headings = ("similarity from", "share served", "answers", "wrong", "share wrong", "at most")
        caption = f"{number(trial['compared'])} answers compared in the last {trial['days']} days"
        parts.append(table(headings, rows, caption=caption))
    return parts


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100.0 * share:.1f} %"
