"""Sentences for a synthesiser: an early first piece, then whole sentences, without citation marks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.pipelines.sentence_stream import SentenceStream


def pieces_of(text: str, step: int = 1, **bounds: int) -> list[str]:
    stream = SentenceStream(**bounds)
    found: list[str] = []
    for at in range(0, len(text), step):
        found += stream.feed(text[at : at + step])
    return found + stream.finish()


def test_each_sentence_is_a_piece() -> None:
    assert pieces_of("It is port 8000. You can change it. See there!") == [
        "It is port 8000.",
        "You can change it.",
        "See there!",
    ]


def test_the_first_piece_may_end_at_a_clause() -> None:
    found = pieces_of("If you start the server without a file, it listens on port 8000 of this machine.")
    assert found[0] == "If you start the server without a file,"


def test_citation_marks_are_not_spoken() -> None:
    assert pieces_of("It is port 8000 [1]. See [2] there.") == ["It is port 8000.", "See there."]


def test_a_piece_is_complete_before_the_answer_ends() -> None:
    stream = SentenceStream()
    assert stream.feed("It is port 8000. You") == ["It is port 8000."]


@given(st.text(alphabet="abc .,!?\n", max_size=400), st.integers(1, 40), st.integers(20, 80))
def test_pieces_are_bounded_and_nothing_is_lost(text: str, step: int, most: int) -> None:
    found = pieces_of(text, step, first_chars=10, most_chars=most)
    assert all(0 < len(piece) <= most for piece in found)
    assert "".join("".join(found).split()) == "".join(text.split())
