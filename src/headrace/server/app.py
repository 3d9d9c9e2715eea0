"""App: the ASGI application. Finds the route, identifies the caller, turns errors into responses and logs each call.

Knows no endpoint (see `routes`), no socket and no process.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import Any, Final

import structlog

from headrace.gateway.accounts.directory import IdentifiedCaller
from headrace.gateway.accounts.tenant_policies import limit_scopes
from headrace.gateway.api_errors import ApiError, as_api_error
from headrace.observe import metrics
from headrace.observe.logs import log_request
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.allowed_hosts import AllowedHosts
from headrace.server.http.api_call import LOCAL, ApiCall, GoneError, Receive, Response, Scope, Send, error_reply
from headrace.server.http.client_address import client_address
from headrace.server.http.route_table import MethodError, Route, RouteTable

log: Final = structlog.stdlib.get_logger("headrace.requests")

_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


class App:
    def __init__(self, context: EndpointContext, routes: tuple[Route, ...], *, host: str) -> None:
        """`host`: the address that it is served on."""
        self.routes = routes
        self._context = context
        self._hosts = AllowedHosts.of(context.config, host)
        self._directory = context.services.accounts.directory
        self._table = RouteTable(routes, preflight=self._preflight, redact=self._directory.hidden)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        call = ApiCall(scope, receive, send, "")
        asked_id = call.headers.get("x-request-id", "")
        own = _REQUEST_ID.fullmatch(asked_id) and not self._directory.is_secret(asked_id)
        call.id = asked_id if own else f"req_{os.urandom(12).hex()}"
        route: Route | None = None
        error: ApiError | None = None
        try:
            if self._hosts is not None and LOCAL not in scope:
                self._hosts.check(call.headers.get("host"))
            route = self._table.find(call)
            if route.errors is not None:
                call.errors = route.errors
            if route.lenient:
                call.unknown = self._context.unknown_fields(call.headers)
            if not route.open:
                await self._admit(call, route)
            call.timeline.enter("read" if route.reserves else "compute")
            await route.handler(call)
        except GoneError:
            pass
        except Exception as caught:
            error = as_api_error(caught)
            if error.status >= 500 and not isinstance(caught, ApiError):
                log.error("failed", request=call.id, exc_info=caught)
            if not call.started:
                call.timeline.enter("deliver")
                await self._refuse(call, error)
        finally:
            self._done(call, route, error)
            if error is not None or not call.status:
                await self._charge_mistake(call, route, error)
            if error is not None:
                # Its frames hold the body, and this frame holds the error: only the collector could free them, all the
                # large bodies of many refused calls at once, which takes tenths of a second.
                error.__traceback__ = None

    async def _admit(self, call: ApiCall, route: Route) -> None:
        """Identify the caller, and count the call or check that there is room for it. ApiError where there is not."""
        charges, address = self._context.charges, client_address(call.scope.get("client"))
        if self._directory.needed:
            charges.check_address(address)
        else:
            charges.charge_address(address)
        caller = call.caller = self._directory.identify(call.headers)
        if route.reserves:
            charges.check(limit_scopes(caller, "", ""))  # before its body is read
        else:
            await self._context.charge(caller)

    async def _charge_mistake(self, call: ApiCall, route: Route | None, error: ApiError | None) -> None:
        """Count a call that failed by a fault of its client and has not counted yet."""
        if error is not None and (error.status >= 500 or error.kind == "rate_limit_error"):
            return
        if route is not None and route.relayed:
            return
        charges, caller = self._context.charges, call.caller
        with contextlib.suppress(ApiError):  # there is no room: the next call is refused
            if not isinstance(caller, IdentifiedCaller):
                charges.charge_address(client_address(call.scope.get("client")))
            elif route is not None and (route.reserves or route.open) and not call.charged:
                await self._context.charge(caller)

    async def _refuse(self, call: ApiCall, error: ApiError) -> None:
        try:
            reply = error_reply(error, call.errors, call.id)
            if isinstance(error, MethodError):
                reply.headers["allow"] = error.allowed
            await self._context.reply(call, reply)
        except Exception as caught:  # where this could not be said, something is
            log.error("failed", request=call.id, exc_info=caught)
            if not call.started:
                await call.reply(error_reply(as_api_error(caught), call.errors, call.id))

    def _done(self, call: ApiCall, route: Route | None, error: ApiError | None) -> None:
        if route is not None and route.relayed:
            return
        path = "-" if route is None else route.path
        status = call.status or 499  # the client left before an answer
        metrics.of(metrics.http_requests, path, str(status)).inc()
        if route is None or route.open:
            call.timeline.ended = time.monotonic()
            fields: dict[str, Any] = {}
        else:
            record = self._context.services.observer.finish_call(
                call.timeline,
                call.exchange,
                request_id=call.id,
                tenant=call.caller.tenant,
                method=call.scope["method"],
                endpoint=path,
                status=status,
                error=error,
                counted=route.reserves,
            )
            fields = record.fields
        if not self._context.config.log.requests or (route is not None and route.open and error is None):
            return
        known: dict[str, Any] = {"request": call.id, "route": path, "status": status, "ms": call.timeline.milliseconds}
        if call.caller.tenant:
            known["tenant"] = call.caller.tenant
        if call.caller.key:
            known["key"] = call.caller.key
        if error is not None:
            known |= {"error": error.code or error.kind, "parameter": error.parameter}
        known |= fields
        if ignored := call.unknown.header:
            known["ignored"] = ignored
        for name in ("parameter", "user", "ignored"):  # a client's own words
            if known.get(name):
                known[name] = self._directory.hidden(known[name])
        log_request("headrace.requests", known)

    async def _preflight(self, call: ApiCall) -> None:
        headers = self._context.cors_headers(call)
        if headers:
            del headers["access-control-expose-headers"]  # belongs to the response itself
            headers["access-control-allow-methods"] = "GET, POST, DELETE, OPTIONS"
            headers["access-control-allow-headers"] = call.headers.get("access-control-request-headers", "*")
            headers["access-control-max-age"] = "600"
        await call.reply(Response(b"", 204, headers=headers))
