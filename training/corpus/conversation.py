"""Defines turns, conversations to learn from, and held-out questions. Does not know tasks or tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal, TypeAlias, Union

JSON: TypeAlias = Union[dict[str, "JSON"], list["JSON"], str, int, float, bool, None]  # noqa: UP007 (it names itself)
Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

CALL_BEGIN = "<tool_call>"  # both are special tokens of the vocabulary
CALL_END = "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, JSON]


@dataclass(frozen=True)
class Turn:
    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()  # assistant only
    name: str = ""  # tool only: the function that answered


@dataclass(frozen=True)
class Conversation:
    """Something to learn: its assistant turns are what is learnt."""

    task: str  # "facts", "reading", "extraction", "tools", "triage", "arithmetic" or "talk"
    turns: tuple[Turn, ...]
    tools: tuple[JSON, ...] = ()  # OpenAI function declarations: {"type": "function", "function": {...}}
    key: str = ""  # what it is an instance of; no key is in both training and evaluation


@dataclass(frozen=True)
class Question:
    """Something to be answered once, after turns that end with a user's or a tool's."""

    task: str
    turns: tuple[Turn, ...]
    tools: tuple[JSON, ...]
    expected: str  # the text of the assistant's turn, as `rendered` gives it
    metric: str  # one of scoring.METRICS
    key: str


def rendered(turn: Turn) -> str:
    """The text of a turn as the model reads and writes it: its content, then its tool calls, without a line between."""
    calls = "".join(
        CALL_BEGIN + json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False) + CALL_END
        for call in turn.tool_calls
    )
    return turn.content.strip() + calls
