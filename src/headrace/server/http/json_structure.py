"""Finds the structure of a JSON text without decoding it, so that its size is bounded before an object is made.

Looks at brackets, commas and colons outside strings. It runs on arrays, for which NumPy releases the interpreter lock,
so other threads go on meanwhile. Does not check that the text is valid JSON, and knows no parameter.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

_SLICE: Final = 256 * 1024  # bytes looked at in one go: small enough for the processor's cache
_QUOTE, _BACKSLASH, COMMA, COLON = 34, 92, 44, 58
_OPEN: Final = (91, 123)  # [ {
_CLOSE: Final = (93, 125)  # ] }


def _marks(*, of: tuple[int, ...], dtype: Any = np.bool_, value: int = 1) -> NDArray[Any]:
    table = np.zeros(256, dtype)
    table[list(of)] = value
    return table


_SPECIAL: Final = _marks(of=(_QUOTE, _BACKSLASH, COMMA, COLON, *_OPEN, *_CLOSE))
_COUNTED: Final = _marks(of=(COMMA, *_OPEN))
_STEP: Final = _marks(of=_OPEN, dtype=np.int8) - _marks(of=_CLOSE, dtype=np.int8)


class StructureError(Exception):
    """The text is not JSON: a string or a bracket is not closed."""


class TooManyValuesError(Exception):
    """The text has more values than it may have. The rest was not looked at."""


class JsonStructure(msgspec.Struct, frozen=True):
    """The brackets, commas and colons outside strings, in order."""

    places: NDArray[np.int64]  # in the text
    marks: NDArray[np.uint8]  # the bytes
    depths: NDArray[np.int32]  # brackets that are open after each of them

    @property
    def deepest(self) -> int:
        return int(self.depths.max(initial=0))

    def separators(self, first: int, last: int, mark: int, depth: int) -> NDArray[np.int64]:
        """Return the indices, from `first` to before `last`, of a mark at a depth."""
        found = (self.marks[first:last] == mark) & (self.depths[first:last] == depth)
        return np.flatnonzero(found) + first


def find_structure(text: bytes, *, most_values: int) -> JsonStructure:
    """Return the structure of a text with at most so many values: items of lists and fields of objects.

    TooManyValuesError as soon as there are more; StructureError for a string or bracket that is not closed.
    """
    finder = _Finder(most_values)
    for start in range(0, len(text), _SLICE):
        finder.take(np.frombuffer(text, np.uint8, min(_SLICE, len(text) - start), start), start)
    return finder.structure()


class _Finder:
    def __init__(self, most_values: int) -> None:
        self._left = most_values
        self._colons = most_values  # there is none without a value
        self._in_string = False
        self._escaping = False  # an odd number of backslashes came last
        self._depth = 0
        self._places: list[NDArray[np.int64]] = []
        self._marks: list[NDArray[np.uint8]] = []
        self._depths: list[NDArray[np.int32]] = []

    def take(self, data: NDArray[np.uint8], start: int) -> None:
        places = np.flatnonzero(_SPECIAL[data])
        marks = data[places]
        escaped = self._escaped(places[marks == _BACKSLASH], len(data))
        kept = marks != _BACKSLASH
        if escaped is not None:
            kept &= ~escaped[places]
        places, marks = places[kept], marks[kept]
        quotes = marks == _QUOTE
        inside = (np.cumsum(quotes) + self._in_string) % 2 == 1
        if len(inside):
            self._in_string = bool(inside[-1])
        outside = ~(inside | quotes)
        places, marks = places[outside], marks[outside]
        depths = np.cumsum(_STEP[marks], dtype=np.int32) + self._depth
        if len(depths):
            if depths.min() < 0:
                raise StructureError("a bracket is closed that was not opened")
            self._depth = int(depths[-1])
        self._left -= int(np.count_nonzero(_COUNTED[marks]))
        self._colons -= int(np.count_nonzero(marks == COLON))
        if self._left < 0 or self._colons < 0:
            raise TooManyValuesError
        self._places.append(places + start)
        self._marks.append(marks)
        self._depths.append(depths)

    def _escaped(self, backslashes: NDArray[np.int64], length: int) -> NDArray[np.bool_] | None:
        """Return which bytes follow an odd number of backslashes; None where there is none."""
        if not len(backslashes):
            if not self._escaping:
                return None
            self._escaping = False
            escaped = np.zeros(length, np.bool_)
            escaped[0] = True
            return escaped
        begins = np.flatnonzero(np.diff(backslashes, prepend=-2) != 1)
        firsts = backslashes[begins]
        counts = np.diff(begins, append=len(backslashes))
        ends = firsts + counts  # the byte after each run
        escaped = np.zeros(length + 1, np.bool_)
        if self._escaping:
            if firsts[0] == 0:
                counts[0] += 1
            else:
                escaped[0] = True
        escaped[ends[counts % 2 == 1]] = True
        self._escaping = bool(escaped[length])
        return escaped[:length]

    def structure(self) -> JsonStructure:
        if self._in_string:
            raise StructureError("a string is not closed")
        if self._depth:
            raise StructureError("a bracket is not closed")
        none = np.zeros(0, np.int64)
        return JsonStructure(
            np.concatenate([none, *self._places]),
            np.concatenate([none.astype(np.uint8), *self._marks]),
            np.concatenate([none.astype(np.int32), *self._depths]),
        )
