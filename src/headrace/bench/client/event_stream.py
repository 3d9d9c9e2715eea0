"""Parses server-sent events: bytes in, the data of complete events out. Does not interpret the data."""

from __future__ import annotations

from typing import Final

MOST_EVENT: Final = 16 * 1024 * 1024  # bytes per event: 16 MiB


class EventTooLongError(Exception):
    """An event is longer than the limit."""


class EventStreamReader:
    """Splits lines at LF or CRLF, which is what OpenAI-compatible servers write."""

    def __init__(self, most: int = MOST_EVENT) -> None:
        self._most = most
        self._line = bytearray()  # incomplete
        self._data: list[bytes] = []  # lines of the incomplete event
        self._size = 0  # bytes of _data

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events completed by these bytes. Raises EventTooLongError."""
        if not self._line and not self._data and data.endswith(b"\n\n") and data.find(b"\n") == len(data) - 2:
            # Fast path: one event of one line in one read.
            if len(data) > self._most:
                raise EventTooLongError
            found = _data_of(data[:-2].removesuffix(b"\r"))
            return [] if found is None else [found]
        lines = data.split(b"\n")
        if self._line:
            self._line += lines[0]
            if len(lines) > 1:
                lines[0] = bytes(self._line)
                self._line.clear()
            else:
                self._check_size()
                return []
        self._line += lines.pop()
        events: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line:
                found = _data_of(line)
                if found is not None:
                    self._data.append(found)
                    self._size += len(found)
                    self._check_size()
            elif self._data:
                events.append(self._take_event())
        self._check_size()
        return events

    def finish(self) -> list[bytes]:
        """Return an event at the end of the stream whose final empty line is missing: some servers omit it."""
        found = _data_of(bytes(self._line).removesuffix(b"\r"))
        self._line.clear()
        if found is not None:
            self._data.append(found)
        return [self._take_event()] if self._data else []

    def _take_event(self) -> bytes:
        event = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
        self._data, self._size = [], 0
        return event

    def _check_size(self) -> None:
        if self._size + len(self._line) > self._most:
            raise EventTooLongError


def _data_of(line: bytes) -> bytes | None:
    """Return the value of a data line; None for comments and other fields."""
    if not line.startswith(b"data:"):
        return None
    return line[6:] if line[5:6] == b" " else line[5:]
