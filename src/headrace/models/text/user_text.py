"""UserText: a text that knows which of its characters come from a request, and keeps that through a template.

A chat template joins user text with the model's control tokens. Rendered with UserText, the result says which spans are
the user's, so that a forged `<|end|>` in a message can be tokenised as plain text. The methods here follow characters
exactly; every other operation that makes a text from user text marks all of its result (see `inherit`), which is safe.
Does not know tokens or jinja.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Self, SupportsIndex, cast

Spans = tuple[tuple[int, int], ...]

# Methods of str that keep every character in its place if they keep the length.
_SAME_PLACES: Final = ("upper", "lower", "title", "capitalize", "swapcase", "casefold")
# Some templates write '<|' + role + '|>'. These roles may be part of a control token.
ROLES: Final = frozenset({"system", "user", "assistant", "tool", "developer", "function", "ipython", "model"})


class UserText(str):
    """A text with the spans that a request wrote: all of it by default. The rest is the template's."""

    __slots__ = ("spans",)
    spans: Spans

    def __new__(cls, text: object = "", spans: Spans | None = None) -> Self:
        made = str.__new__(cls, text)
        made.spans = (((0, len(made)),) if made else ()) if spans is None else spans
        return made

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> UserText:
        if not isinstance(key, slice):
            start = range(len(self))[key]  # an IndexError past the end
            return self._cut(start, start + 1)
        start, stop, step = key.indices(len(self))
        if step == 1:
            return self._cut(start, max(start, stop))
        return join("", [self._cut(place, place + 1) for place in range(start, stop, step)])

    def __iter__(self) -> Iterator[UserText]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (self._cut(place, place + 1) for place in range(len(self)))

    def __add__(self, other: str) -> UserText:
        return join("", (self, other)) if isinstance(other, str) else NotImplemented  # pyright: ignore[reportUnnecessaryIsInstance]

    def __radd__(self, other: str) -> UserText:
        return join("", (other, self)) if isinstance(other, str) else NotImplemented  # pyright: ignore[reportUnnecessaryIsInstance]

    def __mul__(self, times: SupportsIndex) -> UserText:
        return join("", (self,) * times.__index__())

    def __rmul__(self, times: SupportsIndex) -> UserText:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self * times

    def _cut(self, start: int, stop: int) -> UserText:
        text = str.__getitem__(self, slice(start, stop))
        stop = start + len(text)
        spans: list[tuple[int, int]] = []
        # A text cut into many pieces may have many spans, so the first is not searched from the beginning.
        for place in range(bisect_right(self.spans, start, key=_end), len(self.spans)):
            first, last = self.spans[place]
            if first >= stop:
                break
            spans.append((max(first, start) - start, min(last, stop) - start))
        return UserText(text, tuple(spans) if start < stop else ())

    def _pieces(self, texts: Iterable[str]) -> list[UserText]:
        """Find texts that were cut from this one, in their order."""
        place = 0
        found: list[UserText] = []
        for text in texts:
            place = str.find(self, text, place)
            found.append(self._cut(place, place + len(text)))
            place += len(text)
        return found

    def strip(self, chars: str | None = None, /) -> UserText:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> UserText:
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> UserText:
        return self._cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> UserText:
        return self._cut(len(prefix) if self.startswith(prefix) else 0, len(self))

    def removesuffix(self, suffix: str, /) -> UserText:
        return self._cut(0, len(self) - len(suffix) if self.endswith(suffix) else len(self))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[UserText]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._apart(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[UserText]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._apart(str.rsplit(self, sep, maxsplit), sep)

    def _apart(self, texts: list[str], sep: str | None) -> list[UserText]:
        if sep is None:
            return self._pieces(texts)
        place = 0
        found: list[UserText] = []
        for text in texts:
            found.append(self._cut(place, place + len(text)))
            place += len(text) + len(sep)
        return found

    def splitlines(self, keepends: bool = False) -> list[UserText]:  # pyright: ignore[reportIncompatibleMethodOverride]
        whole = self._pieces(str.splitlines(self, keepends=True))
        if keepends:
            return whole
        bare = str.splitlines(self)
        return [line._cut(0, len(text)) for line, text in zip(whole, bare, strict=True)]

    def partition(self, sep: str, /) -> tuple[UserText, UserText, UserText]:
        before, found, _ = str.partition(self, sep)
        return self._three(len(before), len(before) + len(found))

    def rpartition(self, sep: str, /) -> tuple[UserText, UserText, UserText]:
        before, found, _ = str.rpartition(self, sep)
        return self._three(len(before), len(before) + len(found))

    def _three(self, start: int, stop: int) -> tuple[UserText, UserText, UserText]:
        return self._cut(0, start), self._cut(start, stop), self._cut(stop, len(self))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> UserText:
        if not old:  # between all characters
            return UserText(str.replace(self, old, new, count))
        return join(new, self.split(old, count))

    def join(self, texts: Iterable[str], /) -> UserText:
        return join(self, list(texts))


def _end(span: tuple[int, int]) -> int:
    return span[1]


def _same_places(name: str) -> Any:
    change = getattr(str, name)

    def changed(self: UserText) -> UserText:
        text: str = change(self)
        return UserText(text, self.spans if len(text) == len(self) else None)

    changed.__name__ = name
    return changed


for _name in _SAME_PLACES:
    setattr(UserText, _name, _same_places(_name))


def plain(text: str) -> str:
    """Return the characters alone."""
    return str.__str__(text)


def join(separator: str, texts: Iterable[str]) -> UserText:
    """Join texts as str.join does, and keep their spans."""
    pieces: list[str] = []
    for text in texts:
        if pieces and separator:
            pieces.append(separator)
        pieces.append(text)
    spans: list[tuple[int, int]] = []
    place = 0
    for piece in pieces:
        if isinstance(piece, UserText):
            for first, last in piece.spans:
                if spans and spans[-1][1] == place + first:
                    spans[-1] = spans[-1][0], place + last
                else:
                    spans.append((place + first, place + last))
        place += len(piece)
    return UserText("".join(pieces), tuple(spans))


def has_user_text(value: object) -> bool:
    """Return whether a value is or contains user text."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, UserText):
            return True
        if isinstance(item, Mapping):
            pairs = cast("Mapping[object, object]", item)
            stack += pairs.keys()
            stack += pairs.values()
        elif isinstance(item, list | tuple):
            stack += cast("Iterable[object]", item)
    return False


def inherit(result: Any, *sources: object) -> Any:
    """Return a text that was made from sources as user text if one of them has any; return all else as it is."""
    if not isinstance(result, str) or isinstance(result, UserText) or any(result is source for source in sources):
        return result
    return UserText(plain(result)) if has_user_text(sources) else result


def as_user_text(value: Any) -> Any:
    """Mark every text in a JSON value. The value's containers are changed in place or rebuilt."""
    if isinstance(value, str):
        return UserText(value)
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value)
        return {as_user_text(key): as_user_text(item) for key, item in pairs.items()}
    if isinstance(value, list):
        items = cast("list[Any]", value)
        items[:] = map(as_user_text, items)  # in place: it may be a list that knows its weight
    return cast(object, value)
