"""What is done to a request's messages before they are a prompt: its sources are written in, old turns go.

Owns the order of the two and their budgets. Tokens are counted by the variant's own tokenizer where it is known, and
estimated otherwise; each message counts a few more for what the template puts around it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec.structs import replace

from headrace.config import ShapingConfig
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.degradation.shaping.conversation import Message
from headrace.gateway.degradation.shaping.history import (
    Summariser,
    SummaryOptions,
    fit_conversation,
    fit_conversation_with_summary,
)
from headrace.gateway.degradation.shaping.sources import (
    SelectedSources,
    SourceOptions,
    extract_tagged_sources,
    insert_sources,
    select_sources,
)
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.serving.fleet import ServedVariant

log: Final = logging.getLogger(__name__)

_AROUND: Final = 6  # tokens that a template puts around a message, about
_BYTES: Final = 4  # of a token, where there is no tokenizer


class FittedRequest(msgspec.Struct, frozen=True):
    asked: TextRequest
    shaped: tuple[ShapingChange, ...] = ()


def text_token_counter(served: ServedVariant) -> Callable[[str], int]:
    """Tokens of a text."""
    if served.upstream is None:
        encode = served.tokenizer.encode
        return lambda text: len(encode(text, False))
    known = served.upstream.tokenizer
    if known is not None:
        return lambda text: len(known.encode(text, False))
    return lambda text: -(-len(text.encode(errors="replace")) // _BYTES)


def number_sources(
    asked: TextRequest, served: ServedVariant, options: SourceOptions
) -> tuple[TextRequest, SelectedSources | None, tuple[ShapingChange, ...]]:
    """With the request's sources chosen, numbered and written into its messages; None where it has none."""
    messages = asked.messages or []
    sources = asked.sources
    if not sources:
        if not any(_tagged(message) for message in messages):
            return asked, None, ()
        messages, sources = extract_tagged_sources(messages)
        if not sources:
            return asked, None, ()
    options = replace(options, total_tokens=min(options.total_tokens, served.context // 2))  # there is a question, too
    selected = select_sources(sources, options, text_token_counter(served))
    return asked.but(messages=insert_sources(messages, selected, options), sources=()), selected, selected.shaped


def _tagged(message: Message) -> bool:
    return "<source" in (message.get("content") or "") or str(message.get("name") or "").startswith("source")


async def fit_request(
    asked: TextRequest,
    served: ServedVariant,
    config: ShapingConfig,
    budget: int | None,  # tokens of the prompt, beside what the context has room for
    summariser: Summariser | None,
) -> FittedRequest:
    """With its oldest turns dropped or summarised, where that is asked for and needed."""
    overflow = asked.overflow or config.overflow
    messages = asked.messages or []
    if overflow == "refuse" and budget is None:
        return FittedRequest(asked)
    most = served.context if budget is None else min(budget, served.context)
    if overflow != "refuse":
        answer = asked.max_tokens if asked.max_tokens is not None else config.answer_tokens
        most = min(most, served.context - min(answer, served.context // 2))
    if sum(len(message.get("content") or "") + _AROUND for message in messages) < most and not asked.tools:
        return FittedRequest(asked)  # no token is shorter than a character
    count_text = text_token_counter(served)

    def count(message: Message) -> int:
        calls = message.get("tool_calls")
        more = count_text(msgspec.json.encode(calls).decode()) if calls else 0
        return count_text(message.get("content") or "") + more + _AROUND

    overhead = _AROUND + sum(
        count_text(msgspec.json.encode((tool.name, tool.description, tool.parameters)).decode()) + 2 * _AROUND
        for tool in asked.tools
    )
    if overflow == "summarise" and summariser is not None:
        found = await fit_conversation_with_summary(
            messages,
            budget=most,
            count=count,
            overhead=overhead,
            summariser=summariser,
            options=SummaryOptions(tokens=config.summary_tokens, seconds=config.summary_s),
            failed=lambda error: log.warning("a conversation was not summarised: %s", error),
        )
    else:
        found = fit_conversation(messages, budget=most, count=count, overhead=overhead)
    if not found.dropped:
        return FittedRequest(asked)
    shaped = found.shaped or (ShapingChange("turns", found.before, found.after),)
    return FittedRequest(asked.but(messages=found.messages), shaped)
