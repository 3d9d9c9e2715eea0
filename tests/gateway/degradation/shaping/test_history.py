"""Conversations that fit: what stays, what goes, and that the rest is still a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.shaping_section import ShapingConfig
from headrace.gateway.degradation.shaping.conversation import (
    ChatMessage,
    find_turn_problem,
    group_messages,
)
from headrace.gateway.degradation.shaping.history import fit_conversation, fit_conversation_with_summary
from tests.support.conversations import conversation, count


def said(role: str, content: str, **more: object) -> ChatMessage:
    return {"role": role, "content": content, **more}


def talk(rounds: int, words: int = 10) -> list[ChatMessage]:
    found = [said("system", "be kind")]
    for number in range(rounds):
        found += [said("user", f"q{number} " + "x " * words), said("assistant", f"a{number} " + "y " * words)]
    return [*found, said("user", "last one")]


seeds = st.integers(0, 2**32)


@settings(max_examples=200, deadline=None)
@given(seeds, st.integers(0, 300), st.integers(0, 20), st.integers(1, 60))
def test_what_is_left_is_a_conversation_that_fits_or_all_that_must_stay(
    seed: int, budget: int, overhead: int, stride: int
) -> None:
    messages = conversation(seed)
    assert find_turn_problem(messages) is None
    fitted = fit_conversation(messages, budget=budget, count=count, overhead=overhead, stride=stride)
    assert find_turn_problem(fitted.messages) is None
    assert fitted.after == sum(map(count, fitted.messages)) + overhead
    assert fitted.before == sum(map(count, messages)) + overhead
    assert fitted.fits == (fitted.after <= budget)
    # What is left stands in its order, and with what was dropped it is all there was.
    left = [id(message) for message in fitted.messages]
    assert left == [id(message) for message in messages if id(message) in set(left)]
    assert len(left) + len(fitted.dropped) == len(messages)
    last_user = max(place for place, message in enumerate(messages) if message["role"] == "user")
    kept = {id(messages[last_user]), id(messages[-1]), *(id(each) for each in messages if each["role"] == "system")}
    assert kept <= set(left)
    if not fitted.fits:
        units = group_messages(messages)
        assert sum(len(unit.indices) for unit in units if unit.must_stay) == len(
            [message for message in fitted.messages if message["role"] != "system"]
        )
    assert bool(fitted.changes) == bool(fitted.dropped)


@settings(max_examples=100, deadline=None)
@given(seeds, st.integers(1, 300))
def test_a_conversation_that_was_fitted_is_not_changed_again(seed: int, budget: int) -> None:
    messages = conversation(seed)
    once = fit_conversation(messages, budget=budget, count=count)
    again = fit_conversation(once.messages, budget=budget, count=count)
    if once.fits:
        assert again.messages == once.messages
        assert not again.dropped


def test_what_fits_is_left_alone() -> None:
    messages = talk(3)
    fitted = fit_conversation(messages, budget=10_000, count=count)
    assert fitted.messages == messages
    assert (fitted.changes, fitted.dropped, fitted.fits) == ((), (), True)


def test_the_oldest_turns_go_first_and_are_told() -> None:
    messages = talk(4)
    fitted = fit_conversation(messages, budget=80, count=count, stride=1)
    assert [message["content"].split()[0] for message in fitted.messages] == ["be", "q2", "a2", "q3", "a3", "last"]
    assert str(fitted.changes[0]) == f"turns={fitted.before}>{fitted.after}"


def test_the_cut_stays_where_it_is_while_a_conversation_grows() -> None:
    """Or else no turn would find the one before it in the prefix cache."""
    cuts: list[str] = []
    for rounds in range(20, 40):
        fitted = fit_conversation(talk(rounds), budget=300, count=count)
        assert fitted.fits
        cuts.append(fitted.messages[1]["content"].split()[0])
    assert len(set(cuts)) <= 9  # of twenty
    assert cuts == sorted(cuts, key=lambda name: int(name[1:]))


def test_within_the_last_turn_the_oldest_calls_go_with_their_results() -> None:
    messages = [said("user", "old"), said("assistant", "fine"), said("user", "find it")]
    for number in range(4):
        messages.append(said("assistant", "", tool_calls=[{"id": f"c{number}"}]))
        messages.append(said("tool", "r " * 20, tool_call_id=f"c{number}"))
    fitted = fit_conversation(messages, budget=80, count=count, stride=1)
    assert [message.get("tool_call_id") for message in fitted.messages if message["role"] == "tool"] == ["c2", "c3"]
    assert fitted.messages[0]["content"] == "find it"
    assert fitted.fits


def test_calls_that_are_answered_in_a_later_turn_go_with_it() -> None:
    messages = [
        said("user", "one"),
        said("assistant", "", tool_calls=[{"id": "c"}]),
        said("user", "wait"),
        said("tool", "late " * 10, tool_call_id="c"),
        said("assistant", "done"),
        said("user", "last"),
    ]
    fitted = fit_conversation(messages, budget=12, count=count, stride=1)
    assert [message["content"] for message in fitted.messages] == ["last"]
    assert (
        len(fit_conversation(messages, budget=40, count=count, stride=1).messages) == 1
    )  # both turns, though one would do


def test_too_much_to_keep_is_said_and_not_hidden() -> None:
    fitted = fit_conversation([said("system", "s " * 50), said("user", "u " * 50)], budget=40, count=count)
    assert not fitted.fits
    assert fitted.after == 108
    assert not fitted.changes


class Teller:
    def __init__(self, text: str, *, seconds: float = 0.0) -> None:
        self.text = text
        self.seconds = seconds
        self.read: list[ChatMessage] = []

    async def summarise(self, messages: Sequence[ChatMessage], *, tokens: int) -> str:
        self.read = list(messages)
        await asyncio.sleep(self.seconds)
        return self.text


class Broken:
    async def summarise(self, messages: Sequence[ChatMessage], *, tokens: int) -> str:
        raise RuntimeError("no model")


def test_a_summary_stands_before_the_first_turn_that_stays() -> None:
    messages = talk(6)
    teller = Teller("They spoke of x.")
    config = ShapingConfig(summary_tokens=20)
    fitted = asyncio.run(
        fit_conversation_with_summary(
            messages, budget=120, count=count, summariser=teller, config=config, input_tokens=60
        )
    )
    assert fitted.fits
    assert fitted.after <= 120
    assert find_turn_problem(fitted.messages) is None
    first = next(message for message in fitted.messages if message["role"] == "user")
    assert "They spoke of x." in first["content"]
    assert first["content"].split()[-11] == "q4"
    assert [each.name for each in fitted.changes] == ["turns", "summary"]
    assert messages[1]["content"].startswith("q0")  # what was given is not changed
    # Of what was dropped, the newest is read.
    assert sum(map(count, teller.read)) <= 60
    assert teller.read[-1]["content"].startswith("a3")


@pytest.mark.parametrize(
    "summariser", [Broken(), Teller("too long " * 100), Teller("   "), Teller("late", seconds=60.0)]
)
def test_without_a_summary_turns_are_dropped(summariser: Teller | Broken) -> None:
    messages = talk(6)
    config = ShapingConfig(summary_tokens=20, summary_s=0.05)
    heard: list[Exception] = []
    fitted = asyncio.run(
        fit_conversation_with_summary(
            messages, budget=120, count=count, summariser=summariser, config=config, on_failure=heard.append
        )
    )
    assert fitted == fit_conversation(messages, budget=120, count=count)
    assert len(heard) == (0 if isinstance(summariser, Teller) and not summariser.text.strip() else 1)


def test_nobody_is_asked_for_a_summary_where_nothing_is_dropped() -> None:
    teller = Teller("unused")
    asyncio.run(fit_conversation_with_summary(talk(1), budget=1000, count=count, summariser=teller))
    assert not teller.read


@pytest.mark.parametrize(
    ("roles", "problem"),
    [
        (["system", "user", "assistant", "user"], None),
        (["assistant", "user"], "Message 0 comes first but is not a user's."),
        (["user", "user"], "Message 1 has the role 'user', which cannot follow 'user'."),
        (["user", "tool"], "Message 1 is the result of a call that the turn before it did not make."),
    ],
)
def test_problems_of_conversations_are_named(roles: list[str], problem: str | None) -> None:
    assert find_turn_problem([said(role, "x") for role in roles]) == problem
