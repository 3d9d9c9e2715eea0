"""Reads the words and sentences of the corpus from words/*.toml.

In these files a text of several lines stands for a list with one entry a line. Knows no task.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")
FOLDER = Path(__file__).parent / "words"


def lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def with_lists(value: Any) -> Any:
    """The value with a tuple of lines in place of every text that ends with a line end."""
    if isinstance(value, str):
        return lines(value) if value.endswith("\n") else value
    if isinstance(value, dict):
        return {key: with_lists(item) for key, item in cast("dict[str, Any]", value).items()}
    return [with_lists(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value


def read(name: str, type: type[T]) -> T:
    content = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    return msgspec.convert(with_lists(content), type)


class Names(msgspec.Struct):
    words: dict[str, str | tuple[str, ...]]
    phrases: dict[str, tuple[str, ...]]


@cache
def lists() -> dict[str, tuple[str, ...]]:
    """Every list of names.toml: first names, cities, goods, ..."""
    names = read("names", Names)
    words = {
        name: tuple(word for line in ([text] if isinstance(text, str) else text) for word in line.split())
        for name, text in names.words.items()
    }
    return words | names.phrases


class Told(msgspec.Struct, frozen=True):
    """A kind of thing that a user tells about himself, and where its values come from."""

    noun: str
    telling: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    list: str = ""
    range: tuple[int, int, int] = (0, 0, 1)
    unit: str = ""
    code: tuple[str, ...] = ()


class Phrases(msgspec.Struct):
    told: tuple[Told, ...]
    facts: dict[str, Any]
    talk: dict[str, tuple[str, ...]]
    reading: dict[str, tuple[str, ...]]
    tools: dict[str, tuple[str, ...]]
    arithmetic: dict[str, Any]
    typing: dict[str, tuple[str, ...]]


PHRASES = read("phrases", Phrases)
