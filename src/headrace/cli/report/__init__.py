"""`headrace report`: writes the traffic, objectives, changes and costs of a week as one HTML file."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from headrace.cli.admin.admin_client import request_json
from headrace.errors import HeadraceError, RequestError

_UNITS: Final = {"h": 3600, "d": 86_400, "w": 7 * 86_400}
_MOST_S: Final = 31 * 86_400


def report(
    *,
    since: str = "7d",
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("headrace-report.html"),
    url: Annotated[str, Parameter(env_var="HEADRACE_URL")] = "http://localhost:8000",
) -> None:
    """Write what a running server did in the last days, compared with the days before, as one HTML file.

    Usage: headrace report --since 7d -o week.html

    The file has what became slower, dearer or less reliable, with intervals; objectives, traffic, costs, caches,
    budgets that run out, outcomes, the mix of requests, drift, and the semantic cache's trial. It needs no network to
    be read. A server with keys needs the key of an administrator in HEADRACE_ADMIN_KEY, or its admin.socket.

    Parameters
    ----------
    since
        Length of the span, such as 24h, 7d or 2w; it is compared with the span before it. Whole hours count.
    output
        File to write.
    url
        URL of the server, or unix:PATH for its admin.socket. Default: $HEADRACE_URL, else http://localhost:8000.
    """
    from headrace.cli.report.changes import changes
    from headrace.cli.report.report_page import Report, report_html
    from headrace.cli.report.weeks import HOUR, read_span

    seconds = _seconds(since)
    last = int(time.time()) // HOUR * HOUR + HOUR

    def fetch(path: str, query: Mapping[str, Any]) -> dict[str, Any]:
        return request_json(url, "GET", path, **query)

    before, after = (read_span(fetch, last - n * seconds, last - (n - 1) * seconds) for n in (2, 1))
    live = fetch("live", {})
    written = report_html(
        Report(
            server=f"{url}, version {live.get('version', 'unknown')}",
            currency=str(live.get("currency") or ""),
            before=before,
            after=after,
            changes=changes(before, after),
            targets={(each["slo"], each["objective"]): each["target"] for each in live.get("objectives", ())},
            budgets=_budgets(url),
            drift=_of_lab(url, "drift", seconds),
            semantic=_of_lab(url, "cache/trial", seconds),
            outcomes=(_outcomes(url, before.first, before.last), _outcomes(url, after.first, after.last)),
        )
    )
    output.write_text(written, encoding="utf-8")
    print(f"{output}: {after.total.requests:,} requests, compared with {before.total.requests:,} before")


def _budgets(url: str) -> list[Any]:
    """Return forecasts of all budgets; none if the server has no ledger, or shows them to administrators only."""
    from headrace.cli.report.budget_forecast import forecast

    found: list[Any] = []
    after: str | None = None
    while True:
        try:
            answer = request_json(url, "GET", "budgets", after=after, limit=1000)
        except HeadraceError:
            return found
        found += [forecast(each, time.time()) for each in answer["data"]]
        if not answer.get("has_more"):
            return found
        after = answer["last_id"]


def _of_lab(url: str, path: str, seconds: int) -> dict[str, Any] | None:
    """Return what the lab knows of the last days; None if the server does not watch that."""
    try:
        return request_json(url, "GET", path, days=max(1, seconds // 86_400))
    except HeadraceError:
        return None


def _outcomes(url: str, first: int, last: int) -> list[dict[str, Any]]:
    days = [datetime.fromtimestamp(each, UTC).date().isoformat() for each in (first, last - 1)]
    try:
        answer = request_json(url, "GET", "feedback", first_day=days[0], last_day=days[1], by="outcome,model")
    except HeadraceError:
        return []
    return answer["data"]


def _seconds(text: str) -> int:
    found = re.fullmatch(r"(\d{1,4})([hdw])", text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= _MOST_S:
        raise RequestError(f"Invalid --since '{text}'. Expected hours, days or weeks, up to 31 days, such as 7d.")
    return seconds
