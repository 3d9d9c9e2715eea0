"""App: the ASGI application. Finds the route, identifies the caller, turns errors into responses and logs each call.

Knows no endpoint (see `routes`), no socket and no process.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Any, Final

import structlog

from headrace.gateway.api_errors import ApiError, as_api_error
from headrace.observe import metrics
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import ApiCall, GoneError, Receive, Response, Scope, Send, error_reply
from headrace.server.http.route_table import MethodError, Route, RouteTable

log: Final = structlog.stdlib.get_logger("headrace.requests")

_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


class App:
    def __init__(self, context: EndpointContext, routes: tuple[Route, ...]) -> None:
        self.routes = routes
        self._context = context
        self._directory = context.services.accounts.directory
        self._table = RouteTable(routes, preflight=self._preflight, redact=self._directory.hidden)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began = time.monotonic()
        call = ApiCall(scope, receive, send, "")
        asked_id = call.headers.get("x-request-id", "")
        own = _REQUEST_ID.fullmatch(asked_id) and not self._directory.is_secret(asked_id)
        call.id = asked_id if own else f"req_{secrets.token_hex(12)}"
        route: Route | None = None
        error: ApiError | None = None
        try:
            route = self._table.find(call)
            if not route.open:
                call.caller = self._directory.identify(call.headers)
            await route.handler(call)
        except GoneError:
            pass
        except Exception as caught:
            error = as_api_error(caught)
            if error.status >= 500 and not isinstance(caught, ApiError):
                log.error("failed", request=call.id, exc_info=caught)
            if not call.started:
                await self._refuse(call, error, route)
        finally:
            self._done(call, route, error, time.monotonic() - began)

    async def _refuse(self, call: ApiCall, error: ApiError, route: Route | None) -> None:
        shape = "openai" if route is None else route.errors
        try:
            reply = error_reply(error, shape)
            if isinstance(error, MethodError):
                reply.headers["allow"] = error.allowed
            await self._context.reply(call, reply)
        except Exception as caught:  # where this could not be said, something is
            log.error("failed", request=call.id, exc_info=caught)
            if not call.started:
                await call.reply(error_reply(as_api_error(caught), shape))

    def _done(self, call: ApiCall, route: Route | None, error: ApiError | None, seconds: float) -> None:
        path = "-" if route is None else route.path
        status = call.status or 499  # the client left before an answer
        metrics.of(metrics.http_requests, path, str(status)).inc()
        if not self._context.config.log.requests or (route is not None and route.open and error is None):
            return
        known: dict[str, Any] = {"request": call.id, "route": path, "status": status, "ms": round(seconds * 1e3, 2)}
        if call.caller.key:
            known["key"] = call.caller.key
        if error is not None:
            known |= {"error": error.code or error.kind, "parameter": error.parameter}
        if call.log_fields:
            known |= call.log_fields
        for name in ("parameter", "user"):  # a client's own words
            if known.get(name):
                known[name] = self._directory.hidden(known[name])
        log.info("request", **known)

    async def _preflight(self, call: ApiCall) -> None:
        headers = self._context.cors_headers(call)
        if headers:
            headers["access-control-allow-methods"] = "GET, POST, DELETE, OPTIONS"
            headers["access-control-allow-headers"] = call.headers.get("access-control-request-headers", "*")
            headers["access-control-max-age"] = "600"
        await call.reply(Response(b"", 204, headers=headers))
