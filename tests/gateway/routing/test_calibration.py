"""Calibration: the threshold that a quality target means, the curve, and the file of labelled answers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.routing.calibration import (
    ALWAYS_LARGE,
    CalibrationError,
    LabelledAnswer,
    curve,
    evaluate_threshold,
    fit_threshold,
    read_labelled,
    write_labelled,
)


def labelled(confidence: float, small: float, large: float) -> LabelledAnswer:
    measures = {"mean": confidence, "least": confidence / 2, "entropy": confidence}
    return LabelledAnswer(confidence=measures, small=small, large=large, small_cost=1.0, large_cost=10.0)


# The surer, the more often right: above 0.6 always, below never; the large model always.
ORDERLY = [labelled(place / 10, 1.0 if place > 6 else 0.0, 1.0) for place in range(1, 11)]


def test_the_threshold_is_the_lowest_that_keeps_the_quality() -> None:
    assert fit_threshold(1.0, ORDERLY) == 0.7
    assert fit_threshold(0.9, ORDERLY) == 0.6
    assert fit_threshold(0.8, ORDERLY) == 0.5
    assert fit_threshold(0.0, ORDERLY) == 0.1
    assert fit_threshold(1.0, ORDERLY, measure="least") == 0.35


def test_a_quality_that_the_large_model_has_not_got_is_reached_by_none() -> None:
    assert fit_threshold(1.01, ORDERLY) == ALWAYS_LARGE
    point = evaluate_threshold(ALWAYS_LARGE, ORDERLY)
    assert (point.share, point.quality, point.cost) == (0.0, 1.0, 1.1)


def test_a_small_model_that_is_better_may_raise_the_quality() -> None:
    rows = [labelled(0.9, 1.0, 0.0), labelled(0.2, 0.0, 1.0)]
    assert fit_threshold(1.0, rows) == 0.9
    assert evaluate_threshold(0.9, rows).quality == 1.0


def test_a_cost_is_that_of_both_beside_the_large_one_alone() -> None:
    point = evaluate_threshold(0.7, ORDERLY)
    assert point.share == 0.4
    assert point.quality == 1.0
    assert point.cost == pytest.approx((10 * 1 + 6 * 10) / 100)


def test_equal_confidences_are_taken_together() -> None:
    rows = [labelled(0.5, 1.0, 1.0), labelled(0.5, 0.0, 1.0), labelled(0.4, 0.0, 1.0)]
    assert fit_threshold(1.0, rows) == ALWAYS_LARGE
    assert fit_threshold(0.6, rows) == 0.5


def test_to_be_surer_is_to_take_less() -> None:
    noisy = [labelled(place / 1000, float(place % 7 != 0 or place > 900), 1.0) for place in range(1, 1001)]
    assert fit_threshold(0.95, noisy, sure=2.0) > fit_threshold(0.95, noisy)


rows = st.lists(
    st.builds(labelled, st.floats(0, 1), st.sampled_from((0.0, 1.0)), st.sampled_from((0.0, 1.0))),
    min_size=1,
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(rows, st.floats(0, 1))
def test_what_was_fitted_keeps_its_promise_and_no_lower_threshold_would(
    found: list[LabelledAnswer], target: float
) -> None:
    threshold = fit_threshold(target, found)
    confidences = [each.confidence["mean"] for each in found]
    if threshold == ALWAYS_LARGE:
        assert all(evaluate_threshold(each, found).quality < target for each in confidences)
        return
    assert evaluate_threshold(threshold, found).quality >= target - 1e-9
    lower = [each for each in confidences if each < threshold]
    assert all(evaluate_threshold(each, found).quality < target + 1e-9 for each in lower)


@settings(max_examples=100, deadline=None)
@given(rows)
def test_a_curve_goes_from_the_large_model_alone_to_the_small_one_alone(found: list[LabelledAnswer]) -> None:
    points = curve(found)
    assert points[0].share == 0.0
    assert points[-1].share == 1.0
    assert [point.share for point in points] == sorted(point.share for point in points)
    assert points[-1].quality == pytest.approx(math.fsum(each.small for each in found) / len(found))


def test_labelled_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "labelled.jsonl"
    write_labelled(path, ORDERLY)
    assert read_labelled(path) == ORDERLY


@pytest.mark.parametrize(
    ("content", "wrong"),
    [(b"", "no labelled answers"), (b"{}\n", "Line 1"), (b"nonsense", "Line 1")],
)
def test_a_file_that_is_wrong_is_refused_with_its_line(tmp_path: Path, content: bytes, wrong: str) -> None:
    path = tmp_path / "labelled.jsonl"
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=wrong):
        read_labelled(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"nothing\.jsonl"):
        read_labelled(tmp_path / "nothing.jsonl")
