"""`/admin/v1/workers`: the workers of each variant, on this machine and others, and their draining."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from headrace.errors import RequestError
from headrace.gateway.serving.fleet import Fleet
from headrace.server.admin import admin_tables as tables
from headrace.server.admin.administration import Administration
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall
from headrace.server.http.route_table import Route

if TYPE_CHECKING:
    from headrace.gateway.serving.registry.worker_discovery import WorkerDiscovery

log = structlog.stdlib.get_logger("headrace.admin")

_ANNOUNCED: Final = ("precision", "arithmetic", "release", "fingerprint", "running", "waiting", "kv_used_share")


def list_workers(fleet: Fleet, discovery: WorkerDiscovery | None) -> list[dict[str, Any]]:
    """Return every worker with its state here and, if it announces itself, with what it said last."""
    found: list[dict[str, Any]] = []
    for name in fleet.served:
        for replica in fleet.replicas(name):
            said = None if discovery is None else discovery.announcement(replica.address)
            announced = None if said is None else {key: getattr(said, key) for key in _ANNOUNCED}
            found.append({"model": name, **msgspec.to_builtins(replica), "announced": announced})
    return found


def routes(administration: Administration, context: EndpointContext) -> tuple[Route, ...]:
    fleet, discovery = context.services.fleet, context.services.discovery

    async def workers(call: ApiCall) -> dict[str, Any]:
        data = [{"object": "worker", **each} for each in list_workers(fleet, discovery)]
        answers = {} if discovery is None else {"registry_answers": discovery.answers}
        return {"object": "list", "data": data, **answers}

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
