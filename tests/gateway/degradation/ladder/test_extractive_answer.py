"""Answers quoted from sources: the right sentence to the letter, its source's number, or that it is not there."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.degradation.ladder.extractive_answer import (
    NOT_THERE,
    ExtractOptions,
    extract_answer,
    question_and_sources,
)
from headrace.gateway.degradation.ladder.question_terms import parse_questions, stem
from headrace.gateway.requests.text_request import SourceText
from headrace.gateway.sentences import split_sentences

OFFICES = [
    SourceText(
        "a", "The Porto office opens at 9:30. It is run by Maria Silva. The Porto office has room for 34 people."
    ),
    SourceText("b", "The Lisbon office is at 12 Mill Road. It opens at 8:15. Its phone number is +351 21 555 0142."),
    SourceText(
        "c", "The travel policy is valid from 3 March. Under the travel policy a night costs 120 euros at most."
    ),
]
ONE = ExtractOptions(quotes=1)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("When does the Porto office open?", "The Porto office opens at 9:30. [1]"),
        ("when does the porto office open", "The Porto office opens at 9:30. [1]"),
        ("When does the Lisbon office open?", "It opens at 8:15. [2]"),
        ("Who runs the Porto office?", "It is run by Maria Silva. [1]"),
        ("How many people fit into the Porto office?", "The Porto office has room for 34 people. [1]"),
        ("What is the address of the Lisbon office?", "The Lisbon office is at 12 Mill Road. [2]"),
        ("What is the phone number of the Lisbon office?", "Its phone number is +351 21 555 0142. [2]"),
        ("How much may a night cost under the travel policy?",
         "Under the travel policy a night costs 120 euros at most. [3]"),
        ("Since when is the travel policy valid? And who runs the Porto office?",
         "The travel policy is valid from 3 March. [3] It is run by Maria Silva. [1]"),
        ("When does the Madrid office open?", NOT_THERE),
        ("What is the security policy?", NOT_THERE),
        ("", NOT_THERE),
        ("???", NOT_THERE),
    ],
)  # fmt: skip
def test_questions_are_answered_with_sentences_of_the_sources(question: str, answer: str) -> None:
    found = extract_answer(question, OFFICES, options=ONE)
    assert found.text == answer
    assert bool(found.quotes) == (answer != NOT_THERE)
    for quote in found.quotes:
        source = OFFICES[quote.number - 1]
        assert (source.id, source.text[quote.start : quote.end]) == (quote.id, quote.text)
        assert quote.confidence >= ONE.least


def test_a_short_question_takes_the_rest_from_the_one_before() -> None:
    found = extract_answer("And Lisbon?", OFFICES, before=["Hello", "When does the Porto office open?"], options=ONE)
    assert found.text == "It opens at 8:15. [2]"


@pytest.mark.parametrize(
    ("question", "texts", "answer"),
    [
        (
            "Wann öffnet das Museum in Köln?",
            ["Das Museum in Bonn öffnet um 8 Uhr.", "Das Museum in Köln öffnet um 10 Uhr. Der Eintritt kostet 7 Euro."],
            "Das Museum in Köln öffnet um 10 Uhr. [2]",
        ),
        (
            "¿Cuánto cuesta la entrada del museo?",
            ["El museo abre a las 9:00. La entrada del museo cuesta 7 euros.", "La tienda vende libros."],
            "La entrada del museo cuesta 7 euros. [1]",
        ),
        (
            "図書館は何時に開きますか\uff1f",
            ["図書館は九時に開きます。駅は近いです。", "市場は水曜日です。"],
            "図書館は九時に開きます。 [1]",
        ),
        (
            "Когда открывается музей?",
            ["Музей открывается в 10:00. Билет стоит 300 рублей.", "Парк большой."],
            "Музей открывается в 10:00. [1]",
        ),
    ],
)
def test_other_languages_are_read_too(question: str, texts: list[str], answer: str) -> None:
    assert (
        extract_answer(question, [SourceText(str(at), text) for at, text in enumerate(texts)], options=ONE).text
        == answer
    )


def test_a_further_sentence_says_something_else_or_is_left_out() -> None:
    sources = [
        SourceText("a", "Refunds are paid within 14 days."),
        SourceText("b", "Refunds are paid within 14 days!"),
        SourceText("c", "Refunds over 500 euros are paid by bank transfer."),
    ]
    found = extract_answer("What about refunds?", sources, options=ExtractOptions(quotes=3, margin=2.0))
    assert [quote.number for quote in found.quotes] == [1, 3]
    assert found.text == "Refunds are paid within 14 days. [1] Refunds over 500 euros are paid by bank transfer. [3]"


WORDS = "river mill Porto opens at 9:30 the office. It Maria 2024 [3] ü 水 \n\n ; e.g. A. ?".split(" ")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_quotes_are_always_verbatim_and_the_same(seed: int) -> None:
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(0, 40))) for _ in range(draw.randint(0, 6))]
    question = " ".join(draw.choices(WORDS, k=draw.randint(0, 12)))
    sources = [SourceText(str(place), text) for place, text in enumerate(texts)]
    found = extract_answer(question, sources)
    assert found == extract_answer(question, sources)
    assert 0.0 <= found.confidence <= 1.0
    for quote in found.quotes:
        assert sources[quote.number - 1].text[quote.start : quote.end] == quote.text
        assert quote.text.strip() == quote.text != ""
        assert f"{quote.text} [{quote.number}]" in found.text


@settings(max_examples=200, deadline=None)
@given(st.text("ab A.!?。\n\t-1#) e.g", max_size=200), st.integers(2, 40))
def test_sentences_cover_the_text_in_order_within_their_bound(text: str, most: int) -> None:
    spans = split_sentences(text, most)
    end = 0
    for start, stop in spans:
        assert end <= start < stop
        assert stop - start <= most
        end = stop
    said = "".join(text[start:stop] for start, stop in spans)
    # What is left out is space, marks, and the numbers of lists.
    assert sum(char.isalpha() for char in said) == sum(char.isalpha() for char in text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Ask Dr. Lund at 9 a.m. sharp. He knows.", ["Ask Dr. Lund at 9 a.m. sharp.", "He knows."]),
        ("It is in hall A. It stands there.", ["It is in hall A.", "It stands there."]),
        ("J. Smith and Ada K. Lund came. Then they left.", ["J. Smith and Ada K. Lund came.", "Then they left."]),
        ("Version 2.1 is out! Is it? Yes…", ["Version 2.1 is out!", "Is it?", "Yes…"]),
        ("# Title\n\n- one thing\n- another\n1. first", ["Title", "one thing", "another", "first"]),
        ("A line of running text that goes on for more than sixty characters and\nis wrapped.",
         ["A line of running text that goes on for more than sixty characters and\nis wrapped."]),
        ("他来了。她走了\uff01", ["他来了。", "她走了\uff01"]),
    ],
)  # fmt: skip
def test_sentences_end_where_readers_see_it(text: str, parts: list[str]) -> None:
    assert [text[start:end] for start, end in split_sentences(text)] == parts


def test_endings_make_no_difference_to_a_word() -> None:
    for one, other in (("opens", "opened"), ("release", "releases"), ("carries", "carrier"), ("müller", "muller")):
        assert stem(one) == stem(other)
    assert stem("2.1") != stem("2.3")


def test_the_kind_of_answer_is_told_from_the_question() -> None:
    kinds = {
        "When does it start?": "time",
        "What time is it?": "clock",
        "In which year was Acme founded?": "year",
        "On which day does Acme close?": "day",
        "How many seats has room Alder?": "number",
        "How much does the lamp cost?": "money",
        "Who wrote Hamlet?": "name",
        "Wo ist das Museum?": "place",
        "Combien de places y a-t-il?": "number",
        "What does Acme sell?": None,
    }
    for text, kind in kinds.items():
        assert (text, [each.kind for each in parse_questions(text)]) == (text, [kind] if parse_questions(text) else [])


def test_the_question_and_the_sources_are_found_in_messages() -> None:
    numbered = "Sources:\n[1] Alpha is first.\n[2] Beta is second.\n\nQuestion: Which is first?"
    assert question_and_sources([{"role": "user", "content": numbered}])[0] == "Which is first?"
    question, before, sources = question_and_sources(
        [
            {"role": "system", "content": "Cite.\n\n[1] Alpha is first.\n[2] Beta is second."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Which is first?"},
        ]
    )
    assert (question, before, [each.id for each in sources]) == ("Which is first?", ["Hi"], ["1", "2"])
    tagged = [{"role": "user", "content": '<source id="x">Alpha is first.</source>Which?'}]
    assert question_and_sources(tagged) == ("Which?", [], (SourceText("x", "Alpha is first."),))
    given_ones = [SourceText("f", "Gamma.")]
    assert question_and_sources([{"role": "user", "content": "Which?"}], given_ones) == (
        "Which?",
        [],
        tuple(given_ones),
    )


def test_large_and_hostile_sources_are_bounded() -> None:
    rng = random.Random(1)
    sources = [SourceText(str(place), "".join(rng.choices("a. \nB1", k=30_000))) for place in range(200)]
    assert extract_answer("When does a B1 open? " * 2000, sources).confidence <= 1.0
    assert (
        extract_answer("When does it open?", [SourceText("x", "9" * 200_000), SourceText("y", " " * 200_000)]).quotes
        == ()
    )
