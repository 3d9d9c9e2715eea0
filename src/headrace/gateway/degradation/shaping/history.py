"""A conversation that fits: its oldest turns dropped, or a summary in their place.

Owns what goes and in which order: the oldest turns first, then the oldest calls with their results within the last
turn. What the system says, the last user's turn and the last thing after it always stay; calls and their results go
together; roles take turns afterwards as they did before. The one who summarises is another's (`Summariser`); it is
bounded in what it reads, what it writes and how long it takes, and where it fails the turns are dropped.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from headrace.gateway.degradation.shaping.change_record import ShapingChange
from headrace.gateway.degradation.shaping.conversation import Message, TokenCounter, group_messages

_HEADING = "Summary of the conversation before this:"


class Summariser(Protocol):
    """Makes a short text of turns, such as by asking a small variant."""

    async def summarise(self, messages: Sequence[Message], *, tokens: int) -> str:
        """At most `tokens` long; it may be cancelled."""
        ...


class SummaryOptions(msgspec.Struct, frozen=True, kw_only=True):
    tokens: int = 160  # of the summary, its heading included
    seconds: float = 2.0  # that it may take
    reads: int = 2048  # tokens of the dropped turns that are summarised: the newest of them


class FittedConversation(msgspec.Struct, frozen=True):
    messages: list[Message]
    dropped: tuple[Message, ...]  # oldest first
    before: int  # tokens
    after: int
    fits: bool  # False: what must stay is more than the budget already, and is all that there is
    shaped: tuple[ShapingChange, ...] = ()


def fit_conversation(
    messages: Sequence[Message], *, budget: int, count: TokenCounter, overhead: int = 0, stride: int | None = None
) -> FittedConversation:
    """The conversation within `budget` tokens, `overhead` of which are taken by what is no message (tools, the
    template's own words).

    Turns are dropped in strides (a quarter of the budget by default): while a conversation grows, the place where it is
    cut stays the same for several turns, so that its prefix is found in the cache again.
    """
    sizes = [count(message) for message in messages]
    before = sum(sizes) + overhead
    over = before - budget
    if over <= 0:
        return FittedConversation(list(messages), (), before, before, True)
    each = max(stride if stride is not None else budget // 4, 1)
    wanted = math.ceil(over / each) * each
    gone: set[int] = set()
    dropped = 0
    # Turns of the past before what the last turn has come to.
    for unit in sorted(group_messages(messages), key=lambda unit: unit.last):
        if unit.stays:
            continue
        if dropped >= (over if unit.last else wanted):
            break
        gone.update(unit.places)
        dropped += sum(sizes[place] for place in unit.places)
    kept = [message for place, message in enumerate(messages) if place not in gone]
    after = before - dropped
    shaped = (ShapingChange("turns", before, after),) if gone else ()
    return FittedConversation(
        kept, tuple(messages[place] for place in sorted(gone)), before, after, after <= budget, shaped
    )


async def fit_conversation_with_summary(
    messages: Sequence[Message],
    *,
    budget: int,
    count: TokenCounter,
    summariser: Summariser,
    options: SummaryOptions | None = None,
    overhead: int = 0,
    stride: int | None = None,
    failed: Callable[[Exception], None] = lambda _error: None,
) -> FittedConversation:
    """As `fit`, with a summary of what was dropped before the first user's turn that stays.

    It stands in the user's turn and not in the system's: what users said must not come back with more authority.
    `failed` hears why there is none.
    """
    options = options or SummaryOptions()
    plain = fit_conversation(messages, budget=budget, count=count, overhead=overhead, stride=stride)
    if not plain.dropped or not plain.fits:
        return plain
    room = fit_conversation(messages, budget=budget - options.tokens, count=count, overhead=overhead, stride=stride)
    if not room.fits:
        return plain
    try:
        async with asyncio.timeout(options.seconds):
            text = await summariser.summarise(_newest(room.dropped, options.reads, count), tokens=options.tokens)
    except Exception as error:  # whatever another variant may fail with, turns can still be dropped
        failed(error)
        return plain
    if not text.strip():
        return plain
    kept = _with_summary(room.messages, text.strip())
    after = sum(map(count, kept)) + overhead
    if after > budget:
        failed(ValueError(f"the summary is longer than {options.tokens} tokens"))
        return plain
    turns = ShapingChange("turns", plain.before, room.after)
    return FittedConversation(
        kept, room.dropped, plain.before, after, True, (turns, ShapingChange("summary", None, after - room.after))
    )


def _newest(dropped: Sequence[Message], most: int, count: TokenCounter) -> list[Message]:
    found: list[Message] = []
    total = 0
    for message in reversed(dropped):
        total += count(message)
        if total > most:
            break
        found.append(message)
    return found[::-1]


def _with_summary(messages: Sequence[Message], summary: str) -> list[Message]:
    found = list(messages)
    place = next(at for at, message in enumerate(found) if message["role"] == "user")
    content = f"{_HEADING}\n{summary}\n\n{found[place].get('content') or ''}"
    found[place] = {**found[place], "content": content}
    return found
