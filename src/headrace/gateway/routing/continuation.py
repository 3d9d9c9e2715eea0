"""Continues an answer on another variant: compares the repeated text with what a client already has.

Owns DeliveredText and Continuation, which reads the second answer, checks that it matches the delivered one and returns
what follows it. Nothing is returned before all of the delivered text has come again: content, reasoning and tool call
arguments alike. Does not know variants or usage.
"""

from __future__ import annotations

import msgspec

from headrace.gateway.requests.text_request import ChoiceDelta, TokenLogprob, ToolCallDelta


class DivergedError(Exception):
    """The second answer does not match the delivered one."""


class _Call(msgspec.Struct):
    id: str
    name: str
    arguments: list[str] = []


class DeliveredText:
    """The delivered part of one choice."""

    __slots__ = ("calls", "content", "is_visible", "logprobs", "reasoning")

    def __init__(self) -> None:
        self.is_visible = False  # the client has seen something of it
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[_Call] = []
        self.logprobs: list[TokenLogprob] | None = None

    def add(self, piece: ChoiceDelta) -> None:
        if piece.content:
            self.is_visible = True
            self.content.append(piece.content)
        if piece.reasoning:
            self.is_visible = True
            self.reasoning.append(piece.reasoning)
        for delta in piece.calls:
            self.is_visible = True
            if delta.index == len(self.calls):
                self.calls.append(_Call(delta.id or "", delta.name or ""))
            self.calls[delta.index].arguments.append(delta.arguments)
        if piece.logprobs is not None:
            self.is_visible = self.is_visible or bool(piece.logprobs)
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += piece.logprobs


class _ExpectedText:
    """A text that must come again."""

    __slots__ = ("_at", "_expected")

    def __init__(self, parts: list[str]) -> None:
        self._expected = "".join(parts)
        self._at = 0

    def follow(self, text: str) -> None:
        expected = self._expected[self._at : self._at + len(text)]
        if text[: len(expected)] != expected:
            raise DivergedError("the text differs")
        self._at += len(text)

    @property
    def complete(self) -> bool:
        return self._at >= len(self._expected)

    def rest_of(self, parts: list[str]) -> str:
        return "".join(parts)[len(self._expected) :]


class Continuation:
    def __init__(self, delivered: DeliveredText) -> None:
        self._content = _ExpectedText(delivered.content)
        self._reasoning = _ExpectedText(delivered.reasoning)
        self._calls = [(call.name, _ExpectedText(call.arguments)) for call in delivered.calls]
        self._logprobs = len(delivered.logprobs or ())
        self._again = DeliveredText()
        self._tokens = 0
        self._last: ChoiceDelta | None = None

    def read(self, piece: ChoiceDelta) -> ChoiceDelta | None:
        """Return what follows the delivered text once that is complete, which ends the comparison; None before.

        DivergedError if the text differs; `whole_answer` then returns it.
        """
        before = len(self._again.calls)
        self._again.add(piece)
        self._tokens += piece.tokens
        self._last = piece
        self._content.follow(piece.content)
        self._reasoning.follow(piece.reasoning)
        for place in range(before, min(len(self._again.calls), len(self._calls))):
            if self._again.calls[place].name != self._calls[place][0]:
                raise DivergedError("it calls another tool")
        for delta in piece.calls:
            if delta.index < len(self._calls):
                self._calls[delta.index][1].follow(delta.arguments)
        if self._complete():
            return self._rest(piece)
        if piece.finish is not None:
            raise DivergedError("it ended early")
        return None

    def whole_answer(self, index: int) -> ChoiceDelta:
        """Return the second answer from its beginning, as one delta."""
        again, last = self._again, self._last
        assert last is not None
        return ChoiceDelta(
            index,
            content="".join(again.content),
            reasoning="".join(again.reasoning),
            calls=[
                ToolCallDelta(place, call.id, call.name, "".join(call.arguments))
                for place, call in enumerate(again.calls)
            ],
            logprobs=again.logprobs,
            finish=last.finish,
            stop=last.stop,
            usage=last.usage,
            tokens=self._tokens,
        )

    def _complete(self) -> bool:
        calls = len(self._again.calls) >= len(self._calls) and all(text.complete for _, text in self._calls)
        return calls and self._content.complete and self._reasoning.complete

    def _rest(self, piece: ChoiceDelta) -> ChoiceDelta:
        again = self._again
        calls: list[ToolCallDelta] = []
        for place, call in enumerate(again.calls):
            if place >= len(self._calls):
                calls.append(ToolCallDelta(place, call.id, call.name, "".join(call.arguments)))
            elif rest := self._calls[place][1].rest_of(call.arguments):
                calls.append(ToolCallDelta(place, arguments=rest))
        return ChoiceDelta(
            piece.index,
            content=self._content.rest_of(again.content),
            reasoning=self._reasoning.rest_of(again.reasoning),
            calls=calls,
            logprobs=None if again.logprobs is None else again.logprobs[self._logprobs :],
            finish=piece.finish,
            stop=piece.stop,
            usage=piece.usage,
            tokens=piece.tokens,  # earlier ones were counted when they were delivered
        )
