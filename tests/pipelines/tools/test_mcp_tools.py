"""MCP servers over stdio and streamable HTTP as sources of tools."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from headrace.config.tool_section import ToolConfig
from headrace.pipelines.tools.mcp_tools import McpTools
from headrace.pipelines.tools.tool import ToolError
from tests.support.programs import mcp_server

STDIO = {"command": (sys.executable, "-P", mcp_server.__file__)}
ENVIRON = {"PATH": "/usr/bin:/bin", "GIVEN": "yes", "KEPT": "secret", "MCP_TOKEN": "Bearer t"}


def source(**config: Any) -> McpTools:
    return McpTools("files", ToolConfig(kind="mcp", **config), ENVIRON)


def test_the_tools_of_a_stdio_server_are_listed_and_called() -> None:
    async def it() -> None:
        tools = source(**STDIO)
        specs = {spec.name: spec for spec in await tools.tools()}
        assert list(specs) == ["files__echo", "files__variable", "files__fail", "files__end"]
        assert specs["files__echo"].schema["properties"] == {"text": {"type": "string"}}
        assert await specs["files__echo"].call({"text": "Hi"}, "acme") == "Hi"
        with pytest.raises(ToolError, match=r"It failed\."):
            await specs["files__fail"].call({}, "acme")
        await tools.close()

    asyncio.run(it())


def test_a_server_gets_only_the_variables_that_are_named() -> None:
    async def it() -> None:
        tools = source(**STDIO, environment=("GIVEN",))
        variable = next(spec for spec in await tools.tools() if spec.name == "files__variable")
        assert await variable.call({"text": "GIVEN"}, "acme") == "yes"
        assert await variable.call({"text": "KEPT"}, "acme") == "-"
        await tools.close()

    asyncio.run(it())


def test_a_server_that_ends_is_started_again() -> None:
    async def it() -> None:
        tools = source(**STDIO)
        specs = {spec.name: spec for spec in await tools.tools()}
        with pytest.raises(ToolError, match="has ended"):
            await specs["files__end"].call({}, "acme")
        assert await specs["files__echo"].call({"text": "again"}, "acme") == "again"
        await tools.close()

    asyncio.run(it())


def test_the_operator_says_which_tools_are_offered_and_have_effects() -> None:
    async def it() -> None:
        tools = source(**STDIO, only=("echo", "fail"), effects=True, safe=("echo",))
        assert {spec.name: spec.effects for spec in await tools.tools()} == {"files__echo": False, "files__fail": True}
        await tools.close()

    asyncio.run(it())


def test_a_program_that_does_not_exist_is_an_error() -> None:
    async def it() -> None:
        with pytest.raises(ToolError, match="cannot be started"):
            await source(command=("/no/such/program",)).tools()

    asyncio.run(it())


@asynccontextmanager
async def over_http(*, events: bool) -> AsyncIterator[tuple[str, list[web.Request]]]:
    seen: list[web.Request] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(request)
        message = await request.json()
        result = mcp_server.answer(message)
        if "id" not in message:
            return web.Response(status=202)
        body = {"jsonrpc": "2.0", "id": message["id"], "result": result}
        headers = {"mcp-session-id": "s1"} if message["method"] == "initialize" else {}
        if not events:
            return web.json_response(body, headers=headers)
        text = f"event: message\ndata: {web.json_response(body).text}\n\n"
        return web.Response(text=text, content_type="text/event-stream", headers=headers)

    app = web.Application()
    app.router.add_post("/mcp", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/mcp", seen
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("events", [False, True])
def test_the_tools_of_an_http_server_are_listed_and_called(*, events: bool) -> None:
    async def it() -> None:
        async with over_http(events=events) as (url, seen):
            tools = source(url=url, private=True, headers_env={"authorization": "MCP_TOKEN"})
            specs = {spec.name: spec for spec in await tools.tools()}
            assert await specs["files__echo"].call({"text": "Hi"}, "acme") == "Hi"
            assert {request.headers["authorization"] for request in seen} == {"Bearer t"}
            assert [request.headers.get("mcp-session-id") for request in seen[1:]] == ["s1"] * (len(seen) - 1)

    asyncio.run(it())


def test_an_http_server_in_the_own_network_is_refused_unless_declared() -> None:
    async def it() -> None:
        async with over_http(events=False) as (url, seen):
            with pytest.raises(ToolError, match="not public"):
                await source(url=url).tools()
            assert seen == []

    asyncio.run(it())
