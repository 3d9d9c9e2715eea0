"""Parameters that several endpoints share: sampling, streaming, reasoning and Headrace's extensions.

Holds their tables and converts them to the engine's types. Seven extensions may also come as `x-headrace-*` headers,
for clients that cannot add fields to a body; the body takes precedence. Does not know any dialect.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from headrace.config import RequestLimits
from headrace.config.shaping_section import DegradeMode
from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.api_errors import invalid_request
from headrace.gateway.degradation.shaping.sources import SourceField, parse_sources
from headrace.gateway.flow.answer_flow import PIPELINE_PREFIX
from headrace.gateway.requests.text_request import PipelineOptions
from headrace.server.http.body_parameters import (
    Parameter,
    ParameterTable,
    invalid_value,
    unsupported_parameter,
)
from headrace.server.http.unknown_fields import STRICT_HEADER, unknown_parameter
from headrace.surfaces import MOST_PRIORITY, SURFACES

Surface = Literal[tuple(SURFACES)]  # pyright: ignore[reportInvalidTypeForm]
Milliseconds = Annotated[float, Meta(gt=0, le=86_400_000)]
RewriteName = Annotated[str, Meta(min_length=1, max_length=64)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
MOST_SEED: Final = 2**63 - 1
MOST_SOURCES: Final = 256  # in one request, before the best of them are selected
MOST_BIASES: Final = 1024  # tokens with a logit bias
MOST_STOP_IDS: Final = 1024
MOST_GUIDED_CHOICES: Final = 1024
MOST_APPROVALS: Final = 32

MODEL: Final = Parameter("Model to use. Default: the configured model.", str)

SAMPLING: Final = {
    "temperature": Parameter(
        "Sampling temperature. 0 always takes the most likely token.", Annotated[float, Meta(ge=0, le=2)]
    ),
    "top_p": Parameter(
        "Samples from the most likely tokens whose probabilities add up to this value.",
        Annotated[float, Meta(ge=0, le=1)],
    ),
    "n": Parameter("Number of choices to generate for each prompt.", Annotated[int, Meta(ge=1)]),
    "seed": Parameter(
        "Seed for sampling. The same seed gives the same answer.", Annotated[int, Meta(ge=-MOST_SEED - 1, le=MOST_SEED)]
    ),
    "stop": Parameter("Strings that end an answer. The answer does not include them.", Stop | list[Stop], limit="stop"),
    "frequency_penalty": Parameter(
        "Subtracted from a token's logit for each time it occurs in the answer.", Annotated[float, Meta(ge=-2, le=2)]
    ),
    "presence_penalty": Parameter(
        "Subtracted from a token's logit once it occurs in the answer.", Annotated[float, Meta(ge=-2, le=2)]
    ),
    "logit_bias": Parameter(
        "Values to add to the logits of tokens, by token id.",
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MOST_BIASES)],
    ),
}

STREAM: Final = {
    "stream": Parameter("Sends the answer as server-sent events while it is generated.", bool),
    "stream_options": Parameter(
        "include_usage: sends a last chunk with the usage.", Annotated[dict[str, bool], Meta(max_length=16)]
    ),
}


class PipelineField(msgspec.Struct, forbid_unknown_fields=True):
    """What a request for a pipeline says beside its messages."""

    filters: dict[str, Any] | None = None
    approvals: Annotated[list[Annotated[str, Meta(max_length=1024)]], Meta(max_length=MOST_APPROVALS)] | None = None
    detail: bool | None = None

    def options(self) -> PipelineOptions:
        return PipelineOptions(
            filters=self.filters or {}, approvals=tuple(self.approvals or ()), detail=bool(self.detail)
        )


PIPELINE_FIELDS: Final = {
    "filters": Parameter("Metadata that passages must have, where the pipeline lets clients filter.", dict[str, Any]),
    "approvals": Parameter(
        "Tokens of tool calls that may take effect, from an earlier answer's `headrace.pipeline.approvals`.",
        Annotated[list[Annotated[str, Meta(max_length=1024)]], Meta(max_length=MOST_APPROVALS)],
    ),
    "detail": Parameter("The details, where the pipeline gives a short answer first.", bool),
}

# Headrace's extensions, and those of other open servers.
EXTRAS: Final = {
    "top_k": Parameter("Samples from this many most likely tokens. 0 or -1: all tokens.", Annotated[int, Meta(ge=-1)]),
    "min_p": Parameter(
        "Samples from tokens at least this probable relative to the most likely one.",
        Annotated[float, Meta(ge=0, le=1)],
    ),
    "repetition_penalty": Parameter(
        "Values above 1 make tokens that already occurred less likely.", Annotated[float, Meta(gt=0, le=100)]
    ),
    "min_tokens": Parameter("Minimum tokens in an answer.", Annotated[int, Meta(ge=0)]),
    "stop_token_ids": Parameter(
        "Token ids that end an answer.", Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MOST_STOP_IDS)]
    ),
    "ignore_eos": Parameter("Continues past the model's end-of-sequence token.", bool),
    "chat_template_kwargs": Parameter("Additional variables for the chat template.", dict[str, Any]),
    "guided_regex": Parameter("Constrains the answer to a regular expression.", str),
    "guided_grammar": Parameter("Constrains the answer to a Lark grammar.", str),
    "guided_choice": Parameter(
        "Constrains the answer to one of these strings.", Annotated[list[str], Meta(max_length=MOST_GUIDED_CHOICES)]
    ),
    "guided_json": Parameter("Constrains the answer to a JSON schema.", dict[str, Any] | str),
    "deadline_ms": Parameter(
        "Time limit in milliseconds from the request's arrival. The answer ends there with what was generated.",
        Milliseconds,
    ),
    "surface": Parameter(f"Product surface: {', '.join(SURFACES)}.", Surface),
    "profile": Parameter("standard, fast or golden.", Literal["standard", "fast", "golden"]),
    "priority": Parameter(
        "Requests with a higher priority run first within a tenant.",
        Annotated[int, Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)],
    ),
    "cache_prompt": Parameter("false: the same as cache: off.", bool),
    "cache": Parameter("off: computes the prompt anew and neither reads nor fills a cache.", Literal["on", "off"]),
    "speculate": Parameter("false: no draft tokens. The answer is the same, and its tokens come one at a time.", bool),
    "degrade": Parameter("Degradation allowed under pressure: on, off, or a list of steps.", DegradeMode),
    "rewrite": Parameter(
        "Name of a declared rewrite: the sampled answer is rewritten at temperature 0. none: it is not.", RewriteName
    ),
    "pipeline": Parameter(
        "For models named pipeline/NAME: `filters`, `approvals` and `detail`, as of /v1/pipelines/NAME.", PipelineField
    ),
    "sources": Parameter(
        "Texts to base the answer on, each with an id.", Annotated[list[SourceField], Meta(max_length=MOST_SOURCES)]
    ),
    "overflow": Parameter(
        "What to do with a conversation that is too long: refuse, drop or summarise.",
        Literal["refuse", "drop", "summarise"],
    ),
    "user": Parameter("Your end user's id. It appears in the log.", Annotated[str, Meta(max_length=512)]),
    "safety_identifier": Parameter("Newer name of user.", Annotated[str, Meta(max_length=512)]),
    "metadata": Parameter("Pairs of strings that the answer repeats.", Annotated[dict[str, str], Meta(max_length=16)]),
}
# OpenAI's name, of the endpoints whose conversations can be shortened.
TRUNCATION: Final = Parameter(
    "auto: drops the oldest messages of a conversation that is too long, as overflow: drop does.",
    Literal["auto", "disabled"],
)
_EXTRA_NAMES: Final = frozenset({*EXTRAS, "seed", "truncation"})  # that `extra_fields` reads
HEADER_PREFIX: Final = "x-headrace-"
_HEADERS: Final = {
    HEADER_PREFIX + name.replace("_", "-"): name
    for name in ("deadline_ms", "surface", "profile", "priority", "cache", "degrade", "speculate")
}
_RESERVED_TEMPLATE_NAMES: Final = ("messages", "tools", "add_generation_prompt")  # the server sets these itself

_GUIDES: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


# What other open servers and hosted services call the model's reasoning, for /v1/chat/completions.
class ThinkingConfig(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = None  # not enforced: reasoning counts toward max_tokens


REASONING: Final = {
    "reasoning_effort": Parameter(
        "none: a model that can reason answers without reasoning. Any other value: it reasons first, and its chat "
        "template gets the value.",
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    ),
    "thinking": Parameter("type: enabled or disabled. Whether a model that can reason does so.", ThinkingConfig),
    "think": Parameter(
        "Whether a model that can reason does so, or how much: low, medium or high.",
        bool | Literal["low", "medium", "high"],
    ),
    "enable_thinking": Parameter("Whether a model that can reason does so.", bool),
    "include_reasoning": Parameter("false: leaves the reasoning out of the answer.", bool),
    "verbosity": Parameter(
        "How long answers should be. The chat template gets the value; most models ignore it.",
        Literal["low", "medium", "high"],
    ),
}


def read_thinking(given: Mapping[str, Any]) -> tuple[bool | None, dict[str, Any]]:
    """Return whether the model reasons first, None if it decides itself, and hints for the chat template."""
    hints: dict[str, Any] = {}
    effort = given.get("reasoning_effort")
    think: bool | None = None if effort is None else effort != "none"
    thinking: ThinkingConfig | None = given.get("thinking")
    if think is None and thinking is not None and thinking.type in ("enabled", "disabled"):
        think = thinking.type == "enabled"
    level = given.get("think", given.get("enable_thinking"))
    if think is None and level is not None:
        think = level is not False
        effort = level if isinstance(level, str) else None
    if effort not in (None, "none"):
        hints["reasoning_effort"] = effort
    if "verbosity" in given:
        hints["verbosity"] = given["verbosity"]
    return think, hints


def check_count(name: str, count: int, most: int, *, least: int = 1) -> int:
    if not least <= count <= most:
        raise invalid_request(f"'{name}' must be between {least} and {most}, not {count}.", name)
    return count


def check_stream_options(given: Mapping[str, Any]) -> None:
    if "stream_options" in given and not given.get("stream"):
        raise invalid_request("'stream_options' requires `stream: true`.", "stream_options")


def build_sampling(given: Mapping[str, Any], *, logprobs: int | None) -> SamplingParams:
    """Return how tokens are chosen. A pipeline answers from sources, so it samples only if the request says so."""
    seed = given.get("seed")
    usual = 0.0 if given.get("model", "").startswith(PIPELINE_PREFIX) else 1.0
    return SamplingParams(
        temperature=given.get("temperature", usual),
        top_p=max(given.get("top_p", 1.0), 1e-6),
        top_k=max(given.get("top_k", 0), 0),
        min_p=given.get("min_p", 0.0),
        repetition_penalty=given.get("repetition_penalty", 1.0),
        frequency_penalty=given.get("frequency_penalty", 0.0),
        presence_penalty=given.get("presence_penalty", 0.0),
        logit_bias=_parse_bias(given.get("logit_bias") or {}),
        seed=int.from_bytes(os.urandom(8)) >> 1 if seed is None else seed % 2**64,
        logprobs=logprobs,
    )


def _parse_bias(given: Mapping[str, float]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise invalid_request(f"'logit_bias' has the key '{key[:20]}'. Expected a token id.", "logit_bias")
        # OpenAI's clients use 100 for "always" and -100 for "never".
        biases[int(key)] = bias * 100 if abs(bias) == 100 else bias
    return biases


def check_min_tokens(given: Mapping[str, Any], max_tokens: int | None) -> None:
    min_tokens = given.get("min_tokens", 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid_request(
            f"'min_tokens' is {min_tokens}. Expected at most {max_tokens}, the maximum tokens of the answer.",
            "min_tokens",
        )


def parse_stops(stop: str | list[str] | None, limits: RequestLimits) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    check_count("stop", len(stops), limits.stop, least=0)
    return stops


def with_headers(given: Mapping[str, Any], headers: Mapping[str, str], table: ParameterTable) -> dict[str, Any]:
    """Return the parameters with those that came as headers. ApiError for a header that the endpoint does not take."""
    merged = dict(given)
    if HEADER_PREFIX not in " ".join(headers):
        return merged
    for header, text in headers.items():
        if not header.startswith(HEADER_PREFIX) or header == STRICT_HEADER:
            continue
        name = _HEADERS.get(header)
        if name is None or name not in table:
            raise unknown_parameter(header, (each for each in _HEADERS if _HEADERS[each] in table), what="header")
        merged.setdefault(name, _convert_header(text, EXTRAS[name].type, header))
    return merged


def extra_fields(given: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a request that come from EXTRAS and from the headers, if there is any."""
    all_given = with_headers(given, headers, EXTRAS)
    if all_given.keys().isdisjoint(_EXTRA_NAMES):
        return {}
    own = {name: all_given[name] for name in _HEADERS.values() if name in all_given}
    deadline = own.pop("deadline_ms", None)
    if given.get("cache_prompt") is False:
        own.setdefault("cache", "off")
    return {
        **own,
        "deadline_s": None if deadline is None else deadline / 1000.0,
        "min_tokens": given.get("min_tokens", 0),
        "stop_ids": frozenset(given.get("stop_token_ids") or ()),
        "ignore_eos": given.get("ignore_eos", False),
        "template": _check_template(given.get("chat_template_kwargs") or {}),
        "seeded": given.get("seed") is not None,
        "sources": parse_sources(given.get("sources") or (), most=MOST_SOURCES),
        "overflow": given.get("overflow", "drop" if given.get("truncation") == "auto" else None),
        "rewrite": given.get("rewrite"),
        "user": given.get("safety_identifier", given.get("user")),
        "metadata": given.get("metadata") or {},
        "pipeline": _read_pipeline(given.get("pipeline")),
    }


def _read_pipeline(field: PipelineField | None) -> PipelineOptions:
    return PipelineOptions() if field is None else field.options()


def _check_template(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in _RESERVED_TEMPLATE_NAMES:
        if name in settings:
            raise unsupported_parameter(f"chat_template_kwargs.{name}", "the server sets it itself")
    return settings


def _convert_header(text: str, type: Any, name: str) -> Any:
    try:
        return msgspec.convert(text, type, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_value(name, str(error)) from None


def guided_parameter(given: Mapping[str, Any]) -> str | None:
    """Return the name of the guided_* parameter that the request has."""
    if given.keys().isdisjoint(_GUIDES):
        return None
    return next((name for name in _GUIDES if name in given), None)


def select_grammar(given: Mapping[str, Any], format_grammar: Grammar | None, parameter: str) -> Grammar | None:
    """Return the grammar of the dialect's own format parameter or of a guided_* parameter. ApiError if both are set."""
    guided = guided_grammar(given)
    if guided is not None and format_grammar is not None:
        raise invalid_request(
            f"'{parameter}' cannot be combined with '{guided_parameter(given)}'. Send one.", parameter
        )
    return format_grammar or guided


def json_schema_grammar(schema: Mapping[str, Any]) -> Grammar:
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def guided_grammar(given: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of the guided_* parameter. ApiError if there are several."""
    if given.keys().isdisjoint(_GUIDES):
        return None
    names = [name for name in _GUIDES if name in given]
    if len(names) > 1:
        raise invalid_request(f"'{names[1]}' cannot be combined with '{names[0]}'. Send one.", names[1])
    value = given[names[0]]
    match names[0]:
        case "guided_json":
            return Grammar("json_schema", value) if isinstance(value, str) else json_schema_grammar(value)
        case "guided_regex":
            return Grammar("regex", value)
        case "guided_choice":
            return Grammar("choice", msgspec.json.encode(value).decode())
        case _:
            return Grammar("lark", value)
