"""Server-sent events: bytes in as they come, the data of whole events out.

Owns the cutting of lines and the bound on one event. Knows nothing of what the data says.
"""

from __future__ import annotations

from typing import Final

MOST_EVENT: Final = 16 * 1024 * 1024  # bytes of one event: 16 MiB


class EventTooLongError(Exception):
    """An event past the bound."""


class EventStreamReader:
    """Lines end in LF or CRLF, as every server of this kind writes them."""

    def __init__(self, most: int = MOST_EVENT) -> None:
        self._most = most
        self._line = bytearray()  # that is not whole
        self._data: list[bytes] = []  # lines of the event that is not whole
        self._size = 0  # bytes of those

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are whole by now. EventTooLongError for one that is too long to be."""
        if not self._line and not self._data and data.endswith(b"\n\n") and data.find(b"\n") == len(data) - 2:
            # One event of one line in one read, as tokens mostly come.
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
                self._check()
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
                    self._check()
            elif self._data:
                events.append(self._whole())
        self._check()
        return events

    def finish(self) -> list[bytes]:
        """What stood at the end without the empty line that ends an event: some servers forget it."""
        found = _data_of(bytes(self._line).removesuffix(b"\r"))
        self._line.clear()
        if found is not None:
            self._data.append(found)
        return [self._whole()] if self._data else []

    def _whole(self) -> bytes:
        event = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
        self._data, self._size = [], 0
        return event

    def _check(self) -> None:
        if self._size + len(self._line) > self._most:
            raise EventTooLongError


def _data_of(line: bytes) -> bytes | None:
    """None for comments and for the fields that say nothing of the answer."""
    if not line.startswith(b"data:"):
        return None
    return line[6:] if line[5:6] == b" " else line[5:]
