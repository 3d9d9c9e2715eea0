"""The parameters of `/v1/pipelines/NAME`, read into a TextRequest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta

from headrace.config import RequestLimits
from headrace.gateway.api_errors import invalid_request
from headrace.gateway.flow.answer_flow import PIPELINE_PREFIX
from headrace.gateway.requests.text_request import TextRequest
from headrace.server.api.chat_completions import ChatInputMessage, build_chat_request
from headrace.server.api.common_parameters import EXTRAS, PIPELINE_FIELDS, SAMPLING, STREAM, PipelineField
from headrace.server.http.body_parameters import Parameter, ParameterTable, parse_body
from headrace.server.http.unknown_fields import STRICT, UnknownFields

_EXTRAS: Final = ("deadline_ms", "surface", "priority", "cache", "degrade", "overflow", "user", "metadata")

PIPELINE_PARAMETERS: Final[ParameterTable] = {
    "input": Parameter(
        "The question. Shorter than `messages` with one user message.", Annotated[str, Meta(min_length=1)]
    ),
    "messages": Parameter(
        "Messages of the conversation; the last user message is the question.",
        Annotated[list[ChatInputMessage], Meta(min_length=1)],
        limit="messages",
    ),
    "max_tokens": Parameter("Maximum tokens of the answer.", Annotated[int, Meta(ge=1)]),
    "temperature": SAMPLING["temperature"],
    "seed": SAMPLING["seed"],
    "stream": STREAM["stream"],
    **PIPELINE_FIELDS,
    **{name: EXTRAS[name] for name in _EXTRAS if name in EXTRAS},
}


def read_pipeline_request(
    name: str, body: bytes, headers: Mapping[str, str], limits: RequestLimits, unknown: UnknownFields = STRICT
) -> TextRequest:
    given = parse_body(body, PIPELINE_PARAMETERS, limits, unknown)
    question: str | None = given.pop("input", None)
    if (question is None) == ("messages" not in given):
        raise invalid_request("Expected either 'input' or 'messages'.", "input")
    if question is not None:
        given["messages"] = [ChatInputMessage("user", question)]
    field = PipelineField(**{key: given.pop(key) for key in PIPELINE_FIELDS if key in given})
    request = build_chat_request({**given, "model": f"{PIPELINE_PREFIX}{name}"}, headers, limits)
    return request.but(pipeline=field.options())
