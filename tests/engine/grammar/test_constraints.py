"""GrammarCompiler: what grammars allow, what they force, and that drafts leave no trace in them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders

from headrace.engine.grammar.constraints import (
    Grammar,
    GrammarCompiler,
    GrammarError,
    GrammarLimits,
    GrammarState,
    Mask,
)
from headrace.engine.grammar.token_vocabulary import TokenVocabulary
from headrace.engine.interface.output_text import OutputText
from headrace.errors import RequestError
from headrace.models.text.tokenizer import Tokenizer
from tests.support.grammar_masks import allowed
from tests.support.models.small_tokenizers import byte_level, load, sentencepiece

EOS = 2
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "value": {"type": "integer", "minimum": 0, "maximum": 500},
        "tags": {"type": "array", "items": {"enum": ["water", "narrow"]}, "maxItems": 3},
    },
    "required": ["name", "value", "tags"],
    "additionalProperties": False,
}


def schema(content: object) -> Grammar:
    return Grammar("json_schema", json.dumps(content))


def mask_of(grammars: GrammarCompiler, state: GrammarState) -> Mask:
    ((mask,),) = grammars.launch([(state, ())]).collect()
    return mask


def walk(
    grammars: GrammarCompiler, state: GrammarState, seed: int, *, most: int = 400, force: bool = False
) -> list[int]:
    """Tokens drawn from the masks alone, whatever they are; without the one that ends the text."""
    draw = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < most and not state.finished:
        choices = allowed(mask_of(grammars, state))
        # As a model would, now and then what ends something.
        token = min(choices) if draw.random() < 0.5 else draw.choice(choices)
        state.advance([token])
        if token == EOS:
            assert state.finished
            return tokens
        tokens.append(token)
        if force:
            tokens += state.forced(most - len(tokens))
    return tokens


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    output = OutputText(tokenizer)
    return output.push(tokens) + output.finish()


# What is allowed.


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_drawn_from_the_masks_fits_the_schema(each_kind: GrammarCompiler, seed: int) -> None:
    state = each_kind.compile(schema(PERSON))
    tokens = walk(each_kind, state, seed, force=bool(seed % 2))
    assert state.finished
    found = json.loads(text_of(each_kind.tokenizer, tokens))
    assert list(found) == ["name", "value", "tags"]
    assert isinstance(found["name"], str)
    assert 0 <= found["value"] <= 500
    assert set(found["tags"]) <= {"water", "narrow"}


@pytest.mark.parametrize("seed", range(4))
def test_a_regular_expression_is_matched_whole(each_kind: GrammarCompiler, seed: int) -> None:
    state = each_kind.compile(Grammar("regex", "(the|a) [a-f]{3,5}é?(中|[0-9]+)!"))
    text = text_of(each_kind.tokenizer, walk(each_kind, state, seed))
    assert re.fullmatch("(the|a) [a-f]{3,5}é?(中|[0-9]+)!", text)


@pytest.mark.parametrize("seed", range(4))
def test_a_choice_is_one_of_them(each_kind: GrammarCompiler, seed: int) -> None:
    choices = ["the wheel", "the water", 'a "quoted" one', "naïve 😀", "tab\tand\nline", "a", "ab", "", "\u0001/\\"]
    state = each_kind.compile(Grammar("choice", json.dumps(choices)))
    assert text_of(each_kind.tokenizer, walk(each_kind, state, seed)) in choices


def test_a_lark_grammar_is_followed(each_kind: GrammarCompiler) -> None:
    rules = 'start: pair ("," pair)*\npair: NAME "=" NUMBER\nNAME: /[a-c]{1,4}/\nNUMBER: /[0-9]{1,3}/'
    text = text_of(each_kind.tokenizer, walk(each_kind, each_kind.compile(Grammar("lark", rules)), 3, most=60))
    assert re.match("([a-c]{1,4}=[0-9]{1,3},)*", text)


def test_any_json_object_is_an_object(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = grammars.compile(Grammar("json_object"))
    assert [text_of(tokenizer, [token])[0] for token in allowed(mask_of(grammars, state))] == ["{"] * 2
    state.advance(tokenizer.encode('{"name": [1, {"a": null}], "b": "中"}'))
    assert state.finished


def test_masks_have_the_samplers_shape(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    mask = mask_of(grammars, grammars.compile(Grammar("regex", "[a-z]+")))
    assert mask.dtype == np.uint32
    assert mask.shape == (-(-tokenizer.vocab_size // 32),)
    letters = allowed(mask)
    assert tokenizer.encode("q")[0] in letters
    assert all(re.fullmatch("[a-z]+", text_of(tokenizer, [token])) for token in letters)


def test_special_tokens_and_padding_are_no_text(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = grammars.compile(Grammar("regex", r"(.|\n)*"))
    found = set(allowed(mask_of(grammars, state)))
    special = {token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token)}
    assert found & special == {EOS}
    assert max(found) < tokenizer.vocab_size
    assert all(tokenizer.pieces.raw(token) for token in found)
    # A token that was added and is not special is text.
    assert tokenizer.encode("<tool>")[0] in found


def test_every_token_that_ends_a_text_ends_a_grammar(tmp_path: Path) -> None:
    grammars = GrammarCompiler(load(tmp_path, byte_level(), eos=[2, 3]))
    state = grammars.compile(Grammar("regex", "a+"))
    assert not {2, 3} & set(allowed(mask_of(grammars, state)))
    state.advance(grammars.tokenizer.encode("a"))
    assert {2, 3} <= set(allowed(mask_of(grammars, state)))
    assert state.accepting
    assert not state.finished
    state.advance([3])
    assert state.finished
    grammars.close()


def test_a_tokenizer_without_an_end_still_has_grammars_that_end(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level(), eos=[], vocab_size=512)
    tokenizer.eos_ids = frozenset()
    grammars = GrammarCompiler(tokenizer)
    state = grammars.compile(Grammar("choice", '["fox", "foxes"]'))
    state.advance(tokenizer.encode("fox"))
    mask = mask_of(grammars, state)
    assert mask.shape == (16,)
    assert state.accepting
    state.advance(tokenizer.encode("es"))
    assert state.finished
    grammars.close()


def test_a_text_that_must_be_written_is_not_a_special_token(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = grammars.compile(Grammar("choice", '["<|end|></s>"]'))
    tokens = walk(grammars, state, 1)
    assert text_of(tokenizer, tokens) == "<|end|></s>"


# What is forced.


def test_what_must_come_is_forced_in_the_tokenizers_own_tokens(each_kind: GrammarCompiler) -> None:
    tokenizer = each_kind.tokenizer
    state = each_kind.compile(Grammar("choice", '["the wheel and the water", "a wheel"]'))
    state.advance([next(t for t in allowed(mask_of(each_kind, state)) if text_of(tokenizer, [t]) == "t")])
    forced = state.forced(100)
    assert text_of(tokenizer, forced) == "he wheel and the water"[: len(text_of(tokenizer, forced))]
    assert len(forced) >= 3
    assert state.finished


def test_forced_tokens_are_those_that_the_masks_allow(each_kind: GrammarCompiler) -> None:
    for seed in range(8):
        start = each_kind.compile(schema(PERSON))
        draw = random.Random(seed)
        sampled, forced = start.clone(), start
        for _ in range(60):
            if sampled.finished:
                break
            token = draw.choice(allowed(mask_of(each_kind, sampled)))
            sampled.advance([token])
            forced.advance([token])
            for certain in forced.forced(100):
                assert allowed(mask_of(each_kind, sampled)) == [certain]
                sampled.advance([certain])
            assert sampled.finished == forced.finished
            if not sampled.finished:
                assert np.array_equal(mask_of(each_kind, sampled), mask_of(each_kind, forced))


def test_no_more_is_forced_than_is_wanted(grammars: GrammarCompiler) -> None:
    state = grammars.compile(Grammar("choice", '["the wheel and the water"]'))
    everything = state.clone().forced(100)
    first = state.forced(2)
    assert first == everything[:2]
    assert state.forced(0) == []
    assert first + state.forced(100) == everything


def test_a_long_text_is_forced_a_part_at_a_time(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    text = " ".join(["the wheel and the water"] * 400)
    state = grammars.compile(Grammar("choice", json.dumps([text])))
    (first,) = allowed(mask_of(grammars, state))
    tokens = state.forced(10_000)
    assert 30 < len(tokens) < 100
    assert tokens[0] == first
    while more := state.forced(10_000):
        tokens += more
    assert tokens == tokenizer.encode(text)
    assert state.finished


def test_many_choices_are_served(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = grammars.compile(Grammar("choice", json.dumps([f"choice {number}" for number in range(5000)])))
    state.advance(tokenizer.encode("choice 4765"))
    assert state.accepting


# How far it is.


def test_advancing_stops_where_the_grammar_is_finished(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = grammars.compile(Grammar("choice", '["fox"]'))
    tokens = tokenizer.encode("fox")
    assert state.advance([*tokens, EOS, *tokens]) == len(tokens)
    assert state.finished
    assert state.advance([EOS]) == 0
    assert state.error is None


def test_a_token_that_is_not_allowed_is_an_error(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = grammars.compile(Grammar("choice", '["fox"]'))
    with pytest.raises(GrammarError):
        state.advance(tokenizer.encode("dog"))
    assert state.error


def test_a_clone_goes_its_own_way(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = grammars.compile(Grammar("choice", '["the fox", "the dog"]'))
    state.advance(tokenizer.encode("the "))
    other = state.clone()
    state.advance(tokenizer.encode("fox"))
    assert state.finished
    assert not other.finished
    other.advance(tokenizer.encode("dog"))
    assert other.finished


def test_drafts_are_followed_as_far_as_the_grammar_goes(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = grammars.compile(Grammar("choice", '["fox jumps", "fox runs"]'))
    good, bad = tokenizer.encode("fox "), tokenizer.encode("dog")
    assert state.fitting(good) == len(good)
    assert state.fitting([*good, *bad]) == len(good)
    assert state.fitting(bad) == 0
    assert state.fitting([]) == 0
    assert state.tokens == []


# Masks of a step.


def test_masks_after_drafts_are_those_of_each_state(each_kind: GrammarCompiler) -> None:
    """With drafts that hold, drafts that do not, and several states at once."""
    tokenizer = each_kind.tokenizer
    for seed in range(6):
        draw = random.Random(seed)
        work: list[tuple[GrammarState, list[int]]] = []
        for kind, text in (("json_schema", json.dumps(PERSON)), ("regex", "[a-z ]+!"), ("json_object", "")):
            state = each_kind.compile(Grammar(kind, text))
            ahead = state.clone()
            tokens = walk(each_kind, ahead, seed, most=12)
            cut = draw.randrange(len(tokens) + 1)
            state.advance(tokens[:cut])
            drafts = tokens[cut : cut + draw.randrange(6)]
            if draw.random() < 0.5:
                drafts.insert(draw.randrange(len(drafts) + 1), draw.randrange(tokenizer.vocab_size))
            work.append((state, drafts))
        found = each_kind.launch(work).collect()
        for (state, drafts), masks in zip(work, found, strict=True):
            step = state.clone()
            assert 1 <= len(masks) <= len(drafts) + 1
            for place, mask in enumerate(masks):
                assert np.array_equal(mask, mask_of(each_kind, step))
                if place < len(masks) - 1:
                    step.advance([drafts[place]])
            if len(masks) <= len(drafts):
                assert drafts[len(masks) - 1] not in allowed(masks[-1]) or step.finished
            # Nothing is left of the drafts.
            assert np.array_equal(mask_of(each_kind, state), masks[0])


def test_a_state_is_the_same_however_it_was_reached(each_kind: GrammarCompiler) -> None:
    """Sampled, forced, drafted and taken back, cloned, or built anew from its tokens: the masks are the same."""
    for seed in range(6):
        draw = random.Random(seed)
        start = each_kind.compile(schema(PERSON))
        state = start.clone()
        tokens: list[int] = []
        for _ in range(40):
            if state.finished:
                break
            plain = start.clone()
            plain.advance(tokens)
            expected = mask_of(each_kind, plain)
            assert np.array_equal(mask_of(each_kind, state), expected)
            if draw.random() < 0.5:
                drafts = [draw.choice(allowed(expected)), draw.randrange(300), draw.randrange(300)]
                each_kind.launch([(state, drafts)]).collect()
            if draw.random() < 0.3:
                state = state.clone()
            if draw.random() < 0.3:
                state.rebuild()
            token = draw.choice(allowed(expected))
            assert state.advance([token]) == 1
            tokens.append(token)
            if draw.random() < 0.3:
                tokens += state.forced(3)
        assert state.tokens == tokens


def test_many_states_of_one_grammar_are_filled_side_by_side(tokenizer: Tokenizer) -> None:
    grammars = GrammarCompiler(tokenizer, threads=4)
    start = grammars.compile(schema(PERSON))
    states = [start.clone() for _ in range(16)]
    tokens = tokenizer.encode('{"name": "the wheel", "value": 12')
    for place, state in enumerate(states):
        state.advance(tokens[: place % len(tokens)])
    together = grammars.launch([(state, ()) for state in states]).collect()
    for state, (mask,) in zip(states, together, strict=True):
        assert np.array_equal(mask, mask_of(grammars, state))
    grammars.close()


def test_the_mask_after_drafts_is_that_of_the_state_moved_on(each_kind: GrammarCompiler) -> None:
    state = each_kind.compile(schema(PERSON))
    tokens = walk(each_kind, state.clone(), 7)
    for end in range(len(tokens)):
        moved = state.clone()
        moved.advance(tokens[:end])
        mask = each_kind.mask_after(state, tokens[:end])
        assert mask is not None
        assert np.array_equal(mask, mask_of(each_kind, moved))
    assert each_kind.mask_after(state, tokens) is None
    assert each_kind.mask_after(state, [tokens[0], 400, 401]) is None
    assert state.fitting(tokens) == len(tokens)
    assert state.tokens == []


# Compiling beside the loop.


def test_what_was_compiled_is_kept_for_the_same_salt(tokenizer: Tokenizer) -> None:
    grammars = GrammarCompiler(tokenizer, GrammarLimits(kept=2))
    first = grammars.prepare(schema(PERSON), salt="a")
    first.result()
    assert grammars.prepare(schema(PERSON), salt="a").done()
    assert grammars.prepare(schema(PERSON), salt="b") is not first
    grammars.compile(Grammar("regex", "a"))
    grammars.compile(Grammar("regex", "b"))
    assert len(grammars._known) == 2  # pyright: ignore[reportPrivateUsage]
    grammars.close()


def test_what_is_kept_is_bounded_by_its_length_too(tokenizer: Tokenizer) -> None:
    grammars = GrammarCompiler(tokenizer, GrammarLimits(kept_bytes=100))
    for length in (30, 40, 50, 200):
        grammars.compile(Grammar("regex", "a" * length))
    known = grammars._known  # pyright: ignore[reportPrivateUsage]
    assert [len(grammar.text) for _, grammar in known] == [200]
    grammars.compile(Grammar("regex", "b"))
    assert [len(grammar.text) for _, grammar in known] == [1]
    grammars.close()


def test_too_many_at_once_are_refused(tokenizer: Tokenizer) -> None:
    grammars = GrammarCompiler(tokenizer, GrammarLimits(compiling=0))
    with pytest.raises(RequestError, match="Try again"):
        grammars.prepare(Grammar("regex", "a"))
    grammars.close()


def test_what_takes_too_long_is_refused(tokenizer: Tokenizer) -> None:
    grammars = GrammarCompiler(tokenizer, GrammarLimits(compile_seconds=0.0))
    large = schema({"enum": [f"{number}" * 4 for number in range(5000)]})
    compilation = grammars.prepare(large)
    assert compilation.done()
    with pytest.raises(RequestError, match="takes longer than 0 s"):
        compilation.result()
    grammars.close()


# Tokenizers.


def test_texts_are_cut_as_the_tokenizer_cuts_them(tokenizers_of: dict[str, Tokenizer]) -> None:
    for name, tokenizer in tokenizers_of.items():
        vocabulary = TokenVocabulary(tokenizer)
        for text in ("the wheel", ' "name": 1', '"name"', "中", " ", "\n\n", "", "<|end|>", "x </s> y", "é "):
            found = vocabulary(text)
            assert b"".join(vocabulary.tokens[token] for token in found).decode() == text, name
            assert not any(tokenizer.is_special(token) for token in found)
    assert TokenVocabulary(tokenizers_of["byte level"])("the wheel") == tokenizers_of["byte level"].encode("the wheel")


def test_a_tokenizer_whose_tokens_have_no_bytes_cannot_follow_grammars(tmp_path: Path) -> None:
    other: tokenizers.Tokenizer = sentencepiece()
    other.decoder = decoders.WordPiece()
    grammars = GrammarCompiler(load(tmp_path, other))
    with pytest.raises(RequestError, match="cannot follow a grammar"):
        grammars.compile(Grammar("regex", "a"))
    grammars.close()
