"""Reasoning formats, and the splitting of an answer into reasoning and content.

A model reasons before it answers, so only markers at the beginning of an answer count. Does not parse tool calls, which
are part of the content. The joined output never depends on how the text was cut.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from headrace.engine.interface.grammar_spec import Grammar
from headrace.errors import RequestError
from headrace.gateway.output.markers import MOST_WAITING, WHITESPACE, ContentBuffer, partial_marker_start
from headrace.models.text.tokenizer import Tokenizer

_Beginning = Literal["reasoning", "content", "either"]
_BEGINS: Final[dict[Literal["open", "closed", "unknown"], _Beginning]] = {
    "open": "reasoning",
    "closed": "content",
    "unknown": "either",
}


class ReasoningFormat(msgspec.Struct, frozen=True):
    name: str
    opening: str
    closing: str
    special: tuple[str, ...] = ()  # markers whose text is only seen where special tokens are shown

    def splitter(self, prompt_tail: str) -> ReasoningSplitter:
        """Return a splitter for the answer to a prompt with this end."""
        return ReasoningSplitter(self.opening, self.closing, begins=_BEGINS[self.state_after(prompt_tail)])

    def state_after(self, prompt_tail: str) -> Literal["open", "closed", "unknown"]:
        """Return how the prompt leaves the reasoning: opened or closed by the template, or unknown."""
        tail = prompt_tail.rstrip(WHITESPACE)
        if tail.endswith(self.opening):
            return "open"
        return "closed" if tail.endswith(self.closing) else "unknown"


REASONING_FORMATS: Final = {
    known.name: known
    for known in (ReasoningFormat("think", "<think>", "</think>"), ReasoningFormat("magistral", "[THINK]", "[/THINK]"))
}


def detect_reasoning_format(template_source: str | None, tokenizer: Tokenizer) -> ReasoningFormat | None:
    """Return the format whose markers a model's chat template contains, or None."""
    for known in REASONING_FORMATS.values():
        if template_source is not None and (known.opening in template_source or known.closing in template_source):
            return _for(known, tokenizer)
    return None


def reasoning_format_by_name(name: str, tokenizer: Tokenizer) -> ReasoningFormat:
    """Return the format of this name. RequestError if there is none."""
    if name not in REASONING_FORMATS:
        known = ", ".join(REASONING_FORMATS)
        raise RequestError(f"Unknown reasoning_format '{name}'. Expected one of {known}.", parameter="reasoning_format")
    return _for(REASONING_FORMATS[name], tokenizer)


def _for(found: ReasoningFormat, tokenizer: Tokenizer) -> ReasoningFormat:
    special = (marker for marker in (found.opening, found.closing) if _is_special(marker, tokenizer))
    return replace(found, special=tuple(special))


def after_reasoning(grammar: Grammar, format: ReasoningFormat, prompt_tail: str) -> Grammar:
    """Return a triggered grammar that ignores its markers inside the reasoning. `prompt_tail`: the prompt's end."""
    assert grammar.trigger is not None
    trigger = replace(
        grammar.trigger,
        reasoning=(format.opening, format.closing),
        reasoning_begins=format.state_after(prompt_tail),
    )
    return replace(grammar, trigger=trigger)


class ReasoningSplitter:
    """Splits one answer. Without a closing marker, all that follows an opening one is reasoning."""

    def __init__(self, opening: str, closing: str, *, begins: _Beginning) -> None:
        self._opening = opening
        self._closing = closing
        self._state: _Beginning = begins
        self._left = ""  # may be the beginning of a marker, with the whitespace before it
        self._reasoning = ContentBuffer()
        self._content = ""
        self._dropping = begins == "content"  # whitespace at the beginning of the content
        self._reasoning.after_marker()

    @property
    def is_open(self) -> bool:
        """True if the next text is reasoning."""
        return self._state == "reasoning"

    def push(self, text: str) -> tuple[str, str]:
        """Return the new reasoning and the new content."""
        text = self._left + text
        self._left = ""
        if self._state == "either":
            text = self._begin(text)
        if self._state == "reasoning":
            text = self._reason(text)
        if self._state == "content":
            self._say(text)
        return self._taken()

    def finish(self) -> tuple[str, str]:
        """End the text. Return the reasoning and content that were held back."""
        if self._state == "reasoning":
            self._reasoning.say(self._left)
        else:
            self._content += self._left
        self._left = ""
        return self._taken(last=True)

    def _begin(self, text: str) -> str:
        begun = text.lstrip(WHITESPACE)
        if len(text) - len(begun) <= MOST_WAITING:
            if begun.startswith(self._opening):
                self._state = "reasoning"
                return begun[len(self._opening) :]
            if self._opening.startswith(begun):
                self._left = text
                return ""
        self._state = "content"
        return text

    def _reason(self, text: str) -> str:
        found = text.find(self._closing)
        if found < 0:
            stop = partial_marker_start(self._closing, text)
            self._reasoning.say(text[:stop])
            self._left = text[stop:]
            return ""
        self._reasoning.say(text[:found])
        self._reasoning.drop()
        self._state = "content"
        self._dropping = True
        return text[found + len(self._closing) :]

    def _say(self, text: str) -> None:
        if self._dropping:
            text = text.lstrip(WHITESPACE)
            self._dropping = not text
        self._content += text

    def _taken(self, *, last: bool = False) -> tuple[str, str]:
        content, self._content = self._content, ""
        return self._reasoning.take(last=last and self._state == "reasoning"), content


def _is_special(marker: str, tokenizer: Tokenizer) -> bool:
    token = tokenizer.token_id(marker)
    return token is not None and tokenizer.is_special(token)
