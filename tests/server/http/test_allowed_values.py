"""Allowed values: literals at any place of a type."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import msgspec
import pytest

from headrace.gateway.api_errors import ApiError
from headrace.server.http.allowed_values import allowed_values, value_list
from headrace.server.http.body_parameters import convert_value


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Part(msgspec.Struct):
    kind: Literal["text", "image"] = msgspec.field(name="type", default="text")


class Message(msgspec.Struct):
    role: Literal["user", "system"]
    content: str | list[Part] = ""


@pytest.mark.parametrize(
    ("type", "path", "values"),
    [
        (Literal["a", "b"] | None, "", ("a", "b")),
        (Colour, "", ("red", "blue")),
        (list[Message], "[3].role", ("system", "user")),
        (list[Message], "[3].content[0].type", ("image", "text")),
        (dict[str, Literal[1, 2]], "[...]", (1, 2)),
        (Message | list[Message], ".role", ("system", "user")),
        (str, "", ()),
        (Message, ".missing", ()),
    ],
)
def test_the_literals_of_a_place_are_found(type: Any, path: str, values: tuple[Any, ...]) -> None:
    assert sorted(allowed_values(type, path), key=str) == sorted(values, key=str)


def test_values_are_listed_as_a_sentence_has_them() -> None:
    assert value_list(("a",)) == "'a'"
    assert value_list(("a", "b", 3)) == "'a', 'b' or 3"


def test_the_error_names_the_allowed_values() -> None:
    with pytest.raises(ApiError) as caught:
        convert_value([{"role": "usr"}], list[Message], "messages")
    assert caught.value.message == "'messages[0].role': invalid enum value 'usr'. Expected 'system' or 'user'."
    assert caught.value.parameter == "messages[0].role"
