"""Pinned prompts in the admin API: list, create and delete. gateway.accounts.pin_operations does the work."""

from __future__ import annotations

from typing import Any

from headrace.config.pin_section import PinConfig
from headrace.server.admin import admin_tables as tables
from headrace.server.admin.administration import Administration
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall
from headrace.server.http.route_table import Route


def routes(administration: Administration, context: EndpointContext) -> tuple[Route, ...]:
    pins = context.services.pins
    if pins is None:
        return ()  # a front process relays the admin API

    async def list_pins(call: ApiCall) -> dict[str, Any]:
        tables.query(call, {})
        return pins.list()

    async def create(call: ApiCall) -> dict[str, Any]:
        given = await administration.given(call, tables.PIN)
        model = given.pop("model")
        return await pins.create(administration.who(call), model, PinConfig(**given))

    async def delete(call: ApiCall) -> dict[str, Any]:
        return await pins.delete(administration.who(call), call.params["pin"])

    route = administration.route
    return (
        route("GET", "/admin/v1/pins", list_pins, "List pinned prompts with their state in each variant."),
        route("POST", "/admin/v1/pins", create, "Compute a prompt's beginning and keep it in memory.", tables.PIN),
        route("DELETE", "/admin/v1/pins/{pin}", delete, "Stop keeping a pinned prompt."),
    )
