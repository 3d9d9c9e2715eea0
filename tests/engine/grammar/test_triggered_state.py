"""Grammars that begin in free text: nothing is masked before the marker, and everything after it is held."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken

from headrace.engine.grammar.constraints import Grammar, GrammarCompiler, GrammarError, GrammarLimits, GrammarState
from headrace.engine.interface.grammar_spec import GrammarSchema, GrammarTrigger
from headrace.errors import RequestError
from headrace.models.text.tokenizer import Tokenizer
from tests.support import grammar_masks
from tests.support.models.small_tokenizers import byte_level, load

TRIGGER = GrammarTrigger(("<call>",), repeats=True)
CALL = Grammar("lark", 'start: "<call>" /[a-c]{2,4}/ "</call>"', trigger=TRIGGER)
ONCE = Grammar("lark", CALL.text, trigger=GrammarTrigger(("<call>",)))


def spelt(grammars: GrammarCompiler, text: str) -> list[int]:
    return grammars.tokenizer.encode(text, add_special_tokens=False)


def allowed(grammars: GrammarCompiler, state: GrammarState) -> set[int] | None:
    """The tokens that may follow; None for all."""
    ((mask,),) = grammars.launch([(state, ())]).collect()
    return None if mask is None else set(grammar_masks.allowed(mask))


def test_nothing_is_masked_before_a_marker(each_kind: GrammarCompiler) -> None:
    state = each_kind.compile(CALL)
    for token in spelt(each_kind, "The water runs to the wheel. x = {1}\n"):
        assert allowed(each_kind, state) is None
        assert not state.constrains(())
        assert state.advance([token]) == 1
    assert state.accepting
    assert state.forced(9) == []


def test_after_a_marker_the_grammar_holds_to_its_end_and_then_text_is_free(each_kind: GrammarCompiler) -> None:
    state = each_kind.compile(CALL)
    state.advance(spelt(each_kind, "So <call>"))
    assert not state.accepting
    assert state.fitting(spelt(each_kind, "x")[-1:]) == 0
    with pytest.raises(GrammarError):
        state.clone().advance(spelt(each_kind, "x")[-1:])
    state.advance(spelt(each_kind, "<call>abca</call>")[len(spelt(each_kind, "<call>")) :])
    assert state.accepting
    assert not state.finished
    assert allowed(each_kind, state) is None
    state.advance(spelt(each_kind, " and <call>"))
    assert not state.accepting  # again


def test_without_repeating_the_end_of_the_grammar_is_the_end(grammars: GrammarCompiler) -> None:
    state = grammars.compile(ONCE)
    tokens = spelt(grammars, "So <call>ab</call> more")
    count = state.advance(tokens)
    assert state.finished
    assert grammars.tokenizer.decode(tokens[:count]) == "So <call>ab</call>"


def test_a_token_across_the_end_of_a_marker_must_fit_the_grammar(grammars: GrammarCompiler) -> None:
    """Whatever tokens complete the marker: they are free to if the rest of them fits, and masked out if not."""
    texts = [grammars.tokenizer.decode([token]) for token in range(grammars.tokenizer.vocab_size)]
    for marker in ("the w", "er", "ing", "e "):
        grammar = Grammar("lark", f'start: "{marker}" /[a-m]{{2,}}/ ";"', trigger=GrammarTrigger((marker,)))
        for end in range(len(marker)):
            state = grammars.compile(grammar)
            before = spelt(grammars, "x " + marker[:end])
            if grammars.tokenizer.decode(before) != "x " + marker[:end]:
                continue
            state.advance(before)
            mask = allowed(grammars, state)
            for token, text in enumerate(texts):
                found = (marker[:end] + text).find(marker)
                completes = found >= 0 and not grammars.tokenizer.is_special(token)
                fits = not completes or re.match("[a-m]*$|[a-m]{2,};$", (marker[:end] + text)[found + len(marker) :])
                assert (mask is None or token in mask) == bool(fits), (marker, end, text)
                assert state.fitting([token]) == (1 if fits else 0)


def test_a_marker_that_is_a_special_token_cannot_be_spelt(tmp_path: Path) -> None:
    made = byte_level()
    made.add_special_tokens([AddedToken("<call>", special=True)])  # pyright: ignore[reportUnknownMemberType]
    tokenizer = load(tmp_path, made)
    grammars = GrammarCompiler(tokenizer)
    marker = tokenizer.token_id("<call>")
    assert marker is not None
    grammar = Grammar("lark", f'start: <[{marker}]> "ab"', trigger=GrammarTrigger(("<call>",)))
    state = grammars.compile(grammar)
    before = [*tokenizer.encode("<", False), *tokenizer.encode("call", False)]
    state.advance(before)
    assert state.fitting(tokenizer.encode(">", False)) == 0
    state.advance([marker])
    assert grammars.tokenizer.decode(state.forced(9)) == "ab"
    assert state.finished
    grammars.close()


def test_masks_with_drafts_are_those_of_each_state(each_kind: GrammarCompiler) -> None:
    tokens = spelt(each_kind, "a <call>abc</call> b <call>ba</call> c")
    for start in range(0, len(tokens), 3):
        state = each_kind.compile(CALL)
        state.advance(tokens[:start])
        drafts = tokens[start : start + 9]
        assert state.fitting(drafts) == len(drafts)
        (masks,) = each_kind.launch([(state, drafts)]).collect()
        assert len(masks) == 1 + len(drafts)
        follower = each_kind.compile(CALL)
        follower.advance(tokens[:start])
        for place, mask in enumerate(masks):
            ((expected,),) = each_kind.launch([(follower, ())]).collect()
            assert (mask is None) == (expected is None)
            if mask is not None and expected is not None:
                assert np.array_equal(mask, expected)
            after = each_kind.mask_after(state, drafts[:place])
            assert (after is None) == (expected is None)
            assert after is None or expected is None or np.array_equal(after, expected)
            follower.advance(drafts[place : place + 1])


def test_drafts_that_do_not_fit_end_the_masks(grammars: GrammarCompiler) -> None:
    state = grammars.compile(CALL)
    drafts = spelt(grammars, "a <call>ab") + spelt(grammars, "x") + spelt(grammars, "</call>")
    count = state.fitting(drafts)
    assert grammars.tokenizer.decode(drafts[:count]) == "a <call>ab"
    (masks,) = grammars.launch([(state, drafts)]).collect()
    assert len(masks) == count + 1
    assert state.constrains(drafts)
    assert not state.constrains(spelt(grammars, "a b"))
    assert allowed(grammars, state) is None  # the drafts left no trace


def test_a_state_is_the_same_however_it_was_reached(each_kind: GrammarCompiler) -> None:
    tokens = spelt(each_kind, "one <call>abc</call> two <call>ab")
    draw = random.Random(3)
    straight = each_kind.compile(CALL)
    straight.advance(tokens)
    expected = allowed(each_kind, straight)
    assert expected is not None
    for _ in range(5):
        state = each_kind.compile(CALL)
        at = 0
        while at < len(tokens):
            count = draw.randrange(1, 5)
            each_kind.launch([(state, tokens[at : at + count])]).collect()
            state.fitting([draw.randrange(3, 200)])
            state = state.clone() if draw.random() < 0.3 else state
            state.advance(tokens[at : at + count])
            at += count
        assert allowed(each_kind, state) == expected


def test_what_must_come_is_forced_inside_the_grammar_alone(grammars: GrammarCompiler) -> None:
    grammar = Grammar("lark", 'start: "<call>" "the water runs" "</call>"', trigger=TRIGGER)
    state = grammars.compile(grammar)
    state.advance(spelt(grammars, "a <call>"))
    forced = state.forced(64)
    assert grammars.tokenizer.decode(forced) == "the water runs</call>"
    assert state.accepting
    assert state.forced(64) == []


BIG = Grammar(
    "lark",
    "start: s+\ns: x | y\nx: /[a-z]/ s?\ny: /[a-z]/ s? s?",
    trigger=GrammarTrigger(("<call>",)),
)


@pytest.mark.parametrize("best_effort", [True, False])
def test_a_grammar_that_exceeds_its_bounds_frees_the_text_if_it_is_best_effort(
    grammars: GrammarCompiler, best_effort: bool
) -> None:
    narrow = GrammarCompiler(grammars.tokenizer, GrammarLimits(step_items=40, row_items=30))
    grammar = Grammar(
        "lark", f'start: "<call>" s\n{BIG.text.split(chr(10), 1)[1]}', trigger=BIG.trigger, best_effort=best_effort
    )
    state = narrow.compile(grammar)
    tokens = spelt(narrow, "a <call>" + "thewaterrunstothewheel" * 4)
    error: str | None = None
    try:
        for token in tokens:
            narrow.launch([(state, ())]).collect()
            state.advance([token])
    except GrammarError as raised:
        error = str(raised)
    assert (error is None) == best_effort
    if best_effort:
        assert allowed(narrow, state) is None
        assert state.error is None
    narrow.close()


def test_a_grammar_that_cannot_be_compiled_leaves_the_text_free_if_it_is_best_effort(
    grammars: GrammarCompiler,
) -> None:
    wrong = Grammar("lark", "start: nothing", trigger=TRIGGER)
    with pytest.raises(RequestError, match="cannot be used"):
        grammars.compile(wrong)
    state = grammars.compile(Grammar("lark", wrong.text, trigger=TRIGGER, best_effort=True))
    state.advance(spelt(grammars, "a <call>whatever"))
    assert allowed(grammars, state) is None
    assert state.accepting


def test_only_the_schemas_that_cannot_be_used_are_replaced(grammars: GrammarCompiler) -> None:
    good = '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": false}'
    bad = '{"$ref": "#/nothing"}'
    anything = '{"type": "object"}'
    text = 'start: "1" good | "2" bad'

    def grammar(instead: str | None) -> Grammar:
        schemas = (GrammarSchema("good", good, anything), GrammarSchema("bad", bad, instead))
        return Grammar("lark", text, schemas=schemas)

    with pytest.raises(RequestError, match="cannot be used"):
        grammars.compile(grammar(None))
    state = grammars.compile(grammar(anything))
    assert state.fitting(spelt(grammars, '2{"b":')) == len(spelt(grammars, '2{"b":'))
    wrong = spelt(grammars, '1{"b":')
    assert state.fitting(wrong) < len(wrong)


def test_a_tokenizer_that_cannot_follow_grammars_leaves_best_effort_text_free(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = GrammarCompiler(grammars.tokenizer)

    def refuse(_: Tokenizer) -> None:
        raise RequestError("This model's tokenizer cannot follow a grammar.", parameter="grammar")

    monkeypatch.setattr("headrace.engine.grammar.constraints.TokenVocabulary", refuse)
    with pytest.raises(RequestError, match="cannot follow"):
        other.compile(CALL)
    state = other.compile(Grammar("lark", CALL.text, trigger=TRIGGER, best_effort=True))
    assert state.advance([7, 8, 9]) == 3
    assert not state.constrains([7])
    other.close()
