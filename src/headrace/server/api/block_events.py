"""Splits an answer's deltas into blocks with a beginning and an end, for dialects that stream blocks.

Does not know any dialect.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.gateway.api_errors import ApiError
from headrace.gateway.requests.text_request import ChoiceDelta, ToolCallDelta

BlockKind = Literal["reasoning", "text", "call"]


class BlockEvent(msgspec.Struct, frozen=True):
    """The beginning, the continuation or the end of a block."""

    action: Literal["begin", "more", "end"]
    kind: BlockKind
    text: str = ""  # with "more"
    call: ToolCallDelta | None = None  # with the "begin" of a call


def restart_error() -> ApiError:
    """Build the error for an answer that begins anew: a dialect of blocks cannot take back what it has sent."""
    return ApiError("The answer broke off.", kind="server_error", code="generation_failed")


class BlockSplitter:
    """Turns deltas into block events. One block is open at a time, and none after the last delta."""

    def __init__(self) -> None:
        self._kind: BlockKind | None = None
        self._call = -1  # index of the last call that began

    def split(self, piece: ChoiceDelta) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        calls = list(piece.calls)
        # The rest of an open call came before the piece's reasoning and content.
        while self._kind == "call" and calls and calls[0].index == self._call:
            events.append(BlockEvent("more", "call", calls.pop(0).arguments))
        if piece.reasoning:
            self._add_text("reasoning", piece.reasoning, events)
        if piece.content:
            self._add_text("text", piece.content, events)
        for call in calls:
            if self._kind != "call" or call.index != self._call:
                self._end_block(events)
                self._kind, self._call = "call", call.index
                events.append(BlockEvent("begin", "call", call=call))
            if call.arguments:
                events.append(BlockEvent("more", "call", call.arguments))
        if piece.finish is not None:
            self._end_block(events)
        return events

    def _add_text(self, kind: BlockKind, text: str, events: list[BlockEvent]) -> None:
        if self._kind != kind:
            self._end_block(events)
            self._kind = kind
            events.append(BlockEvent("begin", kind))
        events.append(BlockEvent("more", kind, text))

    def _end_block(self, events: list[BlockEvent]) -> None:
        if self._kind is not None:
            events.append(BlockEvent("end", self._kind))
        self._kind = None
