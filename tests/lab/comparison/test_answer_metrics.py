"""Tool calls, citations, facts, similarity: each metric on pairs whose result is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.gateway.requests.text_request import SourceText
from headrace.lab.comparison.answer import Answer, AnswerContext, AnsweredCall
from headrace.lab.comparison.answer_comparison import compare_all, compare_answers
from headrace.lab.comparison.citations import check_citations
from headrace.lab.comparison.factual_consistency import check_facts
from headrace.lab.comparison.similarity import EncoderSimilarity, lexical_overlap
from headrace.lab.comparison.tool_calls import diff_calls

SOURCES = (
    SourceText("doc-1", "The mill opened in 1874 and employs 1,250 people."),
    SourceText("doc-2", "Ada runs it."),
)


def test_arguments_are_compared_as_values() -> None:
    one = [AnsweredCall("weather", '{"city": "Porto", "days": 2}')]
    same = diff_calls(one, [AnsweredCall("weather", '{"days":2,"city":"Porto"}')])
    other = diff_calls(one, [AnsweredCall("weather", '{"city": "Lisbon", "days": 2}')])
    assert same is not None
    assert same.same
    assert other is not None
    assert (other.same_names, other.same_arguments, other.valid_arguments) == (True, False, True)
    assert [change.path for change in other.changes] == ["weather$.city"]


def test_a_missing_call_and_invalid_arguments_are_differences() -> None:
    one = [AnsweredCall("weather", "{}")]
    missing = diff_calls(one, [])
    assert missing is not None
    assert not missing.same_names
    broken = diff_calls(one, [AnsweredCall("weather", "{")])
    assert broken is not None
    assert (broken.same_names, broken.same_arguments, broken.valid_arguments) == (True, False, False)
    assert diff_calls([], []) is None


@pytest.mark.parametrize(
    ("answer", "cited", "unknown"),
    [
        ("It opened in 1874 [1].", ("doc-1",), ()),
        ("Ada runs it [doc-2], as [2] says.", ("doc-2",), ()),
        ("Both say so [1, 2].", ("doc-1", "doc-2"), ()),
        ("See [3] and [doc-7].", (), ("3", "doc-7")),
        ("A quote [sic] and a [link](http://x).", (), ()),
    ],
)
def test_citations_must_name_a_source(answer: str, cited: tuple[str, ...], unknown: tuple[str, ...]) -> None:
    found = check_citations(answer, SOURCES)
    assert found is not None
    assert (found.cited, found.unknown) == (cited, unknown)
    assert found.correct == (not unknown)


def test_without_sources_there_is_nothing_to_cite() -> None:
    assert check_citations("See [3].", ()) is None


def test_facts_that_no_text_has_are_unsupported() -> None:
    texts = [source.text for source in SOURCES]
    good = check_facts("The mill, which Ada runs, opened in 1874 [1] and has 1250 people.", texts)
    assert (good.facts, good.unsupported, good.consistency) == (3, (), 1.0)
    bad = check_facts("It opened in 1974 under Grace.", texts)
    assert bad.unsupported == ("1974", "Grace")
    assert bad.consistency == 0.0
    assert check_facts("yes", texts).consistency == 1.0


def test_lexical_overlap_counts_words_and_their_order() -> None:
    assert lexical_overlap("a b c", "a b c") == 1.0
    assert lexical_overlap("a b", "c d") == 0.0
    assert 0.0 < lexical_overlap("a b c", "c b a") < lexical_overlap("a b c", "a b d c") < 1.0
    assert lexical_overlap("", "") == 1.0
    assert lexical_overlap("", "a") == 0.0


def test_an_encoder_embeds_each_text_once_and_names_itself() -> None:
    batches: list[list[str]] = []

    def embed(texts: object) -> np.ndarray:
        batches.append(list(texts))  # type: ignore[call-overload]
        return np.array([[len(text), 1.0] for text in batches[-1]], dtype=np.float32)

    measure = EncoderSimilarity(embed, "lengths")
    found = measure.of([("aa", "bb"), ("aa", "aa"), ("aa", " "), ("aa", "cccccccc")])
    assert batches == [["aa", "bb", "cccccccc"]]
    assert found[:3] == pytest.approx([1.0, 1.0, 0.0])
    assert 0.9 < found[3] < 1.0
    assert compare_all([(Answer(text="aa"), Answer(text="bb"), AnswerContext())], measure)[0].similarity_by == (
        "cosine by lengths"
    )


def test_a_comparison_holds_every_metric() -> None:
    english = "The mill is by the river and it was opened in 1874 with the help of Ada [1]."
    german = "Die Mühle ist nicht alt und wird mit der Hilfe von Ada auf dem Fluss betrieben [4]."
    found = compare_answers(
        Answer(text=german, output_tokens=40, ttft_s=0.2, e2el_s=2.0, cost_micros=30),
        Answer(text=english, output_tokens=20, ttft_s=0.1, e2el_s=1.0),
        AnswerContext(sources=SOURCES),
    )
    assert not found.exact
    assert (found.candidate_language, found.baseline_language, found.same_language) == ("de", "en", False)
    assert found.candidate_citations is not None
    assert not found.candidate_citations.correct
    assert found.baseline_citations is not None
    assert found.baseline_citations.correct
    assert found.length_log_ratio == pytest.approx(math.log(2.0))
    assert found.e2el_log_ratio == pytest.approx(math.log(2.0))
    assert found.cost_log_ratio is None
    assert found.json is None
    assert found.similarity_by == "lexical overlap"


def test_json_is_compared_where_the_prompt_or_the_baseline_asks_for_it() -> None:
    prose, value = Answer(text="hello"), Answer(text='{"a": 1}')
    assert compare_answers(value, value).json is not None
    assert compare_answers(prose, prose).json is None
    wanted = compare_answers(prose, prose, AnswerContext(wants_json=True)).json
    assert wanted is not None
    assert not wanted.candidate_valid
    assert compare_answers(Answer(text="5"), Answer(text="5")).json is None  # a number is not structured output


def test_calls_count_for_exactness() -> None:
    one = Answer(calls=(AnsweredCall("f", "{}"),))
    assert compare_answers(one, one).exact
    assert not compare_answers(one, Answer()).exact
