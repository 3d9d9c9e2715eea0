"""User text keeps its place through every operation that a template may apply to it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.text.user_text import UserText, inherit, join, plain

# Upper case is the user's, so that every operation can be checked on the characters themselves.
MIXED = st.text("abcABC \n<>", max_size=12)


def marked(text: str) -> UserText:
    return join("", [UserText(c) if c.isupper() else c for c in text])


def check(result: str) -> None:
    """The spans hold the upper-case characters and no others, in order and apart."""
    assert isinstance(result, UserText)
    covered = {place for start, stop in result.spans for place in range(start, stop)}
    assert covered == {place for place, character in enumerate(plain(result)) if character.isupper()}
    assert all(start < stop for start, stop in result.spans)
    assert all(one[1] < other[0] for one, other in zip(result.spans, result.spans[1:], strict=False))


OPERATIONS: dict[str, Any] = {
    "strip": lambda text: [text.strip(), text.lstrip(), text.rstrip(), text.strip("aA<")],
    "split": lambda text: [*text.split(), *text.split("<"), *text.split(None, 1), *text.split("a", 2)],
    "rsplit": lambda text: [*text.rsplit(), *text.rsplit(">"), *text.rsplit(None, 1), *text.rsplit("A", 1)],
    "lines": lambda text: [*text.splitlines(), *text.splitlines(keepends=True)],
    "partition": lambda text: [*text.partition("<"), *text.rpartition("<"), *text.partition("AB")],
    "affixes": lambda text: [text.removeprefix("a"), text.removesuffix("B"), text.removeprefix("AB")],
    "slices": lambda text: [text[1:], text[:-1], text[::-1], text[2:9:2], text[5:2], *text, *(text[-1:], text[:1])],
    "items": lambda text: [text[0], text[-1]] if text else [],
    "repeat": lambda text: [text * 3, 2 * text, text * 0],
    "add": lambda text: [text + "xy", "xy" + text, text + text],
    "join": lambda text: [text.join(["p", "q", "r"]), text.join([]), text.join([text, "z"])],
    "replace": lambda text: [text.replace("<", "[x]"), text.replace("A", "b"), text.replace("a", "", 1)],
    "text": lambda text: [str(text)],
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(text=MIXED)
def test_an_operation_gives_the_text_of_str_with_the_users_characters(name: str, text: str) -> None:
    results = OPERATIONS[name](marked(text))
    assert results == OPERATIONS[name](text)
    for result in results:
        check(result)


@given(text=MIXED)
def test_a_change_of_case_keeps_the_spans_or_marks_all(text: str) -> None:
    own = marked(text)
    for name in ("upper", "lower", "title", "capitalize", "swapcase", "casefold"):
        result = getattr(own, name)()
        assert result == getattr(text, name)()
        assert result.spans == own.spans
    assert UserText("ß").upper().spans == ((0, 2),)


def test_a_text_that_was_made_of_user_text_is_user_text() -> None:
    assert inherit("x{}", {"a": [UserText("A")]}).spans == ((0, 3),)
    assert type(inherit("x", {"a": ["A"]})) is str
    assert inherit(3, UserText("A")) == 3
    default = "<|end|>"
    assert inherit(default, UserText(""), default) is default  # what a filter only passes on
