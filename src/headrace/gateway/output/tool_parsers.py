"""Splits streamed text into content and tool calls, with one parser for each family of formats.

Does not check whether a tool exists. The joined output never depends on how the text was cut, and the text held back is
bounded. No model output is an error: text that is not a call is content, and an incomplete call stays as it is.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Final

from headrace.gateway.output.markers import ContentBuffer, partial_marker_start
from headrace.gateway.output.streamed_json import JsonValueScanner, ToolCallReader
from headrace.gateway.requests.text_request import ToolCallDelta

MOST_HELD: Final = 64 * 1024  # characters held after a marker; longer text is content
_SPACE: Final = re.compile(r"\s*")
_SPACE_OR_CLOSER: Final = re.compile(r"[\s}\]]*")  # small models close once too often
_SEPARATOR: Final = re.compile(r"[\s;,\]]*")
_HEAD: Final = re.compile(r"[^{]*")
_LONGEST_HEAD: Final = 512  # characters between [TOOL_CALLS] and the arguments
_NAMED: Final = re.compile(r"\s*([^\s\[\]{}]{1,256})\s*(?:\[CALL_ID\]\s*[^\s\[\]{}]*\s*)?(?:\[ARGS\])?\s*")

_State = Callable[[str, int], int]


def new_call_id() -> str:
    return f"call_{secrets.token_urlsafe(18)}"  # 24 characters


class ToolCallParser:
    """The parts that all formats share: content up to a marker, then a call, then content again.

    A state is a method that takes the text and a position, and returns the position up to which it consumed the text.
    """

    _marked = True  # calls have a marker; without one, what was held may be an answer in JSON

    def __init__(self, marker: str, *, parallel: bool, new_id: Callable[[], str], by_name: bool = True) -> None:
        self._marker = marker
        self._parallel = parallel
        self._new_id = new_id
        self._by_name = by_name
        self._left = ""  # the end of the text, which may be the beginning of a marker
        self._passing = ContentBuffer()
        self._raw: list[str] = []  # held text, which is content if it is not a call
        self._held = 0  # its length
        self._calls = 0
        self.complete = 0  # calls that ended with all of their arguments
        self.is_half = False  # the last call has not ended with all of its arguments
        self._deltas: list[ToolCallDelta] = []
        self._reader = ToolCallReader(by_name=by_name)
        self._state: _State = self._content

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Return the new content, and the new deltas of calls."""
        text = self._left + text
        at = 0
        while at < len(text):
            state = self._state
            new = state(text, at)
            if new == at and self._state == state:
                break
            at = new
        self._left = text[at:]
        return self._passing.take(), self._taken()

    def finish(self, *, cut: bool = False) -> tuple[str, list[ToolCallDelta]]:
        """End the text. Return the content and deltas that were held back.

        `cut`: the model had not ended, so what it had begun behind a marker is half a call and no content.
        """
        if self._raw and cut and self._marked:
            self._forget()
            self._passing.after_marker()
        elif self._raw:
            self._no_call()
        elif self._state == self._content:
            self._passing.say(self._left)
        self._left = ""
        self._state = self._nothing
        return self._passing.take(last=True), self._taken()

    def _taken(self) -> list[ToolCallDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _content(self, text: str, at: int) -> int:
        found = text.find(self._marker, at)
        if found < 0:
            stop = partial_marker_start(self._marker, text, at)
            self._passing.say(text[at:stop])
            return stop
        self._passing.say(text[at:found])
        stop = found + len(self._marker)
        self._hold(text, found, stop)
        self._state = self._opened
        return stop

    def _opened(self, text: str, at: int) -> int:
        """Read what follows the marker."""
        at, mark = self._next(text, at)
        if mark == "{":
            self._begin_call()
        elif mark:
            self._no_call()
        return at

    def _begin_call(self) -> None:
        self._reader = ToolCallReader(by_name=self._by_name)
        self._state = self._maybe_call

    def _maybe_call(self, text: str, at: int) -> int:
        stop = self._reader.read(text, at, min(len(text), at + MOST_HELD - self._held))
        self._hold(text, at, stop)
        if self._reader.certain:
            self._start_call(self._reader.name or "")
            self._state = self._call
            self._go_on()
        elif self._reader.failed or self._held >= MOST_HELD:
            self._no_call()
        return stop

    def _call(self, text: str, at: int) -> int:
        stop = self._reader.read(text, at, len(text))
        self._go_on()
        return stop

    def _go_on(self) -> None:
        self._add(self._reader.take())
        if self._reader.done or self._reader.failed:
            self._end_call(self._after_call if self._reader.done else self._broken)

    def _after_call(self, text: str, at: int) -> int:
        raise NotImplementedError

    def _broken(self, text: str, at: int) -> int:
        """Skip to the next marker: the call is not valid JSON from here on."""
        found = text.find(self._marker, at)
        if found < 0:
            return partial_marker_start(self._marker, text, at)
        self._state = self._content
        return found

    def _nothing(self, text: str, at: int) -> int:
        return len(text)

    def _hold(self, text: str, start: int, stop: int) -> None:
        self._raw.append(text[start:stop])
        self._held += stop - start

    def _next(self, text: str, at: int) -> tuple[int, str]:
        """Return the position and text of the next non-space character; "" if it has not arrived or is too far off."""
        stop = _end(_SPACE, text, at, at + MOST_HELD - self._held)
        self._hold(text, at, stop)
        if self._held >= MOST_HELD:
            self._no_call()
            return stop, ""
        return stop, text[stop : stop + 1]

    def _no_call(self) -> None:
        """Pass the held text on as content: it is not a call."""
        self._passing.say("".join(self._raw))
        self._forget()
        self._state = self._content

    def _forget(self) -> None:
        self._raw.clear()
        self._held = 0

    def _start_call(self, name: str) -> None:
        self._forget()
        self._passing.after_marker()
        self._deltas.append(ToolCallDelta(self._calls, self._new_id(), name))
        self.is_half = True

    def _add(self, arguments: str) -> None:
        if not arguments:
            return
        index = self._calls
        if self._deltas and self._deltas[-1].index == index:
            self._deltas[-1].arguments += arguments
        else:
            self._deltas.append(ToolCallDelta(index, arguments=arguments))

    def _end_call(self, state: _State) -> None:
        self._calls += 1
        if state == self._after_call:
            self.complete += 1
            self.is_half = False
        self._state = state if self._parallel else self._nothing


class TaggedParser(ToolCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as often as wanted, between content."""

    def __init__(self, opening: str, closing: str, *, parallel: bool, new_id: Callable[[], str]) -> None:
        super().__init__(opening, parallel=parallel, new_id=new_id)
        self._closing = closing
        self._either = re.compile(f"{re.escape(opening)}|{re.escape(closing)}")

    def _after_call(self, text: str, at: int) -> int:
        at = _end(_SPACE_OR_CLOSER, text, at)
        if text.startswith(self._closing, at):
            at += len(self._closing)
        elif partial_marker_start(self._closing, text, at) == at:
            return at
        self._state = self._content
        return at

    def _broken(self, text: str, at: int) -> int:
        found = self._either.search(text, at)
        if found is None:
            return min(partial_marker_start(marker, text, at) for marker in (self._marker, self._closing))
        self._state = self._after_call
        return found.start()


class CallListParser(ToolCallParser):
    """Calls as JSON objects, alone, in a list, or one after the other with `;`, `,` or nothing between them."""

    def _opened(self, text: str, at: int) -> int:
        at, mark = self._next(text, at)
        if mark == "[":
            self._hold(text, at, at + 1)
            self._state = self._in_list
            return at + 1
        return self._first(text, at) if mark else at

    def _first(self, text: str, at: int) -> int:
        """Read the first call, if it is not in a list."""
        return self._in_list(text, at)

    def _in_list(self, text: str, at: int) -> int:
        return super()._opened(text, at)

    def _after_call(self, text: str, at: int) -> int:
        at = _end(_SEPARATOR, text, at)
        if at < len(text):
            if text[at] == "{":
                self._begin_call()
            else:
                self._state = self._content
        return at


class WholeAnswerParser(CallListParser):
    """The whole answer is a call, or calls; a marker before it is allowed. Other JSON is content."""

    _marked = False

    def __init__(self, marker: str, *, parallel: bool, new_id: Callable[[], str]) -> None:
        super().__init__(marker, parallel=parallel, new_id=new_id, by_name=False)
        self._state = self._beginning

    def _beginning(self, text: str, at: int) -> int:
        stop = _end(_SPACE, text, at)
        self._passing.say(text[at:stop])
        if stop < len(text):
            self._state = self._opened if text[stop] in "{[" else self._content
        return stop


class MarkerParser(CallListParser):
    """`[TOOL_CALLS]`, then a list of objects, or a name and its arguments: `name{...}`, `name[ARGS]{...}`."""

    def __init__(self, marker: str, *, parallel: bool, new_id: Callable[[], str]) -> None:
        super().__init__(marker, parallel=parallel, new_id=new_id)
        self._head = ""
        self._scanner = JsonValueScanner()

    def _first(self, text: str, at: int) -> int:
        if text[at] == "{":
            return super()._first(text, at)
        self._head = ""
        self._state = self._in_head
        return at

    def _in_head(self, text: str, at: int) -> int:
        stop = _end(_HEAD, text, at, at + _LONGEST_HEAD - len(self._head))
        self._head += text[at:stop]
        self._hold(text, at, stop)
        if len(self._head) >= _LONGEST_HEAD:
            self._no_call()
        elif stop < len(text):
            named = _NAMED.fullmatch(self._head)
            if named is None:
                self._no_call()
            else:
                self._start_call(named[1])
                self._scanner = JsonValueScanner()
                self._state = self._in_arguments
        return stop

    def _in_arguments(self, text: str, at: int) -> int:
        stop = self._scanner.scan(text, at, len(text))
        self._add(text[at:stop])
        if self._scanner.done or self._scanner.failed:
            self._end_call(self._after_call if self._scanner.done else self._broken)
        return stop


def _end(pattern: re.Pattern[str], text: str, at: int, most: int | None = None) -> int:
    """Return the end of the match of a pattern that also matches the empty text."""
    found = pattern.match(text, at) if most is None else pattern.match(text, at, most)
    return at if found is None else found.end()
