"""Citations are checked against the sources while the text streams."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.requests.text_request import SourceText
from headrace.pipelines.citation_check import CitationCheck

SOURCES = [SourceText("a", "The server listens on port 8000."), SourceText("b", "The ledger keeps every charge.")]


def fed(check: CitationCheck, *pieces: str) -> str:
    return "".join([check.feed(piece)[0] for piece in pieces]) + check.finish()[0]


def test_a_citation_in_pieces_is_found_whole() -> None:
    check = CitationCheck(SOURCES)
    assert fed(check, "The port is 8000 ", "[", "1", "]", ".") == "The port is 8000 [1]."
    assert [(each.number, each.id) for each in check.citations] == [(1, "a")]
    assert check.text[check.citations[0].start : check.citations[0].end] == "[1]"


def test_a_citation_of_no_source_is_left_out_of_the_text() -> None:
    check = CitationCheck(SOURCES)
    assert fed(check, "Yes [7] it", " is [1].") == "Yes it is [1]."
    assert check.unknown == [7]


def test_a_citation_of_no_source_can_be_only_reported() -> None:
    check = CitationCheck(SOURCES, unknown="mark")
    assert fed(check, "Yes [7].") == "Yes [7]."
    assert check.unknown == [7]


def test_support_is_the_share_of_the_sentence_that_the_source_has() -> None:
    check = CitationCheck(SOURCES)
    fed(check, "Hello there. The server listens on port 8000 [1]. Penguins swim quickly [2].")
    assert [round(each.support, 2) for each in check.citations] == [1.0, 0.0]


def test_brackets_that_are_no_citations_stay() -> None:
    assert fed(CitationCheck(SOURCES), "a[i] = [", "x] and [12345]") == "a[i] = [x] and [12345]"


@given(st.text(alphabet="ab 0129[].", max_size=60), st.lists(st.integers(1, 7), max_size=20))
def test_pieces_do_not_change_what_is_delivered(text: str, cuts: list[int]) -> None:
    pieces, at = list[str](), 0
    for cut in cuts:
        pieces.append(text[at : at + cut])
        at += cut
    pieces.append(text[at:])
    whole, parts = CitationCheck(SOURCES), CitationCheck(SOURCES)
    assert fed(parts, *pieces) == fed(whole, text)
    assert parts.citations == whole.citations
    assert parts.unknown == whole.unknown
