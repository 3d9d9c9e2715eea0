"""Builds the sources of the declared tools. HeadraceError for a document or a function that cannot be used."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.config.tool_section import ToolConfig
from headrace.pipelines.tools.http_tool import http_tools
from headrace.pipelines.tools.mcp_tools import McpTools
from headrace.pipelines.tools.python_tool import PythonTool, load_function
from headrace.pipelines.tools.sql_tool import sql_tool
from headrace.pipelines.tools.tool import ToolSource


def tool_sources(configs: Mapping[str, ToolConfig], environ: Mapping[str, str]) -> dict[str, ToolSource]:
    return {name: _source(name, config, environ) for name, config in configs.items()}


def _source(name: str, config: ToolConfig, environ: Mapping[str, str]) -> ToolSource:
    match config.kind:
        case "http":
            return http_tools(name, config, environ)
        case "sql":
            return sql_tool(name, config, environ)
        case "mcp":
            return McpTools(name, config, environ)
        case "python":
            return PythonTool(name, config, None if config.function is None else load_function(config.function))
