"""`POST /admin/v1/reload`: replaces a variant's engine by one that reads the model's files again."""

from __future__ import annotations

import time
from typing import Any

import structlog

from headrace.server.admin import admin_tables as tables
from headrace.server.admin.administration import Administration
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall
from headrace.server.http.route_table import Route

log = structlog.stdlib.get_logger("headrace.admin")


def routes(administration: Administration, context: EndpointContext) -> tuple[Route, ...]:
    fleet = context.services.fleet

    async def reload(call: ApiCall) -> dict[str, Any]:
        given = await administration.given(call, tables.RELOAD)
        served = fleet.find(given["model"])
        before, began = served.fingerprint, time.monotonic()
        await fleet.reload(served.name)
        log.info("reloaded", model=served.name, who=administration.who(call).key)
        return {
            "object": "reload",
            "model": served.name,
            "changed": served.fingerprint != before,
            "seconds": round(time.monotonic() - began, 3),
        }

    about = "Replace a variant's engine by one that reads the model's files again; no request fails."
    return (administration.route("POST", "/admin/v1/reload", reload, about, tables.RELOAD),)
