"""What a caller may ask for as a grammar, its bounds, and the grammar as llguidance takes it.

Owns Grammar, GrammarLimits and the checks that need no tokenizer, so that they can be made before a request goes
anywhere. Compiles nothing.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, Literal, cast, get_args

import msgspec

from headrace.errors import RequestError

GrammarKind = Literal["json_schema", "json_object", "regex", "lark", "choice"]
GRAMMAR_KINDS: Final[tuple[str, ...]] = get_args(GrammarKind)

# Whitespace between the parts of JSON: a space or a few, or a new line and its indentation. Unbounded, it is where
# small models get stuck.
_WHITESPACE: Final = r"[\x20\x09]{1,4}|\x0D?\x0A[\x20\x09]{0,32}"
_TEMPERATURE: Final = re.compile(r"\[[^\]\n]*\btemperature\s*=")


class Grammar(msgspec.Struct, frozen=True):
    kind: GrammarKind
    text: str = ""  # of a choice, a JSON list of strings; of json_object, nothing


class GrammarLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on a caller's grammar. Fuel is llguidance's measure of work."""

    text_bytes: int = 128 * 1024  # 128 KiB; compiled, a text may take 400 times its length
    depth: int = 64  # of nested JSON
    values: int = 50_000  # of JSON: numbers, texts, lists and objects all count
    compile_seconds: float = 5.0
    compiling: int = 16  # at once, those that wait for a thread included
    kept: int = 32  # compiled grammars that are remembered
    kept_bytes: int = 1024 * 1024  # 1 MiB, of their texts
    symbols: int = 100_000
    compile_fuel: int = 1_000_000  # about 20 ms
    step_fuel: int = 200_000  # of one mask; about 14 ms
    step_items: int = 50_000  # of one mask; about 3 ms
    row_items: int = 2_000
    lexer_states: int = 30_000  # of a compiled grammar; about 1.5 kB each


def grammar_source(grammar: Grammar, limits: GrammarLimits) -> str:
    """The grammar as llguidance takes it; RequestError for what can be seen to be wrong without compiling."""
    if len(grammar.text) > limits.text_bytes or len(grammar.text.encode(errors="replace")) > limits.text_bytes:
        raise RequestError(f"the grammar is longer than {limits.text_bytes} bytes", parameter="grammar")
    match grammar.kind:
        case "json_object":
            if grammar.text:
                raise RequestError("a JSON object takes no schema; use a JSON schema", parameter="grammar")
            return _schema_source('{"type": "object"}', limits)
        case "json_schema":
            return _schema_source(grammar.text, limits)
        case "choice":
            choices = _json(grammar.text, limits)
            if not isinstance(choices, list) or not choices:
                raise RequestError("a choice must be a list of texts, one at least", parameter="grammar")
            texts = cast("list[object]", choices)
            if not all(isinstance(text, str) for text in texts):
                raise RequestError("a choice must be a list of texts, one at least", parameter="grammar")
            # A terminal: as rules, a few thousand of them would be more than the parser's row takes.
            terminal = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
            return _lark_source(f"start: CHOICE\nCHOICE: {terminal}")
        case "regex":
            from llguidance import LLMatcher  # for those who ask for a grammar

            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            if _TEMPERATURE.search(grammar.text):
                raise RequestError("a grammar cannot set the temperature", parameter="grammar")
            return _lark_source(grammar.text)


def _lark_source(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _schema_source(text: str, limits: GrammarLimits) -> str:
    schema = _json(text, limits)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError("a JSON schema must be an object", parameter="grammar")
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
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the grammar is not JSON: {why}", parameter="grammar") from None
    level: list[object] = [value]
    count = 0
    for _ in range(limits.depth):
        count += len(level)
        if count > limits.values:
            raise RequestError(f"the grammar has more than {limits.values} values", parameter="grammar")
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += cast("dict[str, object]", item).values()
            elif isinstance(item, list):
                inner += cast("list[object]", item)
        if not inner:
            return value
        level = inner
    raise RequestError(f"the grammar is nested deeper than {limits.depth} levels", parameter="grammar")
