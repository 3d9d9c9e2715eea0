"""The bodies that the OpenVINO server takes, and the settings of OpenVINO GenAI that they become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.errors import RequestError
from headrace.server.openvino_server.pipeline_thread import last_line

_MOST_NEW = 32_768  # tokens of an answer that sets no bound


class OpenVinoStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False


class JsonSchema(msgspec.Struct, frozen=True):
    schema: dict[str, Any]


class ResponseFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class RequestBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str = ""
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    stream: bool = False
    stream_options: OpenVinoStreamOptions = OpenVinoStreamOptions()
    max_tokens: Annotated[int, Meta(ge=1)] = _MOST_NEW
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    temperature: Annotated[float, Meta(ge=0.0)] = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None


def read_body(data: bytes, *, chat: bool) -> RequestBody:
    """Decode and check a body. RequestError says what is wrong with it."""
    try:
        body = msgspec.json.decode(data, type=RequestBody)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"The body is not a request: {error}.") from None
    expected = "messages" if chat else "prompt"
    if not getattr(body, expected):
        raise RequestError(f"Expected '{expected}' in the body.", parameter=expected)
    given = body.response_format
    if given is not None and given.type == "json_schema" and given.json_schema is None:
        raise RequestError("Expected 'json_schema' in 'response_format'.", parameter="response_format")
    return body


def generation_config(genai: Any, body: RequestBody, room: int | None) -> Any:
    """Return OpenVINO GenAI's settings for a body. `room`: tokens of the context behind the prompt; None: unbounded."""
    config = genai.GenerationConfig()
    config.max_new_tokens = body.max_tokens if room is None else min(body.max_tokens, room)
    config.min_new_tokens = min(body.min_tokens, config.max_new_tokens)
    config.ignore_eos = body.ignore_eos
    config.do_sample = body.temperature > 0.0
    if config.do_sample:
        config.temperature = body.temperature
        config.top_p = body.top_p
        config.rng_seed = body.seed
        if body.top_k > 0:
            config.top_k = body.top_k
        if body.min_p > 0.0:
            config.min_p = body.min_p
    config.repetition_penalty = body.repetition_penalty
    config.frequency_penalty = body.frequency_penalty
    config.presence_penalty = body.presence_penalty
    stops: Sequence[str] = [body.stop] if isinstance(body.stop, str) else body.stop
    if stops:
        config.stop_strings = set(stops)
    if body.stop_token_ids:
        config.stop_token_ids = set(config.stop_token_ids) | set(body.stop_token_ids)
    schema = _schema(body.response_format)
    if schema is not None:
        config.structured_output_config = genai.StructuredOutputConfig()
        config.structured_output_config.json_schema = schema
    try:
        config.validate()
    except RuntimeError as error:
        raise RequestError(f"OpenVINO GenAI rejects the settings: {last_line(error)}") from None
    return config


def _schema(given: ResponseFormat | None) -> str | None:
    if given is None or given.type == "text":
        return None
    schema: dict[str, Any] = {"type": "object"} if given.json_schema is None else given.json_schema.schema
    return msgspec.json.encode(schema).decode()
