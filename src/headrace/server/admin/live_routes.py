"""What an administrator sees of a running server: its live state, percentiles of any slice, and any recent request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Any, Final, Literal

import msgspec

from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.observe.latency.answer_lengths import AnswerLengths
from headrace.observe.latency.latency_book import DIMENSIONS, group
from headrace.server.admin import admin_tables as tables
from headrace.server.admin.administration import Administration
from headrace.server.admin.live_snapshot import WINDOW_S, LiveSnapshot, row_json
from headrace.server.api.request_endpoints import found_record, with_outcomes
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall
from headrace.server.http.route_table import Route

_EVERY_S: Final = 1.0
_MOST_STREAMS: Final = 16  # of events at once


def routes(administration: Administration, context: EndpointContext) -> tuple[Route, ...]:
    recent, latencies = context.services.observer.recent, context.services.observer.latencies
    live = LiveSnapshot(context, administration.usage)
    streams = 0

    async def request(call: ApiCall) -> dict[str, Any]:
        id = call.params["request"]
        return await with_outcomes(found_record(recent.find_any(id), id, context), context)

    async def snapshot(call: ApiCall) -> dict[str, Any]:
        tables.query(call, {})
        return await live.get()

    async def events(call: ApiCall) -> None:
        """Send a snapshot each second until the client leaves or the server shuts down."""
        nonlocal streams
        tables.query(call, {})
        if streams >= _MOST_STREAMS:
            raise ApiError(
                f"{_MOST_STREAMS} clients follow the live state already. Close one of them.",
                kind="overloaded_error",
                code="too_many_streams",
                retry_after=5.0,
            )
        left = asyncio.Event()
        streams += 1
        unwatch = call.watch(left.set)
        try:
            await call.begin_events({})
            while call.scope["method"] == "GET" and not left.is_set() and not context.is_draining:
                await call.write(b"data: " + msgspec.json.encode(await live.get()) + b"\n\n")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_EVERY_S):
                        await left.wait()
            await call.write(b"", more=False)
        finally:
            unwatch()
            streams -= 1

    async def latency(call: ApiCall) -> dict[str, Any]:
        parameters = tables.query(
            call, {"by": str, "window": Literal["recent", "total"], **dict.fromkeys(DIMENSIONS, str)}
        )
        by = _dimensions(parameters.pop("by", ""))
        window = parameters.pop("window", "recent")
        rows = [
            (slice, row)
            for slice, row in (latencies.window(WINDOW_S) if window == "recent" else latencies.total())
            if all(getattr(slice, name) == value for name, value in parameters.items())
        ]
        found = sorted(group(rows, by).items(), key=lambda each: -each[1].requests)
        data = [{**dict(zip(by, key, strict=True)), **row_json(row)} for key, row in found]
        return {"object": "list", "window": window, "data": data}

    async def lengths(call: ApiCall) -> dict[str, Any]:
        parameters = tables.query(call, {"by": str, "window": Literal["recent", "total"]})
        by = _dimensions(parameters.get("by", "surface"))
        window = parameters.get("window", "total")
        rows = latencies.window(WINDOW_S) if window == "recent" else latencies.total()
        found = [(key, AnswerLengths(row)) for key, row in group(rows, by).items() if row.lengths]
        found.sort(key=lambda each: -each[1].count())
        defaults = context.services.answer_tokens
        data: list[dict[str, Any]] = []
        for key, each in found:
            entry = {**dict(zip(by, key, strict=True)), **each.as_json()}
            if by == ["surface"]:
                entry["default_tokens"] = defaults.get(key[0])
                entry["advice"] = each.advice(key[0], defaults.get(key[0]))
            data.append(entry)
        return {"object": "list", "window": window, "by": by, "data": data}

    route = functools.partial(administration.route, open_here=True)
    return (
        route("GET", "/admin/v1/live", snapshot, "Show the state of the running server."),
        route("GET", "/admin/v1/live/events", events, "Follow the state of the running server, each second."),
        route("GET", "/admin/v1/latency", latency, "Show percentiles and costs of any slice of the traffic."),
        route("GET", "/admin/v1/lengths", lengths, "Show how long answers are and what ends them."),
        route(
            "GET",
            "/admin/v1/requests/{request}",
            request,
            "Show where the time of a recent request of any tenant went.",
        ),
    )


def _dimensions(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in DIMENSIONS]:
        raise invalid_request(f"Unknown dimension '{unknown[0][:100]}'. Expected {', '.join(DIMENSIONS)}.", "by")
    return list(dict.fromkeys(names))
