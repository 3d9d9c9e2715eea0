"""The parameters of `/v1/responses`: OpenAI's types and the parameter table.

Does not check how parameters fit together; responses.py does.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from headrace.server.api.common_parameters import EXTRAS, MODEL, REASONING, SAMPLING, STREAM, TRUNCATION
from headrace.server.api.foreign_parameters import with_foreign
from headrace.server.api.response_tools import ResponseToolChoice
from headrace.server.http.body_parameters import Parameter, ParameterTable

LOGPROBS: Final = "message.output_text.logprobs"


class PlainTextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    pass


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True, omit_defaults=True):
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseTextConfig(Struct, forbid_unknown_fields=True):
    format: PlainTextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Struct, forbid_unknown_fields=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class ConversationReference(Struct, forbid_unknown_fields=True):
    id: str


class ResponseStreamOptions(Struct, forbid_unknown_fields=True):
    include_obfuscation: bool = False


_PARAMETERS: Final[ParameterTable] = {
    "model": MODEL,
    "input": Parameter(
        "A text, or a list of items: message, function_call, function_call_output, custom_tool_call, "
        "custom_tool_call_output, reasoning.",
        str | list[dict[str, Any]],
        required=True,
        limit="messages",
    ),
    "instructions": Parameter("System prompt. Applies to this response only.", str),
    "previous_response_id": Parameter("Id of the stored response to continue.", str),
    "conversation": Parameter(
        "Id of the conversation to continue. Its items come before `input`; `input` and the answer are added to it.",
        str | ConversationReference,
    ),
    "background": Parameter(
        "Replies at once and runs the request in the background. Requires `store`. Retrieve the response to poll it, "
        "or stream it; /v1/responses/{response}/cancel ends it.",
        bool,
    ),
    "store": Parameter("Stores the response. Default: true, if the server stores responses at all.", bool),
    "max_output_tokens": Parameter("Maximum tokens of the answer, including reasoning.", Annotated[int, Meta(ge=1)]),
    **{name: each for name, each in SAMPLING.items() if name != "n"},
    "top_logprobs": Parameter("Number of most likely tokens to return at each position.", Annotated[int, Meta(ge=0)]),
    "include": Parameter(
        f"{LOGPROBS}: returns the log-probabilities of the text's tokens. reasoning.encrypted_content is accepted; "
        "reasoning comes as plain text in the content of its items, and you send it back unchanged.",
        list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
    ),
    "tools": Parameter(
        "Tools that the model may call: functions, namespaces of functions, and custom tools, whose input is text. "
        "A custom tool's grammar is shown to the model, and not enforced. Tools that OpenAI runs itself are left out.",
        list[Any],
        limit="tools",
    ),
    "tool_choice": Parameter(
        "auto, none, required, a function or custom tool that the model must call, or allowed_tools: a subset of the "
        "tools.",
        ResponseToolChoice,
    ),
    "parallel_tool_calls": Parameter("Allows several calls in one answer.", bool),
    "text": Parameter(
        "format: text, a JSON object, or JSON that matches a schema. verbosity: passed to the chat template.",
        ResponseTextConfig,
    ),
    "reasoning": Parameter(
        "effort: none makes a model answer without reasoning; other values are passed to the chat template as "
        "reasoning_effort. summary is accepted; reasoning comes in full, not summarised.",
        ReasoningConfig,
    ),
    "stream": STREAM["stream"],
    "stream_options": Parameter("include_obfuscation is accepted; events are not padded.", ResponseStreamOptions),
    **{name: each for name, each in EXTRAS.items() if name not in SAMPLING},
    **REASONING,
    "truncation": TRUNCATION,
    "background_options": Parameter("", unsupported="background responses have no options here"),
    "context_management": Parameter(
        "", unsupported="the server takes the conversation as you send it", no_op_values=([],), hint=True
    ),
    "max_tool_calls": Parameter("", unsupported="the server runs no tools itself", hint=True),
    "prompt": Parameter("", unsupported="this server stores no prompts. Use `instructions`"),
    "image": Parameter("", unsupported="models read text only"),
    "access_programs": Parameter("", unsupported="this server has no access programs", no_op_values=({},)),
}
RESPONSE_PARAMETERS: Final = with_foreign(_PARAMETERS)
