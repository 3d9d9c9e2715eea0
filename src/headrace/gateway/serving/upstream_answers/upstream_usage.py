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

UsageSource = Literal["told", "counted", "estimated"]

LONG_TEXT: Final = 16 * 1024  # bytes that take a thread of their own to be cut into tokens
BYTES_PER_TOKEN: Final = 4  # of text, about; English and code in today's vocabularies
_MESSAGE_TOKENS: Final = 4  # that a template puts around each message, about
# A count that is told may be off by this much before it counts as wrong: servers put several tokens into a chunk, tell
# tokens that have no text, and count their templates.
_LEAST_SHARE: Final = 0.5
_SLACK: Final = 16
_MOST_PER_BYTE: Final = 2
_PROMPT_SLACK: Final = 2048  # tokens of a template and of tools, as a server may render them


class ReceivedOutput(msgspec.Struct, frozen=True):
    """What came of one choice."""

    chunks: int  # with some output in them; most servers put one token into each
    tokens: int  # with log-probabilities; 0 where there were none
    text: str  # everything that was written, reasoning and calls too
    reasoned: bool  # the reasoning came too

    @property
    def bytes(self) -> int:
        return len(self.text.encode(errors="replace"))


class AnswerUsage(msgspec.Struct):
    """Of a whole answer."""

    usages: list[TokenUsage]  # of the choices, in order
    source: UsageSource
    wrong: bool  # something was told that cannot be


def measure_answer(
    came: Sequence[ReceivedOutput],
    told: ReportedUsage | None,
    *,
    n: int,
    prompt_tokens: int,
    prompt_bytes: int,
    tokenizer: Tokenizer | None,
    echoed: bool = False,
) -> AnswerUsage:
    """`prompt_tokens`: as counted or estimated before. `n`: choices of each prompt. `echoed`: what came has the prompts
    in it."""
    before = prompt_tokens * n // max(len(came), 1) if echoed else 0  # of each choice
    outputs = [max(0, _output(each, tokenizer) - before) for each in came]
    here: UsageSource = "estimated" if tokenizer is None else "counted"
    source: UsageSource = here
    wrong = False
    total = sum(outputs)
    prompt, cached, reasoning = prompt_tokens, 0, 0
    if told is not None and told.completion_tokens is not None:
        reasoning = _within(_reasoning(told), told.completion_tokens)
        hidden = 0 if any(each.reasoned for each in came) else reasoning
        shown = told.completion_tokens - hidden
        if shown >= 0 and (echoed or _output_can_be(shown, came, total, exact=tokenizer is not None)):
            total, source = told.completion_tokens, "told"
        else:
            wrong, reasoning = True, 0
    if told is not None and told.prompt_tokens is not None:
        if is_plausible_prompt(told.prompt_tokens, prompt_bytes):
            prompt = told.prompt_tokens
            cached = _within(_cached(told), prompt)
        else:
            wrong, source = True, here
    shares = _shared(total, outputs)
    reasonings = _shared(reasoning, shares) if reasoning else [0] * len(came)
    usages = [
        TokenUsage(
            # The first prompt's choices have all of it: nobody tells how long each of several was.
            prompt_tokens=prompt if place < n else 0,
            cached_tokens=cached if place < n else 0,
            output_tokens=share,
            reasoning_tokens=min(thought, share),
        )
        for place, (share, thought) in enumerate(zip(shares, reasonings, strict=True))
    ]
    return AnswerUsage(usages, source, wrong)


def _output(came: ReceivedOutput, tokenizer: Tokenizer | None) -> int:
    if came.tokens:
        return came.tokens
    if tokenizer is None:
        return max(came.chunks, -(-came.bytes // BYTES_PER_TOKEN))
    return count_text_tokens(came.text, tokenizer) or came.chunks


def count_text_tokens(text: str, tokenizer: Tokenizer) -> int:
    """0 where the tokenizer cannot say."""
    try:
        return len(tokenizer.encode(text, False))
    except HeadraceError:
        return 0


def _output_can_be(told: int, came: Sequence[ReceivedOutput], here: int, *, exact: bool) -> bool:
    """Whether so many tokens can have been what came."""
    if exact:
        return _LEAST_SHARE * here - _SLACK <= told <= here / _LEAST_SHARE + 4 * _SLACK
    chunks, length = sum(each.chunks for each in came), sum(each.bytes for each in came)
    return _LEAST_SHARE * chunks - _SLACK <= told <= _MOST_PER_BYTE * (length + chunks) + 4 * _SLACK


def is_plausible_prompt(told: int, length: int) -> bool:
    """Whether so many tokens can be a prompt of so many bytes: they are rarely shorter than a byte, and it has one at
    least."""
    return (told > 0 or length == 0) and told <= _MOST_PER_BYTE * length + _PROMPT_SLACK


def _within(value: int | None, most: int) -> int:
    return max(0, min(value or 0, most))


def _reasoning(told: ReportedUsage) -> int | None:
    details = told.completion_tokens_details
    return None if details is None else details.reasoning_tokens


def _cached(told: ReportedUsage) -> int | None:
    details = told.prompt_tokens_details
    if details is not None and details.cached_tokens is not None:
        return details.cached_tokens
    return told.prompt_cache_hit_tokens


def _shared(total: int, weights: Sequence[int]) -> list[int]:
    """A sum in shares like the weights; they add up to it."""
    whole = sum(weights)
    if whole == 0:
        weights, whole = [1] * len(weights), len(weights)
    shares = [total * weight // whole for weight in weights]
    for place in range(total - sum(shares)):
        shares[place % len(shares)] += 1
    return shares


# Prompts


def prompt_text(asked: TextRequest) -> str:
    """All that a prompt is made of, for a length."""
    if asked.messages is None:
        return "".join(prompt for prompt in asked.prompts or () if isinstance(prompt, str))
    texts = [message.get("content") or "" for message in asked.messages]
    for message in asked.messages:
        for call in message.get("tool_calls") or ():
            texts.append(str(call["function"]["name"]) + str(call["function"]["arguments"]))
    for tool in asked.tools if asked.choosing != "none" else ():
        texts.append(f"{tool.name}{tool.description or ''}{dict(tool.parameters or {})}")
    return "".join(texts)


def prompt_bytes(asked: TextRequest) -> int:
    """Of all prompts together; token ids count as so many as a token has on average."""
    ids = sum(bytes_of_tokens(prompt) for prompt in asked.prompts or () if not isinstance(prompt, str))
    return len(prompt_text(asked).encode(errors="replace")) + ids


def bytes_of_tokens(tokens: Sequence[int]) -> int:
    """About."""
    return len(tokens) * BYTES_PER_TOKEN


def estimate_prompt_tokens(length: int, messages: int) -> int:
    """Tokens of so many bytes, about."""
    return max(1, -(-length // BYTES_PER_TOKEN) + _MESSAGE_TOKENS * messages)


def count_prompts(asked: TextRequest, tokenizer: Tokenizer) -> list[int]:
    """Tokens of each prompt. HeadraceError where the tokenizer cannot say."""
    if asked.messages is None:
        prompts = asked.prompts or ()
        return [len(tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt) for prompt in prompts]
    if tokenizer.template is None:
        return [estimate_prompt_tokens(prompt_bytes(asked), len(asked.messages))]
    tools: list[Mapping[str, Any]] | None = None
    if asked.tools and asked.choosing != "none":
        tools = [
            {"type": "function", "function": {"name": tool.name, "parameters": dict(tool.parameters or {})}}
            for tool in asked.tools
        ]
    text = tokenizer.apply_template(asked.messages, tools=tools, **asked.template)
    return [len(tokenizer.encode(text, False))]
