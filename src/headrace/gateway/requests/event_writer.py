"""The interface of a dialect's writer of streams: server-sent events or lines of JSON."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import ChoiceDelta, NoteDelta, RestartDelta


class EventWriter(Protocol):
    """Writes the pieces of one answer as a stream, in one dialect."""

    def begin(self) -> bytes: ...

    def piece(self, piece: ChoiceDelta) -> bytes: ...

    def restart(self, piece: RestartDelta) -> bytes: ...

    def end(self) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...


@runtime_checkable
class NoteWriter(Protocol):
    """A writer whose dialect has a place for events beside the text."""

    def note(self, note: NoteDelta) -> bytes: ...
