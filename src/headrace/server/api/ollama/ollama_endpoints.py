"""The endpoints of Ollama's API: text, embeddings, models, and the operations that a server of fixed models rejects.

Requests go through the same flow as those of the other dialects. Models are declared in the server's configuration, so
no endpoint loads, fetches, changes or removes one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from headrace.config import RequestLimits
from headrace.gateway.accounts.access import find_model, visible_models
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.serving.exchange import Exchange
from headrace.server.api.common_parameters import with_headers
from headrace.server.api.metered_endpoint import run_prepared
from headrace.server.api.ollama import model_listing
from headrace.server.api.ollama.model_tags import find_name, tag_of
from headrace.server.api.ollama.ollama_answers import (
    AnswerFields,
    AnswerLines,
    answer_body,
    chat_fields,
    generate_fields,
    loaded_body,
    nanoseconds,
)
from headrace.server.api.ollama.ollama_parameters import (
    CHAT_PARAMETERS,
    EMBED_PARAMETERS,
    GENERATE_PARAMETERS,
    OLDER_EMBEDDINGS_PARAMETERS,
    PULL_PARAMETERS,
)
from headrace.server.api.ollama.ollama_requests import OllamaRequest, read_chat_request, read_generate_request
from headrace.server.api.text_endpoint import Dialect, answer_call
from headrace.server.api.vectors import prepare_embeddings
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.api_call import OLLAMA, ApiCall, Response
from headrace.server.http.body_parameters import ParameterTable
from headrace.server.http.route_table import Route
from headrace.server.http.unknown_fields import UnknownFields
from headrace.version import __version__

VERSION: Final = "0.13.5"  # the release of Ollama that this API follows; clients compare it with what they need
LINES: Final = b"application/x-ndjson"

Read = Callable[[bytes, Mapping[str, str], RequestLimits, UnknownFields], OllamaRequest]


def routes(context: EndpointContext) -> tuple[Route, ...]:
    async def running(call: ApiCall) -> None:
        await context.reply(call, Response(b"Ollama is running", type=b"text/plain; charset=utf-8"))

    async def version(call: ApiCall) -> None:
        await context.reply(call, Response.json({"version": VERSION, "headrace": __version__}))

    return (
        _text_route(
            context, "/api/chat", CHAT_PARAMETERS, read_chat_request, chat_fields, "Answer a chat in Ollama's dialect."
        ),
        _text_route(
            context,
            "/api/generate",
            GENERATE_PARAMETERS,
            read_generate_request,
            generate_fields,
            "Answer a prompt in Ollama's dialect.",
        ),
        *_embedding_routes(context),
        *model_listing.routes(context),
        Route("GET", "/api/version", version, "Report the release of Ollama that the API follows.", errors=OLLAMA),
        # How Ollama's command-line client looks for a server. GET / is not taken.
        Route("HEAD", "/", running, "Report that the server runs.", open=True, listed=False, errors=OLLAMA),
        *_administration_routes(context),
    )


# Text


def _text_route(
    context: EndpointContext, path: str, table: ParameterTable, read: Read, fields: AnswerFields, about: str
) -> Route:
    async def handler(call: ApiCall) -> None:
        context.admit()
        limits = context.config.limits
        request = await context.read(call, lambda body: read(body, call.headers, limits, call.unknown))
        name = find_name(call.caller, context.services.fleet, request.text_request.model)
        exchange = context.exchange(call.caller, request.text_request.but(model=name), path, call.timeline)
        if request.is_empty:
            await context.charge(call.caller)
            await context.reply(call, Response.json(loaded_body(fields, exchange)))
            return
        _check_thinks(exchange)
        await answer_call(context, call, exchange, _dialect(table, read, fields, request))

    return Route("POST", path, handler, about, table, errors=OLLAMA, reserves=True, lenient=True)


def _dialect(table: ParameterTable, read: Read, fields: AnswerFields, request: OllamaRequest) -> Dialect:
    """Return the dialect for one request: its answer ends with the conversation, if it is to."""
    return Dialect(
        "ollama",
        table,
        lambda body, headers, limits, unknown: read(body, headers, limits, unknown).text_request,
        partial(answer_body, fields, request),
        partial(AnswerLines, fields, request),
        errors=OLLAMA,
        stream_type=LINES,
    )


def _check_thinks(exchange: Exchange) -> None:
    served = exchange.served
    if exchange.text_request.think and served.upstream is None and served.reasoning is None:
        raise ApiError(
            f"'{served.name}' does not support thinking. Remove 'think', or set it to false.",
            parameter="think",
            code="unsupported_parameter",
        )


# Embeddings


def _embedding_routes(context: EndpointContext) -> tuple[Route, ...]:
    async def embed(call: ApiCall) -> None:
        began = time.monotonic()
        given = await _read_embedding(context, call, EMBED_PARAMETERS)
        found = await _embed(context, call, given, given.get("input", ""), "/api/embed")
        body: dict[str, Any] = {
            "model": tag_of(found["model"], latest=False),
            "embeddings": [item["embedding"] for item in found["data"]],
            "total_duration": nanoseconds(time.monotonic() - began),
            "load_duration": 0,
            "prompt_eval_count": found["usage"]["prompt_tokens"],
        }
        await context.reply(call, Response.json(body, headers=found["headers"]))

    async def older(call: ApiCall) -> None:
        given = await _read_embedding(context, call, OLDER_EMBEDDINGS_PARAMETERS)
        found = await _embed(context, call, given, given.get("prompt", ""), "/api/embeddings")
        vectors = [item["embedding"] for item in found["data"]]
        body: dict[str, Any] = {"embedding": vectors[0] if vectors else []}
        await context.reply(call, Response.json(body, headers=found["headers"]))

    about = "Turn texts into vectors in Ollama's dialect."
    return (
        Route("POST", "/api/embed", embed, about, EMBED_PARAMETERS, errors=OLLAMA, reserves=True, lenient=True),
        Route(
            "POST",
            "/api/embeddings",
            older,
            "The older form of /api/embed, for one text.",
            OLDER_EMBEDDINGS_PARAMETERS,
            errors=OLLAMA,
            reserves=True,
            lenient=True,
        ),
    )


async def _read_embedding(context: EndpointContext, call: ApiCall, table: ParameterTable) -> dict[str, Any]:
    context.admit()
    return with_headers(await context.parameters(call, table), call.headers, table)


async def _embed(
    context: EndpointContext, call: ApiCall, given: Mapping[str, Any], texts: str | list[str], endpoint: str
) -> dict[str, Any]:
    """Return the embeddings in the shape of /v1/embeddings, with the response's `headers`. No text: none."""
    fleet = context.services.fleet
    model = find_name(call.caller, fleet, given.get("model", ""))
    served = find_model(call.caller, fleet, model)
    if not texts:
        await context.charge(call.caller)
        return {"model": served.name, "data": [], "usage": {"prompt_tokens": 0}, "headers": {}}
    with context.count_running():
        asked = {**given, "input": texts}
        cut = asked.pop("truncate", True)  # Ollama's default
        if served.upstream is None:
            asked["truncate"] = cut
        prepared = await prepare_embeddings(served, call.caller, asked, context.config.limits)
        work = run_prepared(context.services, call.caller, prepared, endpoint, model=model)
        call.charged = True
        found, headers = await call.unless_gone(work)
    return {**found, "headers": headers}


# Operations on models


def _administration_routes(context: EndpointContext) -> tuple[Route, ...]:
    fleet = context.services.fleet
    declare = "Declare the model in the server's configuration and restart the server"

    async def pull(call: ApiCall) -> None:
        """Succeed for a model that is served: many clients pull what they are about to use."""
        given = await context.parameters(call, PULL_PARAMETERS)
        name = given.get("model") or given.get("name", "")
        if not name:
            raise invalid_request("Missing required parameter 'model'.", "model", code="missing_required_parameter")
        try:
            find_model(call.caller, fleet, find_name(call.caller, fleet, name))
        except ApiError as error:
            there = ", ".join(sorted(tag_of(each.name) for each in visible_models(call.caller, fleet)))
            raise _not_offered(
                f"This server does not serve '{name[:200]}' and pulls no models. {declare}, or use one of: "
                f"{there or 'none for this API key'}."
            ) from error
        await context.reply(call, Response.json({"status": "success"}))

    def rejected(message: str) -> Callable[[ApiCall], Any]:
        async def handler(call: ApiCall) -> None:
            raise _not_offered(message)

        return handler

    create = rejected(f"This server creates no models. {declare}. Send a system prompt with each request.")
    remove = rejected("This server removes no models. Remove the model from the server's configuration and restart it.")
    alias = rejected("This server copies no models. Add an alias to the model in the server's configuration.")
    push = rejected("This server pushes no models. Its model folders are files of the server's operator.")
    blobs = rejected(f"This server takes no model files. {declare}.")
    return (
        Route(
            "POST",
            "/api/pull",
            pull,
            "Succeed if the model is served. Nothing is pulled.",
            PULL_PARAMETERS,
            listed=False,
            errors=OLLAMA,
            lenient=True,
        ),
        *(
            Route(method, path, handler, "Rejected with 501.", listed=False, errors=OLLAMA)
            for method, path, handler in (
                ("POST", "/api/push", push),
                ("POST", "/api/create", create),
                ("POST", "/api/copy", alias),
                ("DELETE", "/api/delete", remove),
                ("HEAD", "/api/blobs/{digest}", blobs),
                ("POST", "/api/blobs/{digest}", blobs),
            )
        ),
    )


def _not_offered(message: str) -> ApiError:
    return ApiError(message, status=501, code="not_offered")
