"""The rows of examples: where answers end, what is held out, and the order of training."""

from __future__ import annotations

from headrace.adapt.training_rows import TrainingRow, answer_row, batch_rows, digest, hold_out, pieces


def test_an_answer_ends_with_its_first_end_token() -> None:
    assert answer_row([5, 6, 7, 1, 9], 2, frozenset({1}), 1) == TrainingRow([5, 6, 7, 1], 2)


def test_an_answer_without_an_end_gets_one() -> None:
    assert answer_row([1, 6, 7], 1, frozenset({1}), 1) == TrainingRow([1, 6, 7, 1], 1)
    assert answer_row([1, 6, 7], 0, frozenset(), None) == TrainingRow([1, 6, 7], 1)


def test_equal_seeds_hold_out_equal_places() -> None:
    train, held = hold_out(50, 0.1, seed=3)
    assert (train, held) == hold_out(50, 0.1, seed=3)
    assert len(held) == 5
    assert sorted([*train, *held]) == list(range(50))
    assert held != hold_out(50, 0.1, seed=4)[1]
    assert [len(each) for each in hold_out(2, 0.1, seed=0)] == [1, 1]


def test_every_epoch_has_all_rows_in_an_order_of_its_own() -> None:
    rows = [TrainingRow([number, 0], 1) for number in range(7)]
    epochs = [
        [row.tokens[0] for step in range(3) for row in batch_rows(rows, 3, 1, 3 * epoch + step)] for epoch in (0, 1)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(7))
    assert epochs[0] != epochs[1]
    assert batch_rows(rows, 3, 1, 4) == batch_rows(rows, 3, 1, 4)


def test_pieces_hold_rows_of_like_length_within_the_bound() -> None:
    rows = [TrainingRow([0] * length, 1) for length in (9, 2, 40, 3, 2)]
    assert [[len(row.tokens) for row in piece] for piece in pieces(rows, 9)] == [[2, 2, 3], [9], [40]]


def test_a_digest_follows_tokens_and_what_is_learnt() -> None:
    rows = [TrainingRow([1, 2, 3], 1)]
    assert digest(rows) == digest([TrainingRow([1, 2, 3], 1)])
    assert len({digest(rows), digest([TrainingRow([1, 2, 3], 2)]), digest([TrainingRow([1, 2, 4], 1)])}) == 3
