"""Counts the tokens of an upstream's answer: as reported if plausible, else counted with a tokenizer or estimated.

The shares of the choices are whole numbers that add up to the sum. Does not open connections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from headrace.errors import HeadraceError
from headrace.gateway.requests.text_request import TextRequest, TokenUsage
from headrace.gateway.serving.upstream_answers.upstream_chunks import ReportedUsage
from headrace.models.text.tokenizer import Tokenizer

UsageSource = Literal["told", "counted", "estimated"]  # logged as `usage_from`; told: reported by the upstream

LONG_TEXT: Final = 16 * 1024  # bytes; longer texts are tokenised on a thread
BYTES_PER_TOKEN: Final = 4  # roughly, for English and code in current vocabularies
_MESSAGE_TOKENS: Final = 4  # roughly what a template adds to each message
# How far a reported count may be off before it counts as wrong: servers put several tokens into a chunk, report tokens
# without text, and count their templates.
_LEAST_SHARE: Final = 0.5
_SLACK: Final = 16
_MOST_PER_BYTE: Final = 2
_PROMPT_SLACK: Final = 2048  # tokens that a server may add for its template and for tools


class ReceivedOutput(msgspec.Struct, frozen=True):
    """The output received for one choice."""

    chunks: int  # chunks with output; most servers put one token into each
    tokens: int  # tokens with log-probabilities; 0 if there were none
    text: str  # all output, including reasoning and tool calls
    reasoned: bool  # the upstream sent its reasoning

    @property
    def bytes(self) -> int:
        return len(self.text.encode(errors="replace"))


class AnswerUsage(msgspec.Struct):
    """The usage of a whole answer."""

    usages: list[TokenUsage]  # one for each choice, in order
    source: UsageSource
    wrong: bool  # the upstream reported an impossible count


def measure_answer(
    outputs: Sequence[ReceivedOutput],
    reported: ReportedUsage | None,
    *,
    n: int,
    prompt_tokens: int,
    prompt_bytes: int,
    tokenizer: Tokenizer | None,
    echoed: bool = False,
) -> AnswerUsage:
    """Return the usage of an answer: the reported one if it is plausible, else counted or estimated.

    `prompt_tokens`: as counted or estimated before. `n`: choices for each prompt. `echoed`: the output repeats the
    prompts.
    """
    echo = prompt_tokens * n // max(len(outputs), 1) if echoed else 0  # prompt tokens in each choice
    counts = [max(0, _count_output(output, tokenizer) - echo) for output in outputs]
    own: UsageSource = "estimated" if tokenizer is None else "counted"
    source: UsageSource = own
    wrong = False
    total = sum(counts)
    prompt, cached, reasoning = prompt_tokens, 0, 0
    if reported is not None and reported.completion_tokens is not None:
        reasoning = _clamp(_reasoning(reported), reported.completion_tokens)
        hidden = 0 if any(output.reasoned for output in outputs) else reasoning
        shown = reported.completion_tokens - hidden
        if shown >= 0 and (echoed or _is_plausible_output(shown, outputs, total, exact=tokenizer is not None)):
            total, source = reported.completion_tokens, "told"
        else:
            wrong, reasoning = True, 0
    if reported is not None and reported.prompt_tokens is not None:
        if is_plausible_prompt(reported.prompt_tokens, prompt_bytes):
            prompt = reported.prompt_tokens
            cached = _clamp(_cached(reported), prompt)
        else:
            wrong, source = True, own
    shares = _split(total, counts)
    reasonings = _split(reasoning, shares) if reasoning else [0] * len(outputs)
    usages = [
        TokenUsage(
            # The first prompt's choices carry the whole sum, because upstreams do not report each prompt's length.
            prompt_tokens=prompt if place < n else 0,
            cached_tokens=cached if place < n else 0,
            output_tokens=share,
            reasoning_tokens=min(thought, share),
        )
        for place, (share, thought) in enumerate(zip(shares, reasonings, strict=True))
    ]
    return AnswerUsage(usages, source, wrong)


def _count_output(output: ReceivedOutput, tokenizer: Tokenizer | None) -> int:
    if output.tokens:
        return output.tokens
    if tokenizer is None:
        return max(output.chunks, -(-output.bytes // BYTES_PER_TOKEN))
    return count_text_tokens(output.text, tokenizer) or output.chunks


def count_text_tokens(text: str, tokenizer: Tokenizer) -> int:
    """Return the number of tokens; 0 if the tokenizer fails."""
    try:
        return len(tokenizer.encode(text, False))
    except HeadraceError:
        return 0


def _is_plausible_output(reported: int, outputs: Sequence[ReceivedOutput], counted: int, *, exact: bool) -> bool:
    if exact:
        return _LEAST_SHARE * counted - _SLACK <= reported <= counted / _LEAST_SHARE + 4 * _SLACK
    chunks, length = sum(output.chunks for output in outputs), sum(output.bytes for output in outputs)
    return _LEAST_SHARE * chunks - _SLACK <= reported <= _MOST_PER_BYTE * (length + chunks) + 4 * _SLACK


def is_plausible_prompt(reported: int, length: int) -> bool:
    """Return whether a prompt of `length` bytes can have so many tokens."""
    return (reported > 0 or length == 0) and reported <= _MOST_PER_BYTE * length + _PROMPT_SLACK


def _clamp(value: int | None, most: int) -> int:
    return max(0, min(value or 0, most))


def _reasoning(reported: ReportedUsage) -> int | None:
    details = reported.completion_tokens_details
    return None if details is None else details.reasoning_tokens


def _cached(reported: ReportedUsage) -> int | None:
    details = reported.prompt_tokens_details
    if details is not None and details.cached_tokens is not None:
        return details.cached_tokens
    return reported.prompt_cache_hit_tokens


def _split(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` into whole shares in proportion to `weights`."""
    whole = sum(weights)
    if whole == 0:
        weights, whole = [1] * len(weights), len(weights)
    shares = [total * weight // whole for weight in weights]
    for place in range(total - sum(shares)):
        shares[place % len(shares)] += 1
    return shares


# Prompts


def prompt_text(request: TextRequest) -> str:
    """Join all texts that the prompt is rendered from, to measure its length."""
    if request.messages is None:
        return "".join(prompt for prompt in request.prompts or () if isinstance(prompt, str))
    texts = [message.get("content") or "" for message in request.messages]
    for message in request.messages:
        for call in message.get("tool_calls") or ():
            texts.append(str(call["function"]["name"]) + str(call["function"]["arguments"]))
    for tool in request.tools if request.choosing != "none" else ():
        texts.append(f"{tool.name}{tool.description or ''}{dict(tool.parameters or {})}")
    return "".join(texts)


def prompt_bytes(request: TextRequest) -> int:
    """Return the bytes of all prompts; a token id counts as an average token."""
    ids = sum(bytes_of_tokens(prompt) for prompt in request.prompts or () if not isinstance(prompt, str))
    return len(prompt_text(request).encode(errors="replace")) + ids


def bytes_of_tokens(tokens: Sequence[int]) -> int:
    """Estimate the bytes of some token ids."""
    return len(tokens) * BYTES_PER_TOKEN


def estimate_prompt_tokens(length: int, messages: int) -> int:
    """Estimate the tokens of a prompt from its bytes."""
    return max(1, -(-length // BYTES_PER_TOKEN) + _MESSAGE_TOKENS * messages)


def count_prompts(request: TextRequest, tokenizer: Tokenizer) -> list[int]:
    """Count the tokens of each prompt. Raises HeadraceError if the tokenizer fails."""
    if request.messages is None:
        prompts = request.prompts or ()
        return [len(tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt) for prompt in prompts]
    if tokenizer.template is None:
        return [estimate_prompt_tokens(prompt_bytes(request), len(request.messages))]
    tools: list[Mapping[str, Any]] | None = None
    if request.tools and request.choosing != "none":
        tools = [
            {"type": "function", "function": {"name": tool.name, "parameters": dict(tool.parameters or {})}}
            for tool in request.tools
        ]
    text = tokenizer.apply_template(request.messages, tools=tools, **request.template_values)
    return [len(tokenizer.encode(text, False))]
