"""Texts have the length that was asked for, by whatever counts them, and no other run's beginning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from headrace.bench.load_generator.text_generator import FIRST, OPENING, WORDS, TextGenerator, WordCosts, measure
from headrace.models.model_folder import BUNDLED, open_model


def counted(count: Callable[[str], int], *, most: int = 2000) -> tuple[WordCosts, int]:
    """Costs, and how many texts were counted."""
    calls = 0

    async def counter(text: str) -> int:
        nonlocal calls
        calls += 1
        return count(text)

    return asyncio.run(measure(counter, most=most)), calls


def by_words(text: str) -> int:
    return len(text.split()) + 7  # something that is always added


def by_letters(text: str) -> int:
    """No word costs one token: a blank is one, and so is each letter."""
    return len(text) + 1


def mixed(text: str) -> int:
    """Words of one token, of two and of three."""
    return sum(1 + (len(word) > 6) + (len(word) > 9) for word in text.split()) + 1


def test_words_are_different_and_plain() -> None:
    assert len(set(WORDS)) == len(WORDS) > 800
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


def test_words_of_one_token_need_few_counts() -> None:
    costs, calls = counted(by_words)
    assert set(costs.tokens) == {1}
    assert (costs.first, costs.constant, costs.exact) == (1, 7, True)
    assert calls <= 8


def test_costs_are_found_where_words_cost_differently() -> None:
    costs, _ = counted(mixed)
    assert all(tokens == mixed(word) - 1 for word, tokens in zip(costs.words, costs.tokens, strict=True))
    assert 1 in costs.tokens


def test_a_tight_bound_on_counts_is_kept_and_some_words_are_known() -> None:
    costs, calls = counted(by_letters, most=40)
    assert calls <= 40 + 16
    assert all(tokens == len(word) + 1 for word, tokens in zip(costs.words, costs.tokens, strict=True))
    assert not costs.exact


@pytest.mark.parametrize("count", [by_words, mixed])
@pytest.mark.parametrize("tokens", [1, 2, 9, 10, 64, 511, 5000])
def test_texts_have_as_many_tokens_as_asked(count: Callable[[str], int], tokens: int) -> None:
    costs, _ = counted(count)
    text, told = TextGenerator(costs, seed=3, nonce="n").text("x", tokens)
    assert told == tokens
    assert count(text) - costs.constant == tokens


def test_texts_come_near_where_no_word_is_one_token() -> None:
    costs, _ = counted(by_letters)
    text, told = TextGenerator(costs, seed=3, nonce="n").text("x", 500)
    assert by_letters(text) - costs.constant == told
    assert 500 - min(costs.tokens) < told <= 500


@pytest.mark.parametrize("name", ["mini", "draft"])
def test_texts_are_exact_by_a_real_tokenizer(name: str) -> None:
    tokenizer = open_model(BUNDLED / name).tokenizer

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    costs, _ = counted(count)
    writer = TextGenerator(costs, seed=0, nonce="n")
    for tokens in (16, 100, 1000):
        assert count(writer.text(f"x {tokens}", tokens)[0]) == tokens


def test_a_name_has_one_text_and_other_names_begin_otherwise() -> None:
    costs, _ = counted(by_words)
    writer = TextGenerator(costs, seed=0, nonce="n")
    texts = {writer.text(f"x {number}", 50)[0] for number in range(500)}
    assert len({tuple(text.split()[1 : 1 + OPENING]) for text in texts}) == 500
    assert writer.text("x 7", 50) == TextGenerator(costs, seed=0, nonce="n").text("x 7", 50)


def test_another_run_has_other_beginnings_and_the_same_rest() -> None:
    costs, _ = counted(by_words)
    one, other = (TextGenerator(costs, seed=0, nonce=nonce).text("x", 50)[0].split() for nonce in ("a", "b"))
    assert one[0] == other[0] == FIRST
    assert one[1 : 1 + OPENING] != other[1 : 1 + OPENING]
    assert one[1 + OPENING :] == other[1 + OPENING :]
    reused = TextGenerator(costs, seed=0, nonce="")
    assert reused.text("x", 50) == TextGenerator(costs, seed=0, nonce="").text("x", 50)
    assert reused.text("x", 50) != TextGenerator(costs, seed=1, nonce="").text("x", 50)
