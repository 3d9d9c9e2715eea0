"""The server's application: which path is whose, who may call, and how errors become replies.

Owns the routes and what happens around every one of them: the key, the bounds, the log line, the error's shape. What an
endpoint does is its module's. An ASGI application; knows neither sockets nor processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

import msgspec
import structlog
from msgspec.structs import replace

from headrace.config import Config
from headrace.errors import HeadraceError
from headrace.gateway.accounts.access import find_model, visible_models
from headrace.gateway.api_errors import ApiError, as_api_error
from headrace.gateway.caches.cache_maintenance import measure
from headrace.gateway.flow.services import Services
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.serving.exchange import Caller, Exchange
from headrace.gateway.serving.fleet import ServedVariant
from headrace.gateway.serving.prompt_length import prompt_tokens
from headrace.observe import metrics
from headrace.server import openapi
from headrace.server.api.chat_completions import CHAT_PARAMETERS as CHAT
from headrace.server.api.chat_completions import ChatStream, chat_body, read_chat_request
from headrace.server.api.common_parameters import with_headers
from headrace.server.api.completions import COMPLETION_PARAMETERS as COMPLETIONS
from headrace.server.api.completions import CompletionStream, completion_body, read_completion_request
from headrace.server.api.messages import (
    MessageStream,
    message_body,
    read_count_request,
    read_message_request,
)
from headrace.server.api.messages_parameters import COUNT_TOKENS_PARAMETERS
from headrace.server.api.messages_parameters import MESSAGE_PARAMETERS as MESSAGES
from headrace.server.api.metered_endpoint import run_metered
from headrace.server.api.text_endpoint import Dialect, deliver
from headrace.server.api.tokenize import DETOKENIZE_PARAMETERS, TOKENIZE_PARAMETERS, detokenize, tokenize
from headrace.server.api.vectors import (
    EMBEDDINGS_PARAMETERS,
    RERANK_PARAMETERS,
    SCORE_PARAMETERS,
    PreparedCall,
    prepare_embeddings,
    prepare_rerank,
    prepare_score,
)
from headrace.server.http.api_call import ApiCall, GoneError, Receive, Response, Scope, Send, error_reply
from headrace.server.http.body_parameters import ParameterTable, parse_body
from headrace.server.http.route import ANTHROPIC, Handler, Route

log: Final = structlog.stdlib.get_logger("headrace.requests")

_STATISTICS_SECONDS: Final = 0.5  # that an engine has to say how it is
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


CHAT_DIALECT: Final = Dialect("chat", CHAT, read_chat_request, chat_body, ChatStream, relays=True)
COMPLETION_DIALECT: Final = Dialect(
    "completion", COMPLETIONS, read_completion_request, completion_body, CompletionStream, relays=True
)


MESSAGES_DIALECT: Final = Dialect(
    "messages", MESSAGES, read_message_request, message_body, MessageStream, errors=ANTHROPIC
)
# The dialects that batches may use, by their paths.
BATCHED: Final = {"/v1/chat/completions": CHAT_DIALECT, "/v1/completions": COMPLETION_DIALECT}


class _MethodError(ApiError):
    def __init__(self, path: str, methods: set[str]) -> None:
        self.allowed = ", ".join(sorted(methods))
        super().__init__(f"{path[:200]} takes {self.allowed}", code="method_not_allowed", status=405)


class App:
    def __init__(self, config: Config, services: Services, *, routes: tuple[Route, ...] = ()) -> None:
        """`routes`: further ones, of parts of the server that have a state of their own."""
        self.config = config
        self.fleet = services.fleet
        self.services = services
        self.ready = False  # every engine is up
        self.draining = False  # nothing new is taken
        self.running = 0  # requests under way that an engine works for
        self.routes = (*self._own_routes(), *routes)
        if config.server.docs:
            self.routes += self._pages()
        self._fixed = {(route.method, route.path): route for route in self.routes if "{" not in route.path}
        self._patterns = [(route, _pattern(route.path)) for route in self.routes if "{" in route.path]

    def _own_routes(self) -> tuple[Route, ...]:
        return (
            Route("POST", "/v1/chat/completions", self._text(CHAT_DIALECT), "Answer a chat.", CHAT),
            Route(
                "POST",
                "/v1/completions",
                self._text(COMPLETION_DIALECT),
                "Go on with a text.",
                COMPLETIONS,
            ),
            Route(
                "POST",
                "/v1/messages",
                self._text(MESSAGES_DIALECT),
                "Anthropic's chat.",
                MESSAGES,
                errors=ANTHROPIC,
            ),
            Route(
                "POST",
                "/v1/messages/count_tokens",
                self._count,
                "The tokens of such a chat.",
                COUNT_TOKENS_PARAMETERS,
                errors=ANTHROPIC,
            ),
            Route(
                "POST",
                "/v1/embeddings",
                self._vectors(EMBEDDINGS_PARAMETERS, prepare_embeddings),
                "Texts as vectors.",
                EMBEDDINGS_PARAMETERS,
            ),
            Route(
                "POST",
                "/v1/rerank",
                self._vectors(RERANK_PARAMETERS, prepare_rerank),
                "Put documents in order for a query.",
                RERANK_PARAMETERS,
            ),
            Route(
                "POST",
                "/v1/score",
                self._vectors(SCORE_PARAMETERS, prepare_score),
                "How likely a text is after another.",
                SCORE_PARAMETERS,
            ),
            Route(
                "POST", "/tokenize", self._plain(TOKENIZE_PARAMETERS, tokenize), "A text's tokens.", TOKENIZE_PARAMETERS
            ),
            Route(
                "POST",
                "/detokenize",
                self._plain(DETOKENIZE_PARAMETERS, detokenize),
                "Tokens' text.",
                DETOKENIZE_PARAMETERS,
            ),
            Route("GET", "/v1/models", self._models, "The models that are served."),
            Route("GET", "/v1/models/{model}", self._model, "One of them."),
            Route("GET", "/health/live", self._live, "Whether the server runs.", open=True),
            Route("GET", "/health/ready", self._ready, "Whether it takes requests.", open=True),
            Route("GET", "/health", self._ready, "The same, where tools for other servers look.", open=True),
            Route("GET", "/metrics", self._metrics, "Counters and times, for Prometheus.", open=True),
        )

    def _pages(self) -> tuple[Route, ...]:
        described = msgspec.json.encode(openapi.document(self.routes, keys=self.services.accounts.directory.needed))
        shown = openapi.page(self.routes)

        async def document(call: ApiCall) -> None:
            await self.reply(call, Response(described))

        async def page(call: ApiCall) -> None:
            await self.reply(call, Response(shown, type=b"text/html; charset=utf-8"))

        return (
            Route("GET", "/openapi.json", document, "This document.", open=True, listed=False),
            Route("GET", "/docs", page, "The same for people.", open=True, listed=False),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began = time.monotonic()
        call = ApiCall(scope, receive, send, "")
        asked_id = call.headers.get("x-request-id", "")
        own = _REQUEST_ID.fullmatch(asked_id) and not self.services.accounts.directory.is_secret(asked_id)
        call.id = asked_id if own else f"req_{secrets.token_hex(12)}"
        route: Route | None = None
        error: ApiError | None = None
        try:
            route = self._route(call)
            if not route.open:
                call.caller = self.services.accounts.directory.identify(call.headers)
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
            if isinstance(error, _MethodError):
                reply.headers["allow"] = error.allowed
            await self.reply(call, reply)
        except Exception as caught:  # where this could not be said, something is
            log.error("failed", request=call.id, exc_info=caught)
            if not call.started:
                await call.reply(error_reply(as_api_error(caught), shape))

    def _done(self, call: ApiCall, route: Route | None, error: ApiError | None, seconds: float) -> None:
        path = "-" if route is None else route.path
        status = call.status or 499  # the client left before an answer
        metrics.of(metrics.http_requests, path, str(status)).inc()
        if not self.config.log.requests or (route is not None and route.open and error is None):
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
                known[name] = self.services.accounts.directory.hidden(known[name])
        log.info("request", **known)

    def _route(self, call: ApiCall) -> Route:
        method, path = call.scope["method"], call.scope["path"]
        if method == "HEAD":
            method = "GET"
        route = self._fixed.get((method, path))
        if route is not None:
            return route
        allowed = [each for each in self.routes if each.path == path]
        for each, pattern in self._patterns:
            found = pattern.fullmatch(path)
            if found is not None:
                if each.method == method:
                    call.params = found.groupdict()
                    return each
                allowed.append(each)
        if allowed and method == "OPTIONS":
            return replace(allowed[0], handler=self._preflight, open=True)
        if allowed:
            raise _MethodError(self.services.accounts.directory.hidden(path), {each.method for each in allowed})
        shown = self.services.accounts.directory.hidden(path)[:200]
        raise ApiError(f"there is no {shown}", kind="not_found_error", code="unknown_url")

    def cors(self, call: ApiCall) -> dict[str, str]:
        origin = call.headers.get("origin")
        origins = self.config.server.cors_origins
        if origin is None or not ("*" in origins or origin in origins):
            return {}
        return {"access-control-allow-origin": "*" if "*" in origins else origin, "vary": "origin"}

    async def _preflight(self, call: ApiCall) -> None:
        headers = self.cors(call)
        if headers:
            headers["access-control-allow-methods"] = "GET, POST, DELETE, OPTIONS"
            headers["access-control-allow-headers"] = call.headers.get("access-control-request-headers", "*")
            headers["access-control-max-age"] = "600"
        await call.reply(Response(b"", 204, headers=headers))

    # What endpoints have in common

    async def body(self, call: ApiCall) -> bytes:
        server = self.config.server
        return await call.body(server.body_bytes, server.body_s)

    def admit(self) -> None:
        """ApiError where the server as a whole takes nothing more, or nothing yet."""
        if not self.ready:
            raise ApiError("the models are being loaded", kind="overloaded_error", code="starting", retry_after=1.0)
        if self.draining:
            raise ApiError("the server is about to end", kind="overloaded_error", code="draining", retry_after=1.0)
        if self.running >= self.config.limits.requests:
            raise ApiError(
                f"{self.running} requests run already",
                kind="overloaded_error",
                code="too_many_requests",
                retry_after=1.0,
            )

    async def answer(self, call: ApiCall, exchange: Exchange, dialect: Dialect) -> None:
        """Delivers an answer, and notes in the log what it took."""
        self.running += 1
        metrics.running.set(self.running)
        try:
            await deliver(call, exchange, dialect, self.cors(call), self.services)
        finally:
            self.running -= 1
            metrics.running.set(self.running)
            call.log_fields = exchange.log_line()

    def exchange(self, caller: Caller, asked: TextRequest, endpoint: str) -> Exchange:
        """With the variant that is asked for, among those that the caller may use."""
        served = find_model(caller, self.fleet, asked.model, asked.profile)
        return Exchange(caller=caller, asked=asked, served=served, endpoint=endpoint)

    def _text(self, dialect: Dialect) -> Handler:
        async def handler(call: ApiCall) -> None:
            self.admit()
            asked = dialect.read(await self.body(call), call.headers, self.config.limits)
            await self.answer(call, self.exchange(call.caller, asked, call.scope["path"]), dialect)

        return handler

    async def _count(self, call: ApiCall) -> None:
        asked = read_count_request(await self.body(call), call.headers, self.config.limits)
        exchange = self.exchange(call.caller, asked, "/v1/messages/count_tokens")
        await self.reply(call, Response.json({"input_tokens": await prompt_tokens(exchange)}))

    def _vectors(self, table: ParameterTable, prepare: Callable[..., Coroutine[Any, Any, PreparedCall]]) -> Handler:
        async def handler(call: ApiCall) -> None:
            self.admit()
            given = with_headers(parse_body(await self.body(call), table), call.headers, table)
            served = find_model(call.caller, self.fleet, given.get("model", ""))
            self.running += 1
            try:
                prepared = await prepare(served, call.caller, given, self.config.limits)
                work = run_metered(
                    self.services, call.caller, prepared, call.scope["path"], model=given.get("model", "")
                )
                result, headers = await call.unless_gone(work)
            finally:
                self.running -= 1
            await self.reply(call, Response.json(result, headers=headers))

        return handler

    def _plain(
        self, table: ParameterTable, work: Callable[[ServedVariant, Mapping[str, Any]], Awaitable[dict[str, Any]]]
    ) -> Handler:
        async def handler(call: ApiCall) -> None:
            given = parse_body(await self.body(call), table)
            served = find_model(call.caller, self.fleet, given.get("model", ""))
            await self.reply(call, Response.json(await work(served, given)))

        return handler

    async def reply(self, call: ApiCall, reply: Response) -> None:
        reply.headers |= self.cors(call)
        await call.reply(reply)

    # Endpoints without a module of their own

    async def _models(self, call: ApiCall) -> None:
        data = [served.described() for served in visible_models(call.caller, self.fleet)]
        await self.reply(call, Response.json({"object": "list", "data": data}))

    async def _model(self, call: ApiCall) -> None:
        await self.reply(call, Response.json(find_model(call.caller, self.fleet, call.params["model"]).described()))

    async def _live(self, call: ApiCall) -> None:
        await self.reply(call, Response.json({"status": "live"}))

    async def _ready(self, call: ApiCall) -> None:
        if self.ready and not self.draining:
            await self.reply(call, Response.json({"status": "ready", "models": sorted(self.fleet.served)}))
        else:
            status = "draining" if self.draining else "starting"
            await self.reply(call, Response.json({"status": status}, status=503, headers={"retry-after": "1"}))

    async def _metrics(self, call: ApiCall) -> None:
        for name, served in self.fleet.served.items():
            if served.upstream is not None:
                metrics.upstream(name, served.upstream.state())
            with contextlib.suppress(TimeoutError, HeadraceError):  # what is not there says nothing
                async with asyncio.timeout(_STATISTICS_SECONDS):
                    for replica, statistics in enumerate(await served.engine.stats()):
                        metrics.engine(name, replica, statistics)
        await measure(self.services.caches)
        await self.reply(call, Response(metrics.exposition(), type=metrics.CONTENT_TYPE.encode()))


def _pattern(path: str) -> re.Pattern[str]:
    """{name} is one part of a path; {model} may have slashes in it."""
    parts = re.split(r"(\{\w+\})", path)
    found = [
        f"(?P<{part[1:-1]}>{'.+' if part == '{model}' else '[^/]+'})" if part.startswith("{") else re.escape(part)
        for part in parts
    ]
    return re.compile("".join(found))
