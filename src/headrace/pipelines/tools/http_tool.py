"""HTTP tools: one declared request, or the operations of an OpenAPI document.

Only the declared host is contacted, at public addresses unless the operator says `private`, and redirects elsewhere are
refused (public_fetch). Headers come from the environment; neither the model nor the client sees them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from headrace.config.tool_section import ToolConfig
from headrace.pipelines.public_fetch import FetchError, FetchPolicy, fetch
from headrace.pipelines.tools.openapi import Operation, read_operations
from headrace.pipelines.tools.tool import FixedTools, ToolError, ToolSpec, make_spec, text_argument, text_schema

_PLACE: Final = re.compile(r"\{(\w+)\}")


class HttpTarget(msgspec.Struct, frozen=True):
    """Where calls go, and with which bounds."""

    policy: FetchPolicy
    headers: Mapping[str, str]

    @classmethod
    def of(cls, config: ToolConfig, url: str, environ: Mapping[str, str]) -> HttpTarget:
        host = urlsplit(url).hostname or ""
        return cls(
            FetchPolicy(
                hosts=() if config.private else (host,),
                private_hosts=(host,) if config.private else (),
                max_bytes=max(config.result_bytes, 1024) * 4,
                timeout_s=config.timeout_s,
                redirects=2,
            ),
            {name: environ[variable] for name, variable in config.headers_env.items()},
        )

    async def send(self, method: str, url: str, body: bytes | None = None) -> str:
        """Return the response's text. ToolError for a status of 400 and above, and where it fails."""
        headers = dict(self.headers)
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            page = await fetch(url, self.policy, method=method, headers=headers, body=body)
        except FetchError as error:
            raise ToolError(self._hidden(str(error))) from None
        text = self._hidden(page.body.decode(page.charset or "utf-8", errors="replace"))
        if page.status >= 400:
            raise ToolError(f"The server answered with status {page.status}: {text[:500]}")
        return text

    def _hidden(self, text: str) -> str:
        """Hide the headers' secrets where a server repeats them."""
        for secret in self.headers.values():
            if len(secret) >= 6:
                text = text.replace(secret, "[hidden]")
        return text


def http_tools(name: str, config: ToolConfig, environ: Mapping[str, str]) -> FixedTools:
    if config.openapi is not None:
        base, operations = read_operations(config.openapi, config.url)
        target = HttpTarget.of(config, base, environ)
        wanted = [each for each in operations if not config.only or each.id in config.only]
        return FixedTools(*(_operation(name, config, target, base, each) for each in wanted))
    assert config.url is not None  # checked with the configuration
    return FixedTools(_single(name, config, HttpTarget.of(config, config.url, environ), config.url))


def _single(name: str, config: ToolConfig, target: HttpTarget, url: str) -> ToolSpec:
    in_path = set(_PLACE.findall(url))

    async def call(arguments: Mapping[str, Any], tenant: str) -> str:
        given = {each: text_argument(arguments, each) for each in config.parameters}
        filled = _PLACE.sub(lambda mark: quote(given.get(mark[1], ""), safe=""), url)
        rest = {each: value for each, value in given.items() if each not in in_path}
        if config.method in ("GET", "DELETE"):
            return await target.send(config.method, _with_query(filled, rest))
        return await target.send(config.method, filled, msgspec.json.encode(rest))

    return make_spec(config, name, call, text_schema(config.parameters))


def _operation(name: str, config: ToolConfig, target: HttpTarget, base: str, operation: Operation) -> ToolSpec:
    async def call(arguments: Mapping[str, Any], tenant: str) -> str:
        path, query = operation.path, dict[str, str]()
        for each in operation.in_path:
            path = path.replace(f"{{{each}}}", quote(text_argument(arguments, each), safe=""))
        for each in operation.in_query:
            if arguments.get(each) is not None:
                query[each] = text_argument(arguments, each)
        body = msgspec.json.encode(arguments.get("body")) if operation.has_body and "body" in arguments else None
        return await target.send(operation.method, _with_query(base + path, query), body)

    return make_spec(config, name, call, operation.schema, description=operation.about, operation=operation.id)


def _with_query(url: str, query: Mapping[str, str]) -> str:
    if not query:
        return url
    return f"{url}{'&' if '?' in url else '?'}{urlencode(query)}"
