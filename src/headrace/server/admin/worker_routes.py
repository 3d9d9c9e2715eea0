"""`/admin/v1/workers`: the workers of each variant, on this machine and others, and their draining."""

from __future__ import annotations

from typing import Any

import msgspec
import structlog

from headrace.errors import RequestError
from headrace.server.admin import admin_tables as tables
from headrace.server.admin.administration import Administration
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall
from headrace.server.http.route_table import Route

log = structlog.stdlib.get_logger("headrace.admin")


def routes(administration: Administration, context: EndpointContext) -> tuple[Route, ...]:
    fleet = context.services.fleet

    async def workers(call: ApiCall) -> dict[str, Any]:
        data = [
            {"object": "worker", "model": name, **msgspec.to_builtins(replica)}
            for name in fleet.served
            for replica in fleet.replicas(name)
        ]
        return {"object": "list", "data": data}

    async def drain(call: ApiCall) -> dict[str, Any]:
        given = await administration.given(call, tables.DRAIN_WORKER)
        address: str = given["address"]
        models = [name for name in fleet.served if fleet.drain_replica(name, address)]
        if not models:
            raise RequestError(
                f"No worker is connected at '{address[:200]}'. List the workers with GET /admin/v1/workers.",
                parameter="address",
            )
        log.info("draining a worker", address=address, models=models, who=administration.who(call).key)
        return {"object": "worker.drain", "address": address, "models": models}

    path = "/admin/v1/workers"
    about = "Ask a worker to finish its requests, take no new ones, and exit, because its host is going away."
    return (
        administration.route("GET", path, workers, "List the workers of each model with their state."),
        administration.route("POST", f"{path}/drain", drain, about, tables.DRAIN_WORKER),
    )
