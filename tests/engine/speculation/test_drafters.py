"""Drafts: where they come from, and that verification keeps exactly what would have been sampled without them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.interface.request import GenerationRequest, SequenceState, open_sequence
from headrace.engine.interface.sampling import SampleRow, SamplingParams, sequence_seed
from headrace.engine.speculation.drafters import NgramDrafter, PerSequence, ReplayDrafter, sample_rows, verify
from headrace.engine.speculation.suffix_index import SuffixIndex

NONE: frozenset[int] = frozenset()


def sequence(prompt: Sequence[int], output: Sequence[int] = (), *, index: int = 0, **wishes: object) -> SequenceState:
    request = GenerationRequest(id="r", prompt=tuple(prompt), **wishes)  # type: ignore[arg-type]
    found = open_sequence(request, index)
    found.append(output)
    return found


# Predictions.


@pytest.mark.parametrize(
    ("output", "drafts"),
    [
        ([], [10, 11, 12, 13]),
        ([10], [11, 12, 13, 14]),
        ([10, 11], [12, 13, 14, 15]),
        ([99], []),  # it does not begin as predicted
        ([10, 99], []),
        ([10, 99, 12], []),
        ([10, 99, 12, 13], [14, 15, 16, 17]),  # and goes on as predicted after a change
    ],
)
def test_a_prediction_is_drafted_from_where_the_output_is_in_it(output: list[int], drafts: list[int]) -> None:
    predicted = sequence([1, 2, 3], output, prediction=tuple(range(10, 20)))
    assert NgramDrafter().propose(predicted, 4) == drafts
    grown = sequence([1, 2, 3], prediction=tuple(range(10, 20)))
    drafter = NgramDrafter()
    for token in output:  # the same token by token
        drafter.propose(grown, 4)
        grown.append([token])
    assert drafter.propose(grown, 4) == drafts


def test_without_a_prediction_the_prompt_is_searched_as_before() -> None:
    assert NgramDrafter().propose(sequence([7, 8, 9, 1, 7, 8]), 2) == [9, 1]
    assert NgramDrafter().propose(sequence([7, 8, 9, 1, 7, 8], prediction=(4, 5)), 2) == [9, 1]


# Verification.


def test_drafts_are_kept_as_far_as_they_are_what_was_sampled() -> None:
    assert verify([5, 6, 7], [5, 6, 7, 8], most=9) == 4
    assert verify([5, 6, 7], [5, 9, 7, 8], most=9) == 2
    assert verify([5, 6, 7], [9, 6, 7, 8], most=9) == 1
    assert verify([], [5], most=9) == 1


def test_nothing_is_kept_past_a_stop_id_or_the_most_that_are_wanted() -> None:
    assert verify([5, 6, 7], [5, 6, 7, 8], stop_ids=frozenset({6}), most=9) == 2
    assert verify([5, 6, 7], [5, 6, 7, 8], most=3) == 3
    assert verify([5], [5, 6], most=0) == 0


def test_a_row_without_a_token_ends_what_is_kept() -> None:
    assert verify([5, 6], [5, -1, 7], most=9) == 1
    assert verify([5, 6], [-1, 6, 7], most=9) == 0


def test_rows_that_a_grammar_does_not_reach_are_not_there() -> None:
    assert verify([5, 6, 7], [5, 6], most=9) == 2


def test_each_row_is_sampled_as_if_the_drafts_before_it_were_output() -> None:
    sampling = SamplingParams(repetition_penalty=1.5, seed=7)
    rows = sample_rows(sequence([1, 2, 2], [3], sampling=sampling), [2, 4, 4])
    assert [row.position for row in rows] == [4, 5, 6, 7]
    assert [row.seen for row in rows] == [
        {1: 0, 2: 0, 3: 1},
        {1: 0, 2: 1, 3: 1},
        {1: 0, 2: 1, 3: 1, 4: 1},
        {1: 0, 2: 1, 3: 1, 4: 2},
    ]
    assert all(row.seed == 7 for row in rows)


def test_the_sequences_own_counts_stay_as_they_are() -> None:
    drafted = sequence([1, 2], [3], sampling=SamplingParams(presence_penalty=1.0))
    sample_rows(drafted, [1, 1])
    assert drafted.seen == {1: 0, 2: 0, 3: 1}


def test_each_of_n_has_a_seed_of_its_own() -> None:
    (row,) = sample_rows(sequence([1], index=2, sampling=SamplingParams(seed=7)), [])
    assert row.seed == sequence_seed(7, 2) != 7


def test_stop_ids_are_forbidden_before_min_tokens() -> None:
    rows = sample_rows(sequence([1], [8], stop_ids=frozenset({4}), min_tokens=3), [5, 6, 7])
    assert [set(row.forbidden) for row in rows] == [{4}, {4}, set(), set()]


def test_a_grammar_that_can_only_end_does_so_before_min_tokens() -> None:
    ended, going = np.zeros(2, dtype=np.uint32), np.zeros(2, dtype=np.uint32)
    ended[1] = 1 << 3  # token 35
    going[1] = 1 << 3 | 1 << 9
    rows = sample_rows(sequence([1], stop_ids=frozenset({35}), min_tokens=3), [41], [going, ended])
    assert [row.forbidden for row in rows] == [NONE, NONE]
    assert [None if row.mask is None else row.mask.tolist() for row in rows] == [[0, 1 << 9], [0, 1 << 3]]
    assert going.tolist() == [0, 1 << 3 | 1 << 9]


def test_there_are_as_many_rows_as_masks() -> None:
    mask = np.full(2, 0xFFFFFFFF, dtype=np.uint32)
    assert len(sample_rows(sequence([1]), [5, 6, 7], [mask, mask])) == 2


def choose(row: SampleRow, tokens: list[int]) -> int:
    """A model and sampler in one: any function of the tokens before and of the row's state."""
    state = (tuple(tokens[-2:]), row.position, row.seed, tuple(sorted(row.seen.items())), tuple(sorted(row.forbidden)))
    token = random.Random(repr(state)).randrange(4)
    return (token + 1) % 4 if token in row.forbidden else token


def decode(start: SequenceState, most: int, drafts: list[list[int]]) -> list[int]:
    """Decodes with whatever is drafted at each step."""
    request = start.request
    steps = iter(drafts)
    while start.output_count < most:
        drafted = next(steps, [])
        rows = sample_rows(start, drafted)
        sampled = [choose(row, [*start.tokens, *drafted[:place]]) for place, row in enumerate(rows)]
        count = verify(drafted, sampled, stop_ids=request.stop_ids, most=most - start.output_count)
        assert count >= 1
        start.append(sampled[:count])
        if start.tokens[-1] in request.stop_ids:
            break
    return start.output


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 6),
    st.integers(1, 20),
)
def test_whatever_is_drafted_the_output_is_the_same(
    prompt: list[int], drafts: list[list[int]], seed: int, penalised: bool, min_tokens: int, most: int
) -> None:
    def fresh() -> SequenceState:
        sampling = SamplingParams(seed=seed, frequency_penalty=0.5 if penalised else 0.0)
        return sequence(prompt, sampling=sampling, stop_ids=frozenset({3}), min_tokens=min_tokens)

    assert decode(fresh(), most, drafts) == decode(fresh(), most, [])


# What came before.


def test_what_followed_before_is_proposed() -> None:
    drafter = NgramDrafter()
    assert drafter.propose(sequence([1, 2, 3, 4, 5, 6, 1, 2]), 3) == [3, 4, 5]


def test_the_place_with_the_longest_common_past_is_followed() -> None:
    assert NgramDrafter().propose(sequence([9, 1, 2, 7, 8, 1, 2, 5, 9, 1, 2]), 2) == [7, 8]


def test_of_places_that_agree_as_far_the_latest_is_followed() -> None:
    assert NgramDrafter().propose(sequence([1, 2, 5, 0, 1, 2, 6, 0, 3, 1, 2]), 1) == [6]


def test_what_repeats_itself_goes_on_repeating() -> None:
    assert NgramDrafter().propose(sequence([0, 7, 8, 9, 7, 8, 9, 7, 8, 9]), 8) == [7, 8, 9, 7, 8, 9, 7, 8]


def test_little_in_common_proposes_little() -> None:
    tokens = [1, 2, *range(10, 40), 1, 2]
    assert NgramDrafter().propose(sequence(tokens), 20) == [10, 11, 12, 13]


def test_what_never_came_before_proposes_nothing() -> None:
    drafter = NgramDrafter()
    for tokens in ([1], [1, 2], [1, 2, 3], [1, 2, 3, 1], [1, 2, 1]):
        assert drafter.propose(sequence(tokens), 4) == []


def test_the_index_grows_with_the_output() -> None:
    drafter = NgramDrafter()
    growing = sequence([1, 2, 3, 4])
    assert drafter.propose(growing, 4) == []
    growing.append([1, 2])
    assert drafter.propose(growing, 4) == [3, 4, 1, 2]
    growing.append([3])
    assert drafter.propose(growing, 4) == [4, 1, 2, 3]
    growing.append([9])
    assert drafter.propose(growing, 4) == []


def test_a_long_prompt_is_taken_in_a_part_at_a_time() -> None:
    drafter = NgramDrafter(at_once=100)
    tokens = list(range(1000))
    repeated = sequence([*tokens, 500, 501])
    found = [drafter.propose(repeated, 2) for _ in range(12)]
    assert found[3] == []
    assert found[11] == [502, 503]


def test_only_the_window_is_looked_at() -> None:
    tokens = [1, 2, 3, *range(100, 400), 1, 2]
    assert NgramDrafter(window=512).propose(sequence(tokens), 1) == [3]
    assert NgramDrafter(window=256).propose(sequence(tokens), 1) == []
    near = [*range(100, 400), 1, 2, 3, *range(400, 600), 1, 2]
    assert NgramDrafter(window=256).propose(sequence(near), 1) == [3]


def test_sequences_do_not_see_each_other_and_are_forgotten() -> None:
    drafter = NgramDrafter(sequences=2)
    first, second = sequence([1, 2, 3, 1, 2]), sequence([4, 5, 6, 1, 2])
    assert drafter.propose_all([(first, 1), (second, 1)]) == [[3], []]
    drafter.forget(first)
    drafter.forget(first)
    assert drafter.propose(first, 1) == [3]


def test_what_is_kept_per_sequence_is_bounded() -> None:
    kept: PerSequence[list[int]] = PerSequence(2)
    many = [sequence([1]) for _ in range(3)]
    for place, one in enumerate(many):
        kept.find(one, lambda place=place: [place])
    assert len(kept) == 2
    assert kept.find(many[2], list) == [2]
    assert kept.find(many[0], lambda: [9]) == [9]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(1, 5), max_size=20))
def test_the_longest_common_past_is_found(tokens: list[int], growth: list[int]) -> None:
    """With as many candidates as there are tokens, however the tokens come."""
    index = SuffixIndex(1024, 4)
    end = 0
    for count in [*growth, len(tokens)]:
        end = min(len(tokens), end + count)
        part = tokens[:end]
        index.add(part, 1024)
        place, length = index.find(part, 1024)
        longest = 0
        for other in range(2, end):
            common = 0
            while common < min(other, 32) and part[other - 1 - common] == part[end - 1 - common]:
                common += 1
            longest = max(longest, common)
        if longest < 2:
            assert length == 0
        else:
            assert length == longest
            assert part[place - length : place] == part[end - length : end]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=300))
def test_a_small_window_finds_only_what_is_in_it(tokens: list[int]) -> None:
    index = SuffixIndex(64, 4)
    for end in range(len(tokens) + 1):
        index.add(tokens[:end], 7)
        place, length = index.find(tokens[:end], 4)
        if length:
            assert place >= 2
            assert tokens[place - length : place] == tokens[end - length : end]
    assert len(index._before) <= 64  # pyright: ignore[reportPrivateUsage]


# Known acceptance.


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
def test_a_replay_is_right_as_often_as_it_is_told(acceptance: float) -> None:
    output = [3 + place % 5 for place in range(4000)]
    drafts = ReplayDrafter({"r": [output]}, acceptance, seed=1).propose(sequence([1]), len(output))
    assert len(drafts) == len(output)
    assert all(draft >= 0 for draft in drafts)
    right = sum(draft == token for draft, token in zip(drafts, output, strict=True)) / len(output)
    assert right == pytest.approx(acceptance, abs=0.03)


def test_a_replay_goes_on_where_the_output_is() -> None:
    drafter = ReplayDrafter({"r": [[4, 5, 6, 7], [0, 1]]}, 1.0)
    assert drafter.propose(sequence([1], [4, 5]), 9) == [6, 7]
    assert drafter.propose(sequence([1], [4], index=1), 9) == [1]
    assert drafter.propose(sequence([1], index=2), 9) == []
    assert ReplayDrafter({}, 1.0).propose(sequence([1]), 9) == []


def test_a_wrong_token_is_another_one() -> None:
    assert ReplayDrafter({"r": [[0, 5]]}, 0.0).propose(sequence([1]), 9) == [1, 4]
