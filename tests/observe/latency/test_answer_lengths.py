"""What ended answers, how long they are, and the default length that follows from it."""

from __future__ import annotations

import pytest

from headrace.observe.latency.answer_lengths import AnswerLengths, length_key
from headrace.observe.latency.latency_book import RequestSample, Row, Slice

SLICE = Slice("mini", "chat", "red", "/v1/x", "<=128", "direct")


def row_of(*answers: tuple[str, bool, float]) -> Row:
    row = Row()
    for ending, set_by_client, tokens in answers:
        key = length_key(ending, set_by_client=set_by_client)
        row.add(RequestSample(SLICE, {}, ending=key, answer_tokens=tokens))
    return row


def test_shares_and_percentiles_are_those_of_the_answers() -> None:
    ended = [("stop", False, float(number)) for number in range(1, 91)]
    lengths = AnswerLengths(row_of(*ended, *[("length", True, 100.0)] * 6, *[("gone", False, 40.0)] * 4))
    found = lengths.as_json()
    assert found["answers"] == 100
    assert found["p50_tokens"] == pytest.approx(46, abs=1)
    assert found["p99_tokens"] == pytest.approx(100, abs=2)
    assert found["endings"] == {"gone": 0.04, "length": 0.06, "stop": 0.9}
    assert (found["cut_share"], found["left_share"]) == (0.06, 0.04)
    assert found["left_after_tokens"] == pytest.approx(40, abs=1)
    assert (found["without_max_tokens"], found["without_max_tokens_cut_share"]) == (94, 0.0)


def test_a_default_that_is_far_above_what_answers_need_can_be_lowered() -> None:
    lengths = AnswerLengths(row_of(*[("stop", False, 60.0)] * 100))
    for default in (None, 512):
        assert "surfaces.chat.max_tokens = 64" in lengths.advice("chat", default)
    assert lengths.advice("chat", 72) == ""  # not worth a change


def test_a_default_that_cuts_answers_is_to_be_raised() -> None:
    lengths = AnswerLengths(row_of(*[("stop", False, 60.0)] * 100, *[("length", False, 64.0)] * 20))
    assert lengths.advice("voice", 64) == (
        "surfaces.voice.max_tokens = 64 cuts 16.7 % of the answers to requests without max_tokens. Raise it."
    )


def test_limits_that_clients_set_say_nothing_of_the_default() -> None:
    lengths = AnswerLengths(row_of(*[("length", True, 8.0)] * 500, *[("stop", False, 8.0)] * 99))
    assert lengths.advice("chat", 4096) == ""


def test_lengths_survive_storage_and_merging() -> None:
    row = row_of(("stop", False, 10.0), ("length", True, 20.0))
    stored = Row.unpack(row.pack())
    stored.merge(row)
    assert AnswerLengths(stored).as_json()["answers"] == 4
    older = row.pack()
    del older["lengths"]
    assert AnswerLengths(Row.unpack(older)).as_json()["answers"] == 0
