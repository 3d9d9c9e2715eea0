"""Fits a conversation into a token budget by dropping or summarising its oldest turns.

Drops the oldest turns first, then the oldest calls with their results within the last turn. What the system says, the
last user's turn and the last message always stay; calls and their results go together; roles alternate as before. A
Summariser is bounded in what it reads and writes and in time; if it fails, the turns are dropped.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from headrace.config.shaping_section import ShapingConfig
from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.degradation.shaping.conversation import ChatMessage, TokenCounter, group_messages

SUMMARY_INPUT_TOKENS: Final = 2048  # of the dropped turns, the newest, that a summary covers
_HEADING: Final = "Summary of the conversation before this:"


class Summariser(Protocol):
    """Summarises turns, for example by asking a small variant."""

    async def summarise(self, messages: Sequence[ChatMessage], *, tokens: int) -> str:
        """Return at most `tokens` tokens; may be cancelled."""
        ...


class FittedConversation(msgspec.Struct, frozen=True):
    messages: list[ChatMessage]
    dropped: tuple[ChatMessage, ...]  # oldest first
    before: int  # tokens
    after: int
    fits: bool  # False: the messages that must stay exceed the budget, and nothing else is left
    changes: tuple[ShapingChange, ...] = ()


def fit_conversation(
    messages: Sequence[ChatMessage], *, budget: int, count: TokenCounter, overhead: int = 0, stride: int | None = None
) -> FittedConversation:
    """Fit a conversation into `budget` tokens, of which tools and the template's own words take `overhead`.

    Turns are dropped in strides of a quarter of the budget by default: while a conversation grows, its beginning stays
    the same for several turns, so that the prefix cache still finds it.
    """
    sizes = [count(message) for message in messages]
    before = sum(sizes) + overhead
    excess = before - budget
    if excess <= 0:
        return FittedConversation(list(messages), (), before, before, True)
    stride = max(stride if stride is not None else budget // 4, 1)
    target = math.ceil(excess / stride) * stride
    dropped: set[int] = set()
    freed = 0
    # Past turns go before groups of the last turn.
    for group in sorted(group_messages(messages), key=lambda group: group.in_last_turn):
        if group.must_stay:
            continue
        if freed >= (excess if group.in_last_turn else target):
            break
        dropped.update(group.indices)
        freed += sum(sizes[index] for index in group.indices)
    kept = [message for index, message in enumerate(messages) if index not in dropped]
    after = before - freed
    return FittedConversation(
        kept,
        tuple(messages[index] for index in sorted(dropped)),
        before,
        after,
        after <= budget,
        (ShapingChange("turns", before, after),) if dropped else (),
    )


async def fit_conversation_with_summary(
    messages: Sequence[ChatMessage],
    *,
    budget: int,
    count: TokenCounter,
    summariser: Summariser,
    config: ShapingConfig | None = None,
    input_tokens: int = SUMMARY_INPUT_TOKENS,
    overhead: int = 0,
    stride: int | None = None,
    on_failure: Callable[[Exception], None] = lambda _error: None,
) -> FittedConversation:
    """Fit a conversation as `fit_conversation` does, with a summary of the dropped turns.

    The summary goes into the first user's turn that stays, not into the system's: what users said must not come back
    with more authority. `on_failure` is called with the reason if there is no summary.
    """
    config = config or ShapingConfig()
    plain = fit_conversation(messages, budget=budget, count=count, overhead=overhead, stride=stride)
    if not plain.dropped or not plain.fits:
        return plain
    most = config.summary_tokens  # with the heading
    fitted = fit_conversation(messages, budget=budget - most, count=count, overhead=overhead, stride=stride)
    if not fitted.fits:
        return plain
    try:
        async with asyncio.timeout(config.summary_s):
            text = await summariser.summarise(_newest(fitted.dropped, input_tokens, count), tokens=most)
    except Exception as error:  # whatever the other variant fails with, turns can still be dropped
        on_failure(error)
        return plain
    if not text.strip():
        return plain
    kept = _with_summary(fitted.messages, text.strip())
    after = sum(map(count, kept)) + overhead
    if after > budget:
        on_failure(ValueError(f"The summary is longer than {most} tokens."))
        return plain
    changes = (
        ShapingChange("turns", plain.before, fitted.after),
        ShapingChange("summary", None, after - fitted.after),
    )
    return FittedConversation(kept, fitted.dropped, plain.before, after, True, changes)


def _newest(dropped: Sequence[ChatMessage], most: int, count: TokenCounter) -> list[ChatMessage]:
    newest: list[ChatMessage] = []
    total = 0
    for message in reversed(dropped):
        total += count(message)
        if total > most:
            break
        newest.append(message)
    return newest[::-1]


def _with_summary(messages: Sequence[ChatMessage], summary: str) -> list[ChatMessage]:
    result = list(messages)
    index = next(index for index, message in enumerate(result) if message["role"] == "user")
    content = f"{_HEADING}\n{summary}\n\n{result[index].get('content') or ''}"
    result[index] = {**result[index], "content": content}
    return result
