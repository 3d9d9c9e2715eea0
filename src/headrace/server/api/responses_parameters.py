"""The parameters of `/v1/responses`: OpenAI's types and the parameter table.

Does not check how parameters fit together; responses.py does.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from headrace.server.api.common_parameters import EXTRAS, HOSTED, MODEL, SAMPLING, STREAM
from headrace.server.api.tool_parameters import ToolName
from headrace.server.http.body_parameters import Parameter, ParameterTable

LOGPROBS: Final = "message.output_text.logprobs"


class ResponseTool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoiceFunction(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    name: str


class ResponseToolChoiceAllowed(Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[ResponseToolChoiceFunction]


ResponseToolChoice = Literal["auto", "none", "required"] | ResponseToolChoiceFunction | ResponseToolChoiceAllowed


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
    verbosity: Literal["medium"] | None = None  # no-op: the models served here have no such setting


class ReasoningConfig(Struct, forbid_unknown_fields=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Struct, forbid_unknown_fields=True):
    include_obfuscation: bool = False


RESPONSE_PARAMETERS: Final[ParameterTable] = {
    "model": MODEL,
    "input": Parameter(
        "A text, or a list of items: message, function_call, function_call_output, reasoning.",
        str | list[dict[str, Any]],
        required=True,
    ),
    "instructions": Parameter("System prompt. Applies to this response only.", str),
    "previous_response_id": Parameter("Id of the stored response to continue.", str),
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
        "Functions that the model may call. Only those with strict: true are constrained to their schema.", list[Any]
    ),
    "tool_choice": Parameter(
        "auto, none, required, a function that the model must call, or allowed_tools: a subset of the tools.",
        ResponseToolChoice,
    ),
    "parallel_tool_calls": Parameter("Allows several calls in one answer.", bool),
    "text": Parameter("format: text, a JSON object, or JSON that matches a schema.", ResponseTextConfig),
    "reasoning": Parameter(
        "effort: none makes a model answer without reasoning; other values are passed to the chat template as "
        "reasoning_effort. summary is accepted; reasoning comes in full, not summarised.",
        ReasoningConfig,
    ),
    "stream": STREAM["stream"],
    "stream_options": Parameter("include_obfuscation is accepted; events are not padded.", ResponseStreamOptions),
    **{name: each for name, each in EXTRAS.items() if name not in SAMPLING},
    "service_tier": HOSTED["service_tier"],
    "prompt_cache_key": HOSTED["prompt_cache_key"],
    "prompt_cache_retention": HOSTED["prompt_cache_retention"],
    "prompt_cache_options": Parameter(
        "", unsupported="the prefix cache finds common prefixes without them", no_op_values=({}, {"mode": "implicit"})
    ),
    "moderation": HOSTED["moderation"],
    "background": Parameter("", unsupported="use /v1/batches", no_op_values=(False,)),
    "background_options": Parameter("", unsupported="use /v1/batches"),
    "conversation": Parameter("", unsupported="use `previous_response_id`"),
    "context_management": Parameter(
        "", unsupported="the server takes the conversation as you send it", no_op_values=([],)
    ),
    "truncation": Parameter(
        "",
        unsupported="use `overflow` to say what to do with a conversation that is too long",
        no_op_values=("disabled",),
    ),
    "max_tool_calls": Parameter("", unsupported="the server runs no tools itself"),
    "prompt": Parameter("", unsupported="this server stores no prompts. Use `instructions`"),
    "image": Parameter("", unsupported="models read text only"),
    "access_programs": Parameter("", unsupported="this server has no access programs", no_op_values=({},)),
}
