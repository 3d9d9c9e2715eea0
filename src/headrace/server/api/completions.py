"""`/v1/completions`: reads a request into a TextRequest and writes its answer, whole or as chunks.

Holds the endpoint's parameter table and the shapes of answers. A prompt is a text, token ids, or a list of either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

from msgspec import Meta

from headrace.config import RequestLimits
from headrace.gateway.api_errors import invalid_request
from headrace.gateway.requests.text_request import (
    Choice,
    ChoiceDelta,
    TextRequest,
    TokenLogprob,
    TokenUsage,
    combine_usages,
)
from headrace.gateway.serving.exchange import Exchange
from headrace.server.api.chat_completions import ChunkStream, StreamOptions, chat_usage, metadata_field
from headrace.server.api.common_parameters import (
    EXTRAS,
    MODEL,
    SAMPLING,
    STREAM,
    build_sampling,
    check_count,
    check_min_tokens,
    check_stream_options,
    extra_fields,
    guided_grammar,
    guided_parameter,
    parse_stops,
)
from headrace.server.api.foreign_parameters import with_foreign
from headrace.server.api.text_endpoint import Dialect, text_route
from headrace.server.endpoint_context import EndpointContext
from headrace.server.http.body_parameters import Parameter, ParameterTable, parse_body
from headrace.server.http.route_table import Route
from headrace.server.http.unknown_fields import STRICT, UnknownFields

_CHECKED_AT_ONCE: Final = 8192  # token ids; other threads may run in between
DEFAULT_TOKENS: Final = 16  # OpenAI's default for max_tokens

_PARAMETERS: Final[ParameterTable] = {
    "model": MODEL,
    "prompt": Parameter("A text, token ids, or a list of either.", str | list[Any], required=True),
    "max_tokens": Parameter(
        "Maximum tokens of an answer. Default: 16. 0 with echo and logprobs: scores the prompt.",
        Annotated[int, Meta(ge=0)],
    ),
    **SAMPLING,
    "logprobs": Parameter("Number of most likely tokens to return at each position.", Annotated[int, Meta(ge=0)]),
    "echo": Parameter("Puts the prompt's text before the answer's.", bool),
    "stream": STREAM["stream"],
    "stream_options": Parameter("include_usage: sends a last chunk with the usage.", StreamOptions),
    **{name: each for name, each in EXTRAS.items() if name not in ("chat_template_kwargs", "sources", "overflow")},
    "best_of": Parameter("", unsupported="set `n` and choose among the answers", no_op_values=(1,)),
    "suffix": Parameter("", unsupported="the models served here do not fill in the middle", no_op_values=("",)),
}
COMPLETION_PARAMETERS: Final = with_foreign(_PARAMETERS)


def read_completion_request(
    body: bytes, headers: Mapping[str, str], limits: RequestLimits, unknown: UnknownFields = STRICT
) -> TextRequest:
    return build_completion_request(parse_body(body, COMPLETION_PARAMETERS, limits, unknown), headers, limits)


def build_completion_request(given: dict[str, Any], headers: Mapping[str, str], limits: RequestLimits) -> TextRequest:
    check_stream_options(given)
    options: StreamOptions | None = given.get("stream_options")
    prompts = parse_prompts(given["prompt"], "prompt", limits.prompts)
    logprobs = given.get("logprobs")
    if logprobs is not None:
        check_count("logprobs", logprobs, limits.logprobs, least=0)
    echo = given.get("echo", False)
    check_min_tokens(given, given.get("max_tokens", DEFAULT_TOKENS))
    n = check_count("n", given.get("n", 1), limits.choices)
    if n > 1 and given.get("max_tokens") == 0:
        raise invalid_request(f"'n' is {n} and 'max_tokens' is 0. Expected 1: nothing is generated.", "n")
    if n * len(prompts) > limits.prompts:
        raise invalid_request(
            f"'n' times the number of prompts is {n * len(prompts)}. Expected at most {limits.prompts}.", "n"
        )
    return TextRequest(
        model=given.get("model", ""),
        prompts=prompts,
        grammar=guided_grammar(given),
        grammar_of=guided_parameter(given) or "grammar",
        sampling=build_sampling(given, logprobs=logprobs),
        max_tokens=given.get("max_tokens", DEFAULT_TOKENS),
        stop=parse_stops(given.get("stop"), limits),
        n=n,
        echo=echo,
        prompt_logprobs=logprobs if echo else None,
        stream=given.get("stream", False),
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
        **extra_fields(given, headers),
    )


def parse_prompts(value: Any, name: str, most: int) -> list[str | list[int]]:
    """Return a text, token ids, or a list of either, as a list. ApiError for anything else."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise invalid_request(f"'{name}' must be a text, token ids, or a list of either, and must not be empty.", name)
    items: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
    if _are_integers(items):
        return [_check_ids(items, name)]
    check_count(name, len(items), most)
    prompts: list[str | list[int]] = []
    for index, item in enumerate(items):
        path = f"{name}[{index}]"
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and item:
            prompts.append(_check_ids(item, path))  # pyright: ignore[reportUnknownArgumentType]
        else:
            raise invalid_request(f"'{path}' must be a text or token ids.", path)
    return prompts


def _check_ids(ids: Sequence[Any], name: str) -> list[int]:
    if not _are_integers(ids) or any(min(piece) < 0 for piece in _pieces(ids)):
        raise invalid_request(f"'{name}' must contain token ids: integers from 0.", name)
    return list(ids)


def _are_integers(items: Sequence[Any]) -> bool:
    return all(set(map(type, piece)) == {int} for piece in _pieces(items))


def _pieces(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[start : start + _CHECKED_AT_ONCE] for start in range(0, len(items), _CHECKED_AT_ONCE))


# Answers


def completion_body(exchange: Exchange, choices: Sequence[Choice]) -> dict[str, Any]:
    return {
        **_head(exchange),
        "choices": [
            {
                "index": choice.index,
                "text": choice.content,
                "logprobs": _logprobs(choice.logprobs, 0),
                "finish_reason": choice.finish,
            }
            for choice in choices
        ],
        "usage": chat_usage(combine_usages([choice.usage for choice in choices], exchange.text_request.n)),
        "headrace": exchange.report([choice.usage for choice in choices]),
        **metadata_field(exchange),
    }


def _head(exchange: Exchange) -> dict[str, Any]:
    return {
        "id": f"cmpl-{exchange.id}",
        "object": "text_completion",
        "created": exchange.created,
        "model": exchange.model,
        "system_fingerprint": exchange.fingerprint,
    }


def _logprobs(logprobs: Sequence[TokenLogprob] | None, offset: int) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    offsets: list[int] = []
    for each in logprobs:
        offsets.append(offset)
        offset += len(each.shown)
    return {
        # Each token's part of the text, so that they join to it. A hidden token has none.
        "tokens": [each.shown for each in logprobs],
        # The first token of a prompt has no log-probability.
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [None if each.logprob is None else _top_logprobs(each) for each in logprobs],
        "text_offset": offsets,
    }


def _top_logprobs(each: TokenLogprob) -> dict[str, float]:
    """Return the log-probabilities of the most likely tokens and of the chosen one, which may be one more."""
    found = {} if each.logprob is None else {each.shown: each.logprob}
    for text, raw, logprob in each.top:
        if raw != each.bytes:
            found.setdefault(text, logprob)  # parts of characters share one text; the most likely token keeps it
    return found


class CompletionStream(ChunkStream):
    """Writes the chunks of one completion as server-sent events."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange, _head(exchange))
        self._offsets: dict[int, int] = {}

    def begin(self) -> bytes:
        return b""

    def piece(self, piece: ChoiceDelta) -> bytes:
        if self._is_continuous:
            self._count(piece)
        if piece.finish is not None:
            self._usages[piece.index] = piece.usage or TokenUsage()
        elif not piece.content and not piece.logprobs:
            return b""
        elif piece.logprobs is None:
            # Fast path for nearly every token: the same bytes as below, without building objects.
            before, after = b'{"index":%d,"text":' % piece.index, b',"logprobs":null,"finish_reason":null}'
            return b"".join((self._before, before, self._encode(piece.content), after, self._after))
        offset = self._offsets.get(piece.index, 0)
        if piece.logprobs:
            self._offsets[piece.index] = offset + sum(len(each.shown) for each in piece.logprobs)
        choice = {
            "index": piece.index,
            "text": piece.content,
            "logprobs": _logprobs(piece.logprobs, offset),
            "finish_reason": piece.finish,
        }
        return self._before + self._encode(choice) + self._after


COMPLETION_DIALECT: Final = Dialect(
    "completion", COMPLETION_PARAMETERS, read_completion_request, completion_body, CompletionStream, relays=True
)


def routes(context: EndpointContext) -> tuple[Route, ...]:
    return (text_route(context, "/v1/completions", COMPLETION_DIALECT, "Continue a text."),)
