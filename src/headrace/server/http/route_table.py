"""Route and RouteTable: map a method and a path to a handler. Knows no endpoint."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from headrace.gateway.api_errors import ApiError, unknown_url
from headrace.server.http.api_call import ApiCall
from headrace.server.http.body_parameters import ParameterTable

Handler = Callable[[ApiCall], Awaitable[None]]


class Route(msgspec.Struct, frozen=True):
    method: str
    path: str  # a part in braces is a parameter
    handler: Handler
    about: str
    table: ParameterTable | None = None  # of its body
    open: bool = False  # without a key
    errors: str | None = None  # the shape of errors; None: that of the dialect that the client speaks
    listed: bool = True  # in the OpenAPI document
    lenient: bool = False  # unknown fields of its body are ignored, unless the request is strict
    relayed: bool = False  # another process of this server answers, counts and logs it
    reserves: bool = False  # its requests reserve limits themselves; all others are charged when they come


class MethodError(ApiError):
    """The path exists, but not with this method."""

    def __init__(self, path: str, methods: set[str]) -> None:
        self.allowed = ", ".join(sorted(methods))
        super().__init__(f"{path[:200]} takes {self.allowed}", code="method_not_allowed", status=405)


class RouteTable:
    def __init__(self, routes: Sequence[Route], *, preflight: Handler, redact: Callable[[str], str]) -> None:
        """`preflight` answers OPTIONS for every path. `redact` hides secrets in a path before an error repeats it."""
        self._fixed = {(route.method, route.path): route for route in routes if "{" not in route.path}
        self._by_path: dict[str, list[Route]] = {}
        for route in routes:
            self._by_path.setdefault(route.path, []).append(route)
        self._patterns = [(route, _pattern(route.path)) for route in routes if "{" in route.path]
        self._preflight = preflight
        self._redact = redact

    def find(self, call: ApiCall) -> Route:
        """Return the route of a call, and set the call's path parameters. ApiError if there is none."""
        method, path = call.scope["method"], call.scope["path"]
        if path.endswith("/") and path != "/":
            path = path.rstrip("/") or "/"  # clients that join a base URL and a path may add one
        route = self._fixed.get((method, path))
        if route is None and method == "HEAD":
            method = "GET"
            route = self._fixed.get((method, path))
        if route is not None:
            return route
        others = list(self._by_path.get(path, ()))
        for route, pattern in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None:
                if route.method == method:
                    call.params = match.groupdict()
                    return route
                others.append(route)
        if others and method == "OPTIONS":
            return msgspec.structs.replace(others[0], handler=self._preflight, open=True)
        if others:
            raise MethodError(self._redact(path), {route.method for route in others})
        raise unknown_url(self._redact(path))


def _pattern(path: str) -> re.Pattern[str]:
    """{name} matches one part of a path; {model} may contain slashes."""
    parts = re.split(r"(\{\w+\})", path)
    expressions = [
        f"(?P<{part[1:-1]}>{'.+' if part == '{model}' else '[^/]+'})" if part.startswith("{") else re.escape(part)
        for part in parts
    ]
    return re.compile("".join(expressions))
