"""HTTP tools: declared requests and OpenAPI operations, at the declared host only, with secrets that stay hidden."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headrace.config.tool_section import ToolConfig
from headrace.pipelines.tools.http_tool import http_tools
from headrace.pipelines.tools.openapi import OpenApiError, read_operations
from headrace.pipelines.tools.tool import ToolError, ToolSpec

ENVIRON = {"SHOP_TOKEN": "Bearer s3cret-token"}


@asynccontextmanager
async def shop() -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A server that notes what it gets, and repeats the header that it got."""
    got: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        body = await request.text()
        got.append({"method": request.method, "path": request.path_qs, "body": body, "headers": dict(request.headers)})
        status = 404 if "missing" in request.path else 200
        return web.json_response(
            {"path": request.path, "you sent": request.headers.get("authorization")}, status=status
        )

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", got
    finally:
        await runner.cleanup()


async def specs(**config: Any) -> dict[str, ToolSpec]:
    source = http_tools("shop", ToolConfig(kind="http", **config), ENVIRON)
    return {spec.name: spec for spec in await source.tools()}


def test_arguments_go_into_the_path_and_the_query() -> None:
    async def it() -> None:
        async with shop() as (base, got):
            tools = await specs(
                url=f"{base}/orders/{{id}}", parameters={"id": "Number.", "lang": "Language."}, private=True
            )
            await tools["shop"].call({"id": "../a b", "lang": "en"}, "acme")
            assert got[0]["path"] == "/orders/..%2Fa%20b?lang=en"

    asyncio.run(it())


def test_secrets_are_sent_and_never_shown() -> None:
    async def it() -> None:
        async with shop() as (base, got):
            tools = await specs(url=f"{base}/orders", headers_env={"authorization": "SHOP_TOKEN"}, private=True)
            text = await tools["shop"].call({}, "acme")
            assert got[0]["headers"]["Authorization"] == "Bearer s3cret-token"
            assert "s3cret" not in text
            assert "[hidden]" in text
            tools = await specs(url=f"{base}/missing", headers_env={"authorization": "SHOP_TOKEN"}, private=True)
            with pytest.raises(ToolError, match="status 404") as failed:
                await tools["shop"].call({}, "acme")
            assert "s3cret" not in str(failed.value)

    asyncio.run(it())


def test_private_addresses_are_refused_unless_declared() -> None:
    async def it() -> None:
        async with shop() as (base, got):
            tools = await specs(url=f"{base}/orders")
            with pytest.raises(ToolError, match="not public"):
                await tools["shop"].call({}, "acme")
            assert got == []

    asyncio.run(it())


DOCUMENT: dict[str, Any] = {
    "openapi": "3.0.0",
    "servers": [{"url": "https://shop.example/v1"}],
    "paths": {
        "/orders/{id}": {
            "parameters": [{"$ref": "#/components/parameters/Id"}],
            "get": {"operationId": "getOrder", "summary": "Look an order up."},
        },
        "/orders": {
            "post": {
                "operationId": "make order",
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Order"}}},
                },
            },
            "get": {"parameters": [{"name": "x-key", "in": "header", "required": True}]},
        },
    },
    "components": {
        "parameters": {"Id": {"name": "id", "in": "path", "required": True, "schema": {"type": "integer"}}},
        "schemas": {"Order": {"type": "object", "properties": {"next": {"$ref": "#/components/schemas/Order"}}}},
    },
}


def test_an_openapi_document_becomes_tools(tmp_path: Path) -> None:
    path = tmp_path / "shop.json"
    path.write_text(json.dumps(DOCUMENT), encoding="utf-8")
    base, operations = read_operations(str(path))
    assert base == "https://shop.example/v1"
    assert [(each.id, each.method) for each in operations] == [("getOrder", "GET"), ("make_order", "POST")]
    assert operations[0].schema["required"] == ["id"]
    assert operations[0].schema["properties"]["id"]["type"] == "integer"

    async def it() -> None:
        async with shop() as (url, got):
            tools = await specs(openapi=str(path), url=url, private=True, effects=True, safe=("getOrder",))
            assert {name: spec.effects for name, spec in tools.items()} == {
                "shop__getOrder": False,
                "shop__make_order": True,
            }
            await tools["shop__getOrder"].call({"id": 7}, "acme")
            await tools["shop__make_order"].call({"body": {"next": {}}}, "acme")
            assert [(each["method"], each["path"], each["body"]) for each in got] == [
                ("GET", "/orders/7", ""),
                ("POST", "/orders", '{"next":{}}'),
            ]

    asyncio.run(it())


@pytest.mark.parametrize(
    "text", ["no: yaml", "[]", '{"paths": {}}', '{"servers": [{"url": "/v1"}], "paths": {"/a": 3}}']
)
def test_a_document_that_cannot_be_used_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(OpenApiError):
        read_operations(str(path), "http://127.0.0.1" if "paths" in text else None)
