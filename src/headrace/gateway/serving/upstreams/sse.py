"""Server-sent events as they come over a connection: bytes in, the data of whole events out.

Owns the cutting (LF, CRLF and CR, comments, several data lines, a byte order mark) and the bound on one event. Knows
nothing of what the data says. One way is for what nearly all servers write, one line of data and an empty one; the
other takes everything that the standard allows.
"""

from __future__ import annotations

import re
from typing import Final

DONE: Final = b"[DONE]"
_LINE: Final = re.compile(rb"\r\n|\n|\r")
_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")  # of an event: two line ends of any kind
_BOM: Final = b"\xef\xbb\xbf"


class ErrorEvent(bytes):
    """The data of an event that is named `error`. Other names say nothing that the data does not."""


class EventTooLongError(Exception):
    """An event that is longer than the bound."""


class EventReader:
    def __init__(self, most: int) -> None:
        """`most`: bytes of one event."""
        self._most = most
        self._rest = bytearray()  # of an event that is not whole
        self._began = False
        self._carriages = False  # carriage returns were seen, so that the plain way does not do

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are whole by now. TooLongError for one that is too long to be."""
        if not self._began:
            data = bytes(self._rest) + data
            self._rest.clear()
            if _BOM.startswith(data):
                self._rest += data  # three bytes at most
                return []
            self._began = True
            data = data.removeprefix(_BOM)
        if not self._carriages and b"\r" in data:
            self._carriages = True
        found = self._any(data) if self._carriages else self._plain(data)
        if len(self._rest) > self._most:
            raise EventTooLongError
        return found

    def finish(self) -> list[bytes]:
        """What stood at the end without the empty line that ends an event: some servers forget it."""
        rest = bytes(self._rest)
        self._rest.clear()
        event = _event(_LINE.split(rest))
        return [] if event is None else [event]

    def _plain(self, data: bytes) -> list[bytes]:
        rest = self._rest
        if not rest and data.startswith(b"data: ") and 6 < data.find(b"\n") == len(data) - 2 and data.endswith(b"\n\n"):
            if len(data) > self._most:
                raise EventTooLongError
            return [data[6:-2]]  # one event in one packet, as tokens come
        if rest:
            # Only what is new is searched, so that an event in many small parts is not looked at again with each.
            start = len(rest) - 1
            rest += data
            if rest.find(b"\n\n", start) < 0:
                return []
            data = bytes(rest)
            rest.clear()
        blocks = data.split(b"\n\n")
        rest += blocks.pop()
        found: list[bytes] = []
        for block in blocks:
            if len(block) > self._most:
                raise EventTooLongError
            if block.startswith(b"data: ") and b"\n" not in block:
                found.append(block[6:])
            elif (event := _event(block.split(b"\n"))) is not None:
                found.append(event)
        return found

    def _any(self, data: bytes) -> list[bytes]:
        rest = self._rest
        start = max(0, len(rest) - 3)
        rest += data
        if _END.search(rest, start) is None:
            return []
        data = bytes(rest)
        found: list[bytes] = []
        at = 0
        for end in _END.finditer(data):
            if end.end() == len(data) and data.endswith(b"\r"):
                break  # its line feed may be still to come
            block, at = data[at : end.start()], end.end()
            if len(block) > self._most:
                raise EventTooLongError
            if (event := _event(_LINE.split(block))) is not None:
                found.append(event)
        del rest[:at]
        return found


def _event(lines: list[bytes]) -> bytes | None:
    """None where there is no data: a comment, a ping."""
    texts: list[bytes] = []
    failed = False
    for line in lines:
        field, colon, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            texts.append(value)
        elif field == b"event":
            failed = value == b"error"
        elif field == b"error" and colon:  # llama.cpp's older way to say that it failed
            texts.append(value)
            failed = True
    if not texts:
        return None
    data = b"\n".join(texts)
    return ErrorEvent(data) if failed else data
