"""LoRA adapters in the admin API: list, load and unload. gateway.accounts.adapter_operations does the work."""

from __future__ import annotations

from typing import Any

from headrace.server.admin import admin_tables as tables
from headrace.server.admin.administration import Administration
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall
from headrace.server.http.route_table import Route


def routes(administration: Administration, context: EndpointContext) -> tuple[Route, ...]:
    adapters = context.services.adapters
    if adapters is None:
        return ()  # a front process relays the admin API

    async def list_adapters(call: ApiCall) -> dict[str, Any]:
        tables.query(call, {})
        return await adapters.list(call.params["model"])

    async def load(call: ApiCall) -> dict[str, Any]:
        given = await administration.given(call, tables.ADAPTER)
        return await adapters.load(administration.who(call), call.params["model"], **given)

    async def unload(call: ApiCall) -> dict[str, Any]:
        return await adapters.unload(administration.who(call), call.params["model"], call.params["adapter"])

    route, path = administration.route, "/admin/v1/models/{model}/adapters"
    return (
        route("GET", path, list_adapters, "List a model's LoRA adapters and the memory that they use."),
        route("POST", path, load, "Serve a LoRA adapter as MODEL:NAME.", tables.ADAPTER),
        route("DELETE", f"{path}/{{adapter}}", unload, "Stop serving a LoRA adapter."),
    )
