"""Requests and answers in one form for all dialects: between the dialects and the engine.

Owns TextRequest (one request for text, whatever endpoint it came by), Piece (what is new of one of its answers) and
Choice (an answer, whole). Dialects read bodies into TextRequest and write Pieces and Choices back; the flow between
knows neither.

    body ──dialect.read──▶ TextRequest ──flow──▶ Piece, Piece, ... ──dialect.write──▶ server-sent events, or one body
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from headrace.config.shaping_section import DegradeMode
from headrace.engine.interface.request import GenerationParams

FinishReason = Literal["stop", "length", "tool_calls", "deadline"]
ToolChoiceMode = Literal["auto", "none", "required"]


class SourceText(msgspec.Struct, frozen=True):
    id: str
    text: str
    score: float | None = None  # the higher, the better


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # JSON schema of its arguments; None: any object
    strict: bool = False  # arguments are held to the schema while they are written


class PipelineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a request for a pipeline says beside its messages."""

    filters: Mapping[str, Any] = {}  # metadata that passages must have, where the pipeline lets clients filter
    approvals: tuple[str, ...] = ()  # tokens of tool calls that may take effect
    detail: bool = False  # the details of an answer that was given first


class TextRequest(GenerationParams, frozen=True, kw_only=True):
    """A request for text, with either `messages` or `prompts`. Its generation fields are those of GenerationParams."""

    model: str
    messages: list[dict[str, Any]] | None = None  # in the shape that chat templates take; contents are texts
    prompts: list[str | list[int]] | None = None  # with max_tokens 0, they are measured and nothing is generated
    tools: tuple[Tool, ...] = ()
    choosing: ToolChoiceMode = "auto"
    only_tool: str | None = None  # with choosing "required": this one
    allowed_tools: tuple[str, ...] | None = None  # the model is shown all tools and may call these; None: all
    parallel_calls: bool = True
    grammar_of: str = "grammar"  # the parameter that asks for it, for errors
    template: Mapping[str, Any] = {}  # further values for the chat template
    template_hints: Mapping[str, Any] = {}  # the same, but dropped where they cannot be passed on
    think: bool | None = None  # whether the model is to reason first; None: as it likes
    show_reasoning: bool = True  # False: the reasoning is left out of the answer
    prediction: str = ""  # text that the answer may repeat: draft tokens, where the engine speculates
    begun: str = ""  # text of the answer that the client has already: the model continues after it
    sources: tuple[SourceText, ...] = ()  # that the answer is to be made from
    overflow: Literal["refuse", "drop", "summarise"] | None = None  # None: as the configuration has it

    seeded: bool = False  # the client chose the seed
    echo: bool = False  # the prompt's text before the answer's

    stream: bool = False
    include_usage: bool = False  # with a stream: a last chunk with the usage
    continuous_usage: bool = False  # and every chunk has the usage so far

    deadline_s: float | None = None  # from the request's arrival
    profile: str = "standard"
    cache: str = "on"  # "off": nothing of this prompt is read from the prefix cache of others of the tenant
    degrade: DegradeMode | None = None  # what may become of the answer under pressure; None: all that is declared
    rewrite: str | None = None  # the rewrite of a sampled answer; "none": no rewrite. None: the surface's
    user: str | None = None
    metadata: Mapping[str, str] = {}
    pipeline: PipelineOptions = PipelineOptions()

    @property
    def template_values(self) -> dict[str, Any]:
        """All variables for the chat template of a model that this server runs, or whose tokenizer it has."""
        values = {**self.template_hints, **self.template}
        if self.think is not None:
            values.setdefault("enable_thinking", self.think)
        return values

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may call, if it may call any."""
        allowed = self.allowed_tools
        return self.tools if allowed is None else tuple(tool for tool in self.tools if tool.name in allowed)

    def but(self, **changes: Any) -> TextRequest:
        """The same but for these fields."""
        return msgspec.structs.replace(self, **changes)


class ToolCallDelta(msgspec.Struct):
    """The new part of a tool call. The first delta of a call has its id and name; the others have arguments only."""

    index: int  # among the choice's calls
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class TokenLogprob(msgspec.Struct):
    text: str
    bytes: bytes
    logprob: float | None  # None for the first token of a prompt
    top: list[tuple[str, bytes, float]]  # likeliest tokens: text, bytes, log-probability
    shown: str = ""  # its part of the answer's text: none where it is hidden, or only a part of a character


class TokenUsage(msgspec.Struct):
    """The tokens of one choice."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # of the prompt
    reasoning_tokens: int = 0  # of the output
    drafted: int = 0  # tokens proposed by speculation, and how many of them held
    accepted: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_steps: int = 0  # of the engine, up to the first token and from then on
    decode_steps: int = 0


class ChoiceDelta(msgspec.Struct):
    """The new part of one choice. Exactly one piece of a choice, its last, has `finish`."""

    index: int  # of the choice: prompt by prompt, n for each
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = []
    logprobs: list[TokenLogprob] | None = None  # of the tokens whose text is certain by now
    finish: FinishReason | None = None
    stop: str | None = None  # the stop string that ended it
    half_call: bool = False  # with `finish`: the last call is not complete
    usage: TokenUsage | None = None  # with `finish`
    tokens: int = 0  # of the answer, that came with it

    def cuts(self, arguments: str) -> bool:
        """Return whether the answer ends here in the midst of its last call, which has these arguments."""
        is_cut = self.half_call or self.finish in ("length", "deadline")
        return is_cut and not _is_json(arguments)


class RestartDelta(ChoiceDelta):
    """Marks that a choice begins anew, by another variant: what came of it before does not count."""

    variant: str = ""
    why: str = ""


class NoteDelta(ChoiceDelta):
    """An event beside the text: progress, sources, a citation, a sentence. Dialects without a place for it skip it."""

    event: str = ""
    data: Any = None


# Takes a delta. False asks the sender to pause.
TakeDelta = Callable[[ChoiceDelta], bool]


class ToolCall(msgspec.Struct):
    id: str
    name: str
    arguments: str  # JSON as the model wrote it


class Choice(msgspec.Struct):
    """An answer, whole."""

    index: int
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = []
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason = "stop"
    stop: str | None = None
    usage: TokenUsage = msgspec.field(default_factory=TokenUsage)

    def add(self, piece: ChoiceDelta) -> None:
        self.content += piece.content
        self.reasoning += piece.reasoning
        for delta in piece.calls:
            if delta.index == len(self.calls):
                self.calls.append(ToolCall(delta.id or "", delta.name or "", ""))
            self.calls[delta.index].arguments += delta.arguments
        if piece.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *piece.logprobs]
        if piece.finish is not None:
            self.finish, self.stop = piece.finish, piece.stop
            self.usage = piece.usage or self.usage
            if self.calls and piece.cuts(self.calls[-1].arguments):
                self.calls.pop()  # clients parse arguments


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    except RecursionError:  # nested too deeply to check
        pass
    return True


def combine_usages(usages: list[TokenUsage], n: int) -> TokenUsage:
    """Add up the usage of all choices. A prompt counts once, however many answers it has."""
    if len(usages) == 1:
        return msgspec.structs.replace(usages[0])
    result = TokenUsage()
    for place, usage in enumerate(usages):
        if place % n == 0:
            result.prompt_tokens += usage.prompt_tokens
            result.cached_tokens += usage.cached_tokens
        result.output_tokens += usage.output_tokens
        result.reasoning_tokens += usage.reasoning_tokens
        result.drafted += usage.drafted
        result.accepted += usage.accepted
        result.queue_s = max(result.queue_s, usage.queue_s)
        result.prefill_s = max(result.prefill_s, usage.prefill_s)
        result.decode_s = max(result.decode_s, usage.decode_s)
        result.prefill_steps = max(result.prefill_steps, usage.prefill_steps)
        result.decode_steps = max(result.decode_steps, usage.decode_steps)
    return result
