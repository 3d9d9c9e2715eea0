"""The parameters of `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's types and the two parameter tables.

Does not check how parameters fit together; messages.py does.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from headrace.server.api.common_parameters import EXTRAS, MODEL, REASONING, SAMPLING, STREAM, Stop
from headrace.server.api.foreign_parameters import with_foreign
from headrace.server.api.tool_parameters import ToolName
from headrace.server.http.body_parameters import Parameter, ParameterTable

_KEEP_THINKING: Final = {"type": "clear_thinking_20251015", "keep": "all"}  # the edit that clears nothing
_NO_EDITS: Final = "the server takes the conversation as you send it"


class TextBlock(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str
    cache_control: Any = None  # ignored in every block: the prefix cache works without it
    citations: Any = None


class ToolUseBlock(Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None


class ThinkingBlock(Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking", forbid_unknown_fields=True):
    data: str = ""  # encrypted by another service, so the model does not see it


class ImageBlock(Struct, tag_field="type", tag="image", forbid_unknown_fields=True):
    source: Any = None
    cache_control: Any = None


class DocumentBlock(Struct, tag_field="type", tag="document"):
    pass


class SearchResultBlock(Struct, tag_field="type", tag="search_result"):
    pass


class ToolReferenceBlock(Struct, tag_field="type", tag="tool_reference", forbid_unknown_fields=True):
    """A tool that the client's search found. The model has all tools anyway."""

    tool_name: str


ResultBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock


class ToolResultBlock(Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None


ContentBlock = (
    TextBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
)


class AnthropicMessage(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(Struct, forbid_unknown_fields=True):
    name: ToolName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as they are generated
    cache_control: Any = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    input_examples: list[Any] | None = None


class AnthropicToolChoiceAuto(Struct, tag_field="type", tag="auto", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool = False


class AnthropicToolChoiceAny(Struct, tag_field="type", tag="any", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool = False


class AnthropicToolChoiceTool(Struct, tag_field="type", tag="tool", forbid_unknown_fields=True):
    name: str
    disable_parallel_tool_use: bool = False


class AnthropicToolChoiceNone(Struct, tag_field="type", tag="none", forbid_unknown_fields=True):
    pass


AnthropicToolChoice = (
    AnthropicToolChoiceAuto | AnthropicToolChoiceAny | AnthropicToolChoiceTool | AnthropicToolChoiceNone
)
ThinkingDisplay = Literal["summarized", "omitted"]  # summarized: in full


class ThinkingEnabled(Struct, tag_field="type", tag="enabled", forbid_unknown_fields=True):
    budget_tokens: Annotated[int, Meta(ge=1)]
    display: ThinkingDisplay | None = None


class ThinkingAdaptive(Struct, tag_field="type", tag="adaptive", forbid_unknown_fields=True):
    display: ThinkingDisplay | None = None


class ThinkingDisabled(Struct, tag_field="type", tag="disabled", forbid_unknown_fields=True):
    pass


class OutputFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class AnthropicMetadata(Struct, forbid_unknown_fields=True):
    user_id: Annotated[str, Meta(max_length=512)] | None = None


# Parameters that decide the prompt. `/v1/messages/count_tokens` takes these alone.
_PROMPT_PARAMETERS: Final[ParameterTable] = {
    "model": MODEL,
    "messages": Parameter(
        "Messages of the conversation.",
        Annotated[list[AnthropicMessage], Meta(min_length=1)],
        required=True,
        limit="messages",
    ),
    "system": Parameter("System prompt.", str | list[TextBlock]),
    "tools": Parameter(
        "Tools that the model may call: name, description and input_schema.", list[dict[str, Any]], limit="tools"
    ),
    "tool_choice": Parameter("auto, any, tool (with its name) or none.", AnthropicToolChoice),
    "thinking": Parameter(
        "enabled, disabled or adaptive, for models that can reason first. Default: disabled. The server does not "
        "enforce budget_tokens: reasoning counts toward max_tokens.",
        ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled,
    ),
    "output_config": Parameter(
        "format: constrains the answer to a JSON schema. effort: passed to the chat template as reasoning_effort.",
        OutputConfig,
    ),
    "output_format": Parameter("Older name of output_config.format.", OutputFormat),
    "cache_control": Parameter("Accepted and ignored: the prefix cache finds common prefixes without it.", Any),
    "speed": Parameter("fast: the same as profile: fast.", Literal["standard", "fast"]),
    "chat_template_kwargs": EXTRAS["chat_template_kwargs"],
    "container": Parameter("", unsupported="the server runs no code"),
    "mcp_servers": Parameter(
        "", unsupported="the server calls no tools itself. Call them in the client", no_op_values=([],)
    ),
    "context_management": Parameter(
        "", unsupported=_NO_EDITS, no_op_values=({}, {"edits": []}, {"edits": [_KEEP_THINKING]}), hint=True
    ),
    "compaction": Parameter("", unsupported=_NO_EDITS, hint=True),
    "user_profile_id": Parameter("", unsupported="use `metadata.user_id`", hint=True),
    # As other open servers have it.
    **{name: each for name, each in REASONING.items() if name != "thinking"},
}

_MESSAGE_PARAMETERS: Final[ParameterTable] = {
    **_PROMPT_PARAMETERS,
    "max_tokens": Parameter(
        "Maximum tokens of the answer, including thinking.", Annotated[int, Meta(ge=1)], required=True
    ),
    "stop_sequences": Parameter(
        "Strings that end the answer. The answer does not include them.", list[Stop], limit="stop"
    ),
    "stream": STREAM["stream"],
    "temperature": SAMPLING["temperature"],
    "top_p": SAMPLING["top_p"],
    "metadata": Parameter("user_id: your end user's id. It appears in the log.", AnthropicMetadata),
    "service_tier": Parameter(
        "", unsupported="use `priority` and `surface`", no_op_values=("auto", "standard_only"), hint=True
    ),
    "inference_geo": Parameter("", unsupported="the server answers where it runs"),
    "diagnostics": Parameter("", unsupported="this server has no diagnostics", hint=True),
    "fallbacks": Parameter("", unsupported="the server operator configures fallbacks"),
    "fallback_credit_token": Parameter("", unsupported="this server has no credits"),
    "billing_policy": Parameter("", unsupported="this server has no billing", hint=True),
    "thread": Parameter("", unsupported="this server keeps no threads. Send the conversation in `messages`"),
    # Headrace's extensions.
    **{name: SAMPLING[name] for name in ("seed", "frequency_penalty", "presence_penalty", "logit_bias")},
    **{name: each for name, each in EXTRAS.items() if name not in ("user", "safety_identifier", "metadata")},
}

MESSAGE_PARAMETERS: Final = with_foreign(_MESSAGE_PARAMETERS)
_NOT_COUNTED: Final = Parameter("", unsupported="it is no part of a prompt", hint=True)
COUNT_TOKENS_PARAMETERS: Final[ParameterTable] = {
    **_PROMPT_PARAMETERS,
    **{name: _NOT_COUNTED for name in MESSAGE_PARAMETERS if name not in _PROMPT_PARAMETERS},
}
