"""Conversations drawn at random, all of them such as a strict template takes."""

from __future__ import annotations

from random import Random

from headrace.gateway.degradation.shaping.conversation import ChatMessage


def count(message: ChatMessage) -> int:
    """A token for each word, and four around a message."""
    words = len(str(message.get("content") or "").split())
    return 4 + words + 3 * len(message.get("tool_calls") or ())


def text_of(draw: Random) -> str:
    return "w " * draw.randint(1, 30)


def conversation(seed: int) -> list[ChatMessage]:
    """The system's turn or none, then rounds; the last one ends where something is to be answered."""
    draw = Random(seed)
    found: list[ChatMessage] = [{"role": "system", "content": text_of(draw)}] if draw.random() < 0.5 else []
    rounds = draw.randint(1, 6)
    same_ids = draw.random() < 0.5
    for number in range(rounds):
        found.append({"role": "user", "content": f"u{number} {text_of(draw)}"})
        for step in range(draw.choice((0, 0, 1, 2, 3))):
            calls = [f"c{at}" if same_ids else f"c{number}-{step}-{at}" for at in range(draw.randint(1, 3))]
            found.append({"role": "assistant", "content": "", "tool_calls": [{"id": id} for id in calls]})
            for id in draw.sample(calls, len(calls)):
                found.append({"role": "tool", "tool_call_id": id, "content": text_of(draw)})
        if number < rounds - 1:
            found.append({"role": "assistant", "content": f"a{number} {text_of(draw)}"})
    return found
