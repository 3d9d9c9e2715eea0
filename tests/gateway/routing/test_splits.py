"""Splits: shares, and that a conversation stays where it is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.requests.text_request import TextRequest
from headrace.gateway.routing.splits import BUCKETS, Split, bucket_of, conversation_key
from tests.support.scripted_answers import asked_for, exchange_of

CONVERSATIONS = [b"conversation %d" % number for number in range(20_000)]


def counts(split: Split) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in CONVERSATIONS:
        variant = split.choose(each)
        found[variant] = found.get(variant, 0) + 1
    return found


@pytest.mark.parametrize("percent", [{"a": 95.0, "b": 5.0}, {"a": 50.0, "b": 30.0, "c": 20.0}, {"a": 99.5, "b": 0.5}])
def test_shares_are_what_they_say_within_what_chance_allows(percent: dict[str, float]) -> None:
    found = counts(Split.of("canary", percent))
    total = len(CONVERSATIONS)
    for variant, share in percent.items():
        expected = total * share / 100
        assert abs(found[variant] - expected) < 4 * math.sqrt(expected * (1 - share / 100))


def test_the_ends_of_the_shares_are_exact() -> None:
    split = Split.of("canary", {"a": 33.3333, "b": 33.3333, "c": 33.3334})
    assert split.ends == (("a", 333_333), ("b", 666_666), ("c", BUCKETS))


@pytest.mark.parametrize("percent", [{"a": 50.0, "b": 49.0}, {"a": 100.0, "b": 1.0}, {}, {"a": 99.99999, "b": 0.00001}])
def test_shares_that_are_not_a_hundred_percent_are_refused(percent: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="percent"):
        Split.of("canary", percent)


def test_two_splits_are_independent() -> None:
    first, second = Split.of("one", {"a": 50.0, "b": 50.0}), Split.of("two", {"a": 50.0, "b": 50.0})
    both = sum(first.choose(each) == second.choose(each) == "a" for each in CONVERSATIONS)
    total = len(CONVERSATIONS)
    assert abs(both - total / 4) < 4 * math.sqrt(total * 3 / 16)


def test_splits_of_one_salt_choose_alike() -> None:
    first = Split.of("one", {"a": 50.0, "b": 50.0}, "same")
    second = Split.of("two", {"a": 50.0, "b": 50.0}, "same")
    assert all(first.choose(each) == second.choose(each) for each in CONVERSATIONS[:500])


def test_a_growing_canary_takes_conversations_and_gives_none_back() -> None:
    before, after = Split.of("c", {"stable": 95.0, "canary": 5.0}), Split.of("c", {"stable": 80.0, "canary": 20.0})
    for each in CONVERSATIONS[:5000]:
        if before.choose(each) == "canary":
            assert after.choose(each) == "canary"


def test_a_place_is_the_same_in_every_process_and_version() -> None:
    assert [bucket_of("canary", each) for each in CONVERSATIONS[:3]] == [708_083, 318_281, 101_617]


def place(asked: TextRequest, tenant: str = "acme") -> bytes:
    return conversation_key(exchange_of(asked, tenant=tenant), "conversation")


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40), st.lists(st.text(max_size=40), max_size=4), st.text(max_size=40))
def test_a_conversation_is_the_same_at_all_of_its_turns(system: str, later: list[str], first: str) -> None:
    opening = [{"role": "system", "content": system}, {"role": "user", "content": first}]
    turns = list(opening)
    for number, text in enumerate(later):
        turns.append({"role": "user" if number % 2 else "assistant", "content": text})
    split = Split.of("canary", {"a": 50.0, "b": 50.0})
    begun = place(TextRequest(model="mini", messages=opening))
    assert place(TextRequest(model="mini", messages=turns)) == begun
    assert split.choose(begun) == split.choose(place(TextRequest(model="mini", messages=turns)))


def test_an_id_comes_before_a_user_and_a_user_before_how_it_began() -> None:
    plain = asked_for("Hello")
    of_user = plain.but(user="anna")
    named = of_user.but(metadata={"conversation": "17"})
    assert len({place(each) for each in (plain, of_user, named)}) == 3
    assert place(named) == place(asked_for("Goodbye").but(metadata={"conversation": "17"}))
    assert place(of_user) == place(asked_for("Goodbye").but(user="anna"))
    assert place(plain) != place(asked_for("Goodbye"))


def test_tenants_have_nothing_to_do_with_each_other() -> None:
    assert place(asked_for("Hello"), "acme") != place(asked_for("Hello"), "globex")
    named = asked_for("Hello", metadata={"conversation": "17"})
    assert place(named, "acme") != place(named, "globex")


def test_no_two_conversations_are_written_alike() -> None:
    as_id = asked_for(metadata={"conversation": "4:user4:anna"})
    assert place(as_id, "a") != place(asked_for(user="anna"), "a")
    assert place(asked_for(user="b"), "a2:") != place(asked_for(user="2:b"), "a")


def test_a_text_without_messages_is_known_by_its_beginning() -> None:
    beginning = "Once upon a time there was a mill that had no water for a year, and"
    first, second = (TextRequest(model="mini", prompts=[beginning + rest]) for rest in (" then", " then it rained"))
    assert place(first) == place(second)
    assert place(TextRequest(model="mini", prompts=[[1, 2, 3]])) != place(
        TextRequest(model="mini", prompts=[[1, 2, 4]])
    )
