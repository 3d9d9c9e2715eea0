"""Decodes a large JSON text in small pieces, so that no single step holds the interpreter lock for long.

The result is that of msgspec.json.decode. Between two pieces, the thread rests for as long as the piece took: other
threads, such as the event loop, get at least half of the interpreter's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np

from headrace.server.http.json_structure import COLON, COMMA, JsonStructure

_PIECE: Final = 16 * 1024  # bytes decoded in one step: 4 ms for the slowest text there is, long decimals
_ESCAPE: Final = 12  # bytes of the longest escape, a surrogate pair
_OPEN_LIST, _OPEN_OBJECT, _QUOTE = 91, 123, 34


def rest(seconds: float) -> None:
    """Let other threads run. Longer work rests for longer."""
    time.sleep(seconds)


def decode_in_pieces(text: bytes, structure: JsonStructure, *, pause: Callable[[float], None] = rest) -> Any:
    """Return the value. msgspec.DecodeError for a text that is not JSON. `pause` gets the seconds of each piece."""
    return _PieceDecoder(text, structure, pause).value(0, len(text), 0, len(structure.places))


class _PieceDecoder:
    def __init__(self, text: bytes, structure: JsonStructure, pause: Callable[[float], None]) -> None:
        self._text = text
        self._structure = structure
        self._pause = pause

    def value(self, start: int, end: int, first: int, last: int) -> Any:
        """Decode text[start:end]. Its brackets, commas and colons are those from `first` to before `last`."""
        if end - start <= _PIECE:
            return self._decode(self._text[start:end])
        inner = self._text[start:end]
        start += len(inner) - len(inner.lstrip())
        inner = inner.strip()
        end = start + len(inner)
        if not inner or len(inner) <= _PIECE:
            return self._decode(inner)
        match inner[0]:
            case 0x5B:
                self._check_brackets(start, end, first, last)
                return self._list(first, last)
            case 0x7B:
                self._check_brackets(start, end, first, last)
                return self._object(first, last)
            case 0x22:
                return self._string(inner)
            case _:
                return self._decode(inner)

    def _decode(self, piece: bytes) -> Any:
        began = time.perf_counter()
        value = msgspec.json.decode(piece)
        self._pause(time.perf_counter() - began)
        return value

    def _check_brackets(self, start: int, end: int, first: int, last: int) -> None:
        """Check that the text is one value: one bracket from its first byte to its last."""
        structure = self._structure
        depth = structure.depths[first]
        closing = np.flatnonzero(structure.depths[first:last] < depth)
        whole = structure.places[first] == start and structure.places[last - 1] == end - 1
        if not whole or closing[0] != last - 1 - first:
            raise msgspec.DecodeError("JSON is malformed: unexpected characters after a value")
        if self._text[end - 1] != self._text[start] + 2:
            raise msgspec.DecodeError("JSON is malformed: mismatched brackets")

    def _list(self, first: int, last: int) -> list[Any]:
        found: list[Any] = []

        def single(start: int, end: int, at: int, until: int) -> None:
            found.append(self.value(start, end, at, until))

        def several(piece: bytes) -> None:
            found.extend(self._decode(b"[" + piece + b"]"))

        self._items(first, last, single, several)
        return found

    def _object(self, first: int, last: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        structure = self._structure
        depth = int(structure.depths[first])

        def single(start: int, end: int, at: int, until: int) -> None:
            colons = structure.separators(at, until, COLON, depth)
            if not len(colons):
                raise msgspec.DecodeError("JSON is malformed: expected ':'")
            colon = int(colons[0])
            place = int(structure.places[colon])
            key = self.value(start, place, at, colon)
            if not isinstance(key, str):
                raise msgspec.DecodeError("JSON is malformed: expected a string as the key of an object")
            found[key] = self.value(place + 1, end, colon + 1, until)

        def several(piece: bytes) -> None:
            found.update(self._decode(b"{" + piece + b"}"))

        self._items(first, last, single, several)
        return found

    def _items(
        self,
        first: int,
        last: int,
        single: Callable[[int, int, int, int], None],
        several: Callable[[bytes], None],
    ) -> None:
        """Hand over the items between two brackets: those that fit into a piece together, larger ones one by one."""
        structure, text = self._structure, self._text
        commas = structure.separators(first + 1, last - 1, COMMA, int(structure.depths[first]))
        borders = np.concatenate(([first], commas, [last - 1]))  # indices of the marks around the items
        places = structure.places[borders]
        item, count = 0, len(borders) - 1
        while item < count:
            start = int(places[item]) + 1
            after = int(np.searchsorted(places, start + _PIECE, side="right")) - 1  # the first item that does not fit
            if after > item:
                piece = text[start : int(places[after])]
                if count > 1 and not piece.strip():
                    raise msgspec.DecodeError("JSON is malformed: a value is missing beside a comma")
                several(piece)
                item = after
            else:
                single(start, int(places[item + 1]), int(borders[item]) + 1, int(borders[item + 1]))
                item += 1

    def _string(self, text: bytes) -> str:
        """Decode a long string part by part. A part that decodes ends between two characters."""
        if text[-1] != _QUOTE:
            raise msgspec.DecodeError("JSON is malformed: expected a string")
        parts: list[str] = []
        start, end = 1, len(text) - 1
        while end - start > _PIECE:
            cut = start + _PIECE
            escape = text.rfind(b"\\", max(start, cut - _ESCAPE), cut)
            last = cut if escape < 0 else escape
            for place in range(last, max(start, last - 2 * _ESCAPE), -1):
                try:
                    parts.append(self._part(text[start:place]))
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue
                start = place
                break
            else:
                return self._part(text[1:-1])  # it is not JSON: raise the error of the whole
        parts.append(self._part(text[start:end]))
        return "".join(parts)

    def _part(self, text: bytes) -> str:
        return self._decode(b'"' + text + b'"')
