"""What a conversation is made of, as far as something may be left out of it: turns that only go together.

Owns the grouping of messages into units (a user's turn with all that follows it until the next; within what follows the
last user's turn, each of the assistant's turns with the results of its calls), the check that a conversation is one
that templates take, and a count of tokens for plain messages. Knows no tokenizer and decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

Message = dict[str, Any]  # in the shape that chat templates take: role, content (a text), tool_calls, tool_call_id
TokenCounter = Callable[[Message], int]  # tokens of a message, with what the template puts around it

AROUND: Final = 4  # tokens that most templates put around a message


class MessageGroup(msgspec.Struct):
    """Messages that stay or go together."""

    places: list[int] = []
    stays: bool = False
    last: bool = False  # after the last user's turn began


def group_messages(messages: Sequence[Message]) -> list[MessageGroup]:
    """Every message but the system's is in exactly one, oldest first. Those that must stay say so: the last user's turn
    and the last of what follows it."""
    places = [place for place, message in enumerate(messages) if message["role"] != "system"]
    users = [place for place in places if messages[place]["role"] == "user"]
    if not users:
        return [MessageGroup(places, stays=True, last=True)] if places else []
    units: list[MessageGroup] = []
    before = ""
    last_turn = _begins_last(messages, places)
    for place in places:
        role = messages[place]["role"]
        in_last = place >= last_turn
        if (
            not units
            or (role == "user" and before != "user")
            or (in_last and role == "assistant")
            or (in_last and not units[-1].last)
        ):
            units.append(MessageGroup(last=in_last))
        units[-1].places.append(place)
        before = role
    for unit in units:
        unit.stays = unit.last and messages[unit.places[0]]["role"] == "user"
    units[-1].stays = True
    return _paired(messages, units)


def _begins_last(messages: Sequence[Message], places: Sequence[int]) -> int:
    """Where the last run of users' messages begins."""
    found = len(messages)
    for place in reversed(places):
        if messages[place]["role"] == "user":
            found = place
        elif found < len(messages):
            break
    return found


def _paired(messages: Sequence[Message], units: list[MessageGroup]) -> list[MessageGroup]:
    """Units across which a call and its result lie become one."""
    home: dict[int, int] = {place: at for at, unit in enumerate(units) for place in unit.places}
    into = list(range(len(units)))
    caller: dict[str, int] = {}  # the latest call of an id: clients count anew in every turn
    for place in sorted(home):
        message = messages[place]
        for call in message.get("tool_calls") or ():
            caller[call.get("id", "")] = home[place]
        if message["role"] == "tool":
            other = caller.get(message.get("tool_call_id") or "", home[place])
            _join(into, other, home[place])
    joined: dict[int, MessageGroup] = {}
    for at, unit in enumerate(units):
        root = _root(into, at)
        whole = joined.setdefault(root, MessageGroup(last=True))
        whole.places += unit.places
        whole.stays |= unit.stays
        whole.last &= unit.last
    return list(joined.values())


def _root(into: list[int], at: int) -> int:
    while into[at] != at:
        at = into[at]
    return at


def _join(into: list[int], one: int, other: int) -> None:
    first, second = sorted((_root(into, one), _root(into, other)))
    into[second] = first


def find_turn_problem(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a strict template would not take it; None where it would.

    After the system's messages a user begins, users and assistants take turns, and the results of calls follow the
    assistant's turn that made them, each call with one.
    """
    before, open_calls = "", set[str]()
    for place, message in enumerate(messages):
        role = message["role"]
        if role == "system":
            continue
        where = f"message {place}"
        if role == "tool":
            id = message.get("tool_call_id")
            if id not in open_calls:
                return f"{where} is the result of no call of the turn before it"
            open_calls.discard(id)
            before = "tool"
            continue
        if open_calls:
            return f"{where} comes before the results of all calls"
        if not before and role != "user":
            return f"{where} is the first and no user's"
        if role == before or (before == "tool" and role == "user"):
            return f"{where}: a {role}'s message after a {before}'s"
        open_calls = {call.get("id", "") for call in message.get("tool_calls") or ()}
        before = role
    return None


def message_counter(encode: Callable[[str], Sequence[int]], *, around: int = AROUND) -> TokenCounter:
    """Counts what a message says: content, reasoning, and calls as JSON. A template may write a little more or less."""

    def count(message: Message) -> int:
        total = around
        for name in ("content", "reasoning_content", "name"):
            text = message.get(name)
            if text:
                total += len(encode(text))
        for call in message.get("tool_calls") or ():
            function: dict[str, Any] = call.get("function") or {}
            total += around + len(encode(json.dumps(function, ensure_ascii=False, default=str)))
        return total

    return count
