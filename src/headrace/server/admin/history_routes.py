"""What the storage knows of finished requests: sums of each hour, events of objectives, and outcomes."""

from __future__ import annotations

import csv
import functools
import io
import math
import time
from collections.abc import Sequence
from typing import Any, Final, cast, get_args

from headrace.gateway.api_errors import invalid_request
from headrace.gateway.observation.feedback_store import By, OutcomeGroup
from headrace.gateway.observation.latency_history import HOUR
from headrace.observe.latency.latency_book import DIMENSIONS, group
from headrace.server.admin import admin_tables as tables
from headrace.server.admin.administration import Administration
from headrace.server.api.feedback import keeper_of
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall
from headrace.server.http.route_table import Route

_MOST_HOURS: Final = 24  # of one response
_MOST_ROWS: Final = 5000
_BY: Final = get_args(By)
_Z: Final = 1.959964  # of a 95 % interval


def routes(administration: Administration, context: EndpointContext) -> tuple[Route, ...]:
    route = functools.partial(administration.route, open_here=True)

    async def history(call: ApiCall) -> dict[str, Any]:
        given = tables.query(call, {"first": int, "last": int, "by": str})
        by = _names(given.get("by", ""), DIMENSIONS)
        last = given.get("last", int(time.time()) // HOUR * HOUR + HOUR)
        first = given.get("first", last - _MOST_HOURS * HOUR)
        if not 0 <= last - first <= _MOST_HOURS * HOUR:
            raise invalid_request(f"'first' must be 0 to {_MOST_HOURS} hours before 'last'.", "first")
        keeper = keeper_of(context)
        await keeper.flush()
        store = keeper.history
        hours: dict[int, list[Any]] = {}
        for hour, slice, row in await store.hours(first, last):
            hours.setdefault(hour, []).append((slice, row))
        data: list[dict[str, Any]] = []
        for hour, rows in hours.items():
            data += [
                {"hour": hour, **dict(zip(by, key, strict=True)), "sums": row.pack()}
                for key, row in group(rows, by).items()
            ]
            if len(data) > _MOST_ROWS:
                raise invalid_request(
                    f"The response would have more than {_MOST_ROWS} rows. Group by fewer dimensions, or ask for fewer "
                    "hours.",
                    "by",
                    code="too_many_rows",
                )
        return {
            "object": "list",
            "first": first,
            "last": last,
            "data": data,
            "objectives": [
                {
                    "hour": each.began,
                    "slo": each.slo,
                    "objective": each.objective,
                    "good": each.good,
                    "total": each.total,
                }
                for each in await store.objective_events(first, last)
            ],
        }

    async def feedback(call: ApiCall) -> dict[str, Any] | None:
        given = tables.query(call, tables.USAGE)
        by = cast("list[By]", _names(given.get("by", "outcome,model"), _BY))
        filters = {name: given[name] for name in ("tenant", "first_day", "last_day") if name in given}
        groups = await keeper_of(context).feedback.summary(by, **filters)
        columns = ["outcome", *(name for name in by if name != "outcome")]
        rows = [{**dict(zip(columns, each.key, strict=True)), **outcome_json(each)} for each in groups]
        if given.get("format", "json") == "csv":
            await _send_csv(call, columns, rows)
            return None
        return {"object": "list", "currency": context.config.ledger.currency, "by": columns, "data": rows}

    return (
        route("GET", "/admin/v1/history", history, "Show the latencies, costs and objectives of each hour."),
        route("GET", "/admin/v1/feedback", feedback, "Export outcomes beside latency and cost, as CSV or JSON."),
    )


def outcome_json(group: OutcomeGroup) -> dict[str, Any]:
    """Return count, mean and its 95 % interval, and what the requests took and cost."""
    low, high = _interval(group)
    return {
        "count": group.count,
        "sum": group.sum,
        "mean": round(group.sum / group.count, 6),
        "mean_low": None if low is None else round(low, 6),
        "mean_high": None if high is None else round(high, 6),
        "mean_ttft_ms": None if group.ttft_ms is None else round(group.ttft_ms, 3),
        "mean_e2e_ms": None if group.e2e_ms is None else round(group.e2e_ms, 3),
        "micros": group.micros,
        "micros_per_1000_requests": round(group.micros * 1000 / group.count),
        "micros_per_unit": round(group.micros / group.sum) if group.sum > 0 else None,
    }


def _interval(group: OutcomeGroup) -> tuple[float | None, float | None]:
    """Wilson's interval for shares; the normal one for other numbers, of which it needs some."""
    count, mean = group.count, group.sum / group.count
    if group.binary:
        scale = 1.0 + _Z * _Z / count
        middle = (mean + _Z * _Z / (2 * count)) / scale
        half = _Z * math.sqrt(mean * (1.0 - mean) / count + _Z * _Z / (4 * count * count)) / scale
        return max(0.0, middle - half), min(1.0, middle + half)
    if count < 10:
        return None, None
    variance = max(0.0, group.squares - count * mean * mean) / (count - 1)
    half = _Z * math.sqrt(variance / count)
    return mean - half, mean + half


async def _send_csv(call: ApiCall, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    names = list(rows[0]) if rows else list(columns)
    writer.writerow(names)
    writer.writerows([row[name] for name in names] for row in rows)
    body = buffer.getvalue().encode()
    await call.begin_download(len(body), "text/csv; charset=utf-8", "feedback.csv", {"cache-control": "no-store"})
    if call.scope["method"] != "HEAD":
        await call.write(body)
    await call.write(b"", more=False)


def _names(text: str, known: Sequence[str]) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        raise invalid_request(f"Unknown column '{unknown[0][:100]}'. Expected {', '.join(known)}.", "by")
    return list(dict.fromkeys(names))
