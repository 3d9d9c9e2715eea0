"""Questions are found as a catalogue declares, and slots carry their values into the text."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.gateway.caches.catalogues.catalogue_file import CatalogueError, CatalogueText, version_of
from headrace.gateway.caches.catalogues.catalogue_source import CatalogueSource, SourceEntry, kept_texts, plan_texts
from headrace.gateway.caches.catalogues.question_table import QuestionTable


def text(name: str, *questions: str, answer: str = "Yes.", approved: bool = True) -> CatalogueText:
    return CatalogueText(name=name, questions=questions, text=answer, approved=approved)


def answer(table: QuestionTable, question: str) -> str | None:
    found = table.find(question)
    return None if found is None else found.answer


def test_folded_questions_differ_in_case_spaces_and_end_marks_only() -> None:
    table = QuestionTable([text("open", "Are you open on Sunday?")], is_folded=True)
    for same in ("are you open on sunday", " Are  you open\non Sunday??! "):
        assert answer(table, same) == "Yes."
    for other in ("Are you open on Monday?", "Are you not open on Sunday?", "Are you open on Sunday? And Monday?", ""):
        assert answer(table, other) is None


def test_exact_questions_are_the_same_text() -> None:
    table = QuestionTable([text("open", "Open?")], is_folded=False)
    assert answer(table, " Open? ") == "Yes."
    assert answer(table, "open?") is None


def test_only_approved_texts_answer_and_the_first_wins() -> None:
    texts = [text("a", "Q", approved=False), text("b", "Q", answer="B"), text("c", "Q", answer="C")]
    assert answer(QuestionTable(texts, is_folded=True), "q") == "B"


def test_a_slot_takes_any_value_of_one_line_and_the_text_repeats_it() -> None:
    greeting = text("hello", "My name is {name}.", answer="Hello {name}! {unknown} {name}?")
    table = QuestionTable([greeting], is_folded=True)
    assert answer(table, "my NAME is Ada Lovelace!") == "Hello Ada Lovelace! {unknown} Ada Lovelace?"
    assert answer(table, "My name is {name}") == "Hello {name}! {unknown} {name}?"
    assert answer(table, "My name is .*") == "Hello .*! {unknown} .*?"
    for other in ("My name is", "My name is " + "x" * 81, "My name is a\x00b"):
        assert answer(table, other) is None


def entry(**fields: Any) -> CatalogueSource:
    return CatalogueSource(texts=(SourceEntry(name="e", **fields),))


def test_listed_slots_make_a_text_for_each_value() -> None:
    slots = {"product": ("shoes", "a hat"), "land": ("France",)}
    source = entry(questions=("Return {product} to {land}?",), prompt="How to return {product} to {land}.", slots=slots)
    planned = plan_texts(source)
    assert [each.text.name for each in planned] == ["e[product=shoes, land=France]", "e[product=a hat, land=France]"]
    assert planned[1].prompt == "How to return a hat to France."
    assert planned[1].text.questions == ("Return a hat to France?",)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"questions": ("Q",)}, "exactly one of prompt and text"),
        ({"questions": ("Q {x}",), "prompt": "P"}, "leaves the slot {x} open"),
        ({"questions": ("Q",), "text": "T {x}"}, "needs the slot {x}"),
        ({"questions": ("{a} {b} {c}",), "text": "T"}, "more than 2 open slots"),
    ],
)
def test_a_source_that_cannot_work_is_rejected(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(CatalogueError, match=reason.replace("{", r"\{")):
        plan_texts(entry(**fields))


def test_a_rebuild_keeps_what_did_not_change_and_asks_again_about_new_questions() -> None:
    planned = plan_texts(entry(questions=("Q",), prompt="P"))
    written = CatalogueText(name="e", questions=("Q",), text="T", approved=True, made_from=planned[0].text.made_from)
    assert kept_texts(planned, [written]) == {"e": written}
    more = plan_texts(entry(questions=("Q", "Really?"), prompt="P"))
    assert kept_texts(more, [written])["e"].approved is False
    assert kept_texts(plan_texts(entry(questions=("Q",), prompt="Other")), [written]) == {}


def test_the_version_is_that_of_the_approved_texts() -> None:
    one, other = text("a", "Q"), text("b", "R", approved=False)
    assert version_of([one, other]) == version_of([one]) == version_of([other, one])
    assert version_of([one, text("b", "R")]) != version_of([one])
