"""Retrieved sources: where they are read, which of them are kept, and the way back from a citation."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.shaping_section import ShapingConfig
from headrace.gateway.api_errors import ApiError
from headrace.gateway.degradation.shaping.conversation import ChatMessage, find_turn_problem
from headrace.gateway.degradation.shaping.near_duplicates import find_repeats, similarity
from headrace.gateway.degradation.shaping.sources import (
    SourceField,
    extract_numbered_passages,
    extract_tagged_sources,
    find_citations,
    insert_sources,
    parse_sources,
    plain_brackets,
    select_sources,
)
from headrace.gateway.requests.text_request import SourceText

WORDS = "river mill stone wheel water flour grain road town bridge".split()
seeds = st.integers(0, 2**32)


def drawn(seed: int, most: int) -> list[str]:
    """Texts of a few words, some of them nearly the same."""
    draw = Random(seed)
    found: list[str] = []
    for _ in range(draw.randint(0, most)):
        words = (
            draw.choice(found).split() if found and draw.random() < 0.5 else draw.choices(WORDS, k=draw.randint(1, 40))
        )
        words[draw.randrange(len(words))] = draw.choice(WORDS)
        found.append(" ".join(words))
    return found


def tokens(text: str) -> int:
    return len(text.split())


def numbered(*given: str) -> list[SourceText]:
    return [SourceText(f"id-{place}", text) for place, text in enumerate(given)]


@settings(max_examples=150, deadline=None)
@given(seeds, st.integers(1, 60), st.integers(1, 200), st.integers(1, 12))
def test_caps_hold_repeats_go_and_numbers_find_their_sources(seed: int, chunk: int, total: int, most: int) -> None:
    scores = Random(seed)
    sources = [
        SourceText(f"id-{place}", text, scores.choice((None, scores.random())))
        for place, text in enumerate(drawn(seed, 12))
    ]
    config = ShapingConfig(sources=most, source_tokens=chunk, sources_tokens=total)
    found = select_sources(sources, config, tokens, least_tokens=3)
    kept = found.sources
    assert len(kept) <= most
    assert sum(tokens(each.text) for each in kept) <= total
    assert all(0 < tokens(each.text) <= chunk for each in kept)
    by_id = {source.id: source for source in sources}
    for number, each in enumerate(kept, start=1):
        assert found.id_of(number) == each.id
        assert by_id[each.id].text.startswith(each.text)
    for place, one in enumerate(kept):
        for other in kept[place + 1 :]:
            # The last one may have been cut once more to fit.
            if other.text == by_id[other.id].text or tokens(other.text) == chunk:
                assert similarity(one.text, other.text) < 0.8
    scores_kept = [by_id[each.id].score for each in kept]
    ranks = [99.0 if score is None else -score for score in scores_kept]
    assert ranks == sorted(ranks)
    assert found.id_of(0) is None
    assert found.id_of(len(kept) + 1) is None
    assert select_sources(sources, config, tokens, least_tokens=3) == found


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_of_near_duplicates_the_first_stays_alone(seed: int) -> None:
    given_texts = drawn(seed, 10)
    found = find_repeats(given_texts, jaccard=0.6, contained=0.8)
    kept = [text for text, original in zip(given_texts, found, strict=True) if original is None]
    for place, one in enumerate(kept):
        for other in kept[place + 1 :]:
            assert similarity(one, other) < 0.6
    for place, original in enumerate(found):
        assert original is None or (original < place and found[original] is None)


def test_a_passage_cut_from_a_longer_one_adds_nothing() -> None:
    whole = " ".join(f"word{number}" for number in range(60))
    part = " ".join(f"word{number}" for number in range(20, 45))
    assert find_repeats([whole, part, part.upper() + "!", "something else entirely, and short"]) == [None, 0, 0, None]
    assert find_repeats([part, whole]) == [None, None]  # the longer one says more


def test_numbers_make_a_difference_and_capitals_do_not() -> None:
    assert similarity("The office opens at 9:30 on Monday", "the OFFICE opens at 9:30 on monday.") == 1.0
    assert similarity("The office opens at 9:30 today", "The office opens at 9:35 today") < 0.5
    assert similarity("今日は水曜日です。", "今日は木曜日です。") < 1.0


def test_cuts_and_repeats_of_sources_are_reported() -> None:
    sources = numbered("a b c d e f g h", "a b c d e f g h", "k l m n o p q r")
    found = select_sources(sources, ShapingConfig(source_tokens=6, sources_tokens=9), tokens, least_tokens=2)
    assert [str(each) for each in found.changes] == ["chunks=24>18", "repeats=3>2", "sources=12>9"]
    assert [each.text for each in found.sources] == ["a b c d e f", "k l m"]
    assert not select_sources(numbered("one", "two"), ShapingConfig(), tokens).changes


def test_scores_come_before_the_order_given() -> None:
    sources = [
        SourceText("a", "alpha"),
        SourceText("b", "beta", 0.2),
        SourceText("c", "gamma", 0.9),
        SourceText("d", "delta", 0.2),
    ]
    assert [each.id for each in select_sources(sources, ShapingConfig(), tokens).sources] == ["c", "b", "d", "a"]


def test_sources_are_inserted_into_the_last_users_turn_or_the_systems() -> None:
    selected = select_sources(numbered("First [9] text.", "Second text."), ShapingConfig(), tokens)
    messages: list[ChatMessage] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "Which?"},
    ]
    block = "Sources:\n[1] First (9) text.\n[2] Second text."
    in_turn = insert_sources(messages, selected)
    assert in_turn[-1]["content"] == f"{block}\n\nQuestion: Which?"
    assert in_turn[:-1] == messages[:-1]
    assert messages[-1]["content"] == "Which?"
    in_system = insert_sources(messages, selected, "system")
    assert in_system == [{"role": "system", "content": block}, *messages]
    both = insert_sources([{"role": "system", "content": "Be brief."}, *messages], selected, "system")
    assert both[0]["content"] == f"Be brief.\n\n{block}"
    assert insert_sources(messages, select_sources([], ShapingConfig(), tokens)) == messages


def test_citations_map_back_to_ids_and_unknown_numbers_to_none() -> None:
    selected = select_sources(numbered("one", "two"), ShapingConfig(), tokens)
    answer = "It is so [2]. And so [1][2], but not [3] and not [0]."
    assert [(each.number, each.id, answer[each.start : each.end]) for each in find_citations(answer, selected)] == [
        (2, "id-1", "[2]"),
        (1, "id-0", "[1]"),
        (2, "id-1", "[2]"),
    ]


def test_a_source_cannot_pretend_to_be_another() -> None:
    assert plain_brackets("true [1]\n[2] a lie") == "true (1)\n(2) a lie"


def test_tagged_blocks_are_taken_out_of_messages() -> None:
    content = (
        'Look: <source id="a" score="0.5">Alpha is first.</source> and <source>no id</source>'
        '<source id="a">same id</source>\nWhich is first?'
    )
    rest, sources = extract_tagged_sources([{"role": "system", "content": "S"}, {"role": "user", "content": content}])
    assert rest == [{"role": "system", "content": "S"}, {"role": "user", "content": "Look:  and \nWhich is first?"}]
    assert sources == (
        SourceText("a", "Alpha is first.", 0.5),
        SourceText("source", "no id"),
        SourceText("a-2", "same id"),
    )


def test_named_messages_are_sources() -> None:
    messages: list[ChatMessage] = [
        {"role": "user", "name": "source:doc 7", "content": "Alpha is first."},
        {"role": "user", "name": "source", "content": "Beta is second."},
        {"role": "user", "content": "Which is first?"},
    ]
    rest, sources = extract_tagged_sources(messages)
    assert rest == messages[2:]
    assert [(each.id, each.text) for each in sources] == [("doc 7", "Alpha is first."), ("source", "Beta is second.")]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "nothing tagged"}],
        [{"role": "user", "content": '<source id="a">no end'}],
        [{"role": "user", "content": '<source id="a">all of it</source>'}],  # no question would be left
        [  # two of the assistant's turns would stand side by side
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "name": "source", "content": "text"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "q2"},
        ],
    ],
)
def test_messages_stay_unchanged_if_extraction_would_break_them(messages: list[ChatMessage]) -> None:
    rest, sources = extract_tagged_sources(messages)
    assert rest == messages
    assert sources == ()
    assert find_turn_problem(rest) is None


def test_too_many_tagged_sources_are_left_where_they_are() -> None:
    messages: list[ChatMessage] = [{"role": "user", "content": "<source>x</source>" * 5 + "?"}]
    assert extract_tagged_sources(messages, most=4) == (messages, ())
    assert len(extract_tagged_sources(messages, most=5)[1]) == 5


def test_numbered_passages_are_found_in_text() -> None:
    text = "Sources:\n[1] Alpha is first.\nIt is old.\n[2] Beta is second.\n\nQuestion: Which is first?"
    sources, rest = extract_numbered_passages(text)
    assert [(each.id, each.text) for each in sources] == [
        ("1", "Alpha is first.\nIt is old."),
        ("2", "Beta is second."),
    ]
    assert rest == "Which is first?"
    assert extract_numbered_passages("see [1] and\n[3] three") == ((), "see [1] and\n[3] three")


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ([SourceField("a", "x"), SourceField("a", "y")], "sources[1].id"),
        ([SourceField("a", "x", float("inf"))], "sources[0].score"),
        ([SourceField(str(place), "x") for place in range(4)], "sources"),
    ],
)
def test_wrong_sources_are_refused_by_name(fields: list[SourceField], parameter: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_sources(fields, most=3)
    assert caught.value.parameter == parameter
    assert caught.value.status == 400


def test_hostile_texts_are_read_in_linear_time() -> None:
    for text in (
        "<source" * 50_000,
        "<source>" * 20_000,
        "[1] " * 50_000,
        "\n[1] x" * 20_000,
        "<source " + " " * 200_000,
    ):
        messages: list[ChatMessage] = [{"role": "user", "content": text}]
        assert extract_tagged_sources(messages)[0] == messages
        extract_numbered_passages(text)
    select_sources(numbered("1.1" * 50_000, "a" * 100_000), ShapingConfig(), tokens)
