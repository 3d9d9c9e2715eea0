"""Documents are cut by structure and tokens, and chunks that repeat others are found."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from headrace.pipelines.collections.blocks import StructureBlock, read_markdown
from headrace.pipelines.collections.chunking import Chunk, cut_into_chunks
from headrace.pipelines.collections.duplicate_chunks import find_repeated, sketch_bands, text_digest


def count(text: str) -> int:
    return len(text.split())


def cut(text: str, *, most: int = 40, overlap: int = 0, title: str = "") -> list[Chunk]:
    return cut_into_chunks(read_markdown(text).blocks, count, title=title, most=most, overlap=overlap)


def sentences(name: str, number: int) -> str:
    return " ".join(f"The {name} sentence {place} ends." for place in range(number))


def test_chunks_end_at_headings_and_know_their_titles() -> None:
    chunks = cut(f"# Guide\n\n## First\n\n{sentences('a', 4)}\n\n## Second\n\n{sentences('b', 4)}\n")
    assert [chunk.heading for chunk in chunks] == ["Guide > First", "Guide > Second"]
    assert [chunk.text for chunk in chunks] == [sentences("a", 4), sentences("b", 4)]


def test_small_sections_share_a_chunk() -> None:
    (chunk,) = cut("# Guide\n\n## First\n\nShort.\n\n## Second\n\nAlso short.\n")
    assert chunk.heading == "Guide > First"
    assert chunk.text == "Short.\n\nSecond\n\nAlso short."


def test_long_sections_are_cut_between_sentences_with_an_overlap() -> None:
    text = sentences("a", 12)
    chunks = cut(text, most=20, overlap=5)
    assert all(chunk.tokens <= 20 for chunk in chunks)
    for one, other in pairwise(chunks):
        last = one.text.split(". ")[-1].rstrip(".")
        assert other.text.startswith(last)
    plain = cut(text, most=20, overlap=0)
    assert " ".join(chunk.text for chunk in plain) == text


def test_code_is_cut_between_lines() -> None:
    lines = [f"line_{number} = value {number}" for number in range(30)]
    chunks = cut("```\n" + "\n".join(lines) + "\n```\n", most=32)
    assert "\n".join(chunk.text for chunk in chunks) == "\n".join(lines)


def test_a_long_title_leaves_room_for_the_text() -> None:
    chunks = cut(sentences("a", 20), most=40, title="word " * 500)
    assert all(chunk.tokens <= 40 for chunk in chunks)
    assert all(count(chunk.heading) <= 10 for chunk in chunks)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["text", "code", "heading"]), st.text("ab .\n\t#", min_size=1, max_size=400)),
        max_size=8,
    ),
    st.integers(8, 60),
    st.integers(0, 30),
)
def test_no_word_is_lost_and_no_chunk_is_too_long(parts: list[tuple[str, str]], most: int, overlap: int) -> None:
    blocks = [StructureBlock(kind, text, 1) for kind, text in parts if text.strip()]  # type: ignore[arg-type]
    chunks = cut_into_chunks(blocks, count, title="", most=most, overlap=min(overlap, most // 2))
    assert all(chunk.text for chunk in chunks)
    assert all(count(chunk.text) <= most for chunk in chunks)
    found = " ".join(chunk.text for chunk in chunks).split()
    for block in blocks:
        if block.kind != "heading":  # punctuation alone is no sentence
            assert {word for word in block.text.split() if word.isalpha()} <= set(found)


LONG = " ".join(f"word{number}" for number in range(100))


@pytest.mark.parametrize(
    ("text", "repeats"),
    [
        (LONG, True),
        (LONG.upper(), True),
        (LONG + " and a little more", True),
        (LONG[: len(LONG) // 2], True),
        (" ".join(f"other{number}" for number in range(100)), False),
        (" ".join(reversed(LONG.split())), False),
    ],
)
def test_near_duplicates_share_a_band_and_are_confirmed(text: str, repeats: bool) -> None:
    assert (find_repeated(text, ["something else", LONG]) == 1) is repeats
    if text != LONG[: len(LONG) // 2]:  # a part of a text may share no band with it
        assert bool(set(sketch_bands(text)) & set(sketch_bands(LONG))) is repeats


def test_sketches_are_the_same_in_every_process() -> None:
    # They are stored: other numbers would find no old duplicates.
    assert sketch_bands("one two three four five six")[:2] == STORED
    assert text_digest("One, two") == text_digest("one TWO")
    assert text_digest("one two") != text_digest("onetwo")


STORED = [3301130113046984769, 7617168752460487502]
