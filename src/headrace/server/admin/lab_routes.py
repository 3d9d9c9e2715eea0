"""What an administrator sees of the lab: shadows, the quality of routes, drift, and all of it for the page `/lab`."""

from __future__ import annotations

import functools
from typing import Any, Final

from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.lab.online.online_lab import OnlineLab
from headrace.server.admin import admin_tables as tables
from headrace.server.admin.administration import Administration
from headrace.server.http.api_call import ApiCall
from headrace.server.http.route_table import Route

_WEEK_DAYS: Final = 7


def routes(administration: Administration, lab: OnlineLab, *, currency: str) -> tuple[Route, ...]:
    async def everything(call: ApiCall) -> dict[str, Any]:
        tables.query(call, {})
        canaries = lab.canaries
        assert canaries is not None  # front processes relay the admin API
        operations, config = canaries.operations, canaries.config
        return {
            "object": "lab",
            "currency": currency,
            "variants": operations.variants,
            "canary": {
                "stages": list(config.stages),
                "unit": config.unit,
                "promote": config.promote,
                "slower": config.slower,
                "dearer": config.dearer,
                "worse": config.worse,
                "failures": config.failures,
            },
            "canaries": [canaries.as_json(control) for control in operations.records()],
            "shadows": [shadow.as_json() for shadow in lab.shadows.values()],
            "quality": [each.as_json() for each in lab.route_quality()],
            "semantic": None if lab.semantic is None else lab.semantic.as_json(_WEEK_DAYS),
            "drift": None if lab.drift is None else lab.drift.as_json(_WEEK_DAYS),
        }

    async def quality(call: ApiCall) -> dict[str, Any]:
        tables.query(call, {})
        return {"object": "list", "data": [each.as_json() for each in lab.route_quality()]}

    def days_of(call: ApiCall) -> int:
        days = tables.query(call, {"days": int}).get("days", _WEEK_DAYS)
        if not 1 <= days <= 31:
            raise invalid_request("Invalid 'days'. Expected 1 to 31.", "days")
        return days

    async def semantic(call: ApiCall) -> dict[str, Any]:
        days = days_of(call)
        if lab.semantic is None:
            raise ApiError(
                "This server has no semantic cache. Set cache.semantic.embedder.",
                kind="not_found_error",
                code="no_semantic_cache",
            )
        return lab.semantic.as_json(days)

    async def drift(call: ApiCall) -> dict[str, Any]:
        days = days_of(call)
        if lab.drift is None:
            raise ApiError(
                "This server does not watch its traffic. Set drift.share to a number above 0.",
                kind="not_found_error",
                code="no_drift",
            )
        return lab.drift.as_json(days)

    async def hard_cases(call: ApiCall) -> None:
        tables.query(call, {})
        await _download(call, "hard-cases.jsonl", b"" if lab.hard_cases is None else lab.hard_cases.trace())

    route = functools.partial(administration.route, open_here=True)
    about = "Export requests whose answer failed an online check, as a trace."
    return (
        route("GET", "/admin/v1/lab", everything, "Show canaries, shadows, quality and drift at once."),
        administration.route("GET", "/admin/v1/hard-cases", hard_cases, about),
        *_shadow_routes(administration, lab),
        route("GET", "/admin/v1/drift", drift, "Compare the traffic of the last days with the days before."),
        route("GET", "/admin/v1/cache/trial", semantic, "Show how often the semantic cache would have been wrong."),
        route("GET", "/admin/v1/quality", quality, "Show the quality of routes, from double-checks."),
    )


def _shadow_routes(administration: Administration, lab: OnlineLab) -> tuple[Route, ...]:
    async def shadows(call: ApiCall) -> dict[str, Any]:
        tables.query(call, {})
        return {"object": "list", "data": [shadow.as_json() for shadow in lab.shadows.values()]}

    async def shadow(call: ApiCall) -> dict[str, Any]:
        tables.query(call, {})
        name = call.params["shadow"]
        if (found := lab.shadows.get(name)) is None:
            known = ", ".join(sorted(lab.shadows)) or "none"
            raise ApiError(
                f"Unknown shadow '{name[:64]}'. Configured shadows: {known}.",
                kind="not_found_error",
                parameter="shadow",
                code="shadow_not_found",
            )
        return found.as_json()

    async def judged_pairs(call: ApiCall) -> None:
        tables.query(call, {})
        name = call.params["shadow"]
        if (found := lab.pairs.get(name)) is None:
            known = ", ".join(sorted(lab.pairs)) or "none"
            raise ApiError(
                f"Shadow '{name[:64]}' keeps no pairs. Those that do: {known}. Set judge = \"shadow\" and pairs.",
                kind="not_found_error",
                parameter="shadow",
                code="no_judged_pairs",
            )
        await _download(call, "pairs.jsonl", found.lines())

    route = functools.partial(administration.route, open_here=True)
    about = "Export what a double-check has judged, for headrace tune cascade."
    return (
        route("GET", "/admin/v1/shadows", shadows, "Show the differences that shadows have found."),
        route("GET", "/admin/v1/shadows/{shadow}", shadow, "Show the differences that one shadow has found."),
        administration.route("GET", "/admin/v1/shadows/{shadow}/pairs", judged_pairs, about),
    )


async def _download(call: ApiCall, name: str, body: bytes) -> None:
    await call.begin_download(len(body), "application/jsonl", name, {"cache-control": "no-store"})
    if call.scope["method"] != "HEAD":
        await call.write(body)
    await call.write(b"", more=False)
