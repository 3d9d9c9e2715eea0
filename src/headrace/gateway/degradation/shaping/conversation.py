"""Groups the messages of a conversation that can only be dropped together.

Owns the grouping (a user's turn with all that follows it until the next; after the last user's turn, each assistant
turn with the results of its calls) and the check that a conversation suits strict templates. Does not decide what to
drop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

ChatMessage = dict[str, Any]  # as chat templates take it: role, content (a text), tool_calls, tool_call_id
TokenCounter = Callable[[ChatMessage], int]  # tokens of a message, with what the template puts around it


class MessageGroup(msgspec.Struct):
    """Messages that stay or go together."""

    indices: list[int] = []
    must_stay: bool = False
    in_last_turn: bool = False  # after the last user's turn began


def group_messages(messages: Sequence[ChatMessage]) -> list[MessageGroup]:
    """Put every message but the system's into one group, oldest first.

    The last user's turn and the last group after it must stay.
    """
    indices = [index for index, message in enumerate(messages) if message["role"] != "system"]
    if not any(messages[index]["role"] == "user" for index in indices):
        return [MessageGroup(indices, must_stay=True, in_last_turn=True)] if indices else []
    groups: list[MessageGroup] = []
    previous_role = ""
    last_turn = _last_turn_start(messages, indices)
    for index in indices:
        role = messages[index]["role"]
        in_last_turn = index >= last_turn
        if (
            not groups
            or (role == "user" and previous_role != "user")
            or (in_last_turn and role == "assistant")
            or (in_last_turn and not groups[-1].in_last_turn)
        ):
            groups.append(MessageGroup(in_last_turn=in_last_turn))
        groups[-1].indices.append(index)
        previous_role = role
    for group in groups:
        group.must_stay = group.in_last_turn and messages[group.indices[0]]["role"] == "user"
    groups[-1].must_stay = True
    return _join_calls_with_results(messages, groups)


def _last_turn_start(messages: Sequence[ChatMessage], indices: Sequence[int]) -> int:
    """Return the index at which the last run of user messages begins."""
    start = len(messages)
    for index in reversed(indices):
        if messages[index]["role"] == "user":
            start = index
        elif start < len(messages):
            break
    return start


def _join_calls_with_results(messages: Sequence[ChatMessage], groups: list[MessageGroup]) -> list[MessageGroup]:
    """Merge groups that have a tool call in one and its result in another."""
    group_of: dict[int, int] = {index: number for number, group in enumerate(groups) for index in group.indices}
    parents = list(range(len(groups)))
    caller: dict[str, int] = {}  # by call id, the group of the latest call: clients reuse ids in later turns
    for index in sorted(group_of):
        message = messages[index]
        for call in message.get("tool_calls") or ():
            caller[call.get("id", "")] = group_of[index]
        if message["role"] == "tool":
            other = caller.get(message.get("tool_call_id") or "", group_of[index])
            first, second = sorted((_root(parents, other), _root(parents, group_of[index])))
            parents[second] = first
    joined: dict[int, MessageGroup] = {}
    for number, group in enumerate(groups):
        whole = joined.setdefault(_root(parents, number), MessageGroup(in_last_turn=True))
        whole.indices += group.indices
        whole.must_stay |= group.must_stay
        whole.in_last_turn &= group.in_last_turn
    return list(joined.values())


def _root(parents: list[int], number: int) -> int:
    while parents[number] != number:
        number = parents[number]
    return number


def find_turn_problem(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why a strict chat template would reject the messages, or None.

    After the system's messages a user begins, users and assistants alternate, and each call of an assistant's turn is
    followed by one result.
    """
    previous_role, open_calls = "", set[str]()
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "system":
            continue
        where = f"Message {index}"
        if role == "tool":
            call_id = message.get("tool_call_id")
            if call_id not in open_calls:
                return f"{where} is the result of a call that the turn before it did not make."
            open_calls.discard(call_id)
            previous_role = "tool"
            continue
        if open_calls:
            return f"{where} comes before the results of all tool calls."
        if not previous_role and role != "user":
            return f"{where} comes first but is not a user's."
        if role == previous_role or (previous_role == "tool" and role == "user"):
            return f"{where} has the role '{role}', which cannot follow '{previous_role}'."
        open_calls = {call.get("id", "") for call in message.get("tool_calls") or ()}
        previous_role = role
    return None
