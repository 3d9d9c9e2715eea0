"""Prepares a request's messages for the prompt: writes its sources in, and fits the conversation into the context.

Owns the token budgets of both. Tokens are counted by the variant's own tokenizer if it is known and estimated
otherwise; each message counts a few more for what the template puts around it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from headrace.config.shaping_section import ShapingConfig
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.degradation.shaping.conversation import ChatMessage
from headrace.gateway.degradation.shaping.history import Summariser, fit_conversation, fit_conversation_with_summary
from headrace.gateway.degradation.shaping.sources import (
    SelectedSources,
    extract_tagged_sources,
    insert_sources,
    select_sources,
)
from headrace.gateway.images.message_images import images_of
from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.serving.served_variant import ServedVariant

log: Final = logging.getLogger(__name__)

_TEMPLATE_TOKENS: Final = 6  # that a template puts around a message, about
_BYTES_PER_TOKEN: Final = 4  # without a tokenizer


class FittedRequest(msgspec.Struct, frozen=True):
    text_request: TextRequest
    changes: tuple[ShapingChange, ...] = ()


def text_token_counter(served: ServedVariant) -> Callable[[str], int]:
    """Return a function that counts, or estimates, the tokens of a text."""
    if served.upstream is None:
        encode = served.tokenizer.encode
    elif served.upstream.tokenizer is not None:
        encode = served.upstream.tokenizer.encode
    else:
        return lambda text: -(-len(text.encode(errors="replace")) // _BYTES_PER_TOKEN)
    return lambda text: len(encode(text, False))


def number_sources(
    text_request: TextRequest, served: ServedVariant, config: ShapingConfig, most_tokens: int | None = None
) -> tuple[TextRequest, SelectedSources | None]:
    """Select the request's sources, number them and write them into its messages. None: it has no sources.

    `most_tokens`: a lower cap on all sources together, such as the ladder's.
    """
    messages = text_request.messages or []
    sources = text_request.sources
    if not sources:
        if not any([_may_have_sources(message) for message in messages]):
            return text_request, None
        messages, sources = extract_tagged_sources(messages)
        if not sources:
            return text_request, None
    # At most half of the context, because the conversation needs room as well.
    caps = (config.sources_tokens, served.context // 2, *(() if most_tokens is None else (most_tokens,)))
    selected = select_sources(sources, config, text_token_counter(served), total_tokens=min(caps))
    return text_request.but(messages=insert_sources(messages, selected, config.sources_place), sources=()), selected


def _may_have_sources(message: ChatMessage) -> bool:
    return "<source" in (message.get("content") or "") or (
        "name" in message and str(message["name"] or "").startswith("source")
    )


async def _image_tokens(messages: Sequence[ChatMessage], served: ServedVariant) -> dict[str, int]:
    """Return the tokens of each image, by its URL. An upstream's are unknown and count nothing."""
    images = images_of(messages)
    if not images or served.images is None:
        return dict.fromkeys((image["url"] for image in images), 0)
    measured = await served.images.measured(images)
    return {image["url"]: served.images.tokens_of(each) for image, each in zip(images, measured, strict=True)}


def _log_failure(error: Exception) -> None:
    why = "no summary came within shaping.summary_s" if isinstance(error, TimeoutError) else str(error)
    log.warning("A conversation was not summarised, and turns were dropped: %s", why)


async def fit_request(
    text_request: TextRequest,
    served: ServedVariant,
    config: ShapingConfig,
    budget: int | None,  # prompt tokens, beside the limit that the context sets
    summariser: Summariser | None,
) -> FittedRequest:
    """Drop or summarise the oldest turns if the request allows it and needs it."""
    overflow = text_request.overflow or config.overflow
    messages = text_request.messages or []
    if overflow == "refuse" and budget is None:
        return FittedRequest(text_request)
    most = served.context if budget is None else min(budget, served.context)
    if overflow != "refuse":
        answer = text_request.max_tokens if text_request.max_tokens is not None else config.answer_tokens
        most = min(most, served.context - min(answer, served.context // 2))
    if (
        sum(len(message.get("content") or "") + _TEMPLATE_TOKENS for message in messages) < most
        and not text_request.tools
        and not images_of(messages)
    ):
        return FittedRequest(text_request)  # it fits: no token is shorter than a character
    count_text = text_token_counter(served)
    sizes = await _image_tokens(messages, served)

    def count(message: ChatMessage) -> int:
        calls = message.get("tool_calls")
        call_tokens = count_text(msgspec.json.encode(calls).decode()) if calls else 0
        image_tokens = sum(sizes[image["url"]] for image in message.get("images") or ())
        return count_text(message.get("content") or "") + call_tokens + image_tokens + _TEMPLATE_TOKENS

    overhead = _TEMPLATE_TOKENS + sum(
        count_text(msgspec.json.encode((tool.name, tool.description, tool.parameters)).decode()) + 2 * _TEMPLATE_TOKENS
        for tool in text_request.tools
    )
    if overflow == "summarise" and summariser is not None:
        fitted = await fit_conversation_with_summary(
            messages,
            budget=most,
            count=count,
            overhead=overhead,
            summariser=summariser,
            config=config,
            on_failure=_log_failure,
        )
    else:
        fitted = fit_conversation(messages, budget=most, count=count, overhead=overhead)
    if not fitted.dropped:
        return FittedRequest(text_request)
    return FittedRequest(text_request.but(messages=fitted.messages), fitted.changes)
