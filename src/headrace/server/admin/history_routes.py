"""What the storage knows of finished requests: sums of each hour, events of objectives, and outcomes."""

from __future__ import annotations

import csv
import functools
import io
import time
from collections.abc import Sequence
from typing import Any, Final, cast, get_args

from headrace.gateway.api_errors import invalid_request
from headrace.gateway.observation.feedback_store import By
from headrace.gateway.observation.latency_history import HOUR
from headrace.observe.latency.latency_book import DIMENSIONS, group
from headrace.server.admin import admin_tables as tables
from headrace.server.admin.administration import Administration
from headrace.server.admin.outcome_figures import outcome_json
from headrace.server.api.feedback import keeper_of
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall
from headrace.server.http.route_table import Route

_MOST_HOURS: Final = 24  # of one response
_MOST_ROWS: Final = 5000
_BY: Final = get_args(By)


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
