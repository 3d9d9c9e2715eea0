"""How a model writes tool calls: the known formats, and which of them a model's chat template teaches.

Owns ToolFormat and the table FORMATS. What comes of a model's text is tool_formats_parsing's, how a model is held to
its format tool_formats_grammar's. Knows nothing of requests, and runs no tool.

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

from headrace.engine.interface.grammar_spec import Grammar
from headrace.errors import RequestError
from headrace.gateway.output.tool_grammars import (
    callable_tools,
    calls_only_grammar,
    free_text_grammar,
    lark_marker,
    lark_string,
    named_call_rule,
    object_call_rule,
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

# An answer that does not begin as calls do. A list of anything but objects is no call.
_NO_CALL: Final = r"TEXT: /[ \t\r\n]*([^{\[ \t\r\n](.|\n)*|\[[ \t\r\n]*([^{ \t\r\n](.|\n)*)?)?/"


@dataclass(frozen=True, slots=True)
class ToolFormat(ABC):
    name: str
    ids: Mapping[str, int] = field(default_factory=dict[str, int])  # of the markers that are special tokens

    @property
    def special(self) -> tuple[str, ...]:
        """Markers that are special tokens in this model: their text is only seen where special tokens are shown."""
        return tuple(self.ids)

    @property
    @abstractmethod
    def markers(self) -> tuple[str, ...]:
        """Texts that may be tokens of their own."""

    @abstractmethod
    def parser(self, *, parallel: bool = True, new_id: Callable[[], str] = new_call_id) -> ToolCallParser:
        """For one answer. Without parallel, what follows the first call is dropped."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], *, only: str | None, parallel: bool) -> Grammar:
        """One call of one of the tools, or of the one named, and nothing else; with parallel, one or more."""

    @abstractmethod
    def auto_grammar(self, tools: Sequence[Tool], *, parallel: bool = True) -> Grammar | None:
        """Free text, in which a call is held to a tool's name and schema once it begins; None where none is strict."""


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
        one = f"{lark_marker(self.opening, self.ids)} {self._inside()}"
        shape = f"{one} ({lark_string(self.margin)} {one})*" if parallel else one
        return calls_only_grammar(shape, object_call_rule(callable_tools(tools, only), key="arguments"))

    def auto_grammar(self, tools: Sequence[Tool], *, parallel: bool = True) -> Grammar | None:
        if not any(tool.strict for tool in tools):
            return None
        calls = object_call_rule(tools, key="arguments")
        return free_text_grammar(self._inside(), calls, self.opening, self.ids, parallel=parallel)

    def _inside(self) -> str:
        return f"{lark_string(self.margin)} call {lark_string(self.margin)} {lark_marker(self.closing, self.ids)}"


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

    def auto_grammar(self, tools: Sequence[Tool], *, parallel: bool = True) -> Grammar | None:
        if not any(tool.strict for tool in tools):
            return None
        tag = f"{lark_marker(self.opening, self.ids)}? " if self.opening in self.ids else ""
        shape = f"TEXT | {tag}{_repeated(parallel)}\n{_NO_CALL}"
        return calls_only_grammar(shape, object_call_rule(tools, key="parameters"))


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
        one = f"{lark_marker(self.opening, self.ids)} {self._inside(parallel)}"
        shape = f"({one})+" if self.named and parallel else one
        return calls_only_grammar(shape, self._calls(callable_tools(tools, only)))

    def auto_grammar(self, tools: Sequence[Tool], *, parallel: bool = True) -> Grammar | None:
        if not any(tool.strict for tool in tools):
            return None
        # Of the list there is one; of the others, each has its own marker.
        several = self.named and parallel
        return free_text_grammar(self._inside(parallel), self._calls(tools), self.opening, self.ids, parallel=several)

    def _inside(self, parallel: bool) -> str:
        if self.named:
            return "call"
        return '"[" call (", " call)* "]"' if parallel else '"[" call "]"'

    def _calls(self, tools: Sequence[Tool]) -> str:
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
    """The format that a chat template teaches; None where it shows no tools, or in a format that is not known."""
    found = _taught(template_source or "")
    return None if found is None else _for(found, tokenizer)


def tool_format_by_name(name: str, tokenizer: Tokenizer) -> ToolFormat:
    """RequestError for a name that is none."""
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
        # Other models put other things than JSON between the same tags.
        if "<function=" in source or "<arg_key>" in source or "arguments" not in source:
            return None
        return TOOL_FORMATS["mini" if "<tool_call>{" in source else "hermes"]
    if "<|start_header_id|>" in source and ("<|python_tag|>" in source or '"parameters' in source):
        return TOOL_FORMATS["llama3"]
    return None


def _repeated(parallel: bool) -> str:
    return 'call ("; " call)*' if parallel else "call"
