"""McpTools: the tools of an MCP server as a source. Ignores what the server says about its tools' effects."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from headrace.config.tool_section import ToolConfig
from headrace.pipelines.public_fetch import FetchPolicy
from headrace.pipelines.tools.mcp_client import HttpTransport, McpClient, StdioTransport
from headrace.pipelines.tools.tool import ToolSpec, make_spec

_LISTED_S: Final = 300.0  # seconds that a list of tools is used
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ABOUT_CHARS: Final = 1000


class McpTools:
    def __init__(self, name: str, config: ToolConfig, environ: Mapping[str, str]) -> None:
        self._name = name
        self._config = config
        self._client = McpClient(_transport(config, environ), seconds=config.timeout_s)
        self._specs: list[ToolSpec] = []
        self._listed_at = -_LISTED_S

    async def tools(self) -> list[ToolSpec]:
        if time.monotonic() - self._listed_at >= _LISTED_S:
            self._specs = [
                self._spec(each) for each in await self._client.list_tools() if self._is_offered(each.get("name"))
            ]
            self._listed_at = time.monotonic()
        return self._specs

    def _is_offered(self, operation: Any) -> bool:
        only = self._config.only
        return isinstance(operation, str) and bool(_NAME.fullmatch(operation)) and (not only or operation in only)

    def _spec(self, listed: Mapping[str, Any]) -> ToolSpec:
        operation = str(listed["name"])

        async def call(arguments: Mapping[str, Any], tenant: str) -> str:
            return await self._client.call_tool(operation, arguments)

        schema = listed.get("inputSchema")
        return make_spec(
            self._config,
            self._name,
            call,
            schema if isinstance(schema, dict) else {"type": "object"},  # pyright: ignore[reportUnknownArgumentType]
            description=str(listed.get("description") or operation)[:_ABOUT_CHARS],
            operation=operation,
        )

    async def close(self) -> None:
        await self._client.close()


def _transport(config: ToolConfig, environ: Mapping[str, str]) -> StdioTransport | HttpTransport:
    if config.command:
        return StdioTransport(config.command, config.environment, environ)
    assert config.url is not None  # checked with the configuration
    host = urlsplit(config.url).hostname or ""
    policy = FetchPolicy(
        hosts=() if config.private else (host,),
        private_hosts=(host,) if config.private else (),
        max_bytes=4 * 1024 * 1024,
        timeout_s=config.timeout_s,
        redirects=0,
    )
    headers = {name: environ[variable] for name, variable in config.headers_env.items()}
    return HttpTransport(config.url, policy, headers)
