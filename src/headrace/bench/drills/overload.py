"""The drill `overload`: four times the load that the server can take, then fast mode switched on by an operator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from headrace.bench.drills.drill_client import ChatClient, ChatReply, retry_until, send_at_rate
from headrace.bench.drills.drill_server import KEY, DrillServer
from headrace.bench.drills.promises import Promise, milliseconds, percentile

PATIENCE_S = 2.0  # of the surface
DWELL_S = 0.5
MAX_TOKENS = 96
FAST_MAX_TOKENS = 24
RECOVERY_S = 6 * DWELL_S + 10.0
CONFIG = f"""
[models.mini]

[surfaces.chat]
patience_s = {PATIENCE_S}

[surfaces.chat.ladder]
preset = true
dwell_s = {DWELL_S}

[fast]
max_tokens = {FAST_MAX_TOKENS}
"""
_CAPACITY_S = 3.0
_SOURCES = [
    {"id": "handbook", "text": "The Porto office opens at 9:30 and closes at 18:00. Visitors sign in at the desk."},
    {"id": "prices", "text": "The Lisbon office opens at 8:15. Parking is free for guests on weekdays."},
]
_QUESTIONS = (
    "When does the Porto office open?",
    "What is time to first token?",
    "Why is decoding bound by memory?",
    "When does the Lisbon office open?",
)


async def run(*, seconds: float = 8.0, max_requests: int = 600) -> list[Promise]:
    async with DrillServer(CONFIG) as server, ChatClient(server.url, KEY) as client:
        for _ in range(3):
            await client.chat(_QUESTIONS[1], max_tokens=64)
        rate = 4 * await _capacity(client)
        count = min(max_requests, max(40, int(rate * seconds)))
        replies = await send_at_rate([_request(client, place) for place in range(count)], rate)
        recovered = await retry_until(
            partial(client.chat, _QUESTIONS[1], max_tokens=32), is_full_service, RECOVERY_S, DWELL_S
        )
        return [
            every_request_ends(replies, rate),
            first_tokens_within_patience(replies),
            degraded_replies_are_marked(replies),
            sources_are_used(replies[::2]),
            full_service_returns(recovered),
            await _switch_fast_mode(client),
        ]


def every_request_ends(replies: Sequence[ChatReply], rate: float) -> Promise:
    lost = sum(not (reply.answered or reply.refused) for reply in replies)
    return Promise(
        "every request ends with an answer, or with 429 or 503 and Retry-After",
        f"{len(replies)} requests at {rate:.0f} a second: {sum(each.answered for each in replies)} answered, "
        f"{sum(each.refused for each in replies)} rejected with Retry-After, {lost} neither",
        not lost,
    )


def first_tokens_within_patience(replies: Sequence[ChatReply]) -> Promise:
    ttft = percentile([reply.ttft for reply in replies if reply.answered and reply.ttft is not None], 0.99)
    return Promise(
        f"TTFT stays within the surface's patience, {milliseconds(PATIENCE_S)}, plus 500 ms",
        f"p99 TTFT {milliseconds(ttft)}",
        ttft <= PATIENCE_S + 0.5,
        timed=True,
    )


def degraded_replies_are_marked(replies: Sequence[ChatReply]) -> Promise:
    """Check the header of the answers that can be seen to be degraded: quoted, or cut below the requested limit.

    A machine that keeps up degrades nothing, which keeps the promise.
    """
    degraded = [each for each in replies if each.extracted or (each.finish == "length" and each.tokens < MAX_TOKENS)]
    unmarked = sum("x-headrace-degraded" not in reply.headers for reply in degraded)
    found = (
        f"{len(degraded)} of {len(replies)} answers were quoted or cut, {unmarked} of them without the header"
        if degraded
        else "the server kept up: no answer was quoted or cut"
    )
    return Promise("every degraded answer says so in x-headrace-degraded", found, not unmarked)


def sources_are_used(replies: Sequence[ChatReply]) -> Promise:
    """`replies` are those to requests with sources. How many are rejected depends on how fast the ladder climbs."""
    answered = sum(reply.answered for reply in replies) / max(1, len(replies))
    return Promise(
        "nine of ten requests with sources get an answer, generated or quoted",
        f"{answered:.0%}",
        answered >= 0.9,
        timed=True,
    )


def is_full_service(reply: ChatReply) -> bool:
    return reply.answered and "x-headrace-degraded" not in reply.headers


def full_service_returns(after_s: float | None) -> Promise:
    return Promise(
        "full service returns by itself after the load",
        f"not within {RECOVERY_S:g} s" if after_s is None else f"after {after_s:.1f} s",
        after_s is not None,
        timed=True,
    )


def fast_mode_holds(status: int, body: object, reply: ChatReply) -> Promise:
    """`status` and `body` are those of the admin call, `reply` that of a chat right after it."""
    promised = f"fast mode, one admin call, limits answers to {FAST_MAX_TOKENS} tokens at once and says so"
    if status >= 300:
        return Promise(promised, f"the admin API answered with {status}: {str(body)[:120]}", kept=False)
    limited = reply.answered and reply.headers.get("x-headrace-fast") == "on" and reply.finish == "length"
    return Promise(promised, f"{reply.status}, {len(reply.text)} characters, finish {reply.finish}", kept=limited)


def _request(client: ChatClient, place: int) -> Callable[[], Awaitable[ChatReply]]:
    question = _QUESTIONS[place % len(_QUESTIONS)]
    fields: dict[str, Any] = {"max_tokens": MAX_TOKENS, "cache": "off"}
    if place % 2 == 0:
        return partial(client.chat, question, sources=_SOURCES, **fields)
    return partial(client.chat, f"{question} ({place})", **fields)


async def _capacity(client: ChatClient) -> float:
    """Measure the requests per second that eight closed-loop users get through."""
    began = time.monotonic()
    done = 0

    async def user(number: int) -> None:
        nonlocal done
        while time.monotonic() < began + _CAPACITY_S:
            await _request(client, number)()
            done += 1

    await asyncio.gather(*map(user, range(8)))
    return max(1.0, done / (time.monotonic() - began))


async def _switch_fast_mode(client: ChatClient) -> Promise:
    status, body = await client.send("PUT", "/admin/v1/fast", {"on": True, "ttl_s": 600, "reason": "a drill"})
    reply = ChatReply()

    async def ask() -> ChatReply:
        nonlocal reply
        reply = await client.chat("Tell me about paged memory.", max_tokens=200, ignore_eos=True, cache="off")
        return reply

    # The last of the load may still be there: a rejected request is repeated, as Retry-After says.
    await retry_until(ask, lambda reply: not reply.refused, 60.0, DWELL_S)
    await client.send("DELETE", "/admin/v1/fast")
    return fast_mode_holds(status, body, reply)
