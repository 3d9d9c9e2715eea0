"""The sections [tools.NAME]: what the tools stage of a pipeline may call. headrace.pipelines.tools.tool_rules checks
them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.config.value_types import Count, Seconds, Section, Text

ToolKind = Literal["http", "sql", "python", "mcp"]
CacheSeconds = Annotated[float, Meta(ge=0)]


class ToolConfig(Section, frozen=True):
    """One tool; of kind http with `openapi`, and of kind mcp, several: NAME__OPERATION."""

    kind: ToolKind
    description: str = ""  # what the model reads; default: from the OpenAPI document, the function or the MCP server
    effects: bool = False  # it changes something: every call needs an approval
    only: tuple[Text, ...] = ()  # operations to offer, of several; default: all
    safe: tuple[Text, ...] = ()  # with effects: operations that change nothing
    timeout_s: Seconds = 10.0  # seconds one call may take
    cache_s: CacheSeconds = 0.0  # seconds a result is reused for the same arguments and tenant; 0: never
    tags: tuple[Text, ...] = ()  # of cached results: an invalidation of one removes them
    result_bytes: Count = 64 * 1024  # 64 KiB of one result; the rest is cut
    # http
    url: Text | None = None  # http: address of one operation, or base of `openapi`; mcp: address of the server
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    openapi: Text | None = None  # OpenAPI 3 document, a JSON file
    # http, sql: name and description of each argument; all are texts and required
    parameters: dict[str, Text] = msgspec.field(default_factory=dict[str, Text])
    headers_env: dict[str, Text] = msgspec.field(default_factory=dict[str, Text])  # header and environment variable
    private: bool = False  # http, mcp: may reach loopback and private addresses
    # sql
    database: Text | None = None  # SQLite file, opened read-only
    dsn_env: Text | None = None  # environment variable with a Postgres URL
    statement: Text | None = None  # with :name for each of `parameters`; default: the model writes a SELECT itself
    rows: Count = 100  # rows of one result
    # python
    function: Text | None = None  # MODULE:FUNCTION; default: a callable that the program registers
    # mcp
    command: tuple[Text, ...] = ()  # program and arguments of a server over stdio
    environment: tuple[Text, ...] = ()  # environment variables that the program gets beside PATH
