"""Answers as bytes: what comes back is what was put in, and anything else is nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.caches.exact.cache_entry import ExactEntry, is_complete, is_same_answer, pack, unpack
from headrace.gateway.requests.text_request import ChoiceDelta, TokenLogprob, TokenUsage, ToolCallDelta
from tests.support.stores.exact_caches import said

KEY = bytes(range(32))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
maybe = st.none() | texts
logprobs = st.none() | st.floats(max_value=0, allow_nan=False, width=32)
tokens = st.builds(
    TokenLogprob,
    text=texts,
    bytes=st.binary(max_size=8),
    logprob=logprobs,
    top=st.lists(st.tuples(texts, st.binary(max_size=8), st.floats(allow_nan=False)), max_size=3),
    shown=texts,
)
counts = st.integers(0, 2**40)
usages = st.builds(
    TokenUsage, prompt_tokens=counts, output_tokens=counts, cached_tokens=counts, reasoning_tokens=counts
)  # the times are not kept
pieces = st.builds(
    ChoiceDelta,
    index=st.integers(0, 5),
    content=texts,
    reasoning=texts,
    calls=st.lists(st.builds(ToolCallDelta, st.integers(0, 3), maybe, maybe, texts), max_size=2),
    logprobs=st.none() | st.lists(tokens, max_size=2),
    finish=st.sampled_from([None, "stop", "length", "tool_calls", "deadline"]),
    stop=maybe,
    usage=st.none() | usages,
)


@given(st.lists(pieces | st.builds(ChoiceDelta, st.just(0), texts), max_size=6), st.floats(0, 1e12))
@settings(max_examples=40, deadline=None)
def test_an_entry_comes_back_as_it_was(given_pieces: list[ChoiceDelta], made: float) -> None:
    data = pack(given_pieces, key=KEY, made=made)
    assert unpack(data, key=KEY) == ExactEntry(made, given_pieces)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_entry_is_none(data: st.DataObject) -> None:
    whole = pack(said("Hello", " there", "."), key=KEY, made=1.0)
    place = data.draw(st.integers(0, len(whole) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    damaged = whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :]
    assert unpack(damaged, key=KEY) is None
    assert unpack(whole[:place], key=KEY) is None
    assert unpack(whole + b"x", key=KEY) is None


@given(st.binary(max_size=100))
@settings(max_examples=50, deadline=None)
def test_other_bytes_are_no_entry(data: bytes) -> None:
    assert unpack(data, key=KEY) is None
    assert unpack(b"mx1" + data, key=KEY) is None


def test_an_entry_under_another_key_is_none() -> None:
    data = pack(said("Hello"), key=KEY, made=1.0)
    assert unpack(data, key=bytes(32)) is None


def test_with_a_secret_only_who_has_it_writes_entries() -> None:
    data = pack(said("Hello"), key=KEY, made=1.0, secret=b"ours")
    assert unpack(data, key=KEY, secret=b"ours") is not None
    assert unpack(data, key=KEY) is None
    assert unpack(pack(said("Hello"), key=KEY, made=1.0), key=KEY, secret=b"ours") is None
    assert unpack(pack(said("Hello"), key=KEY, made=1.0, secret=b"theirs"), key=KEY, secret=b"ours") is None


def test_times_are_not_kept() -> None:
    used = TokenUsage(5, 6, 4, 2, drafted=9, accepted=8, queue_s=1.0, prefill_s=2.0, decode_s=3.0)
    entry = unpack(pack([ChoiceDelta(0, "x", finish="stop", usage=used)], key=KEY, made=1.0), key=KEY)
    assert entry is not None
    assert entry.pieces[0].usage == TokenUsage(5, 6, 4, 2)


def test_a_plain_piece_takes_its_text_and_a_byte_or_two() -> None:
    words = [" word"] * 500
    assert len(pack(said(*words), key=KEY, made=1.0)) <= 500 * (len(" word") + 1) + 80


def test_half_a_character_cannot_be_kept() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        pack([ChoiceDelta(0, "x", finish="stop", stop="\ud800")], key=KEY, made=1.0)


@pytest.mark.parametrize(
    ("answer", "choices", "whole"),
    [
        (said("x"), 1, True),
        (said("x", finish="length"), 1, True),
        (said("x", finish="tool_calls"), 1, True),
        (said("x", finish="deadline"), 1, False),
        ([ChoiceDelta(0, "x")], 1, False),
        ([], 1, False),
        ([*said("x"), *said("y", index=1)], 2, True),
        (said("x"), 2, False),
        ([*said("x"), *said("y", index=2)], 2, False),
        ([*said("x"), *said("y")], 1, False),
        ([*said("x"), *said("y", index=1, finish="deadline")], 2, False),
    ],
)
def test_an_answer_is_whole_when_every_choice_has_its_own_end(
    answer: list[ChoiceDelta], choices: int, whole: bool
) -> None:
    assert is_complete(answer, choices) is whole


def test_answers_say_the_same_however_they_are_cut() -> None:
    one = said("Hel", "lo")
    assert is_same_answer(one, said("Hello"))
    assert not is_same_answer(one, said("Hello!"))
    assert not is_same_answer(one, said("Hello", finish="length"))
    calls = [[ChoiceDelta(0, calls=[ToolCallDelta(0, name, "f", "{}")]), *said()] for name in ("call_1", "call_2")]
    assert is_same_answer(*calls)
    assert not is_same_answer(calls[0], [ChoiceDelta(0, calls=[ToolCallDelta(0, "call_1", "f", "[]")]), *said()])
