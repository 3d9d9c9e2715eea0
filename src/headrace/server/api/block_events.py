"""An answer's pieces as runs, each of one kind, for dialects whose streams are blocks with a beginning and an end.

Owns Runs and its Steps. Knows no dialect.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.gateway.requests.text_request import ChoiceDelta, ToolCallDelta

BlockKind = Literal["reasoning", "text", "call"]


class BlockEvent(msgspec.Struct, frozen=True):
    """What a piece does to a run."""

    does: Literal["begin", "more", "end"]
    kind: BlockKind
    text: str = ""  # of "more"
    call: ToolCallDelta | None = None  # of a call's "begin"


class BlockSplitter:
    """An answer as a row of runs, each of one kind and one call: pieces go in, and what begins, goes on and ends comes
    out. One run is open at a time, and none after the last piece."""

    def __init__(self) -> None:
        self._kind: BlockKind | None = None
        self._call = -1  # index of the last call that began

    def take(self, piece: ChoiceDelta) -> list[BlockEvent]:
        steps: list[BlockEvent] = []
        calls = list(piece.calls)
        # What else is new came after the end of the call that is open.
        while self._kind == "call" and calls and calls[0].index == self._call:
            steps.append(BlockEvent("more", "call", calls.pop(0).arguments))
        if piece.reasoning:
            self._say("reasoning", piece.reasoning, steps)
        if piece.content:
            self._say("text", piece.content, steps)
        for call in calls:
            if self._kind != "call" or call.index != self._call:
                self._end(steps)
                self._kind, self._call = "call", call.index
                steps.append(BlockEvent("begin", "call", call=call))
            if call.arguments:
                steps.append(BlockEvent("more", "call", call.arguments))
        if piece.finish is not None:
            self._end(steps)
        return steps

    def _say(self, kind: BlockKind, text: str, steps: list[BlockEvent]) -> None:
        if self._kind != kind:
            self._end(steps)
            self._kind = kind
            steps.append(BlockEvent("begin", kind))
        steps.append(BlockEvent("more", kind, text))

    def _end(self, steps: list[BlockEvent]) -> None:
        if self._kind is not None:
            steps.append(BlockEvent("end", self._kind))
        self._kind = None
