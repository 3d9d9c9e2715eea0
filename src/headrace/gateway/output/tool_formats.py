"""The formats in which models write tool calls, and which of them a model's chat template teaches.

Owns ToolFormat and the table TOOL_FORMATS. tool_parsers.py reads calls in a model's text, and tool_grammars.py builds
the grammars that constrain them. Knows nothing of requests, and runs no tool.

    hermes    text <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>    Hermes, Qwen 2.5 and 3
    mini      text <tool_call>{"name": ..., "arguments": {...}}</tool_call>        the bundled models
    llama3    {"name": ..., "parameters": {...}}; {...}                            Llama 3.1 and 3.2
    mistral   text [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]            Mistral, to 2024
              text [TOOL_CALLS]name[ARGS]{...}                                     Mistral, since 2025
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from headrace.engine.interface.grammar_spec import Grammar, GrammarTrigger
from headrace.errors import RequestError
from headrace.gateway.output.tool_grammars import (
    CallRules,
    callable_tools,
    calls_only_grammar,
    lark_marker,
    lark_string,
    loose_call_rules,
    named_call_rule,
    no_loose_call,
    object_call_rule,
    triggered_grammar,
)
from headrace.gateway.output.tool_parsers import (
    MarkerParser,
    TaggedParser,
    ToolCallParser,
    WholeAnswerParser,
    new_call_id,
)
from headrace.gateway.requests.text_request import Tool
from headrace.models.text.tokenizer import Tokenizer

__all__ = ["TOOL_FORMATS", "ToolCallParser", "ToolFormat", "detect_tool_format", "tool_format_by_name"]

# An answer that begins as a list of calls does, but is a list of anything but objects.
_OTHER_LIST: Final = r"/[ \t\r\n]*\[[ \t\r\n]*([^{ \t\r\n](.|\n)*)?/"


@dataclass(frozen=True, slots=True)
class ToolFormat(ABC):
    name: str
    ids: Mapping[str, int] = field(default_factory=dict[str, int])  # of the markers that are special tokens

    @property
    def special(self) -> tuple[str, ...]:
        """Markers that are special tokens in this model: their text appears only when special tokens are decoded."""
        return tuple(self.ids)

    @property
    @abstractmethod
    def markers(self) -> tuple[str, ...]:
        """Marker texts that may be special tokens."""

    @abstractmethod
    def parser(self, *, parallel: bool = True, new_id: Callable[[], str] = new_call_id) -> ToolCallParser:
        """Return a parser for one answer. Without `parallel`, text after the first call is dropped."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], *, only: str | None, parallel: bool) -> Grammar:
        """Return a grammar for one call, or with `parallel` several, and no other text. `only`: the tool to call."""

    @abstractmethod
    def auto_grammar(self, tools: Sequence[Tool], *, parallel: bool = True) -> Grammar:
        """Return a grammar for free text that constrains each call to a tool's name and schema once it begins. Unless a
        tool is strict, a schema that cannot be compiled counts as any object."""


@dataclass(frozen=True, slots=True)
class TaggedFormat(ToolFormat):
    """Each call is an object between two tags."""

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"
    margin: str = "\n"  # between a tag and the object, and between calls

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opening, self.closing

    def parser(self, *, parallel: bool = True, new_id: Callable[[], str] = new_call_id) -> ToolCallParser:
        return TaggedParser(self.opening, self.closing, parallel=parallel, new_id=new_id)

    def grammar(self, tools: Sequence[Tool], *, only: str | None, parallel: bool) -> Grammar:
        one = self._one()
        shape = f"{one} ({lark_string(self.margin)} {one})*" if parallel else one
        return calls_only_grammar(shape, object_call_rule(callable_tools(tools, only), key="arguments"))

    def auto_grammar(self, tools: Sequence[Tool], *, parallel: bool = True) -> Grammar:
        trigger = GrammarTrigger((self.opening,), repeats=parallel)
        calls = object_call_rule(tools, key="arguments")
        return triggered_grammar(self._one(), calls, trigger, strict=_any_strict(tools))

    def _one(self) -> str:
        margin = lark_string(self.margin)
        return f"{lark_marker(self.opening, self.ids)} {margin} call {margin} {lark_marker(self.closing, self.ids)}"


@dataclass(frozen=True, slots=True)
class WholeAnswerFormat(ToolFormat):
    """The answer as a whole is the call, or calls."""

    opening: str = "<|python_tag|>"  # may come before it

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening,)

    def parser(self, *, parallel: bool = True, new_id: Callable[[], str] = new_call_id) -> ToolCallParser:
        return WholeAnswerParser(self.opening, parallel=parallel, new_id=new_id)

    def grammar(self, tools: Sequence[Tool], *, only: str | None, parallel: bool) -> Grammar:
        return calls_only_grammar(_repeated(parallel), object_call_rule(callable_tools(tools, only), key="parameters"))

    def auto_grammar(self, tools: Sequence[Tool], *, parallel: bool = True) -> Grammar:
        strict = _any_strict(tools)
        tag = f"{lark_marker(self.opening, self.ids)}? " if self.opening in self.ids else ""
        spelt = "" if tag else self.opening
        calls = loose_call_rules(tools, spelt, parallel=parallel)
        # Without strict tools, JSON that does not begin as a call of one of the tools is an answer.
        other = _OTHER_LIST if strict else no_loose_call(tools, spelt)
        shape = f"{tag}(OTHER | {_repeated(parallel)} | list)\nOTHER: {other}"
        trigger = GrammarTrigger((self.opening, "{", "["), at_start=True)
        return triggered_grammar(shape, calls, trigger, strict=strict)


@dataclass(frozen=True, slots=True)
class MarkerFormat(ToolFormat):
    """Calls behind a marker: a list of objects, or names each with its arguments."""

    opening: str = "[TOOL_CALLS]"
    named: bool = False  # the newer form
    call_id: str = ""  # the markers that it has between a name and its arguments
    arguments: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opening, "[CALL_ID]", "[ARGS]"

    def parser(self, *, parallel: bool = True, new_id: Callable[[], str] = new_call_id) -> ToolCallParser:
        return MarkerParser(self.opening, parallel=parallel, new_id=new_id)

    def grammar(self, tools: Sequence[Tool], *, only: str | None, parallel: bool) -> Grammar:
        one = self._one(parallel)
        shape = f"({one})+" if self.named and parallel else one
        return calls_only_grammar(shape, self._calls(callable_tools(tools, only)))

    def auto_grammar(self, tools: Sequence[Tool], *, parallel: bool = True) -> Grammar:
        # A list has one marker for all calls. Named calls have a marker each.
        trigger = GrammarTrigger((self.opening,), repeats=self.named and parallel)
        one = self._one(parallel, margin='" "? ')
        return triggered_grammar(one, self._calls(tools), trigger, strict=_any_strict(tools))

    def _one(self, parallel: bool, *, margin: str = "") -> str:
        inside = "call"
        if not self.named:
            inside = margin + ('"[" call (", " call)* "]"' if parallel else '"[" call "]"')
        return f"{lark_marker(self.opening, self.ids)} {inside}"

    def _calls(self, tools: Sequence[Tool]) -> CallRules:
        if not self.named:
            return object_call_rule(tools, key="arguments")
        between = lark_marker(self.arguments, self.ids)
        if self.call_id:
            between = f"{lark_marker(self.call_id, self.ids)} /[a-zA-Z0-9]{{9}}/ {between}"
        return named_call_rule(tools, between)


TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    known.name: known
    for known in (
        TaggedFormat("hermes"),
        TaggedFormat("mini", margin=""),
        WholeAnswerFormat("llama3"),
        MarkerFormat("mistral"),
    )
}


def detect_tool_format(template_source: str | None, tokenizer: Tokenizer) -> ToolFormat | None:
    """Return the format that a chat template teaches; None if it has no tools, or an unknown format."""
    found = _taught(template_source or "")
    return None if found is None else _for(found, tokenizer)


def tool_format_by_name(name: str, tokenizer: Tokenizer) -> ToolFormat:
    """Return the format of this name. RequestError if there is none."""
    if name not in TOOL_FORMATS:
        raise RequestError(
            f"Unknown tool_format '{name}'. Expected one of {', '.join(TOOL_FORMATS)}.", parameter="tool_format"
        )
    return _for(TOOL_FORMATS[name], tokenizer)


def _for(found: ToolFormat, tokenizer: Tokenizer) -> ToolFormat:
    ids: dict[str, int] = {}
    for text in found.markers:
        token = tokenizer.token_id(text)
        if token is not None and tokenizer.is_special(token):
            ids[text] = token
    return replace(found, ids=ids)


def _taught(source: str) -> ToolFormat | None:
    if "tools" not in source:
        return None
    if "[TOOL_CALLS]" in source:
        known = MarkerFormat("mistral")
        if "[ARGS]" not in source:
            return known
        call_id = "[CALL_ID]" if "[CALL_ID]" in source else ""
        return replace(known, named=True, call_id=call_id, arguments="[ARGS]")
    if "<tool_call>" in source:
        # Some models put other text than JSON between the same tags.
        if "<function=" in source or "<arg_key>" in source or "arguments" not in source:
            return None
        return TOOL_FORMATS["mini" if "<tool_call>{" in source else "hermes"]
    if "<|start_header_id|>" in source and ("<|python_tag|>" in source or '"parameters' in source):
        return TOOL_FORMATS["llama3"]
    return None


def _any_strict(tools: Sequence[Tool]) -> bool:
    return any(tool.strict for tool in tools)


def _repeated(parallel: bool) -> str:
    return 'call ("; " call)*' if parallel else "call"
