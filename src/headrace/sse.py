"""Parses server-sent events: bytes in, the data of complete events out. Does not interpret the data.

Takes all that the standard allows (LF, CRLF and CR, comments, several data lines, a byte order mark). A fast path
handles what nearly all servers write: one line of data and an empty line. Bounds the size of one event.
"""

from __future__ import annotations

import re
from typing import Final

DONE: Final = b"[DONE]"
# Searching for a number is six times as fast as searching for a byte string of length one.
_LF: Final = 10
_CR: Final = 13
_LINE: Final = re.compile(rb"\r\n|\n|\r")
_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")  # of an event: two line ends of any kind
_BOM: Final = b"\xef\xbb\xbf"


class ErrorEvent(bytes):
    """The data of an event named `error`. Other event names are ignored."""


class EventTooLongError(Exception):
    """An event is longer than the limit."""


class EventReader:
    def __init__(self, limit: int) -> None:
        """`limit`: bytes of one event."""
        self._limit = limit
        self._rest = bytearray()  # the incomplete event
        self._began = False  # the byte order mark is behind us
        self._has_carriage_returns = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events completed by these bytes. EventTooLongError for one beyond the limit."""
        if (
            self._began
            and not self._rest
            and data[:6] == b"data: "
            and data.find(b"\n") == len(data) - 2
            and data[-1] == _LF
            and _CR not in data
            and not self._has_carriage_returns
        ):
            # Fast path: one event of one line in one packet, as tokens come.
            if len(data) > self._limit:
                raise EventTooLongError
            return [data[6:-2]]
        if not self._began:
            data = bytes(self._rest) + data
            self._rest.clear()
            if _BOM.startswith(data):
                self._rest += data  # three bytes at most
                return []
            self._began = True
            data = data.removeprefix(_BOM)
        if not self._has_carriage_returns and _CR in data:
            self._has_carriage_returns = True
        events = self._feed_any(data) if self._has_carriage_returns else self._feed_lf(data)
        if len(self._rest) > self._limit:
            raise EventTooLongError
        return events

    def finish(self) -> list[bytes]:
        """Return the last event if its final empty line is missing: some servers forget it."""
        rest = bytes(self._rest)
        self._rest.clear()
        event = _parse_event(_LINE.split(rest))
        return [] if event is None else [event]

    def _feed_lf(self, data: bytes) -> list[bytes]:
        """Parse a stream whose lines all end in LF."""
        rest = self._rest
        if rest:
            # Search only the new bytes, so that an event in many small parts is not scanned again with each.
            start = len(rest) - 1
            rest += data
            if rest.find(b"\n\n", start) < 0:
                return []
            data = bytes(rest)
            rest.clear()
        blocks = data.split(b"\n\n")
        rest += blocks.pop()
        events: list[bytes] = []
        for block in blocks:
            if len(block) > self._limit:
                raise EventTooLongError
            if block[:6] == b"data: " and _LF not in block:
                events.append(block[6:])
            elif (event := _parse_event(block.split(b"\n"))) is not None:
                events.append(event)
        return events

    def _feed_any(self, data: bytes) -> list[bytes]:
        """Parse a stream with carriage returns."""
        rest = self._rest
        start = max(0, len(rest) - 3)
        rest += data
        if _END.search(rest, start) is None:
            return []
        data = bytes(rest)
        events: list[bytes] = []
        at = 0
        for end in _END.finditer(data):
            if end.end() == len(data) and data.endswith(b"\r"):
                break  # its line feed may be in the next packet
            block, at = data[at : end.start()], end.end()
            if len(block) > self._limit:
                raise EventTooLongError
            if (event := _parse_event(_LINE.split(block))) is not None:
                events.append(event)
        del rest[:at]
        return events


def _parse_event(lines: list[bytes]) -> bytes | None:
    """Return the data of an event. None for one without data, such as a comment or a ping."""
    values: list[bytes] = []
    is_error = False
    for line in lines:
        field, colon, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            values.append(value)
        elif field == b"event":
            is_error = value == b"error"
        elif field == b"error" and colon:  # llama.cpp's older error format
            values.append(value)
            is_error = True
    if not values:
        return None
    data = b"\n".join(values)
    return ErrorEvent(data) if is_error else data
