"""Grammars that are wrong or hostile are refused, or end their own sequence within bounds."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import time
from types import SimpleNamespace

import pytest

from headrace.engine.grammar import grammar_state
from headrace.engine.grammar.constraints import Grammar, GrammarCompiler, GrammarError, GrammarLimits, GrammarState
from headrace.engine.interface.grammar_spec import GrammarKind
from headrace.errors import RequestError
from headrace.models.text.tokenizer import Tokenizer
from tests.support.grammar_masks import allowed

BAD: list[tuple[GrammarKind, str]] = [
    ("json_schema", "{"),
    ("json_schema", "[]"),
    ("json_schema", "false"),
    ("json_schema", '"text"'),
    ("json_schema", '{"type": "strin"}'),
    ("json_schema", '{"not": {"type": "object"}}'),
    ("json_schema", '{"type": "array", "uniqueItems": true}'),
    ("json_schema", '{"type": "string", "format": "unheard-of"}'),
    ("json_schema", '{"type": "string", "pattern": "a(?=b)"}'),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}'),
    ("json_schema", '{"$ref": "http://example.com/schema.json"}'),
    ("json_schema", '{"$ref": "file:///etc/hostname"}'),
    ("json_schema", '{"$ref": "#/nowhere"}'),
    ("json_schema", '{"const": NaN}'),
    ("json_schema", "\ud800"),
    ("json_object", '{"type": "object"}'),
    ("regex", "a("),
    ("regex", "a(?=b)"),
    ("regex", "[^\\x00-\\U0010FFFF]"),
    ("choice", "[]"),
    ("choice", '["a", 1]'),
    ("choice", '"a"'),
    ("lark", ""),
    ("lark", "begin: /a/"),
    ("lark", "start: other"),
    ("lark", "start: start"),
    ("lark", '{"grammars": [{"json_schema": {}}]}'),
    ("lark", "start: <|nothing|>"),
    ("lark", "start: a\na[temperature=0.5]: /a+/"),
    ("lark", 'start: a "x"\na[max_tokens=3]: /a+/'),
    ("lark", 'start: a "x"\na[stop="q"]: /a+/'),
    ("lark", 'start: "x" b\nb: a "x"\na[max_tokens=3]: /a+/'),
    ("json_schema", json.dumps({"properties": {f"p{n}": {} for n in range(3000)}, "type": "object"})),
]


@pytest.mark.parametrize(("kind", "text"), BAD)
def test_a_bad_grammar_is_the_requests_fault(grammars: GrammarCompiler, kind: GrammarKind, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammars.compile(Grammar(kind, text))
    assert caught.value.parameter == "grammar"
    assert len(str(caught.value)) < 700
    assert "<state>" not in str(caught.value)


DEEP = "[" * 100_000
HOSTILE: dict[str, tuple[GrammarKind, str]] = {
    "nested": ("json_schema", DEEP),
    "nested and closed": ("json_schema", '{"a":' * 500 + "1" + "}" * 500),
    "nested schema": ("json_schema", '{"items":' * 70 + "{}" + "}" * 70),
    "long": ("json_schema", '{"enum": ["' + "a" * 300_000 + '"]}'),
    "many values": ("json_schema", json.dumps({"enum": list(range(60_000))})),
    "nested in a choice": ("choice", DEEP),
    "repeated class": ("regex", "([a-z]{1,1000}){1,1000}"),
    "repeated and repeated": ("regex", "((a{1,100}){1,100}){1,100}"),
    "alternatives without end": ("regex", "(" + "|".join(f".*{letter}.{{40}}" for letter in "abcdefghij") + ")"),
    "a far look back": ("regex", "(.*a.{300}){5}"),
    "very many items": (
        "json_schema",
        '{"type":"array","minItems":100000000,"items":{"type":"array","minItems":9999999}}',
    ),
    "very long text": ("json_schema", '{"type":"string","minLength":2000000000}'),
    "all of any of": (
        "json_schema",
        json.dumps({"allOf": [{"anyOf": [{"pattern": f"{a}{b}"} for a in "abcdefgh"]} for b in range(12)]}),
    ),
    "endless reference": (
        "json_schema",
        json.dumps({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}),
    ),
    "doubling references": (
        "json_schema",
        json.dumps(
            {
                "$defs": {
                    **{f"d{n}": {"prefixItems": [{"$ref": f"#/$defs/d{n + 1}"}] * 3} for n in range(30)},
                    "d30": {"type": "string"},
                },
                "$ref": "#/$defs/d0",
            }
        ),
    ),
    "ambiguous": ("lark", 'start: a\na: a a | "x" | "xx" | ""'),
    "doubling rules": ("lark", "start: r0\n" + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(40)) + '\nr40: "a"'),
    "nothing, very often": ("lark", "start: e{100000}\ne: |f\nf: |e"),
    "rows without end": (
        "lark",
        "start: " + " | ".join(f"r{n}*" for n in range(3000)) + "\n" + "\n".join(f'r{n}: "{n}"' for n in range(3000)),
    ),
    "everything but": ("lark", "start: A\nA: ~(/(.|\\n)*a.{60}b(.|\\n)*/ & /(.|\\n)*c.{60}d(.|\\n)*/)"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_served_within_its_bounds(grammars: GrammarCompiler, name: str) -> None:
    """Refused, or stopped with an error, or fine; and never for long."""
    kind, text = HOSTILE[name]
    began = time.process_time()
    state: GrammarState | None = None
    with contextlib.suppress(RequestError):
        state = grammars.compile(Grammar(kind, text))
    if state is not None:
        draw = random.Random(1)
        for _ in range(20):
            (masks,) = grammars.launch([(state, ())]).collect()
            if not masks:
                assert state.error
            if state.finished or not masks:
                break
            with contextlib.suppress(GrammarError):
                state.advance([draw.choice(allowed(masks[0]))])
    # A bound for something that hangs, far from what it takes.
    assert time.process_time() - began < 20.0


def test_the_bounds_are_those_that_are_configured(tokenizer: Tokenizer) -> None:
    grammars = GrammarCompiler(tokenizer, GrammarLimits(text_bytes=40, depth=3, values=5))
    grammars.compile(Grammar("json_schema", '{"enum": ["a"]}'))
    for text in ('{"enum": ["' + "a" * 40 + '"]}', '{"items": {"items": {"items": {}}}}', '{"enum": [1, 2, 3, 4, 5]}'):
        with pytest.raises(RequestError):
            grammars.compile(Grammar("json_schema", text))
    with pytest.raises(RequestError, match="longer than 40 bytes"):
        grammars.compile(Grammar("regex", "中" * 20))
    grammars.close()


def test_the_steps_bounds_end_a_sequence_and_not_the_engine(tokenizer: Tokenizer) -> None:
    grammars = GrammarCompiler(tokenizer, GrammarLimits(row_items=20, step_items=100))
    try:
        state = grammars.compile(Grammar("lark", 'start: a\na: a a | "x" | "xx" | "y"'))
    except RequestError:
        return
    fine = grammars.compile(Grammar("regex", "[a-z]+"))
    for _ in range(50):
        masks = grammars.launch([(state, tokenizer.encode("x")), (fine, ())]).collect()
        assert len(masks[1]) == 1
        if not masks[0]:
            assert state.error
            break
        try:
            state.advance(tokenizer.encode("x"))
        except GrammarError:
            assert state.error
            break
    else:
        pytest.fail("the bounds were never met")
    assert fine.error is None
    grammars.close()


def test_a_sequence_does_not_come_to_its_bound_by_what_others_wrote(tokenizer: Tokenizer) -> None:
    """All sequences of a grammar share its lexer, and it has a bound on its states."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    grammars = GrammarCompiler(tokenizer, GrammarLimits(lexer_states=400))
    start = grammars.compile(Grammar("regex", "(" + "|".join(f"{one}[a-z]{{60}}{one}" for one in letters) + ")"))
    for place, letter in enumerate(letters):
        state = start.clone()
        text = letter + "".join(letters[(step * place) % 26] for step in range(60)) + letter
        for token in tokenizer.encode(text):
            ((mask, *_),) = grammars.launch([(state, tokenizer.encode("zq")[:1])]).collect()
            assert token in allowed(mask)
            state.advance([token])
        assert state.finished
    grammars.close()


@pytest.mark.parametrize(("clock", "renewed"), [("monotonic", True), ("thread_time", False)])
def test_a_grammar_is_compiled_again_if_that_takes_little_processor_time(
    clock: str, renewed: bool, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, other processes take most of the time that a compilation lasts."""
    ticks = itertools.count()
    clocks = {"monotonic": time.monotonic, "thread_time": time.thread_time, clock: lambda: float(next(ticks))}
    monkeypatch.setattr(grammar_state, "time", SimpleNamespace(**clocks))
    grammars = GrammarCompiler(tokenizer)
    state = grammars.compile(Grammar("regex", "[a-z]+"))
    before = state._compiled.matcher  # pyright: ignore[reportPrivateUsage]
    state.rebuild()
    assert (state._compiled.matcher is not before) == renewed  # pyright: ignore[reportPrivateUsage]
    grammars.close()
