"""The methods of headrace.v1.Headrace as routes of an App, which identifies callers, and counts and logs the calls."""

from __future__ import annotations

import base64
from typing import Any, Final

import msgspec
import numpy as np

from headrace.config import RequestLimits
from headrace.gateway.api_errors import invalid_request
from headrace.server.api.metered_endpoint import evaluate
from headrace.server.api.model_endpoints import model_entries
from headrace.server.api.text_endpoint import text_route
from headrace.server.api.vectors import EMBEDDINGS_PARAMETERS
from headrace.server.endpoint_context import EndpointContext
from headrace.server.grpc.frames import message_frame
from headrace.server.grpc.generate import GENERATE_DIALECT, merge_parameters
from headrace.server.grpc.messages import (
    SERVICE,
    DecodeError,
    EmbedRequest,
    EmbedResponse,
    ListModelsResponse,
    plain_struct,
)
from headrace.server.grpc.messages import fill as fill_struct
from headrace.server.http.api_call import ApiCall, Response
from headrace.server.http.body_parameters import parse_body
from headrace.server.http.route_table import Route
from headrace.server.http.unknown_fields import UnknownFields

GENERATE: Final = f"/{SERVICE}/Generate"
EMBED: Final = f"/{SERVICE}/Embed"
LIST_MODELS: Final = f"/{SERVICE}/ListModels"


def routes(context: EndpointContext) -> tuple[Route, ...]:
    limits = context.config.limits

    async def embed(call: ApiCall) -> None:
        context.admit()
        given = await context.read(call, lambda body: _read_embed(body, limits, call.unknown))
        result, headers = await evaluate(context, call, "/v1/embeddings", given)
        await call.reply(_response(_embedded(result), headers))

    async def list_models(call: ApiCall) -> None:
        listed = ListModelsResponse()
        for entry in model_entries(context, call.caller):
            model = listed.models.add(id=entry["id"], alias_of=entry.get("alias_of", ""))
            fill_struct(model.details, entry)
        await call.reply(_response(listed, {}))

    return (
        text_route(context, GENERATE, GENERATE_DIALECT, "Generate text."),
        Route("POST", EMBED, embed, "Turn texts into vectors.", reserves=True, lenient=True),
        Route("POST", LIST_MODELS, list_models, "List the models and aliases that the key may use."),
    )


def _read_embed(body: bytes, limits: RequestLimits, unknown: UnknownFields) -> dict[str, Any]:
    try:
        message = EmbedRequest.FromString(body)
    except DecodeError:
        raise invalid_request("The message is not a headrace.v1.EmbedRequest.", code="invalid_message") from None
    given: dict[str, Any] = {"input": list(message.texts), "encoding_format": "base64"}
    if not message.texts:
        raise invalid_request("'texts' is empty. Expected at least one text.", "texts")
    if message.model:
        given["model"] = message.model
    for name in ("dimensions", "input_type"):
        if message.HasField(name):
            given[name] = getattr(message, name)
    given = merge_parameters(given, plain_struct(message.parameters), ("input", "encoding_format"))
    return parse_body(msgspec.json.encode(given), EMBEDDINGS_PARAMETERS, limits, unknown)


def _embedded(result: dict[str, Any]) -> Any:
    response = EmbedResponse(model=result["model"])
    for entry in result["data"]:
        vector = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
        response.embeddings.add(values=vector.tolist())
    usage = result["usage"]
    response.usage.prompt_tokens = usage["prompt_tokens"]
    response.usage.cached_tokens = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return response


def _response(message: Any, headers: dict[str, str]) -> Response:
    return Response(message_frame(message.SerializeToString()), type=b"application/grpc", headers=headers)
