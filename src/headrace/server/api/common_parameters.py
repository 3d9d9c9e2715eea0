"""Parameters that several endpoints have in common: sampling, streaming, Headrace's own, and those refused everywhere.

Owns their tables and their reading into the engine's words. Headrace's own may also come as `x-headrace-*` headers, for
clients that cannot add to a body; the body has the last word.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from headrace.config import RequestLimits
from headrace.config.shaping_section import DegradeMode
from headrace.engine.interface.grammar_spec import Grammar
from headrace.engine.interface.sampling import SamplingParams
from headrace.gateway.api_errors import ApiError, invalid_request
from headrace.gateway.degradation.shaping.sources import SourceField, parse_sources
from headrace.server.http.body_parameters import Parameter, ParameterTable, lower_first
from headrace.surfaces import MOST_PRIORITY, SURFACES

Surface = Literal[tuple(SURFACES)]  # pyright: ignore[reportInvalidTypeForm]
Milliseconds = Annotated[float, Meta(gt=0, le=86_400_000)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
MOST_SEED: Final = 2**63 - 1
MOST_SOURCES: Final = 256  # of a request, before the best of them are chosen

SAMPLING: Final = {
    "temperature": Parameter("0 takes the likeliest token; above, one is drawn.", Annotated[float, Meta(ge=0, le=2)]),
    "top_p": Parameter(
        "Draws among the likeliest that together have this probability.", Annotated[float, Meta(ge=0, le=1)]
    ),
    "n": Parameter("How many answers.", Annotated[int, Meta(ge=1)]),
    "seed": Parameter("The same seed draws the same answer.", Annotated[int, Meta(ge=-MOST_SEED - 1, le=MOST_SEED)]),
    "stop": Parameter("Texts at which an answer ends, before them.", Stop | list[Stop]),
    "frequency_penalty": Parameter(
        "Off a logit for each time its token was said.", Annotated[float, Meta(ge=-2, le=2)]
    ),
    "presence_penalty": Parameter("Off a logit once its token was said.", Annotated[float, Meta(ge=-2, le=2)]),
    "logit_bias": Parameter(
        "Added to the logits of tokens, by their ids.", dict[str, Annotated[float, Meta(ge=-100, le=100)]]
    ),
}

STREAM: Final = {
    "stream": Parameter("Answers as server-sent events, while they are made.", bool),
    "stream_options": Parameter("include_usage: a last chunk with the usage.", dict[str, bool]),
}

# Headrace's own, and those that other open servers have.
EXTRAS: Final = {
    "top_k": Parameter("Draws among so many likeliest tokens; 0 or -1 is all.", Annotated[int, Meta(ge=-1)]),
    "min_p": Parameter(
        "Draws among tokens at least this probable beside the likeliest.", Annotated[float, Meta(ge=0, le=1)]
    ),
    "repetition_penalty": Parameter("Above 1 makes what was said less likely.", Annotated[float, Meta(gt=0, le=100)]),
    "min_tokens": Parameter("Least tokens of an answer.", Annotated[int, Meta(ge=0)]),
    "stop_token_ids": Parameter("Tokens at which an answer ends.", list[Annotated[int, Meta(ge=0)]]),
    "ignore_eos": Parameter("Goes on past the model's own end of a text.", bool),
    "chat_template_kwargs": Parameter("Further values for the chat template.", dict[str, Any]),
    "guided_regex": Parameter("Holds the answer to a regular expression.", str),
    "guided_grammar": Parameter("Holds the answer to a Lark grammar.", str),
    "guided_choice": Parameter("Holds the answer to one of some texts.", list[str]),
    "guided_json": Parameter("Holds the answer to a JSON schema.", dict[str, Any] | str),
    "deadline_ms": Parameter("The answer ends by then, with what there is.", Milliseconds),
    "surface": Parameter(f"The product surface: {', '.join(SURFACES)}.", Surface),
    "profile": Parameter("standard, fast or golden.", Literal["standard", "fast", "golden"]),
    "priority": Parameter(
        "Higher goes first, within a tenant.", Annotated[int, Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)]
    ),
    "cache": Parameter(
        "off: the prompt is computed anew, no cache of answers is used, and nothing is kept.", Literal["on", "off"]
    ),
    "degrade": Parameter("What may become less under pressure: on, off, or a list of steps.", DegradeMode),
    "sources": Parameter("Texts that the answer is to be made from, each with its id.", list[SourceField]),
    "overflow": Parameter("What becomes of a conversation that is too long.", Literal["refuse", "drop", "summarise"]),
    "user": Parameter("Whom the request is for; kept in the log.", Annotated[str, Meta(max_length=512)]),
    "safety_identifier": Parameter("The newer name of user.", Annotated[str, Meta(max_length=512)]),
    "metadata": Parameter("Pairs of texts that are handed back.", Annotated[dict[str, str], Meta(max_length=16)]),
}
_PREFIX: Final = "x-headrace-"
_HEADERS: Final = {
    _PREFIX + name.replace("_", "-"): name
    for name in ("deadline_ms", "surface", "profile", "priority", "cache", "degrade")
}
# What a prompt is made of, and not a setting of its template.
_NO_SETTINGS: Final = ("messages", "tools", "add_generation_prompt")

_GUIDES: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")

# What only the hosted service has.
HOSTED: Final = {
    "store": Parameter("", refused="answers are stored by /v1/responses only", harmless=(False,)),
    "service_tier": Parameter("", refused="use `priority` and `surface`", harmless=("auto", "default")),
    "prompt_cache_key": Parameter("Accepted for clients that send it; common prefixes are found without it.", str),
    "prompt_cache_retention": Parameter(
        "", refused="prefixes are kept as long as there is room", harmless=("in_memory",)
    ),
    "prompt_cache_options": Parameter("", refused="common prefixes are found without breakpoints, and kept by use"),
    "prediction": Parameter("", refused="drafts are made by the engine itself"),
    "verbosity": Parameter("", refused="the models served here have no such setting", harmless=("medium",)),
    "web_search_options": Parameter("", refused="there is no web search"),
    "moderation": Parameter("", refused="there is no moderation"),
}

AUDIO: Final = {
    "modalities": Parameter("", refused="models write text only", harmless=(["text"],)),
    "audio": Parameter("", refused="models write text only"),
}


def check_count(name: str, count: int, most: int, *, least: int = 1) -> int:
    if not least <= count <= most:
        raise invalid_request(f"'{name}' must be {least} to {most}, not {count}", name)
    return count


def build_sampling(given: Mapping[str, Any], *, logprobs: int | None) -> SamplingParams:
    seed = given.get("seed")
    return SamplingParams(
        temperature=given.get("temperature", 1.0),
        top_p=max(given.get("top_p", 1.0), 1e-6),
        top_k=max(given.get("top_k", 0), 0),
        min_p=given.get("min_p", 0.0),
        repetition_penalty=given.get("repetition_penalty", 1.0),
        frequency_penalty=given.get("frequency_penalty", 0.0),
        presence_penalty=given.get("presence_penalty", 0.0),
        logit_bias=_bias(given.get("logit_bias") or {}),
        seed=_seed() if seed is None else seed % 2**64,
        logprobs=logprobs,
    )


def _seed() -> int:
    """Without a seed no two answers are drawn alike."""
    return secrets.randbits(63)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, bias in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise invalid_request(f"'logit_bias': '{key[:20]}' is no token id", "logit_bias")
        # The service's clients use 100 for "always" and -100 for "never".
        found[int(key)] = bias * 100 if abs(bias) == 100 else bias
    if len(found) > 1024:
        raise invalid_request("'logit_bias' may name 1,024 tokens at most", "logit_bias")
    return found


def check_min_tokens(given: Mapping[str, Any], most: int | None) -> None:
    """`most`: the tokens of an answer, where a limit was asked for."""
    least = given.get("min_tokens", 0)
    if most is not None and least > most:
        raise invalid_request(
            f"'min_tokens' must be 0 to {most}, the most tokens of the answer, not {least}", "min_tokens"
        )


def parse_stops(stop: str | list[str] | None, limits: RequestLimits) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    check_count("stop", len(stops), limits.stop, least=0)
    return stops


def with_headers(given: Mapping[str, Any], headers: Mapping[str, str], table: ParameterTable) -> dict[str, Any]:
    """The parameters, with those that came as headers; ApiError for one that the endpoint does not take."""
    found = dict(given)
    for header, text in headers.items():
        if not header.startswith(_PREFIX):
            continue
        name = _HEADERS.get(header)
        if name is None or name not in table:
            raise ApiError(f"there is no header '{header[:100]}'", parameter=header[:100], code="unknown_parameter")
        wish = _header(text, EXTRAS[name].type, header)
        found.setdefault(name, wish)
    return found


def extra_fields(given: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """The fields of an Asked that come from EXTRAS and from the headers."""
    all_given = with_headers(given, headers, EXTRAS)
    own = {name: all_given[name] for name in _HEADERS.values() if name in all_given}
    deadline = own.pop("deadline_ms", None)
    return {
        **own,
        "deadline_s": None if deadline is None else deadline / 1000.0,
        "min_tokens": given.get("min_tokens", 0),
        "stop_ids": frozenset(given.get("stop_token_ids") or ()),
        "ignore_eos": given.get("ignore_eos", False),
        "template": _template(given.get("chat_template_kwargs") or {}),
        "seeded": given.get("seed") is not None,
        "sources": parse_sources(given.get("sources") or (), most=MOST_SOURCES),
        "overflow": given.get("overflow"),
        "user": given.get("safety_identifier", given.get("user")),
        "metadata": given.get("metadata") or {},
    }


def _template(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in _NO_SETTINGS:
        if name in settings:
            path = f"chat_template_kwargs.{name}"
            raise ApiError(f"'{path}' is no setting of a template", parameter=path, code="unsupported_parameter")
    return settings


def _header(text: str, wanted: Any, name: str) -> Any:
    try:
        return msgspec.convert(text, wanted, strict=False)
    except msgspec.ValidationError as error:
        raise ApiError(f"'{name}': {lower_first(str(error))}", parameter=name, code="invalid_value") from None


def guided_parameter(given: Mapping[str, Any]) -> str | None:
    """Which of the guided_* parameters is there."""
    return next((name for name in _GUIDES if name in given), None)


def guided_grammar(given: Mapping[str, Any]) -> Grammar | None:
    """The grammar of the guided_* parameters, of which one at most may be there."""
    found = [name for name in _GUIDES if name in given]
    if not found:
        return None
    if len(found) > 1:
        raise invalid_request(f"'{found[0]}' and '{found[1]}' cannot both hold an answer", found[1])
    value = given[found[0]]
    match found[0]:
        case "guided_json":
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            return Grammar("json_schema", text)
        case "guided_regex":
            return Grammar("regex", value)
        case "guided_choice":
            return Grammar("choice", msgspec.json.encode(value).decode())
        case _:
            return Grammar("lark", value)
