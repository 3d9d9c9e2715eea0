"""Builds Lark grammars that constrain tool calls to a model's format, and their arguments to the tools' schemas.

tool_formats.py describes the calls. A marker that is a special token is written by its id, because its text would be
other tokens; any other marker is written as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from headrace.engine.interface.grammar_spec import Grammar, GrammarSchema, GrammarTrigger
from headrace.errors import RequestError
from headrace.gateway.requests.text_request import Tool

# The spacing of json.dumps, which models were trained on.
_SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_DEEPEST: Final = 64  # of a schema's nested values
# Keywords that describe a schema and constrain nothing.
_ANNOTATIONS: Final = frozenset(
    {"$comment", "default", "deprecated", "description", "example", "examples", "readOnly", "title", "writeOnly"}
)
_SCHEMA_MAPS: Final = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_WS: Final = r"[ \t\r\n]{0,16}"


class CallRules(NamedTuple):
    """The rule `call` and what it needs."""

    text: str
    schemas: tuple[GrammarSchema, ...]


def lark_string(text: str) -> str:
    """Return text as a Lark string; empty for empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def lark_marker(text: str, ids: Mapping[str, int]) -> str:
    return f"<[{ids[text]}]>" if text in ids else lark_string(text)


def callable_tools(tools: Sequence[Tool], only: str | None) -> list[Tool]:
    """Return the tools that may be called. RequestError if there are none."""
    found = [tool for tool in tools if only is None or tool.name == only]
    if not found:
        message = (
            "'tools' is empty." if only is None else f"'tool_choice' names {only[:80]!r}, which is not in 'tools'."
        )
        raise RequestError(message, parameter="tool_choice" if only is not None else "tools")
    return found


def object_call_rule(tools: Sequence[Tool], *, key: str) -> CallRules:
    """Return the rule `call`: one object that names a tool and has its arguments under `key`."""
    heads = [lark_string(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": ') for tool in tools]
    return _calls(tools, heads, lark_string("}"))


def loose_call_rules(tools: Sequence[Tool], opening: str, *, parallel: bool) -> CallRules:
    """Return rules for calls in every spelling that models use: with spaces, with a type, with either key, with or
    without the opening marker.

    The rule `call` is one object and `list` is a list of them. The text up to a call's arguments is one terminal,
    because the lexer follows `no_loose_call` beside it.
    """
    heads = [f'{_named([tool])}{_WS},{_WS}"(parameters|arguments)"{_WS}:{_WS}/' for tool in tools]
    tail = rf"/{_WS}\}}/"
    text, schemas = _calls(tools, [f"/{_optional(opening)}{head}" for head in heads], tail)
    first, _ = _calls(tools, [rf"/{_optional(opening)}{_WS}\[{head}" for head in heads], tail, rule="first")
    further = f"(/{_WS},/ call)*" if parallel else ""
    return CallRules("\n".join([text, first, rf"list: first {further} /{_WS}\]/"]), schemas)


def no_loose_call(tools: Sequence[Tool], opening: str) -> str:
    """Return a terminal for text that does not begin as a call of one of the tools: an object or a list of objects with
    its name, with or without the opening marker."""
    return rf"/(.|\n)*/ & ~/{_optional(opening)}({_WS}\[)?{_named(tools)}(.|\n)*/"


def named_call_rule(tools: Sequence[Tool], before_arguments: str) -> CallRules:
    """Return the rule `call`: a tool's name and its arguments. `before_arguments`: Lark for the text between."""
    return _calls(tools, [f"{lark_string(tool.name)} {before_arguments}" for tool in tools], "")


def calls_only_grammar(shape: str, calls: CallRules) -> Grammar:
    """Return a grammar for calls and no other text. `shape`: markers and repetition around the rule `call`."""
    return Grammar(kind="lark", text=f"start: {shape}\n{calls.text}", schemas=calls.schemas)


def triggered_grammar(shape: str, calls: CallRules, trigger: GrammarTrigger, *, strict: bool) -> Grammar:
    """Return a grammar for free text that follows `shape` from each marker on. Unless strict, it is best effort."""
    return Grammar(
        kind="lark",
        text=f"start: {shape}\n{calls.text}",
        schemas=calls.schemas,
        trigger=trigger,
        best_effort=not strict,
    )


def _named(tools: Sequence[Tool]) -> str:
    names = "|".join(_regex(json.dumps(tool.name, ensure_ascii=False)) for tool in tools)
    return rf'{_WS}\{{{_WS}("type"{_WS}:{_WS}"function"{_WS},{_WS})?"name"{_WS}:{_WS}({names})'


def _optional(text: str) -> str:
    return f"({_regex(text)})?" if text else ""


def _regex(text: str) -> str:
    """Escape text for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace(r"\ ", " ")


def _calls(tools: Sequence[Tool], heads: Sequence[str], tail: str, *, rule: str = "call") -> CallRules:
    lines = [f"{rule}: {' | '.join(f'{rule}_{place}' for place in range(len(tools)))}"]
    lines += (f"{rule}_{place}: {head} arguments_{place} {tail}" for place, head in enumerate(heads))
    schemas = (_arguments(tool, f"arguments_{place}") for place, tool in enumerate(tools))
    return CallRules("\n".join(lines), tuple(schemas))


def _arguments(tool: Tool, rule: str) -> GrammarSchema:
    """Return a tool's schema as the root of its own document, so that its references resolve.

    Unless the tool is strict, a schema that cannot be compiled is replaced by any object.
    """
    options = {"x-guidance": {**_SPACING, "lenient": not tool.strict}}
    anything = json.dumps({"type": "object", **options})
    schema: Mapping[str, Any] = tool.parameters or {}
    if _is_too_deep(schema):
        if tool.strict:
            raise RequestError(
                f"The schema of the tool {tool.name[:80]!r} is nested deeper than {_DEEPEST} levels.",
                parameter="tools",
            )
        return GrammarSchema(rule, anything)
    bare = _without_annotations(schema)
    bare.setdefault("type", "object")
    text = json.dumps({**bare, **options}, ensure_ascii=False)
    return GrammarSchema(rule, text, instead=None if tool.strict else anything)


def _without_annotations(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Drop keywords that only describe: they are most of a tool's text and cost time to compile."""
    bare: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _ANNOTATIONS:
            continue
        if key in _SCHEMA_MAPS and isinstance(value, Mapping):
            named = cast("Mapping[str, Any]", value)
            bare[key] = {name: _bare(each) for name, each in named.items()}
        elif key in ("enum", "const"):
            bare[key] = value
        else:
            bare[key] = _bare(value)
    return bare


def _bare(value: object) -> object:
    if isinstance(value, Mapping):
        return _without_annotations(cast("Mapping[str, Any]", value))
    if isinstance(value, list | tuple):
        return [_bare(each) for each in cast("Sequence[object]", value)]
    return value


def _is_too_deep(schema: object) -> bool:
    level: list[object] = [schema]
    for _ in range(_DEEPEST):
        inner: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                inner += cast("Mapping[str, object]", item).values()
            elif isinstance(item, list | tuple):
                inner += cast("Sequence[object]", item)
        if not inner:
            return False
        level = inner
    return True
