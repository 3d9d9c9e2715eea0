"""Parses streamed JSON as models write it: the end of a value, the text of a string, the name and arguments of a call.

Linear time, no recursion, never raises: text that is not JSON sets `failed`. Checks brackets and
strings but not commas and numbers, because the client gets the arguments as the model wrote them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final, Literal

_STRING: Final = re.compile(r'[^"\\]*')
_BETWEEN: Final = re.compile(r"[\s,:+\-.0-9A-Za-z]*")  # characters in a container outside strings and brackets
_SCALAR: Final = re.compile(r"[+\-.0-9A-Za-z]*")
_SPACE: Final = re.compile(r"\s*")
_CLOSER: Final = {"{": "}", "[": "]"}
_DEEPEST_CHECKED: Final = 4096  # levels of nesting; brackets of deeper ones are counted, not matched in kind
_ESCAPES: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX: Final = re.compile(r"[0-9a-fA-F]{4}")
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_ARGUMENTS: Final = ("arguments", "parameters")
_LONGEST_NAME: Final = 1024  # characters of a key or a name, with its quotes
_State = Callable[[str, int, int], int]


class JsonValueScanner:
    """Finds the end of one JSON value. The text must begin with the value."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._kind: Literal["", "string", "scalar", "container"] = ""
        self._closers: list[str] = []
        self._deeper = 0  # containers beyond those whose closers are kept
        self._in_string = False
        self._escaped = False

    def scan(self, text: str, start: int, end: int) -> int:
        """Return the position up to which the text belongs to the value: its end, or the first invalid character."""
        at = start
        while at < end and not self.done and not self.failed:
            if self._escaped:
                self._escaped = False
                at += 1
            elif self._in_string:
                at = self._string(text, at, end)
            elif self._kind == "scalar":
                at = _end(_SCALAR, text, at, end)
                self.done = at < end
            else:
                at = self._structure(text, at, end)
        return at

    def _string(self, text: str, at: int, end: int) -> int:
        at = _end(_STRING, text, at, end)
        if at == end:
            return at
        if text[at] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = self._kind == "string"
        return at + 1

    def _structure(self, text: str, at: int, end: int) -> int:
        if self._kind == "container":
            at = _end(_BETWEEN, text, at, end)
            if at == end:
                return at
        mark = text[at]
        if mark == '"':
            self._in_string = True
            self._kind = self._kind or "string"
        elif mark in _CLOSER:
            self._kind = "container"
            if len(self._closers) < _DEEPEST_CHECKED:
                self._closers.append(_CLOSER[mark])
            else:
                self._deeper += 1
        elif mark in "}]" and self._deeper:
            self._deeper -= 1
        elif self._closers and mark == self._closers[-1]:
            self._closers.pop()
            self.done = not self._closers
        elif not self._kind and _end(_SCALAR, text, at, end) > at:
            self._kind = "scalar"
            return at
        else:
            self.failed = True
            return at
        return at + 1


class JsonStringDecoder:
    """Decodes the text of a JSON string: begin after the opening quote. It stops after the closing one."""

    def __init__(self) -> None:
        self.done = False
        self._escape = ""
        self._high = ""  # first half of a surrogate pair

    def read(self, text: str, start: int, end: int, out: list[str]) -> int:
        at = start
        while at < end and not self.done:
            if self._escape:
                self._escape += text[at]
                at += 1
                if self._escape[1] != "u" or len(self._escape) == 6:
                    self._add(_escaped(self._escape), out)
                    self._escape = ""
                continue
            stop = _end(_STRING, text, at, end)
            if stop > at:
                self._add(text[at:stop], out)
            if stop < end and text[stop] == "\\":
                self._escape = "\\"
            elif stop < end:
                self._add("", out)
                self.done = True
            at = min(stop + 1, end)
        return at

    def _add(self, text: str, out: list[str]) -> None:
        if self._high:
            if len(text) == 1 and "\udc00" <= text <= "\udfff":
                text = (self._high + text).encode("utf-16", "surrogatepass").decode("utf-16")
            else:
                out.append(_REPLACEMENT)
            self._high = ""
        if len(text) == 1 and "\ud800" <= text <= "\udbff":
            self._high = text
        else:
            out.append(_REPLACEMENT if len(text) == 1 and "\udc00" <= text <= "\udfff" else text)


class ToolCallReader:
    """Reads one object that names a function and has its arguments, from its opening brace to its closing one.

    It is `certain` once it is known to be a call: by its name or, if not `by_name`, by its name and arguments that are
    an object. Read `name` and `take` from then on. Arguments written as a string of JSON, as some models do, count as
    the text in the string.
    """

    def __init__(self, *, by_name: bool) -> None:
        """`by_name`: an object with a name is a call, whatever else it has."""
        self.name: str | None = None
        self.done = False
        self.failed = False
        self._by_name = by_name
        self._has_arguments = False
        self._arguments: list[str] = []
        self._state: _State = self._opening
        self._scanner = JsonValueScanner()
        self._decoder = JsonStringDecoder()
        self._literal = ""  # of the key or name being read, at most _LONGEST_NAME
        self._key = ""
        self._keep = False  # the value that is being read is the arguments

    @property
    def certain(self) -> bool:
        return self.name is not None and (self._by_name or self._has_arguments)

    def take(self) -> str:
        """Return the arguments read since the last call."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def read(self, text: str, start: int, end: int) -> int:
        """Return the position up to which the text was read. Stops where the object ends, fails or becomes certain."""
        at = start
        certain = self.certain
        while at < end and not self.done and not self.failed and self.certain == certain:
            at = self._state(text, at, end)
        return at

    def _opening(self, text: str, at: int, end: int) -> int:
        self.failed = text[at] != "{"
        self._state = self._before_key
        return at + (not self.failed)

    def _before_key(self, text: str, at: int, end: int) -> int:
        at = _end(_SPACE, text, at, end)
        if at == end:
            return at
        if text[at] == "}":
            self._finish()
            return at + 1
        self.failed = text[at] != '"'
        self._begin(self._in_key)
        return at

    def _in_key(self, text: str, at: int, end: int) -> int:
        at, key = self._read_string(text, at, end)
        if key is not None:
            self._key = key
            self._state = self._before_colon
        return at

    def _before_colon(self, text: str, at: int, end: int) -> int:
        at = _end(_SPACE, text, at, end)
        if at == end:
            return at
        self.failed = text[at] != ":"
        self._state = self._before_value
        return at + (not self.failed)

    def _before_value(self, text: str, at: int, end: int) -> int:
        at = _end(_SPACE, text, at, end)
        if at == end:
            return at
        if self._key == "name" and self.name is None:
            self.failed = text[at] != '"'
            self._begin(self._in_name)
            return at
        self._keep = self._key in _ARGUMENTS and not self._has_arguments
        self._begin(self._in_value)
        if self._keep and text[at] == '"':
            self._state = self._at_string
            return at + 1
        if self._keep and (self._by_name or text[at] == "{"):
            self._has_arguments = True
        return at

    def _in_name(self, text: str, at: int, end: int) -> int:
        at, name = self._read_string(text, at, end)
        if name:
            self.name = name
            self._state = self._after_value
        elif name is not None:
            self.failed = True
        return at

    def _at_string(self, text: str, at: int, end: int) -> int:
        self._has_arguments = self._by_name or text[at] == "{"
        if text[at] == "{":
            self._decoder = JsonStringDecoder()
            self._state = self._in_text
        else:
            self._scanner.scan('"', 0, 1)
            self._keep = self._by_name
            if self._keep:
                self._arguments.append('"')
            self._state = self._in_value
        return at

    def _in_text(self, text: str, at: int, end: int) -> int:
        at = self._decoder.read(text, at, end, self._arguments)
        if self._decoder.done:
            self._state = self._after_value
        return at

    def _in_value(self, text: str, at: int, end: int) -> int:
        stop = self._scanner.scan(text, at, end)
        if self._keep and self._has_arguments:
            self._arguments.append(text[at:stop])
        self.failed = self._scanner.failed
        if self._scanner.done:
            self._state = self._after_value
        return stop

    def _after_value(self, text: str, at: int, end: int) -> int:
        at = _end(_SPACE, text, at, end)
        if at == end:
            return at
        if text[at] == "}":
            self._finish()
        else:
            self.failed = text[at] != ","
            self._state = self._before_key
        return at + (not self.failed)

    def _finish(self) -> None:
        if self.certain:
            self.done = True
            if not self._has_arguments:
                self._arguments.append("{}")
        else:
            self.failed = True

    def _begin(self, state: _State) -> None:
        self._scanner = JsonValueScanner()
        self._literal = ""
        self._state = state

    def _read_string(self, text: str, at: int, end: int) -> tuple[int, str | None]:
        stop = self._scanner.scan(text, at, end)
        self._literal += text[at : min(stop, at + _LONGEST_NAME - len(self._literal))]
        if not self._scanner.done:
            return stop, None
        found = _decoded(self._literal)  # None if it was too long
        self.failed = found is None
        return stop, found


def _decoded(literal: str) -> str | None:
    """Return a JSON string's text; None if it is invalid or cannot be encoded."""
    try:
        text: str = json.loads(literal, strict=False)
        text.encode()
    except ValueError:
        return None
    return text


def _escaped(escape: str) -> str:
    """Return the character that an escape stands for, or the escape itself if it is invalid."""
    if escape[1] == "u":
        return chr(int(escape[2:], 16)) if _HEX.fullmatch(escape[2:]) else escape
    if escape[1] in '"\\/':
        return escape[1]
    return _ESCAPES.get(escape[1], escape)


def _end(pattern: re.Pattern[str], text: str, at: int, end: int) -> int:
    """Return the end of the match of a pattern that also matches the empty text."""
    found = pattern.match(text, at, end)
    return at if found is None else found.end()
