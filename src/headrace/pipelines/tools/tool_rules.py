"""Checks the rules of [tools.NAME] that types and ranges cannot express. Yields its findings; see config_checks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from headrace.config import Config
from headrace.config.toml_text import key_path, quoted
from headrace.config.tool_section import ToolConfig
from headrace.config.value_types import Finding
from headrace.pipelines.tools.openapi import OpenApiError, read_operations
from headrace.pipelines.tools.python_tool import PythonToolError, arguments_of, load_function

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9-]*(?:_[A-Za-z0-9-]+)*")  # without __, which parts it from an operation
_OF_KIND: Final[Mapping[str, tuple[str, ...]]] = {
    "http": ("url", "method", "openapi", "parameters", "headers_env", "private", "only", "safe"),
    "sql": ("database", "dsn_env", "statement", "rows", "parameters"),
    "python": ("function",),
    "mcp": ("url", "command", "environment", "headers_env", "private", "only", "safe"),
}


def findings(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    for name, tool in config.tools.items():
        where = key_path("tools", name)
        if not _NAME.fullmatch(name) or len(name) > 48:
            yield where, "expected a name of at most 48 letters, digits and single - or _ that starts with a letter"
        yield from _keys(tool, where)
        for key, variable in [
            ("dsn_env", tool.dsn_env),
            *((f"headers_env.{k}", v) for k, v in tool.headers_env.items()),
        ]:
            if variable is not None and not environ.get(variable):
                yield f"{where}.{key}", f"the environment variable {variable} is not set or empty"
        yield from _kind(tool, where)
    for name, tenant in config.tenants.items():
        for tool in tenant.tools:
            if tool != "*" and tool not in config.tools:
                known = ", ".join(map(quoted, config.tools)) or "none"
                yield f"{key_path('tenants', name)}.tools", f"unknown tool {quoted(tool)}; declared: {known}"


def _keys(tool: ToolConfig, where: str) -> Iterator[Finding]:
    plain = ToolConfig(kind=tool.kind)
    others = {key for keys in _OF_KIND.values() for key in keys} - set(_OF_KIND[tool.kind])
    for key in sorted(others):
        if getattr(tool, key) != getattr(plain, key):
            kinds = ", ".join(quoted(kind) for kind, keys in _OF_KIND.items() if key in keys)
            yield f"{where}.{key}", f"only tools of kind {kinds} have this key"


def _kind(tool: ToolConfig, where: str) -> Iterator[Finding]:
    match tool.kind:
        case "http" if tool.openapi is not None:
            try:
                read_operations(tool.openapi, tool.url)
            except OpenApiError as error:
                yield f"{where}.openapi", str(error)
        case "http":
            yield from _address(tool.url, where)
        case "sql":
            if (tool.database is None) == (tool.dsn_env is None):
                yield where, "expected either database (a SQLite file) or dsn_env (a Postgres URL)"
            if tool.statement is None and tool.parameters:
                yield f"{where}.parameters", "expected a statement that uses them"
        case "python" if tool.function is not None:
            try:
                arguments_of(tool.function, load_function(tool.function))
            except PythonToolError as error:
                yield f"{where}.function", str(error)
        case "mcp":
            if bool(tool.command) == (tool.url is not None):
                yield where, "expected either command (a server over stdio) or url (a server over HTTP)"
            elif tool.url is not None:
                yield from _address(tool.url, where)
        case _:
            pass


def _address(url: str | None, where: str) -> Iterator[Finding]:
    if url is None or not url.startswith(("http://", "https://")):
        yield f"{where}.url", "expected an address that starts with http:// or https://"
