"""Describes a grammar for constrained decoding, checks its bounds and converts it to llguidance's source format.

Holds the checks that need no tokenizer, so a bad grammar is rejected before it is queued. Does not compile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Final, Literal, cast, get_args

import msgspec

from headrace.errors import RequestError

GrammarKind = Literal["json_schema", "json_object", "regex", "lark", "choice"]
GRAMMAR_KINDS: Final[tuple[str, ...]] = get_args(GrammarKind)
NOT_FOLLOWED: Final = "The grammar cannot be followed: "  # begins the reason of a sequence that ends by its grammar

# Whitespace between JSON tokens: a few spaces, or a newline with indentation. Without a bound, small models get stuck
# in it.
_WHITESPACE: Final = r"[\x20\x09]{1,4}|\x0D?\x0A[\x20\x09]{0,32}"
_TEMPERATURE: Final = re.compile(r"\[[^\]\n]*\btemperature\s*=")


class GrammarTrigger(msgspec.Struct, frozen=True):
    """Begins a grammar in the middle of free text: the text is free up to a marker, and the grammar covers the marker
    and what follows it. Tokens that would complete a marker and continue it against the grammar are never sampled."""

    markers: tuple[str, ...]
    at_start: bool = False  # counts only as the first thing in the answer, after whitespace
    repeats: bool = False  # text is free again after the grammar's end; False: the answer ends there
    # The opening and closing marker of reasoning at the answer's beginning, in which no marker counts.
    reasoning: tuple[str, str] | None = None
    reasoning_begins: Literal["open", "closed", "unknown"] = "unknown"  # by the prompt; unknown: the answer shows it


class GrammarSchema(msgspec.Struct, frozen=True):
    """A rule of a Lark grammar that is a JSON schema."""

    rule: str
    schema: str
    instead: str | None = None  # the schema to use if this one cannot be; None: the grammar is rejected


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: GrammarKind
    text: str = ""  # choice: a JSON list of strings; json_object: empty
    schemas: tuple[GrammarSchema, ...] = ()  # lark: further rules
    trigger: GrammarTrigger | None = None  # None: the grammar covers the whole answer
    best_effort: bool = False  # with a trigger: if the grammar cannot be used, the text stays free

    @property
    def size(self) -> int:
        """Characters of source text."""
        return len(self.text) + sum(len(each.schema) for each in self.schemas)


class GrammarLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on a caller's grammar. Fuel is llguidance's unit of work."""

    text_bytes: int = 128 * 1024  # 128 KiB; compiled, a text may take 400 times its length
    depth: int = 64  # of nested JSON
    values: int = 50_000  # in JSON: numbers, strings, lists and objects all count
    compile_seconds: float = 5.0  # of processor time
    compiling: int = 16  # at once, those waiting for a thread included
    kept: int = 32  # compiled grammars in the cache
    kept_bytes: int = 1024 * 1024  # 1 MiB of source text in the cache
    symbols: int = 100_000
    compile_fuel: int = 1_000_000  # about 20 ms
    step_fuel: int = 200_000  # per mask; about 14 ms
    step_items: int = 50_000  # per mask; about 3 ms
    row_items: int = 2_000
    lexer_states: int = 30_000  # per compiled grammar; about 1.5 kB each


def grammar_source(grammar: Grammar, limits: GrammarLimits, *, replaced: Collection[str] = ()) -> str:
    """Return the grammar in llguidance's format. Raise RequestError for errors that are visible without compiling.

    `replaced` are rules whose replacement is used. If the text is too long, the longest schemas are replaced too.
    """
    text = grammar.text if not grammar.schemas else _with_schemas(grammar, limits.text_bytes, replaced)
    if len(text) > limits.text_bytes or len(text.encode(errors="replace")) > limits.text_bytes:
        raise RequestError(f"The grammar is longer than {limits.text_bytes} bytes.", parameter="grammar")
    match grammar.kind:
        case "json_object":
            if grammar.text:
                raise RequestError("'json_object' takes no schema. Use 'json_schema'.", parameter="grammar")
            return _schema_source('{"type": "object"}', limits)
        case "json_schema":
            return _schema_source(grammar.text, limits)
        case "choice":
            choices = _json(grammar.text, limits)
            if not isinstance(choices, list) or not choices:
                raise RequestError("A choice must be a list of at least one string.", parameter="grammar")
            texts = cast("list[object]", choices)
            if not all(isinstance(text, str) for text in texts):
                raise RequestError("A choice must be a list of at least one string.", parameter="grammar")
            # One terminal, because a few thousand rules would exceed the parser's row limit.
            terminal = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
            return _lark_source(f"start: CHOICE\nCHOICE: {terminal}")
        case "regex":
            from llguidance import LLMatcher  # imported on demand

            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            if _TEMPERATURE.search(grammar.text):
                raise RequestError("A grammar cannot set the temperature.", parameter="grammar")
            return _lark_source(text)


def schema_rule_source(schema: GrammarSchema) -> str:
    """Return the source of a grammar that is one rule's schema alone."""
    return _lark_source(f"start: %json {schema.schema}")


def _with_schemas(grammar: Grammar, most: int, replaced: Collection[str]) -> str:
    chosen = {
        each.rule: each.instead if each.instead is not None and each.rule in replaced else each.schema
        for each in grammar.schemas
    }
    size = len(grammar.text.encode(errors="replace")) + sum(
        len(text.encode(errors="replace")) for text in chosen.values()
    )
    for each in sorted(grammar.schemas, key=lambda each: len(each.schema), reverse=True):
        if size + 32 * len(chosen) <= most:
            break
        if each.instead is not None:
            size -= len(chosen[each.rule].encode(errors="replace")) - len(each.instead)
            chosen[each.rule] = each.instead
    return "\n".join([grammar.text, *(f"{rule}: %json {text}" for rule, text in chosen.items())])


def _lark_source(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _schema_source(text: str, limits: GrammarLimits) -> str:
    schema = _json(text, limits)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError("A JSON schema must be an object.", parameter="grammar")
    wanted = dict(cast("dict[str, Any]", schema))
    options = wanted.get("x-guidance")
    if options is None or isinstance(options, dict):
        given = cast("dict[str, Any]", options or {})
        if not given.keys() & {"whitespace_pattern", "whitespace_flexible"}:
            wanted["x-guidance"] = {**given, "whitespace_pattern": _WHITESPACE}
    return json.dumps({"grammars": [{"json_schema": wanted}]})


def _json(text: str, limits: GrammarLimits) -> object:
    try:
        value: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"The grammar is not valid JSON: {why}.", parameter="grammar") from None
    level: list[object] = [value]
    count = 0
    for _ in range(limits.depth):
        count += len(level)
        if count > limits.values:
            raise RequestError(f"The grammar has more than {limits.values} values.", parameter="grammar")
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += cast("dict[str, object]", item).values()
            elif isinstance(item, list):
                inner += cast("list[object]", item)
        if not inner:
            return value
        level = inner
    raise RequestError(f"The grammar is nested deeper than {limits.depth} levels.", parameter="grammar")
