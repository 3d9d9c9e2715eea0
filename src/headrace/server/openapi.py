"""The OpenAPI document, generated from the routes and their parameter tables, and a plain HTML page that shows it."""

from __future__ import annotations

import asyncio
import html
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final

import msgspec

from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.body_parameters import ParameterTable, body_schema
from headrace.server.http.route_table import Route
from headrace.version import __version__

_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_ANTHROPIC_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {"type": "object", "properties": {"error_code": {"type": "string"}}},
            },
            "required": ["type", "message"],
        },
    },
    "required": ["type", "error"],
}
_OLLAMA_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"error": {"type": "string"}},
    "required": ["error"],
}
_ERRORS: Final = {"anthropic": "AnthropicError", "ollama": "OllamaError"}  # schemas by the shape of errors


def routes(context: EndpointContext, described: Sequence[Route]) -> tuple[Route, ...]:
    """Return the routes of the document and the page that describe the other routes. Each is made when it is first
    asked for: the schemas of all parameters take a tenth of a start."""
    keys = context.services.accounts.directory.needed

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(document(described, keys=keys))

    @cache
    def shown() -> bytes:
        return page(described)

    async def get_document(call: ApiCall) -> None:
        await context.reply(call, Response(await asyncio.to_thread(encoded)))

    async def get_page(call: ApiCall) -> None:
        await context.reply(call, Response(await asyncio.to_thread(shown), type=b"text/html; charset=utf-8"))

    public = not context.config.server.docs_need_key
    return (
        Route("GET", "/openapi.json", get_document, "This document.", open=public, listed=False),
        Route("GET", "/docs", get_page, "The same for people.", open=public, listed=False),
    )


def document(routes: Iterable[Route], *, keys: bool) -> dict[str, Any]:
    """Return the OpenAPI document. `keys`: whether clients must send a key."""
    components: dict[str, Any] = {
        "Error": _ERROR,
        "AnthropicError": _ANTHROPIC_ERROR,
        "OllamaError": _OLLAMA_ERROR,
    }
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if route.listed:
            paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, components, keys=keys)
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": __version__, "description": "OpenAI-compatible, and a little more."},
        "paths": paths,
        "components": {"schemas": components},
    }
    if keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return found


def _operation(route: Route, components: dict[str, Any], *, keys: bool) -> dict[str, Any]:
    name = _name(route)
    error = _ERRORS.get(route.errors or "", "Error")
    refused = {
        "description": "An error, as its `type` and `message` say.",
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}},
    }
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": route.about,
        "responses": {"200": {"description": "Done."}, "4XX": refused, "5XX": refused},
    }
    parameters: list[dict[str, Any]] = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": {"type": "string"}}
        for part in route.path.split("/")
        if part.startswith("{")
    ]
    if parameters:
        operation["parameters"] = parameters
    if route.table is not None:
        body = body_schema(route.table, f"{name}_body", components, lenient=route.lenient)
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if keys and not route.open:
        operation["security"] = [{"key": []}]
    return operation


def _name(route: Route) -> str:
    words = [part.strip("{}") for part in route.path.split("/") if part and part != "v1"]
    return "_".join([route.method.lower(), *words]).replace(".", "_")


def page(routes: Iterable[Route]) -> bytes:
    """Return an HTML page with every endpoint and its parameters."""
    parts: list[str] = []
    for route in routes:
        if not route.listed:
            continue
        parts.append(f"<h2><code>{route.method} {html.escape(route.path)}</code></h2><p>{html.escape(route.about)}</p>")
        if route.table is not None:
            parts.append(_rows(route.table))
    return (_PAGE % "\n".join(parts)).encode()


def _rows(table: ParameterTable) -> str:
    rows: list[str] = []
    for name, parameter in table.items():
        about = (
            f"<b>refused:</b> {html.escape(parameter.unsupported)}"
            if parameter.unsupported
            else html.escape(parameter.description)
        )
        needed = " (required)" if parameter.required else ""
        rows.append(f"<tr><td><code>{name}</code>{needed}</td><td>{about}</td></tr>")
    return f"<table><tr><th>parameter</th><th>meaning</th></tr>{''.join(rows)}</table>"


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Headrace</title>
<meta name="viewport" content="width=device-width">
<style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%% } td, th { text-align: left; padding: .3rem .6rem; vertical-align: top;
border-bottom: 1px solid color-mix(in srgb, currentColor 20%%, transparent) } td:first-child { white-space: nowrap }
</style></head><body>
<h1>Headrace</h1>
<p>Every endpoint with every parameter that it takes or refuses. The same as a machine reads it:
<a href="openapi.json">openapi.json</a>.</p>
%s
</body></html>
"""
