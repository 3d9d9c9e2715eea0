"""The drill `overload`: four times the load that the server can take, and then the operator's switch.

Owns the load and what docs/how-to/playbooks.md promises of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from headrace.bench.drills.drill_client import ChatClient, ChatReply, at_rate
from headrace.bench.drills.drill_server import KEY, DrillServer
from headrace.bench.drills.promises import Promise, milliseconds, percentile

PATIENCE = 2.0  # seconds, of the surface
DWELL = 0.5  # seconds
ASKED_TOKENS = 96
SHORT = 24  # tokens that fast mode lets an answer have
CONFIG = f"""
[models.mini]

[surfaces.chat]
patience_s = {PATIENCE}

[surfaces.chat.ladder]
preset = true
dwell_s = {DWELL}

[fast]
max_tokens = {SHORT}
"""
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


async def run(*, seconds: float = 8.0, most: int = 600) -> list[Promise]:
    """`most`: questions of the overload."""
    async with DrillServer(CONFIG) as server:
        asker = ChatClient(server.url, KEY)
        try:
            return await _run(asker, seconds, most)
        finally:
            await asker.close()


async def _run(asker: ChatClient, seconds: float, most: int) -> list[Promise]:
    for _ in range(3):
        await asker.chat(_QUESTIONS[1], max_tokens=64)
    capacity = await _capacity(asker)
    count = min(most, max(40, int(4 * capacity * seconds)))
    asked = [_question(asker, place) for place in range(count)]
    replies = await at_rate(asked, 4 * capacity)
    with_sources = [reply for place, reply in enumerate(replies) if place % 2 == 0]
    lost = [reply for reply in replies if not (reply.answered or reply.refused)]
    slow = percentile([reply.ttft for reply in replies if reply.answered and reply.ttft is not None], 0.99)
    useful = sum(reply.answered for reply in with_sources) / max(1, len(with_sources))
    found = [
        Promise(
            "every request ends with an answer, or with 429 or 503 and Retry-After",
            f"{count} requests at {4 * capacity:.0f} a second: {sum(each.answered for each in replies)} answered, "
            f"{sum(each.refused for each in replies)} refused, {len(lost)} neither",
            not lost,
        ),
        Promise(
            f"who is answered has a first token within the surface's patience, {milliseconds(PATIENCE)}, and 500 ms",
            f"p99 {milliseconds(slow)}",
            slow <= PATIENCE + 0.5,
        ),
        declared(replies),
        Promise(
            "of the requests with sources, nine of ten get an answer, generated or quoted",
            f"{useful:.0%}",
            useful >= 0.9,
        ),
    ]
    found.append(await _recovered(asker))
    found.append(await _switched(asker))
    return found


def declared(replies: Sequence[ChatReply]) -> Promise:
    """Answers that are seen to be degraded (quoted, or cut before the limit that was asked for) carry the header. A
    machine that keeps up degrades none, and breaks no promise by it."""
    degraded = [each for each in replies if each.extracted or (each.finish == "length" and each.tokens < ASKED_TOKENS)]
    silent = [reply for reply in degraded if "x-headrace-degraded" not in reply.headers]
    found = (
        f"{len(degraded)} of {len(replies)} answers were quoted or cut, {len(silent)} of them without the header"
        if degraded
        else "the server kept up: no answer was quoted or cut"
    )
    return Promise("every degraded answer says so in x-headrace-degraded", found, not silent)


def _question(asker: ChatClient, place: int) -> partial[object]:
    question = _QUESTIONS[place % len(_QUESTIONS)]
    more = {"sources": _SOURCES} if place % 2 == 0 else {}
    return partial(
        asker.chat, f"{question} ({place})" if not more else question, max_tokens=ASKED_TOKENS, cache="off", **more
    )


async def _capacity(asker: ChatClient) -> float:
    """Requests a second that eight clients get through, one after another."""
    end = time.monotonic() + 3.0
    done = 0

    async def client(number: int) -> None:
        nonlocal done
        while time.monotonic() < end:
            await _question(asker, number)()  # pyright: ignore[reportGeneralTypeIssues]
            done += 1

    began = time.monotonic()
    await asyncio.gather(*map(client, range(8)))
    return max(1.0, done / (time.monotonic() - began))


async def _recovered(asker: ChatClient) -> Promise:
    began = time.monotonic()
    bound = 6 * DWELL + 10.0
    while time.monotonic() - began < bound:
        reply = await asker.chat(_QUESTIONS[1], max_tokens=32)
        if reply.answered and "x-headrace-degraded" not in reply.headers:
            return Promise(
                "once the load has gone, full service is back by itself",
                f"after {time.monotonic() - began:.1f} s",
                kept=True,
            )
        await asyncio.sleep(DWELL)
    return Promise("once the load has gone, full service is back by itself", f"not within {bound:g} s", kept=False)


async def _switched(asker: ChatClient) -> Promise:
    promised = f"fast mode, one call of the admin API, holds answers to {SHORT} tokens at once and says so"
    status, told = await asker.send("PUT", "/admin/v1/fast", {"on": True, "ttl_s": 60, "reason": "a drill"})
    if status >= 300:
        return Promise(promised, f"the call was answered with {status}: {str(told)[:120]}", kept=False)
    reply: ChatReply = await asker.chat("Tell me about paged memory.", max_tokens=200, ignore_eos=True, cache="off")
    await asker.send("DELETE", "/admin/v1/fast")
    fits = reply.answered and reply.headers.get("x-headrace-fast") == "on" and reply.finish == "length"
    return Promise(promised, f"{reply.status}, {len(reply.text)} characters, finish {reply.finish}", kept=fits)
