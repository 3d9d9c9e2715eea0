"""Decodes the JSON bodies of requests within bounds. Knows no parameter.

A small body is decoded at once. For a large one, the structure is found and checked first, so that a hostile body is
rejected before an object is made of it; then it is decoded in pieces. Large bodies belong in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import numpy as np

from headrace.server.http.json_structure import COLON, COMMA, JsonStructure, StructureError, find_structure
from headrace.server.http.piecewise_json import decode_in_pieces

_SMALL: Final = 4 * 1024  # bytes; so few have few values
_INLINE: Final = 64 * 1024  # bytes decoded at once, where they have few values
_FEW: Final = 1024  # commas
_DEEPEST: Final = 512  # levels of brackets in a large body
_LONGEST_NAME: Final = 1024  # bytes of a field's name that are looked at


class BodyShape:
    """The size of a JSON object: its number of fields, and the number of items of each list and object in it."""

    def __init__(self, body: bytes, structure: JsonStructure) -> None:
        self._body = body
        self._structure = structure
        commas = structure.separators(0, len(structure.places), COMMA, 1)
        self._borders = np.concatenate(([0], commas, [max(0, len(structure.places) - 1)]))
        self.fields = len(self._borders) - 1 if len(structure.places) else 0

    def items(self) -> Iterator[tuple[str, int]]:
        """Yield the name and the number of items of each field with more than one."""
        structure = self._structure
        for first, last in zip(self._borders, self._borders[1:], strict=False):
            colons = structure.separators(first + 1, last, COLON, 1)
            if not len(colons):
                continue  # not an object
            items = len(structure.separators(colons[0], last, COMMA, 2)) + 1
            key = self._body[structure.places[first] + 1 : structure.places[colons[0]]].strip()
            if items > 1 and len(key) <= _LONGEST_NAME:
                yield _name(key), items


def _name(key: bytes) -> str:
    try:
        return msgspec.json.decode(key, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def is_small(body: bytes) -> bool:
    """Return whether a body can be decoded on the event loop: it takes less than a few milliseconds."""
    return len(body) <= _SMALL or (len(body) <= _INLINE and body.count(b",") <= _FEW)


def decode_body(body: bytes, *, most_values: int, check: Callable[[BodyShape], None] | None = None) -> Any:
    """Return the value. `check` raises its own error for the shape of a large body.

    TooManyValuesError for more values than allowed; msgspec.DecodeError, RecursionError and UnicodeDecodeError as by
    msgspec.json.decode.
    """
    if is_small(body):
        return msgspec.json.decode(body)
    try:
        structure = find_structure(body, most_values=most_values)
    except StructureError as error:
        raise msgspec.DecodeError(f"JSON is malformed: {error}") from None
    if structure.deepest > _DEEPEST:
        raise RecursionError
    if check is not None and body.lstrip()[:1] == b"{":
        check(BodyShape(body, structure))
    return decode_in_pieces(body, structure)
