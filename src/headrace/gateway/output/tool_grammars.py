"""Builds Lark grammars that constrain tool calls to a model's format, and their arguments to the tools' schemas.

Two shapes: calls only, and free text that may contain calls. tool_formats.py describes the calls. A marker that is a
special token is written by its id, because its text would be other tokens; any other marker is written as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from headrace.engine.interface.grammar_spec import Grammar
from headrace.errors import RequestError
from headrace.gateway.requests.text_request import Tool

# As models were taught: what json.dumps writes.
_SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_DEEPEST: Final = 64  # of a schema's nested values
_TEXT: Final = r"TEXT: /(.|\n)*/"


def lark_string(text: str) -> str:
    """Text as a Lark string; nothing for no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def lark_marker(text: str, ids: Mapping[str, int]) -> str:
    return f"<[{ids[text]}]>" if text in ids else lark_string(text)


def callable_tools(tools: Sequence[Tool], only: str | None) -> list[Tool]:
    """The tools that may be called; RequestError where there are none."""
    found = [tool for tool in tools if only is None or tool.name == only]
    if not found:
        message = (
            "'tools' is empty." if only is None else f"'tool_choice' names {only[:80]!r}, which is not in 'tools'."
        )
        raise RequestError(message, parameter="tool_choice" if only is not None else "tools")
    return found


def object_call_rule(tools: Sequence[Tool], *, key: str) -> str:
    """The rule `call`: one object that names a tool and has its arguments under `key`."""
    heads = [lark_string(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": ') for tool in tools]
    return _calls(tools, heads, lark_string("}"))


def named_call_rule(tools: Sequence[Tool], before_arguments: str) -> str:
    """The rule `call`: a tool's name and its arguments. `before_arguments`: Lark for what is between the two."""
    return _calls(tools, [f"{lark_string(tool.name)} {before_arguments}" for tool in tools], "")


def calls_only_grammar(shape: str, calls: str) -> Grammar:
    """Calls and nothing else. `shape`: how the rule `call` is put into markers and repeated."""
    return Grammar(kind="lark", text=f"start: {shape}\n{calls}")


def free_text_grammar(shape: str, calls: str, opening: str, ids: Mapping[str, int], *, parallel: bool) -> Grammar:
    """Free text, with calls in it: after each opening marker comes what `shape` says. With parallel, any number."""
    if opening in ids:
        begin = f"begin: TEXT {lark_marker(opening, ids)}"
    else:
        begin = f"begin: before\nbefore[lazy]: TEXT {lark_string(opening)}"
    start = "start: one* TEXT" if parallel else "start: one | TEXT"
    return Grammar(kind="lark", text=f"{start}\none: begin {shape}\n{begin}\n{_TEXT}\n{calls}")


def _calls(tools: Sequence[Tool], heads: Sequence[str], tail: str) -> str:
    lines = [f"call: {' | '.join(f'call_{place}' for place in range(len(tools)))}"]
    for place, (tool, head) in enumerate(zip(tools, heads, strict=True)):
        lines += (f"call_{place}: {head} arguments_{place} {tail}", f"arguments_{place}: %json {_schema(tool)}")
    return "\n".join(lines)


def _schema(tool: Tool) -> str:
    """A tool's schema as the root of its own document, so that its references hold."""
    schema: dict[str, Any] = dict(tool.parameters or {})
    if "type" not in schema:
        schema["type"] = "object"
    # What the grammar cannot hold is left to the model, unless the caller was promised that it is held.
    schema["x-guidance"] = {**_SPACING, "lenient": not tool.strict}
    _check_depth(schema, tool)
    return json.dumps(schema, ensure_ascii=False)


def _check_depth(schema: object, tool: Tool) -> None:
    level: list[object] = [schema]
    for _ in range(_DEEPEST):
        inner: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                inner += cast("Mapping[str, object]", item).values()
            elif isinstance(item, list | tuple):
                inner += cast("Sequence[object]", item)
        if not inner:
            return
        level = inner
    raise RequestError(
        f"The schema of the tool {tool.name[:80]!r} is nested deeper than {_DEEPEST} levels.", parameter="tools"
    )
